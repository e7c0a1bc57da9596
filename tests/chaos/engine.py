"""`python -m tests.chaos.engine LEDGER --port ...`: an emulated engine that notes every generation that it ends.

A line of the ledger, which outlives the engine, is the request's X-Request-ID and "whole" or "broken".
"""

from __future__ import annotations

import os
import sys
from unittest import mock

from aiohttp import web

from lab import emulator
from lab.emulator_app import EngineApp
from services.cli import main

_ledger = -1


class NotingApp(EngineApp):
    """Notes the end of each request."""

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        end = "broken"
        try:
            answer = await super()._generate(request, chat=chat)
            end = "whole"
            return answer
        finally:
            os.write(_ledger, f"{request.headers.get('X-Request-ID', '')} {end}\n".encode())


if __name__ == "__main__":
    _ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.argv[1:] = ["emulate", *sys.argv[2:]]
    with mock.patch.object(emulator, "EngineApp", NotingApp):
        main()
