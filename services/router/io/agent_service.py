"""AgentService: agents' streams into events."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TypeAlias

import grpc
import grpc.aio

from pointsman.agent.v1 import agent_pb2, agent_pb2_grpc
from services.common.channel import END_OF_STREAM
from services.router import events as ev
from services.router.io.runtime import AgentStream, Router
from services.router.io.wire import agents

Context: TypeAlias = "grpc.aio.ServicerContext[agent_pb2.ReportRequest, agent_pb2.ReportResponse]"


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """One stream for each instance."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._stream_ids = itertools.count(1)

    async def Report(self, requests: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Read the agent's messages, write the router's, until either side ends."""
        stream_id = next(self._stream_ids)
        stream = self._router.agents[stream_id] = AgentStream()
        reader = asyncio.ensure_future(self._read(stream_id, context))
        writer = asyncio.ensure_future(self._write(stream, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            ended = await asyncio.gather(reader, writer, return_exceptions=True)
            del self._router.agents[stream_id]
            self._lost(stream_id)
        refusal = ended[1]
        if isinstance(refusal, ev.RefuseReport):
            code = grpc.StatusCode.ABORTED if refusal.replaced else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, refusal.reason)
        if refusal is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the router stops")
        if isinstance(ended[0], _ProtocolError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(ended[0]))
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure

    async def _read(self, stream_id: int, context: Context) -> None:
        instance_id = ""
        while (message := await context.read()) is not END_OF_STREAM:
            kind = message.WhichOneof("kind")
            if kind == "hello":
                if instance_id:
                    raise _ProtocolError("a second hello on one stream")
                instance_id = message.hello.instance.instance_id
                self._router.submit(
                    ev.AgentHello(
                        stream_id,
                        agents.instance_info(message.hello.instance),
                        message.hello.key_scheme,
                        message.hello.oldest_seq,
                        message.hello.latest_seq,
                    )
                )
            elif not instance_id:
                raise _ProtocolError("the first message must be a hello")
            elif kind == "load":
                self._router.submit(
                    ev.LoadReported(stream_id, instance_id, agents.load(message.load, time.monotonic()))
                )
            elif kind == "goodbye":
                self._router.submit(ev.AgentGoodbye(stream_id, instance_id))
            elif (about_keys := agents.key_message(message)) is not None:
                self._router.submit(ev.KeysReported(stream_id, instance_id, about_keys))

    async def _write(self, stream: AgentStream, context: Context) -> ev.RefuseReport | None:
        while isinstance(reply := await stream.replies.get(), agent_pb2.ReportResponse):
            await context.write(reply)
        return reply

    def _lost(self, stream_id: int) -> None:
        for record in self._router.state.fleet.records():
            if record.stream_id == stream_id and record.lost_at is None:
                self._router.submit(ev.AgentLost(stream_id, record.info.instance_id))


class _ProtocolError(Exception):
    """The agent does not follow the protocol."""
