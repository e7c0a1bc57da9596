"""What the events since the last trial have changed for requests that wait: noted where it happens, read by RouterState. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """Notes for one turn. Events that are applied in parts add to it until their last part is applied."""

    # Models, instances or their readiness changed. Gateways are to be told, and any request may find room.
    fleet_changed: bool = False
    anything: bool = False  # what changed may let any request go on
    freed: dict[str, None] = field(default_factory=dict)  # the pools in which a reservation ended or moved on, in order
    session_ended: bool = False  # a client ended a session, whose KV is not needed any more

    def __bool__(self) -> bool:
        """Return whether anything is noted."""
        return self.fleet_changed or self.anything or bool(self.freed) or self.session_ended

    def clear(self) -> None:
        """Forget all notes. Mutates."""
        self.fleet_changed = self.anything = self.session_ended = False
        self.freed.clear()
