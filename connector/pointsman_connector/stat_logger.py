"""Stat logger that reports an engine to the node's agent: KV transfer support on /metrics, and the load after each step.

vLLM loads `StepLoadPublisher` through the entry-point group vllm.stat_logger_plugins. Nothing is pushed unless
POINTSMAN_AGENT_LOADS names the agent's ZMQ address, for example ipc:///run/pointsman/loads or tcp://127.0.0.1:9102.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import zmq
from prometheus_client import PROCESS_COLLECTOR
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from pointsman_connector.announcement import announce
from pointsman_connector.kv_check_metrics import count_check
from pointsman_connector.step_load import Counters, StepLoad
from pointsman_connector.vllm_version import warn_if_untested, warn_without

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

logger = init_logger(__name__)

# Environment variable with the agent's ZMQ address.
ADDRESS = "POINTSMAN_AGENT_LOADS"


class StepLoadPublisher(StatLoggerBase):
    """Pushes a StepLoad after each step without blocking. An agent that is not reachable or slow misses steps, but gets the
    latest one. No error of this class reaches the engine: the engine is more important than what it says of itself."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *_: Any, **__: Any) -> None:
        self._off = False
        try:
            warn_if_untested()
            announce(vllm_config)
            self._begin(engine_index)
        except Exception as error:
            self._off = True
            warn_without("step loads", error)

    def _begin(self, engine_index: int) -> None:
        self._rank = engine_index
        self._counters = Counters()
        self._process = process_start()
        self._ports: list[int] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] | None = None
        if address := os.environ.get(ADDRESS):
            self._socket = _connected(address)
            logger.info("Pushing the load of each step to %s", address)

    def record(
        self,
        scheduler_stats: SchedulerStats | None = None,
        iteration_stats: IterationStats | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Count and push the statistics of one step. vLLM calls this for all of its stat loggers, in the handler of all outputs:
        an error would end every request, so the first one switches this logger off."""
        if self._off:
            return
        try:
            self._record(scheduler_stats, iteration_stats)
        except Exception as error:
            self._off = True
            warn_without("step loads", error)

    def _record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if iteration_stats is not None:
            self._counters.generation_tokens += iteration_stats.num_generation_tokens
            self._counters.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        self._count(scheduler_stats)
        if self._socket is None:
            return
        if self._ports is None:
            # Not earlier: a server listens only when its engine is ready.
            self._ports = listening_ports()
        load = StepLoad(
            process=self._process,
            ports=self._ports,
            rank=self._rank,
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_usage=scheduler_stats.kv_cache_usage,
            counters=self._counters,
        )
        try:
            self._socket.send(self._encoder.encode(load), zmq.NOBLOCK)
        except zmq.Again:
            # There is no connection yet. The next message has the complete state again.
            return

    def _count(self, stats: SchedulerStats) -> None:
        counters = self._counters
        counters.prefix_cache_queries += stats.prefix_cache_stats.queries
        counters.prefix_cache_hits += stats.prefix_cache_stats.hits
        counters.evictions += len(stats.kv_cache_eviction_events)
        external: PrefixCacheStats | None = stats.connector_prefix_cache_stats
        if external is not None:
            counters.external_prefix_cache_queries += external.queries
            counters.external_prefix_cache_hits += external.hits
        for name, values in _lists(stats.kv_connector_stats or {}):
            total = float(sum(values))
            counters.connector[name] = counters.connector.get(name, 0.0) + total
            count_check(name, total)

    def log_engine_initialized(self) -> None:
        """Do nothing. vLLM requires the method."""


# Another vLLM may require further methods. Without them the class could not be instantiated, and the engine would not start.
StepLoadPublisher.__abstractmethods__ = frozenset()


def _connected(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    # Only the newest message waits for the agent, and the engine's end discards it.
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def _lists(stats: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield the statistics of a connector. A MultiConnector has a mapping of them for each of its connectors."""
    for name, values in stats.items():
        if isinstance(values, list):
            yield name, values
        elif isinstance(values, Mapping):
            yield from _lists(values)


def listening_ports() -> list[int]:
    """Return the TCP ports on which this process listens, sorted."""
    sockets = psutil.Process().net_connections("tcp")
    return sorted({one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN})


def process_start() -> float:
    """Return this process's start time as on its /metrics, in unix s; 0 if unknown. The agent identifies the engine by it."""
    for family in PROCESS_COLLECTOR.collect():
        for sample in family.samples:
            if sample.name == "process_start_time_seconds":
                return sample.value
    return 0.0
