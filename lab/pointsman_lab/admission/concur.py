"""CONCUR's rule: the number of active agents follows the use of the KV cache and its hit ratio, as TCP's window does. Pure.

Source: CONCUR (Chen et al., arXiv 2601.22705), cache-aware AIMD (additive increase, multiplicative decrease): every interval

    W + 2    if U < U_low
    W / 2    if U > U_high and H < H_low
    W        otherwise

W: maximum number of active agents; U: share of the KV blocks that requests use (mean of the instances); H: share of the prompt
tokens of the last interval that were cached. U_low 0.2 and U_high 0.5 are the paper's choice. The paper's interval, steps and
H_low could not be read by the authors of this file: the interval (1 s), the step (2 agents), the factor (1/2) and H_low (0.2) are
assumed, and the last one can be set.

An agent is active from its first request to its end, tool calls included. With more than W active agents, one is paused when its
next request comes; an agent that is paused goes on before a new one begins, in order of arrival.

Other than in the paper, W grows only while agents reach it (congestion window validation, RFC 7661): it would be of any size
after a light load. The paper's batches of agents have no such phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from pointsman_lab.admission.rule import Admitted, Answer
from pointsman_router.core.placement_types import Load

INCREASE, DECREASE = 2, 0.5
U_LOW, U_HIGH, H_LOW = 0.2, 0.5, 0.2


class Concur:
    """The rule for one pool of `instances` engines, with one window for all. `h_low`: hit ratio below which the window shrinks.

    The window begins at 2 agents for each instance.
    """

    interval_s = 1.0

    def __init__(self, instances: int, h_low: float = H_LOW) -> None:
        self._h_low = h_low
        self._window = float(INCREASE * instances)
        self._active: set[str] = set()
        # Programs whose requests wait.
        self._paused: deque[str] = deque()
        self._new: deque[str] = deque()
        # Sums of all instances' counters at the last tick: queried and cached tokens.
        self._queries = self._hits = 0

    @property
    def window(self) -> int:
        """Maximum number of active agents."""
        return int(self._window)

    def asked(self, program: str, tokens: int, now: float, parent: str = "") -> Sequence[Admitted]:
        """Handle a program's next request: it goes on if the program is active and the window has room. Mutates."""
        if program in self._active:
            if len(self._active) <= self.window:
                return [Admitted(program)]
            self._active.discard(program)
            self._paused.append(program)
        else:
            self._new.append(program)
        return self._fill()

    def answered(self, program: str, answer: Answer, now: float) -> Sequence[Admitted]:
        """An agent remains active in its tool calls. One whose client has left while it waited waits no more. Mutates."""
        self._leave(program)
        return []

    def ended(self, program: str, now: float) -> Sequence[Admitted]:
        """Forget a program, and let others take its place. Mutates."""
        self._active.discard(program)
        self._leave(program)
        return self._fill()

    def tick(self, loads: Mapping[str, Load], now: float) -> Sequence[Admitted]:
        """Set the window by the loads, and let in what it permits. Mutates."""
        queries = sum(load.prefix_cache_queries or 0 for load in loads.values())
        hits = sum(load.prefix_cache_hits or 0 for load in loads.values())
        usage = fmean(load.kv_usage or 0.0 for load in loads.values())
        asked, found = queries - self._queries, hits - self._hits
        self._queries, self._hits = queries, hits
        if usage < U_LOW:
            if len(self._active) >= self.window:
                self._window += INCREASE
        elif usage > U_HIGH and asked and found / asked < self._h_low:
            self._window = max(self._window * DECREASE, 1.0)
        return self._fill()

    def _leave(self, program: str) -> None:
        for queue in (self._paused, self._new):
            if program in queue:
                queue.remove(program)

    def _fill(self) -> list[Admitted]:
        admitted = []
        while len(self._active) < self.window and (queue := self._paused or self._new):
            program = queue.popleft()
            self._active.add(program)
            admitted.append(Admitted(program))
        return admitted
