"""Receiver of the loads that engines with the connector package push at each step. They are more recent than any scrape of
/metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import structlog
import zmq
import zmq.asyncio

from pointsman_agent.core.step_load import StepLoad
from pointsman_agent.core.warning_limit import WarningLimit
from pointsman_agent.io.engine_monitor import EngineMonitor
from pointsman_agent.io.zmq_sockets import needs_ipv6

log = structlog.get_logger()

# Maximum size of a message, bytes; a load has some 250. ZMQ closes the connection of a sender that exceeds it.
MAX_MESSAGE_BYTES = 4_096
# Minimum interval between two warnings about messages that are dropped, s. A sender of another version sends one at each step.
WARNING_INTERVAL_S = 60.0


async def receive_step_loads(context: zmq.asyncio.Context, address: str, monitors: Sequence[EngineMonitor]) -> None:
    """Bind `address` and pass each load to the monitor of its engine, until cancelled. Raises ZMQError if the address is in use.

    A message that is not a load is dropped, with a warning at most every WARNING_INTERVAL_S. A sender can do no more than
    misstate the load of an engine whose run it has read from the engine's /metrics.
    """
    decoder = msgspec.msgpack.Decoder(StepLoad)
    dropped = WarningLimit(WARNING_INTERVAL_S)
    # What cannot be looked up may be the name of a network interface.
    ipv6 = await needs_ipv6(address, unknown=False)
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.IPV6, ipv6)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    try:
        socket.bind(address)
        while True:
            message = await socket.recv()
            try:
                _pass_on(decoder.decode(message), monitors)
            # Decoding raises more than msgspec's own errors, for example RecursionError. All engines share this task.
            except Exception as error:
                if messages := dropped.occurred(time.monotonic()):
                    reason = f"{type(error).__name__}: {error}"
                    log.warning("load messages are dropped", reason=reason, messages=messages)
            # `recv` does not wait while messages are queued, so one sender could keep all other tasks from running.
            await asyncio.sleep(0)
    finally:
        socket.close(linger=0)


def _pass_on(load: StepLoad, monitors: Sequence[EngineMonitor]) -> None:
    sources = [monitor for monitor in monitors if monitor.is_from_this_engine(load)]
    # Two addresses of one engine cannot be told apart.
    if len(sources) == 1:
        sources[0].step_load_received(load)
