"""An HTTP proxy in front of one engine that makes it ill, path by path: late, wrong, broken, silent or incomplete answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

# Headers that hold for one connection only.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"})


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the answers on a path. Several faults combine: `Fault(delay_s=3, status=500)`."""

    delay_s: float = 0.0  # time before the request is passed on
    status: int = 0  # answer this, with `body`, instead of asking the engine; 0: ask it
    body: bytes | None = None  # replaces the answer's body
    rewrite: Callable[[bytes], bytes] | None = None  # changes the answer's body, which is then sent in one piece
    hang: bool = False  # no answer while the fault lasts; then the connection is closed
    reset: bool = False  # the connection is closed without an answer
    # The connection is closed after this many bytes of the body; its length is announced as before.
    truncate_at: int | None = None
    stall_at: int | None = None  # nothing more comes after this many bytes of the body while the fault lasts

    @property
    def whole(self) -> bool:
        """Whether the answer is read before it is sent."""
        return self.body is not None or self.rewrite is not None or self.truncate_at is not None


HEALTHY = Fault()


class TamperingProxy:
    """Listens on 127.0.0.1:`port`, and passes requests on to the engine at `target`. Use it in one event loop; `set` and `heal`
    can be called from any thread."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.port = 0
        self.requests: Counter[str] = Counter()
        """Requests by path, those that were not passed on included."""
        self._faults: dict[str, Fault] = {}
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """The base URL at which the ill engine answers."""
        return f"http://127.0.0.1:{self.port}"

    def set(self, fault: Fault, *paths: str) -> None:
        """Give the paths that begin with one of `paths` this fault (none: all paths). The longest beginning counts."""
        self._faults |= dict.fromkeys(paths or ("",), fault)
        self._tell()

    def heal(self, *paths: str) -> None:
        """End the faults of these beginnings of paths (none: all faults)."""
        for path in paths or tuple(self._faults):
            self._faults.pop(path, None)
        self._tell()

    async def listen(self) -> None:
        """Accept connections, after `refuse` on the same port."""
        self._loop = asyncio.get_running_loop()
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def refuse(self) -> None:
        """Close all connections, and refuse new ones until `listen`."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._tell()
            await runner.cleanup()

    async def close(self) -> None:
        """End the proxy."""
        await self.refuse()
        if self._session is not None:
            await self._session.close()

    def _tell(self) -> None:
        def tell() -> None:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)

    def _fault(self, path: str) -> Fault:
        begins = [beginning for beginning in self._faults if path.startswith(beginning)]
        return self._faults[max(begins, key=len)] if begins else HEALTHY

    async def _while(self, fault: Fault, path: str) -> None:
        """Wait while a path has this fault, and the proxy accepts connections."""
        while self._runner is not None and self._fault(path) is fault:
            await self._changed.wait()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.requests[path] += 1
        fault = self._fault(path)
        await asyncio.sleep(fault.delay_s)
        if fault.hang:
            await self._while(fault, path)
        if fault.hang or fault.reset:
            return _cut(request)
        if fault.status:
            answer = web.Response(status=fault.status, body=fault.body or b"", content_type="application/json")
            return await self._send_whole(request, answer, fault)
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        sent = self._session.request(
            request.method, f"{self.target}{request.raw_path}", headers=headers, data=await request.read() or None
        )
        try:
            async with sent as engine:
                return await self._answer(request, engine, fault)
        except aiohttp.ClientError:
            return _cut(request)

    async def _answer(self, request: web.Request, engine: aiohttp.ClientResponse, fault: Fault) -> web.StreamResponse:
        headers = {name: value for name, value in engine.headers.items() if name.lower() not in _HOP_BY_HOP}
        if fault.whole:
            body = await engine.read() if fault.body is None else fault.body
            body = fault.rewrite(body) if fault.rewrite is not None else body
            return await self._send_whole(
                request, web.Response(status=engine.status, headers=headers, body=body), fault
            )
        answer = web.StreamResponse(status=engine.status, headers=headers)
        await answer.prepare(request)
        left = fault.stall_at
        async for piece in engine.content.iter_any():
            await answer.write(piece if left is None else piece[:left])
            left = None if left is None else max(left - len(piece), 0)
            if left == 0:
                await self._while(fault, request.path)
                return _cut(request, answer)
        await answer.write_eof()
        return answer

    async def _send_whole(self, request: web.Request, answer: web.Response, fault: Fault) -> web.StreamResponse:
        if fault.truncate_at is None:
            return answer
        body = answer.body
        assert isinstance(body, bytes)
        part = web.StreamResponse(status=answer.status, headers=answer.headers)
        part.content_length = len(body)
        await part.prepare(request)
        await part.write(body[: fault.truncate_at])
        return _cut(request, part)


def _cut(request: web.Request, answer: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the request's connection."""
    if request.transport is not None:
        request.transport.close()
    return answer or web.Response()


@asynccontextmanager
async def tampering(target: str) -> AsyncIterator[TamperingProxy]:
    """Run a proxy of the engine at `target`, a base URL, in the test's event loop."""
    proxy = TamperingProxy(target)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()


@contextmanager
def tampering_beside(*targets: str) -> Iterator[list[TamperingProxy]]:
    """Run a proxy of each target in a thread, for tests without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxies = [TamperingProxy(target) for target in targets]
    try:
        for proxy in proxies:
            asyncio.run_coroutine_threadsafe(proxy.listen(), loop).result(10.0)
        yield proxies
    finally:
        for proxy in proxies:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()
