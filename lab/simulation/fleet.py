"""The instances of a simulation, and what their agents tell the routers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pointsman.common.core.block_keys import KEY_SCHEME
from pointsman.lab.engine.model import EngineModel
from pointsman.lab.report.instance_samples import InstanceSample
from pointsman.lab.simulation.config import SimulationConfig
from pointsman.lab.simulation.event_queue import EventQueue
from pointsman.lab.simulation.instance import OnEngineEvent, SimulatedInstance
from pointsman.lab.simulation.report_channel import Deliver
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.router_state import RouterState
from pointsman.router.core.types import InstanceInfo, KvTransfer


class SimulatedFleet:
    """All instances by name, dealt to `pools` in turn; `deliver` hears all agents, `on_engine_event` all engines."""

    def __init__(
        self,
        config: SimulationConfig,
        pools: Sequence[str],
        event_queue: EventQueue,
        deliver: Deliver,
        on_engine_event: OnEngineEvent,
    ) -> None:
        self._config = config
        self._deliver = deliver
        names = config.names or [f"i{number}" for number in range(config.instances)]
        self.instances = {
            name: SimulatedInstance(
                name, number, EngineModel(config.engine, config.profile), event_queue, deliver, on_engine_event
            )
            for number, name in enumerate(names, 1)
        }
        self.pool_of = {name: pools[number % len(pools)] for number, name in enumerate(self.instances)}

    def of_stream(self, stream_id: int) -> SimulatedInstance:
        """The instance whose agent speaks on that stream, which is numbered as the instances are, from 1."""
        return next(islice(self.instances.values(), stream_id - 1, None))

    @property
    def busy_s(self) -> dict[str, float]:
        """How long each instance has been in steps, in s."""
        return {name: instance.busy_s for name, instance in self.instances.items()}

    def hellos(self) -> list[ev.AgentHello]:
        """What each agent says first."""
        config = self._config.engine
        return [
            ev.AgentHello(
                instance.stream_id,
                InstanceInfo(
                    instance_id=name,
                    incarnation="1",
                    url=f"sim://{name}",
                    model=self.pool_of[name],
                    block_size=config.block_size,
                    kv_capacity_tokens=config.kv_blocks * config.block_size,
                    max_model_len=config.max_model_len,
                    kv_transfer=KvTransfer("MOONCAKE", f"sim://{name}"),
                    long_prefill_token_threshold=config.long_prefill_token_threshold,
                ),
                KEY_SCHEME,
                1,
                0,
            )
            for name, instance in self.instances.items()
        ]

    def report_loads(self, now: float) -> None:
        """All agents tell their engines' figures."""
        for instance in self.instances.values():
            instance.report_load(now)

    def report_bookmarks(self, now: float) -> None:
        """All agents tell what the routers must have by now."""
        for instance in self.instances.values():
            instance.report_bookmark(now)

    def samples(self, owners: dict[str, RouterState], now: float) -> list[InstanceSample]:
        """What each instance and the owner of its pool (`owners`, by pool; none while there is none) think of it at `now`."""
        return [
            _sample(instance, owner, now)
            for name, instance in self.instances.items()
            if (owner := owners.get(self.pool_of[name])) is not None
        ]


def _sample(instance: SimulatedInstance, owner: RouterState, now: float) -> InstanceSample:
    counters, load = owner.reservations.counters(instance.name), instance.load(now)
    return InstanceSample(
        t=round(now, 3),
        instance=instance.name,
        num_requests=counters.num_requests,
        pending_prefill_tokens=counters.pending_prefill_tokens,
        ongoing_decode_tokens=counters.ongoing_decode_tokens,
        keys=instance.num_keys,
        sessions=owner.affinity.sessions_of(instance.name),
        running=load.running,
        waiting=load.waiting,
        kv_usage=round(load.kv_usage, 6),
        prefix_queries=load.prefix_cache_queries,
        prefix_hits=load.prefix_cache_hits,
        external_queries=load.external_prefix_cache_queries,
        external_hits=load.external_prefix_cache_hits,
    )
