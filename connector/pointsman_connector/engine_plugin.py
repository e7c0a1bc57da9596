"""General plug-in of vLLM: pushes the load of an engine core to the node's agent at each step.

vLLM calls `register` in all of its processes (entry-point group vllm.general_plugins). Nothing is pushed unless
POINTSMAN_AGENT_LOADS names the agent's ZMQ address, for example ipc:///run/pointsman/loads or tcp://127.0.0.1:9108. With it, two
methods of each new scheduler are replaced by ones that also observe the step. Only engine cores create schedulers. An error of
the observation puts vLLM's own methods back. vLLM's modules are imported where they are used, because another vLLM may lack them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from socket import AF_INET6, getaddrinfo
from typing import Any

import msgspec
import zmq

from pointsman_connector.engine_run import engine_run
from pointsman_connector.step_load import StepLoad
from pointsman_connector.step_observer import StepObserver, kv_usage, missing_parts
from pointsman_connector.vllm_version import vllm_logger, warn_without

# Environment variable with the agent's ZMQ address.
ADDRESS = "POINTSMAN_AGENT_LOADS"
# Minimum interval between a message and the next one for the end of a step, s: agents forward no more. A message costs several
# times the CPU time of the observation of a step. The end of all work is always pushed.
PUSH_INTERVAL_S = 0.05
# The same while prompts of the batch are not complete, because the next step usually pushes at its begin.
PREFILL_PUSH_INTERVAL_S = 0.5
# The same for the begin of a step with a prompt. A begin with other numbers of requests is always pushed.
BEGIN_PUSH_INTERVAL_S = 0.02


def register() -> None:
    """Prepare this process. Its children inherit the engine's id, and its schedulers are observed. Never raises."""
    try:
        engine_run()
        if os.environ.get(ADDRESS):
            _observe_choice()
    except Exception as error:
        warn_without("step loads", error)


def _observe_choice() -> None:
    from vllm.config import SchedulerConfig

    if not hasattr(SchedulerConfig.get_scheduler_cls, "__wrapped__"):
        SchedulerConfig.get_scheduler_cls = _observing(SchedulerConfig.get_scheduler_cls)


def _observing(choose: Callable[[Any], type]) -> Callable[[Any], type]:
    """Return `choose` such that the class that it returns observes each of its new schedulers."""

    @functools.wraps(choose)
    def get_scheduler_cls(config: Any) -> type:
        kind = choose(config)
        try:
            _observe_new(kind)
        except Exception as error:
            warn_without("step loads", error)
        return kind

    return get_scheduler_cls


def _observe_new(kind: Any) -> None:
    begin = kind.__init__
    if hasattr(begin, "__pointsman__"):
        return

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **more: Any) -> None:  # noqa: N807
        begin(self, *args, **more)
        # A subclass's own __init__ may call this one.
        if type(self) is kind:
            attach(self, os.environ.get(ADDRESS, ""))

    __init__.__pointsman__ = True  # type: ignore[attr-defined]
    kind.__init__ = __init__


def attach(scheduler: Any, address: str) -> None:
    """Push the load of a new scheduler to `address` from now on. Logs why, and changes nothing, if that is not possible."""
    try:
        if missing := missing_parts(scheduler):
            raise AttributeError(f"{type(scheduler).__name__} has no {', '.join(missing)}")
        _Pusher(scheduler, address).attach()
    except Exception as error:
        warn_without("step loads", error)
        return
    vllm_logger().info("Pushing the load of each step to %s", address)


class _Pusher:
    """Observes one scheduler and pushes its load, without blocking. An agent that is not reachable or slow misses messages, but
    gets the latest one."""

    def __init__(self, scheduler: Any, address: str) -> None:
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        self._observer = StepObserver()
        self._sent_counts: tuple[int, int] | None = None
        self._sent_at = float("-inf")
        self._encoder = msgspec.msgpack.Encoder()
        parallel = scheduler.vllm_config.parallel_config
        # With data parallelism of independent ranks data_parallel_rank is 0 in each.
        rank = getattr(parallel, "data_parallel_index", None)
        self._load = StepLoad(
            run=engine_run(),
            rank=parallel.data_parallel_rank if rank is None else rank,
            running=0,
            waiting=0,
            kv_usage=0.0,
            prefill_tokens_left=0,
            totals=self._observer.totals,
        )
        self._socket = _connected(address)

    def attach(self) -> None:
        """Replace the scheduler's methods. Mutates it."""
        self._scheduler.schedule = self._observed_schedule
        self._scheduler.update_from_output = self._observed_update

    def _observed_schedule(self, *args: Any, **more: Any) -> Any:
        began = time.monotonic()
        output = self._schedule(*args, **more)
        try:
            # A step with a prompt may be long, so the agent hears of its begin, too.
            if self._observer.scheduled(self._scheduler, output, began) and (
                began - self._sent_at >= BEGIN_PUSH_INTERVAL_S
                or self._scheduler.get_request_counts() != self._sent_counts
            ):
                self._push(began)
        except Exception as error:
            self._switch_off(error)
        return output

    def _observed_update(self, scheduler_output: Any, *args: Any, **more: Any) -> Any:
        outputs = self._update(scheduler_output, *args, **more)
        try:
            now = time.monotonic()
            computed = self._observer.computed(scheduler_output, now)
            counts = self._scheduler.get_request_counts()
            interval = PREFILL_PUSH_INTERVAL_S if self._observer.prefill_tokens_left else PUSH_INTERVAL_S
            due = counts == (0, 0) or now - self._sent_at >= interval
            # While requests wait for KV, a step without tokens follows another each millisecond.
            if due and (computed or counts != self._sent_counts):
                self._push(now)
        except Exception as error:
            self._switch_off(error)
        return outputs

    def _push(self, now: float) -> None:
        load, scheduler = self._load, self._scheduler
        self._sent_at = now
        self._sent_counts = load.running, load.waiting = scheduler.get_request_counts()
        load.kv_usage = kv_usage(scheduler)
        load.prefill_tokens_left = self._observer.prefill_tokens_left
        try:
            self._socket.send(self._encoder.encode(load), zmq.NOBLOCK)
        except zmq.Again:
            # There is no connection yet. The next message has the complete state again.
            return

    def _switch_off(self, error: Exception) -> None:
        self._scheduler.schedule = self._schedule
        self._scheduler.update_from_output = self._update
        self._socket.close(linger=0)
        warn_without("step loads", error)


def _needs_ipv6(address: str) -> bool:
    """Return whether ZMQ must use IPv6: for an IPv6 address, and for a name that has no IPv4 address."""
    if "[" in address or not address.startswith("tcp://"):
        return "[" in address
    try:
        found = getaddrinfo(address.removeprefix("tcp://").rpartition(":")[0], None)
    except (OSError, UnicodeError):
        return True
    return all(family is AF_INET6 for family, *_ in found)


def _connected(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    # Only the newest message waits for the agent, and the engine's end discards it.
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, _needs_ipv6(address))
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
