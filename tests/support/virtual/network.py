"""Nodes that can die, and gRPC streams between them. Messages keep their order, and can be late, held by a cut, or lost."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from pointsman_common.io.channel import END_OF_STREAM
from tests.support.virtual.loop import VirtualLoop

# Duration of a cut or stop after which keepalive ends the affected streams, s.
KEEPALIVE_S = 8.0
# Probability that a message is late, and the maximum by which it is late, s.
LATE, LATE_S = 0.02, 0.3

_node: ContextVar[Node] = ContextVar("node")
# Context of packets on their way. They belong to no node, so they arrive even if their sender stops.
NETWORK_CONTEXT = Context()


def here() -> Node:
    """Return the node whose code is running."""
    return _node.get()


def owner_of(context: Context) -> Node | None:
    """Return the node whose code runs in a context, or None."""
    return context.get(_node)


def clock_offset_s() -> float:
    """Return the error of the wall clock of the node whose code is running, s."""
    node = _node.get(None)
    return node.clock_s if node is not None else 0.0


class Node:
    """One process: its tasks, and whether it is alive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.clock_s = 0.0
        """Error of the node's wall clock, s."""
        self.late: deque[tuple[float, float]] = deque(maxlen=100)
        """Late messages between the node and Redis: the time of each, and by how much it was late, s."""
        self.blocked: deque[tuple[float, float]] = deque(maxlen=1_000)
        """Periods in which the node was stopped or computed: begin and end, s."""
        self.tasks: dict[asyncio.Task[Any], None] = {}  # a dict for its order

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as this node's task. Tasks that it starts are this node's, too."""
        return self.spawn_on(asyncio.get_running_loop(), work)

    def spawn_on(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Like spawn(), on a loop that does not run yet."""
        before = _node.set(self)
        try:
            task = loop.create_task(work)
            task.add_done_callback(self._done)
            return task
        finally:
            _node.reset(before)

    def _done(self, task: asyncio.Task[Any]) -> None:
        # No task of a node may fail, even if no other task awaits it.
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": f"a fault in {self.name}", "exception": error})


def track_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Make the loop add every new task to the tasks of the node that starts it."""

    def make(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
        if (node := _node.get(None)) is not None:
            node.tasks[task] = None
            task.add_done_callback(lambda done: node.tasks.pop(done, None))
        return task

    loop.set_task_factory(make)


@dataclass(slots=True)
class Ended:
    """The last item of a pipe: the other side has finished (OK), or the stream broke."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""


class Pipe:
    """One direction of a stream."""

    def __init__(self, network: Network, sender: Node, receiver: Node) -> None:
        self._network = network
        self.sender, self.receiver = sender, receiver
        self._latest = 0.0
        self.held: list[bytes | Ended] = []
        self._there: deque[bytes | Ended] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, item: bytes | Ended) -> None:
        """Send an item. Items of a dead node are dropped."""
        if self._closed or not self.sender.alive:
            return
        loop = asyncio.get_running_loop()
        # Timers with equal times can fire in any order, so each time is later than the one before.
        self._latest = max(self._latest + 1e-6, loop.time() + self._network.delay_s())
        loop.call_at(self._latest, self._arrive, item, context=NETWORK_CONTEXT)

    def end(self, ended: Ended) -> None:
        """Close the pipe with `ended`; items on their way are dropped."""
        if not self._closed:
            self._closed = True
            self.held.clear()
            self._give(ended)

    def flush(self) -> None:
        """Deliver what a cut has held."""
        held, self.held = self.held, []
        for item in held:
            self._arrive(item)

    async def get(self) -> bytes | Ended:
        """Return the next item. After the end, each call returns the end."""
        while not self._there:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._there[0] if isinstance(self._there[0], Ended) else self._there.popleft()

    def _arrive(self, item: bytes | Ended) -> None:
        if self._closed:
            return
        if self._network.is_cut(self.sender.name, self.receiver.name) or self.held:
            self.held.append(item)
        else:
            self._give(item)

    def _give(self, item: bytes | Ended) -> None:
        self._there.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


@dataclass(slots=True)
class Method:
    """A server's handler of one stream, and the parser of its messages."""

    run: Callable[[Any, Any], Coroutine[Any, Any, None]]
    parse: Callable[[bytes], Any]


class Call:
    """A client's end of one stream, with the interface of grpc.aio's."""

    keeps_alive = True

    def __init__(self, network: Network, client: Node, address: str, path: str, serialise: Any, parse: Any) -> None:
        self._network = network
        self._serialise, self._parse = serialise, parse
        self._status: Ended | None = None
        self.client, self.server = client, network.at(address)
        self._up = self._down = Pipe(network, client, self.server)
        self._handler: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()  # set also when the stream has ended before
        if client.alive:
            self._up, self._down = Pipe(network, client, self.server), Pipe(network, self.server, client)
            network.calls[self] = None
            asyncio.get_running_loop().call_later(
                network.delay_s(), self._connect, address, path, context=NETWORK_CONTEXT
            )

    async def wait_for_connection(self) -> None:
        """Return once a server has the stream. Raises AioRpcError if it broke before."""
        await self._connected.wait()
        if self._status is not None:
            raise self._error()

    async def read(self) -> Any:
        """Return the next message, or END_OF_STREAM. Raises AioRpcError if the stream broke."""
        item = await self._down.get()
        if isinstance(item, Ended):
            self._status = self._status or item
            if self._status.code is grpc.StatusCode.OK:
                return END_OF_STREAM
            raise self._error()
        return self._parse(item)

    async def write(self, message: Any) -> None:
        """Send a message. Raises AioRpcError if the stream has ended."""
        if self._status is not None:
            raise self._error()
        self._up.put(self._serialise(message))

    async def done_writing(self) -> None:
        """End the client's direction."""
        self._up.put(Ended())

    def cancel(self) -> bool:
        """Cancel the stream; return whether it was still open."""
        if self._status is not None:
            return False
        self._status = Ended(grpc.StatusCode.CANCELLED, "cancelled")
        self._connected.set()
        self._down.end(self._status)
        if self.client.alive:
            asyncio.get_running_loop().call_later(self._network.delay_s(), self._leave, context=NETWORK_CONTEXT)
        return True

    async def code(self) -> grpc.StatusCode:
        """Return the status code with which the stream ended."""
        return self._status.code if self._status is not None else grpc.StatusCode.UNKNOWN

    async def details(self) -> str:
        """Return the text of the status."""
        return self._status.details if self._status is not None else ""

    def lose(self) -> None:
        """Break the stream; both ends are notified."""
        self._network.calls.pop(self, None)
        lost = Ended(grpc.StatusCode.UNAVAILABLE, "connection lost")
        if self.client.alive:
            self._down.end(lost)
            self._status = self._status or lost
            self._connected.set()
        self._leave()

    def flush(self) -> None:
        """Deliver what a cut has held, in both directions."""
        self._up.flush()
        self._down.flush()

    def _leave(self) -> None:
        self._network.calls.pop(self, None)
        if self._handler is not None:
            self._handler.cancel()
        self._up.end(Ended(grpc.StatusCode.CANCELLED))

    def _connect(self, address: str, path: str) -> None:
        if self._status is not None:
            return
        method = self._network.served(address, path)
        if method is None or not self.server.alive:
            self.lose()
        elif self._network.is_cut(self.client.name, self.server.name):
            asyncio.get_running_loop().call_later(0.5, self._connect, address, path, context=NETWORK_CONTEXT)
        else:
            self._handler = self.server.spawn(self._serve(method))
            self._connected.set()

    async def _serve(self, method: Method) -> None:
        ended = Ended()
        try:
            await method.run(None, _Context(self._up, self._down, method.parse))
        except _Aborted as aborted:
            ended = aborted.status
        self._down.put(ended)

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        none = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self._status.code, none, none, self._status.details, None)


class _Aborted(Exception):
    def __init__(self, status: Ended) -> None:
        super().__init__(status.details)
        self.status = status


class _Context:
    """A server's end of one stream."""

    def __init__(self, up: Pipe, down: Pipe, parse: Callable[[bytes], Any]) -> None:
        self._up, self._down, self._parse = up, down, parse

    async def read(self) -> Any:
        item = await self._up.get()
        return END_OF_STREAM if isinstance(item, Ended) else self._parse(item)

    async def write(self, message: Any) -> None:
        self._down.put(message.SerializeToString())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return no certificate: virtual clients have none."""
        return {}

    def peer(self) -> str:
        """Return an empty name: virtual clients have no address."""
        return ""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise _Aborted(Ended(code, details))

    async def abort_with_status(self, status: Any) -> None:
        """Abort with the code and text of `status`; its other fields are dropped."""
        await self.abort(status.code, status.details)


class Channel:
    """A channel from the running node to an address."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return the function that opens a stream, for a stub."""
        return lambda *_, **__: Call(
            self._network, here(), self._address, path, request_serializer, response_deserializer
        )

    def unary_unary(self, path: str, **_: Any) -> Any:
        """Return None: virtual nodes make no unary calls."""
        return None

    unary_stream = unary_unary

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in [call for call in self._network.calls if call.client is here() and call.server is self._server]:
            call.cancel()

    @property
    def _server(self) -> Node:
        return self._network.at(self._address)


@dataclass
class Network:
    """The listening nodes by address, the open streams, and the pairs of nodes that cannot reach each other."""

    rng: random.Random
    calls: dict[Any, None] = field(default_factory=dict)  # gRPC streams and HTTP connections
    _nodes: dict[str, Node] = field(default_factory=dict)
    _methods: dict[str, dict[str, Method]] = field(default_factory=dict)
    _cuts: dict[frozenset[str], int] = field(default_factory=dict)

    def listen(self, address: str, node: Node, methods: dict[str, Method]) -> None:
        """Make `node` serve these paths at `address` from now on."""
        self._nodes[address], self._methods[address] = node, methods

    def at(self, address: str) -> Node:
        """Return the node that listens at an address, or a new dead node."""
        found = self._nodes.get(address)
        if found is None:
            found = Node(address)
            found.alive = False
        return found

    def served(self, address: str, path: str) -> Method | None:
        """Return the method that serves a path at an address, or None."""
        return self._methods.get(address, {}).get(path)

    def delay_s(self) -> float:
        """Draw the delay of a message, s."""
        late = self.rng.uniform(0, LATE_S) if self.rng.random() < LATE else 0.0
        return self.rng.uniform(0.0002, 0.003) + late

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether two nodes cannot reach each other."""
        return frozenset((one, other)) in self._cuts

    def cut(self, one: str, other: str, for_s: float) -> None:
        """Cut two nodes off from each other for `for_s`, in both directions. Messages are held until the end of the cut."""
        pair, loop = frozenset((one, other)), asyncio.get_running_loop()
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        if for_s > KEEPALIVE_S:
            loop.call_later(KEEPALIVE_S, self._lose, pair)
        loop.call_later(for_s, self._heal, pair)

    def stop(self, node: Node, for_s: float) -> None:
        """Stop a node for `for_s`; then it resumes with what has arrived meanwhile.

        After KEEPALIVE_S without an answer the other ends treat the node's streams as broken.
        """
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stop_owner(node)
        node.blocked.append((loop.time(), loop.time() + for_s))
        if for_s > KEEPALIVE_S:
            loop.call_later(KEEPALIVE_S, self._forsake, node, context=NETWORK_CONTEXT)
        loop.call_later(for_s, loop.resume_owner, node, context=NETWORK_CONTEXT)

    def _forsake(self, node: Node) -> None:
        for call in [call for call in self.calls if call.keeps_alive and node in (call.client, call.server)]:
            call.lose()

    def kill(self, node: Node) -> None:
        """Kill a node. The other ends of its streams notice after the delay of a message."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.release_owner(node)
        node.alive = False
        for call in [call for call in self.calls if node in (call.client, call.server)]:
            asyncio.get_running_loop().call_later(self.delay_s(), call.lose)
        for task in list(node.tasks):
            task.cancel()

    def _heal(self, pair: frozenset[str]) -> None:
        self._cuts[pair] -= 1
        if not self._cuts[pair]:
            del self._cuts[pair]
            for call in [call for call in self.calls if {call.client.name, call.server.name} == pair]:
                call.flush()

    def _lose(self, pair: frozenset[str]) -> None:
        for call in [call for call in self.calls if {call.client.name, call.server.name} == pair]:
            if call.keeps_alive:
                call.lose()
