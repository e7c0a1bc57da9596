"""Reports the engines without an instance to a router, which cannot know of them otherwise."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Sequence

import grpc
import grpc.aio
import structlog

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman.agent.v1 import agent_pb2_grpc
from pointsman_agent.io.engine_monitor import EngineMonitor
from pointsman_common.io.auth import CallMetadata
from pointsman_common.io.channel import ReloadingChannel

log = structlog.get_logger()

# Interval between two comparisons with what was reported last, s.
COMPARE_S = 1.0
# Maximum interval between two reports while an engine is absent, s: a third of the time after which a router forgets them.
REPEAT_S = 5.0
# The same for a router that refuses the reports or has no such method, s. Another version may run there by then.
REFUSED_REPEAT_S = 60.0
# Timeout of a call, s.
TIMEOUT_S = 5.0
_REFUSED = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)


async def report_absent_engines(
    router: str,
    channel: ReloadingChannel,
    metadata: CallMetadata,
    agent_id: str,
    monitors: Sequence[EngineMonitor],
) -> None:
    """Report those of `monitors` that have no instance, until cancelled. Sends nothing while each engine has one."""
    stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)  # type: ignore[call-overload]
    node = socket.gethostname()
    reported: list[EngineMonitor] = []
    # `due`: when the same engines are reported again. `allowed`: before which nothing is, because the router has refused.
    due = allowed = -math.inf
    while True:
        absent = [monitor for monitor in monitors if monitor.absent]
        now = time.monotonic()
        # Only the change to "none" is reported without an absent engine.
        if now >= allowed and (absent or reported) and (now >= due or absent != reported):
            engines = [
                pb.AbsentEngine(
                    instance_id=monitor.address.instance_id(None),
                    url=monitor.address.url,
                    problem=monitor.problem,
                    node=node,
                )
                for monitor in absent
            ]
            request = pb.ReportAbsentEnginesRequest(agent_id=agent_id, engines=engines)
            try:
                await stub.ReportAbsentEngines(request, timeout=TIMEOUT_S, metadata=metadata())
                reported, due = absent, now + REPEAT_S
            except grpc.aio.AioRpcError as error:
                log.debug("a router takes no absent engines", router=router, code=error.code().name)
                if error.code() in _REFUSED:
                    allowed = now + REFUSED_REPEAT_S
        await asyncio.sleep(COMPARE_S)
