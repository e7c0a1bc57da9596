"""The agent's side of the report protocol, for one instance and one router. Pure.

    Hello -> Welcome -> (SnapshotBegin SnapshotChunk* SnapshotEnd)? -> Delta*      with Load and ConsistencyCheck in between

`KeyStream` determines the messages about keys.
"""

from __future__ import annotations

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.key_report_sequence import KeyStream, ReportedKeys
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_common.core.key_report_types import Delta, MergedDelta
from pointsman_common.core.key_report_wire import to_wire
from pointsman_common.core.load_age import age_ms


class ProtocolError(Exception):
    """The router sent a message that the protocol does not allow at that point."""


class ReportProtocol:
    """The messages of one stream from Hello on. Pass input to `received` and `load`; call `next_message` until it returns None.

    `consistency_check_interval_s` is the time between two consistency checks, `report_interval_s` what Hello tells as the time
    between two loads.
    """

    def __init__(
        self,
        keys: ReportedKeys,
        instance: pb.Instance,
        agent_id: str,
        *,
        consistency_check_interval_s: float,
        report_interval_s: float,
    ) -> None:
        self._hello: pb.ReportRequest | None = pb.ReportRequest(
            hello=pb.Hello(
                instance=instance,
                key_scheme=KEY_SCHEME,
                oldest_seq=keys.oldest_seq,
                latest_seq=keys.latest_seq,
                agent_id=agent_id,
                report_interval_ms=round(report_interval_s * 1000),
                accepts_pace=True,
            )
        )
        self._stream = KeyStream(keys, consistency_check_interval_s)
        self._load: tuple[pb.Load, float] | None = None
        # The router's limit, when the next load may be sent, and the state in the last one.
        self._load_interval_s = 0.0
        self._load_due = float("-inf")
        self._sent_state: tuple[bool, str] | None = None

    @property
    def welcomed(self) -> bool:
        """Whether the router has answered the hello."""
        return self._stream.welcomed

    @property
    def snapshots(self) -> int:
        """Snapshots begun on this stream."""
        return self._stream.snapshots

    def received(self, response: pb.ReportResponse, now: float) -> None:
        """Handle a message of the router. Raises ProtocolError if the protocol does not allow it. Mutates."""
        kind = response.WhichOneof("kind")
        if kind == "welcome":
            if self.welcomed or self._hello is not None:
                raise ProtocolError("welcome without hello")
            self._stream.welcome(response.welcome.resume_from_seq, now, snapshot=response.welcome.snapshot)
        elif kind == "resync":
            if not self.welcomed:
                raise ProtocolError("resync before welcome")
            self._stream.begin_snapshot()
        elif kind == "pace":
            self._load_interval_s = response.pace.load_interval_ms / 1e3
            self._load_due = min(self._load_due, now + self._load_interval_s)
            self._stream.key_interval_s = response.pace.key_interval_ms / 1e3

    def load(self, load: pb.Load, taken_at: float) -> None:
        """Send `load`, sampled at `taken_at`, as soon as the router's limit permits. It replaces a load that is not sent yet.
        Mutates."""
        self._load = (load, taken_at)

    def next_message(self, now: float) -> pb.ReportRequest | None:
        """Return the next message to write, or None if there is no message before `wake_at` or the next change. Mutates."""
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        if not self.welcomed:
            return None
        if self._load is not None and now >= self._due():
            (load, taken_at), self._load = self._load, None
            self._load_due, self._sent_state = now + self._load_interval_s, _state_of(load)
            message = pb.ReportRequest(load=load)
            message.load.sample_age_ms = age_ms(taken_at, now)
            return message
        key_message = self._stream.next_message(now)
        return None if key_message is None else to_wire(key_message)

    def last_changes(self, now: float) -> list[pb.ReportRequest]:
        """Return the changes of keys that wait for the router's pace: the router resumes after them. Mutates."""
        changes = []
        self._stream.end_pause()
        while (change := self._stream.next_message(now)) is not None and isinstance(change, Delta | MergedDelta):
            changes.append(to_wire(change))
        return changes

    def wake_at(self) -> float | None:
        """Return when `next_message` has a message even if nothing changes; None before Welcome."""
        due = self._stream.wake_at()
        return min(due, self._due()) if due is not None and self._load is not None else due

    def _due(self) -> float:
        """Return when the load may be sent. A change of what the instance can serve does not wait."""
        assert self._load is not None
        return self._load_due if _state_of(self._load[0]) == self._sent_state else float("-inf")


def _state_of(load: pb.Load) -> tuple[bool, str]:
    return load.healthy, load.suspended
