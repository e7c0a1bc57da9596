"""Loads that engines push after each step, through the connector package's stat logger: fresher than any look at /metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog
import zmq
import zmq.asyncio

from services.agent.step_load import StepLoad
from services.agent.watch import EngineWatch

log = structlog.get_logger()


async def receive(context: zmq.asyncio.Context, address: str, watches: Sequence[EngineWatch]) -> None:
    """Bind `address` and give each load to the watch of its engine. Ends by cancellation. ZMQError when the address is taken.

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
                log.warning("load_not_understood", reason=str(error))
                continue
            sources = [watch for watch in watches if watch.pushes(load)]
            if len(sources) > 1:
                # Started at the same moment, as far as /metrics tells moments.
                sources = [watch for watch in sources if watch.target.port in load.ports]
            if len(sources) == 1:
                sources[0].stepped(load)
    finally:
        socket.close(linger=0)
