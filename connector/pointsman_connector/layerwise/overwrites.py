"""Marks transfers whose source blocks a step may overwrite before the sender's loop has processed that step. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class OverwriteMarks:
    """Transfers that are marked and whose marks the sender's loop has not processed yet.

    The engine's thread marks a transfer before it launches the step that may reuse the transfer's blocks. A write that read these
    blocks and ends while the transfer is marked does not count. The loop clears the mark when it has dropped what was computed in
    these blocks: from then on their epoch is old, and writes of an old epoch do not count either. Each of the two counters is
    written by one thread only, so that no lock is needed.
    """

    def __init__(self) -> None:
        self._marked: dict[str, int] = {}
        self._processed: dict[str, int] = {}

    def __contains__(self, transfer_id: str) -> bool:
        return self._marked.get(transfer_id, 0) != self._processed.get(transfer_id, 0)

    def __len__(self) -> int:
        """Transfers of which anything is kept."""
        return len(self._marked.keys() | self._processed.keys())

    def mark(self, transfer_ids: Iterable[str]) -> None:
        """Mark transfers. Called by the engine's thread, once for each reuse of their blocks."""
        for transfer_id in transfer_ids:
            self._marked[transfer_id] = self._marked.get(transfer_id, 0) + 1

    def clear(self, transfer_id: str) -> None:
        """Process one mark of a transfer. Called by the loop's thread, once for each mark, in their order."""
        processed = self._processed.get(transfer_id, 0) + 1
        self._processed[transfer_id] = processed

    def forget(self, transfer_id: str) -> None:
        """Drop the counters of a transfer that has ended and is not marked."""
        if transfer_id not in self:
            self._marked.pop(transfer_id, None)
            self._processed.pop(transfer_id, None)
