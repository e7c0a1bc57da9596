"""Loads that engines push after each step, through the connector package's stat logger: fresher than any look at /metrics."""

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
    """Bind `address` and give each load to the monitor of its engine. Ends by cancellation. ZMQError when the address is taken.

    What is not a load is logged and dropped: whoever reaches the address can only misstate the load of engines whose start it
    knows to the millisecond, so it belongs on the loopback interface or in a folder of its own.
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
                # Started at the same moment, as far as /metrics tells moments.
                sources = [monitor for monitor in sources if monitor.address.port in load.ports]
            if len(sources) == 1:
                sources[0].step_load_received(load)
    finally:
        socket.close(linger=0)
