"""The instances of a simulation, and what their agents tell the routers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from lab.agenda import Agenda
from lab.engine_model import EngineModel
from lab.link import Tell
from lab.samples import InstanceSample
from lab.simulated_instance import Hear, SimulatedInstance
from lab.simulation import Simulation
from services.common.keys import KEY_SCHEME
from services.router import events as ev
from services.router.domain import InstanceInfo, KvTransfer
from services.router.state import RouterState


class SimulatedFleet:
    """All instances by name, dealt to `pools` in turn; `tell` hears all agents, `hear` all engines."""

    def __init__(self, asked: Simulation, pools: Sequence[str], agenda: Agenda, tell: Tell, hear: Hear) -> None:
        self._asked = asked
        self._tell = tell
        names = asked.names or [f"i{number}" for number in range(asked.instances)]
        self.instances = {
            name: SimulatedInstance(name, number, EngineModel(asked.engine, asked.profile), agenda, tell, hear)
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
        config = self._asked.engine
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
                    prefill_chunk_limit=config.long_prefill_token_threshold,
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
