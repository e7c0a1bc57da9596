"""Runs nghttp2's h2load, a third-party load client, against the gateway and nginx: /v1/models and whole chats."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from bench import stack
from bench.figures import Figure
from bench.gateway import fleet

REQUESTS = 10_000
CLIENTS = 64
BODY = {"model": stack.MODEL, "messages": [{"role": "user", "content": "set the points"}], "max_tokens": 1}
CASES = {"models": "/v1/models", "chat": "/v1/chat/completions"}


async def h2load() -> list[Figure]:
    """h2load_models_per_s, h2load_chat_per_s; baseline is nginx in front of the same engines. Raises FileNotFoundError without
    h2load, and RuntimeError if a request failed."""
    executable = shutil.which("h2load")
    if executable is None:
        raise FileNotFoundError("the benchmark needs h2load: apt-get install nghttp2-client")
    async with contextlib.AsyncExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        body = Path(folder) / "body.json"
        body.write_text(json.dumps(BODY))
        engines, model = await running.enter_async_context(fleet(0.0))
        gateway, _ = await running.enter_async_context(stack.pointsman(engines, model))
        nginx = await running.enter_async_context(stack.nginx(engines))
        figures = []
        for name, path in CASES.items():
            sent = ["-d", str(body), "-H", "content-type: application/json"] if name == "chat" else []
            ours, theirs = [await _run(executable, server.port, path, sent) for server in (gateway, nginx)]
            note = f"{REQUESTS:,} requests by {CLIENTS} clients, all answered with 2xx; {ours[1]}; nginx: {theirs[1]}"
            figures.append(Figure(f"h2load_{name}_per_s", ours[0], "1/s", theirs[0], note))
    return figures


async def _run(executable: str, port: int, path: str, sent: list[str]) -> tuple[float, str]:
    """Run h2load; return requests per second and a note of request times."""
    flags = ["--h1", "-n", str(REQUESTS), "-c", str(CLIENTS), *sent, f"http://127.0.0.1:{port}{path}"]
    child = await asyncio.create_subprocess_exec(executable, *flags, stdout=asyncio.subprocess.PIPE)
    output = (await child.communicate())[0].decode()
    statuses = re.search(r"status codes: (\d+) 2xx", output)
    rate = re.search(r"finished in .*?, ([0-9.]+) req/s", output)
    times = re.search(r"time for request: *(\S+) *(\S+) *(\S+)", output)
    if statuses is None or rate is None or times is None or int(statuses[1]) != REQUESTS:
        raise RuntimeError(f"requests failed: {output}")
    return float(rate[1]), f"a request took {times[1]} to {times[2]}, {times[3]} on average"
