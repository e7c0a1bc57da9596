"""An emulated engine that dies of a poisonous prompt, and may publish wrong KV events. Settings: POINTSMAN_EMULATE_...

python -m bench.ill_engine CASE      # a case of bench.events: "right", "unreachable", "wrong tokens"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from unittest.mock import patch

from aiohttp import web

from bench.events import tampering
from pointsman_lab.emulator import emulated_engine
from pointsman_lab.emulator.http_routes import EngineApp

# A prompt with this word ends the engine's process.
POISON = "nightshade"


@web.middleware
async def _dies(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if POISON.encode() in await request.read():
        os._exit(1)
    return await handler(request)


class _MortalApp(EngineApp):
    def make(self) -> web.Application:
        app = super().make()
        app.middlewares.insert(0, _dies)
        return app


def main(case: str) -> None:
    """Serve until SIGTERM, or the first poisonous prompt."""
    with patch.object(emulated_engine, "EngineApp", _MortalApp), tampering(case):
        emulated_engine.run(emulated_engine.EmulateSettings())


if __name__ == "__main__":
    main(sys.argv[1])
