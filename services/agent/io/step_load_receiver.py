"""Receiver of the loads that engines with the connector package push at each step. They are more recent than any scrape of
/metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog
import zmq
import zmq.asyncio

from pointsman.agent.core.step_load import StepLoad
from pointsman.agent.io.engine_monitor import EngineMonitor

log = structlog.get_logger()


async def receive_step_loads(context: zmq.asyncio.Context, address: str, monitors: Sequence[EngineMonitor]) -> None:
    """Bind `address` and pass each load to the monitor of its engine, until cancelled. Raises ZMQError if the address is in use.

    A message that is not a load is logged and dropped. A sender can do no more than misstate the load of an engine whose run it
    has read from the engine's /metrics.
    """
    decoder = msgspec.msgpack.Decoder(StepLoad)
    socket = context.socket(zmq.PULL)
    try:
        socket.bind(address)
        while True:
            message = await socket.recv()
            try:
                load = decoder.decode(message)
            except msgspec.MsgspecError as error:
                log.warning("a load message cannot be read", reason=str(error))
                continue
            sources = [monitor for monitor in monitors if monitor.is_from_this_engine(load)]
            # Two addresses of one engine cannot be told apart.
            if len(sources) == 1:
                sources[0].step_load_received(load)
    finally:
        socket.close(linger=0)
