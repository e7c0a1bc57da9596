"""Engines that agents are set to follow and that have no instance. Operators see them; no decision depends on them. Pure; times
in s on one clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# Time after an agent's last report after which its absent engines are forgotten, s.
FORGOTTEN_AFTER_S = 15.0
# Maximum number of engines that are kept of one agent, and of all agents: what ListInstances returns of them must fit into a
# message.
MAX_ENGINES, MAX_ENGINES_IN_ALL = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class AbsentEngine:
    """An engine without an instance, as its agent describes it."""

    instance_id: str  # that its instance would have, without a rank
    url: str  # where the agent looks for it
    problem: str  # why there is no instance, for people
    node: str  # host name of the agent's node


class AbsentEngines:
    """The absent engines of all agents."""

    def __init__(self) -> None:
        self._by_agent: dict[Hashable, tuple[float, tuple[AbsentEngine, ...]]] = {}

    def reported(self, agent: Hashable, engines: Sequence[AbsentEngine], now: float) -> None:
        """Replace an agent's absent engines. `agent`: what no other agent has; it is small. Mutates."""
        self._forget(now)
        self._by_agent.pop(agent, None)
        room = MAX_ENGINES_IN_ALL - sum(len(kept) for _, kept in self._by_agent.values())
        if kept := tuple(engines[: min(MAX_ENGINES, room)]):
            self._by_agent[agent] = now, kept

    def beside(self, instance_ids: Iterable[str], now: float) -> list[AbsentEngine]:
        """Return the absent engines, ordered by URL, without those of which an instance is known: another agent may follow it.
        Each engine occurs once. Mutates."""
        self._forget(now)
        if not self._by_agent:
            return []
        known = {instance_id.partition("/")[0] for instance_id in instance_ids}
        # Of two agents that follow an engine, as in a rollout, the one that reported last counts.
        latest = sorted(self._by_agent.values(), key=lambda report: report[0])
        absent = {engine.instance_id: engine for _, engines in latest for engine in engines}
        return sorted(
            (engine for engine in absent.values() if engine.instance_id not in known), key=lambda engine: engine.url
        )

    def _forget(self, now: float) -> None:
        old = [agent for agent, (at, _) in self._by_agent.items() if now - at > FORGOTTEN_AFTER_S]
        for agent in old:
            del self._by_agent[agent]
