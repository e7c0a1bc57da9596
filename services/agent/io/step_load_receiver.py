"""Receiver of the loads that engines with the connector package's stat logger push after each step. They are more recent than any
scrape of /metrics."""

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

    A message that is not a load is logged and dropped. A sender cannot do more than misstate the load of an engine whose start
    time it knows to the millisecond. So the address should be on the loopback interface or in a separate folder.
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
            if len(sources) > 1:
                # These engines have the same start time at the resolution of /metrics.
                sources = [monitor for monitor in sources if monitor.address.port in load.ports]
            if len(sources) == 1:
                sources[0].step_load_received(load)
    finally:
        socket.close(linger=0)
