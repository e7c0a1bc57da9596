"""A hub of models over HTTP: the part that huggingface_hub uses to get the files of a model.

As a separate process: `python -m tests.support.fakes.hub PORT ID FOLDER`. It runs until it is terminated.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Serves the folders of `models` (id -> folder) at revision `sha`, which is main, and of `others` (revision -> folder).

    As a proxy the hub serves them for any host. `token`: token that clients must send, if any. `broken`: answer all requests with
    503. `without`: answer requests of paths that end so with 503.
    """

    models: dict[str, Path]
    token: str = ""
    broken: bool = False
    without: str = ""
    url: str = ""
    sha: str = SHA
    others: dict[str, Path] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def _info(self, request: web.Request) -> web.Response:
        if request.match_info.get("revision", "main") not in ("main", self.sha, *self.others):
            return web.json_response({"error": "no"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        return web.json_response({"id": self._id(request), "sha": self._commit(request), "siblings": []})

    async def _tree(self, request: web.Request) -> web.Response:
        folder = self._folder(request)
        return web.json_response(
            [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)}
                for path in sorted(folder.iterdir())
                if path.is_file()
            ]
        )

    async def _subfolder(self, request: web.Request) -> web.Response:
        return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = self._folder(request) / request.match_info["file"]
        if not path.is_file():
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        return web.Response(
            body=path.read_bytes(), headers={"ETag": f'"{_etag(path)}"', "X-Repo-Commit": self._commit(request)}
        )

    def _commit(self, request: web.Request) -> str:
        revision = request.match_info.get("revision", "main")
        return revision if revision in self.others else self.sha

    def _folder(self, request: web.Request) -> Path:
        return self.others.get(request.match_info["revision"]) or self.models[self._id(request)]

    def _id(self, request: web.Request) -> str:
        return f"{request.match_info['owner']}/{request.match_info['name']}"

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.broken or (self.without and request.path.endswith(self.without)):
            return web.Response(status=503)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, headers={"X-Error-Code": "GatedRepo"})
        if "owner" not in request.match_info or self._id(request) not in self.models:
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        answer: web.StreamResponse = await handler(request)
        return answer

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[FakeHub]:
        app = web.Application(middlewares=[self._allowed])
        app.router.add_get("/api/models/{owner}/{name}", self._info)
        app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self._info)
        app.router.add_get("/api/models/{owner}/{name}/tree/{revision}", self._tree)
        app.router.add_get("/api/models/{owner}/{name}/tree/{revision}/{folder:.+}", self._subfolder)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{file}", self._file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


async def _serve(port: int, models: dict[str, Path]) -> None:
    async with FakeHub(models).serve(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), {sys.argv[2]: Path(sys.argv[3])}))
