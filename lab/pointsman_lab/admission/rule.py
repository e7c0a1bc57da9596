"""The interface of an admission rule of the lab: it decides when the next request of a program may go on. Pure.

A program is a session: the requests of one agent, one after the other, with tool calls between them. The rules here are those of
other systems, as published, to be compared with the router's own. They know more than a router does: every program by name, and
when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pointsman_router.core.placement_types import Load


@dataclass(frozen=True, slots=True)
class Admitted:
    """The waiting request of `program` goes on now, to `instance` (empty: to the one that the router chooses)."""

    program: str
    instance: str = ""


class Answer(NamedTuple):
    """The end of a request of a program that goes on, as its rule learns of it. Sizes in tokens."""

    prompt: int
    output: int  # 0 if it was not answered
    cached: int = 0  # of the prompt, as the engine told
    ok: bool = True  # whether it was answered

    @property
    def tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt + self.output


class AdmissionRule(Protocol):
    """Decides for the programs of one pool. A program has one request at a time. Times in s, sizes in tokens.

    Every method returns the programs whose requests go on now.
    """

    @property
    def interval_s(self) -> float:
        """Interval between two ticks."""
        ...

    def asked(self, program: str, tokens: int, now: float, parent: str = "") -> Sequence[Admitted]:
        """Handle the arrival of a program's next request, with a prompt of `tokens`. `parent`: the program that started this
        one, if it is a sub-agent whose requests name it. Mutates."""
        ...

    def answered(self, program: str, answer: Answer, now: float) -> Sequence[Admitted]:
        """Handle the end of a request of a program that goes on, answered or not. Mutates."""
        ...

    def ended(self, program: str, now: float) -> Sequence[Admitted]:
        """Handle the end of a program, also of one whose request waits. Mutates."""
        ...

    def tick(self, loads: Mapping[str, Load], now: float) -> Sequence[Admitted]:
        """Handle the passing of an interval; `loads` has the present load of every instance. Mutates."""
        ...
