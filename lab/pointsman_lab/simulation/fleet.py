"""The instances of a simulation, and their agents' reports to the routers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.report.instance_samples import InstanceSample, sample
from pointsman_lab.simulation.agent import REPORT_INTERVAL_S, ReportTo
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.instance import OnEngineEvent, SimulatedInstance
from pointsman_lab.simulation.report_channel import Deliver
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import InstanceInfo, KvRole, KvTransfer
from pointsman_router.core.router_state import RouterState


class SimulatedFleet:
    """All instances by name. The first ones are assigned to `pools` in turn. `deliver` receives all engines' loads, `report_to`
    an agent's reports of keys to one router, and `on_engine_event` the answers of all engines."""

    def __init__(
        self,
        config: SimulationConfig,
        pools: Sequence[str],
        event_queue: EventQueue,
        deliver: Deliver,
        report_to: ReportTo,
        on_engine_event: OnEngineEvent,
    ) -> None:
        self._config = config
        self._event_queue = event_queue
        self._deliver = deliver
        self._report_to = report_to
        self._on_engine_event = on_engine_event
        self.instances: dict[str, SimulatedInstance] = {}
        self.pool_of: dict[str, str] = {}
        # The blocks in the storage that a pool's instances share, by pool.
        self._storage: dict[str, set[int] | None] = {pool: set() if config.shared_storage else None for pool in pools}
        # All instances so far, by the number of their agent's stream, from 1: a router may still answer one that was removed.
        self._by_stream: list[SimulatedInstance] = []
        self._incarnations: Counter[str] = Counter()
        names = config.names or [f"i{number}" for number in range(config.instances)]
        self._producers = frozenset(names[len(names) - config.producers :])
        for number, name in enumerate(names):
            self.add(name, pools[number % len(pools)])

    def add(self, name: str, pool: str) -> ev.AgentHello:
        """Add an instance with an empty cache, under a name that is not in use; return its agent's hello. Mutates."""
        assert name not in self.instances, name
        stream_id = len(self._by_stream) + 1
        model = EngineModel(self._config.engine, self._config.profile, self._storage[pool])
        instance = SimulatedInstance(
            name,
            stream_id,
            model,
            self._event_queue,
            self._deliver,
            self._report_to,
            self._on_engine_event,
            checks=self._config.report_loss > 0,
            tiers_reported=self._config.tiers_reported,
        )
        self._by_stream.append(instance)
        self._incarnations[name] += 1
        self.instances[name] = instance
        self.pool_of[name] = pool
        return self.hello(name)

    def remove(self, name: str) -> ev.AgentGoodbye:
        """Remove an instance without requests; return its agent's goodbye. Mutates."""
        instance = self.instances.pop(name)
        assert not instance.model.has_work, f"{name} has requests"
        return ev.AgentGoodbye(instance.stream_id, name)

    def of_stream(self, stream_id: int) -> SimulatedInstance:
        """Return the instance whose agent has, or had, that stream."""
        return self._by_stream[stream_id - 1]

    def incarnation(self, name: str) -> str:
        """Return the incarnation of an instance, counted from 1 for each name."""
        return str(self._incarnations[name])

    @property
    def busy_s(self) -> dict[str, float]:
        """Time that each instance has spent in steps, s."""
        return {name: instance.busy_s for name, instance in self.instances.items()}

    def hello(self, name: str) -> ev.AgentHello:
        """Return the hello of an instance's agent."""
        config, instance = self._config.engine, self.instances[name]
        role = KvRole.PRODUCER if name in self._producers else KvRole.BOTH
        return ev.AgentHello(
            instance.stream_id,
            InstanceInfo(
                instance_id=name,
                incarnation=self.incarnation(name),
                url=f"sim://{name}",
                model=self.pool_of[name],
                block_size=config.block_size,
                kv_capacity_tokens=config.kv_blocks * config.block_size,
                max_model_len=config.max_model_len,
                exact_prefix=self._config.exact_prefixes,
                kv_transfer=KvTransfer("MOONCAKE", f"sim://{name}", role=role) if self._config.kv_transfers else None,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                shared_storage=self.pool_of[name] if self._config.shared_storage else "",
            ),
            KEY_SCHEME,
            instance.agent.keys.oldest_seq,
            instance.agent.keys.latest_seq,
            REPORT_INTERVAL_S,
        )

    def hellos(self) -> list[ev.AgentHello]:
        """Return the hellos of all agents."""
        return [self.hello(name) for name in self.instances]

    def report_loads(self, now: float) -> None:
        """Report the loads of all engines."""
        for instance in self.instances.values():
            instance.report_load(now)

    def report_due(self, now: float) -> None:
        """Send the messages that all agents have, even if no keys have changed: consistency checks."""
        for instance in self.instances.values():
            instance.agent.tell(now)

    def samples(self, owners: dict[str, RouterState], now: float) -> list[InstanceSample]:
        """Return the state of each instance at `now`, as the instance and the owner of its pool (`owners`, by pool) have it.
        Instances of pools without an owner are left out."""
        return [
            sample(
                now,
                name,
                owner.reservations.counters(name),
                instance.num_keys,
                owner.affinity.sessions_of(name),
                instance.load(now),
            )
            for name, instance in self.instances.items()
            if (owner := owners.get(self.pool_of[name])) is not None
        ]
