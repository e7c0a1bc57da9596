"""An emulated engine that records the end of every generation: `python -m tests.support.processes.ledger_engine LEDGER --port N`.

The ledger is a file that outlives the engine. A line consists of a request's X-Request-ID and "whole" or "broken".
"""

from __future__ import annotations

import os
import sys
from unittest import mock

from aiohttp import web

from pointsman_cli.main import main
from pointsman_lab.emulator import emulated_engine
from pointsman_lab.emulator.http_routes import Api, EngineApp

_ledger = -1


class NotingApp(EngineApp):
    """An EngineApp that records the end of each request."""

    async def _generate(self, request: web.Request, kind: Api) -> web.StreamResponse:
        end = "broken"
        try:
            answer = await super()._generate(request, kind)
            end = "whole"
            return answer
        finally:
            os.write(_ledger, f"{request.headers.get('X-Request-ID', '')} {end}\n".encode())


if __name__ == "__main__":
    _ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.argv[1:] = ["emulate", *sys.argv[2:]]
    with mock.patch.object(emulated_engine, "EngineApp", NotingApp):
        main()
