"""tls.yaml on top of the compose file: all services talk to each other over TLS and refuse everyone else."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.processes.compose_services import Stack, compose_stack
from tests.support.processes.pointsman import pointsman_command


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with compose_stack(tmp_path, "emulated", "telemetry", tls=True) as stack:
        yield stack


async def instances(stack: Stack, **shown: str) -> tuple[int | None, str]:
    """Run `pointsman instances` as an operator, with `shown` in its environment; return its exit status and output."""
    variables = {"POINTSMAN_ROUTER": f"127.0.0.1:{stack.ports['router', '50051']}"}
    variables |= {"POINTSMAN_OPERATOR_TOKEN": stack.secret("operator"), **shown}
    process = await asyncio.create_subprocess_exec(
        *pointsman_command("instances", "--json"),
        env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.timeout(300)
async def test_everybody_talks_by_tls(stack: Stack) -> None:
    await stack.start_control_plane()
    await stack.start("prometheus", lambda mounts: None)
    tls = stack.folder / "tls"
    body = {"messages": [{"role": "user", "content": "Which way does the train go?"}], "model": "pointsman-emulated"}
    url = f"{stack.url('gateway', '8080')}/v1/chat/completions"
    key = {"Authorization": f"Bearer {stack.secret('api-keys').partition(':')[2]}"}
    trusted = ssl.create_default_context(cafile=tls / "operator/ca.pem")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as client:
        async with client.post(url, json=body, headers=key) as answer:
            assert answer.status == 200, await answer.text()
            assert "X-Pointsman-Degraded" not in answer.headers
        with pytest.raises(aiohttp.ClientError):
            await client.post(url.replace("https", "http"), json=body, headers=key)
        prometheus = stack.url("prometheus", "9090").replace("https", "http")
        up: list[str] = []
        while len(up) < 3:
            await asyncio.sleep(0.5)
            try:
                async with client.get(f"{prometheus}/api/v1/query", params={"query": "up == 1"}) as queried:
                    up = [sample["metric"]["job"] for sample in (await queried.json())["data"]["result"]]
            except aiohttp.ClientError:
                continue
        assert sorted(up) == ["pointsman-agent", "pointsman-gateway", "pointsman-router"]

    operator = {
        f"POINTSMAN_TLS_{kind}": str(tls / f"operator/{file}.pem") for kind, file in (("CERT", "cert"), ("KEY", "key"))
    }
    ca = {"POINTSMAN_TLS_CA": str(tls / "operator/ca.pem")}
    wrong_token = {**operator, **ca, "POINTSMAN_OPERATOR_TOKEN": stack.secret("agent")}
    # Side by side: each of them starts Python, and waits some seconds where it is refused.
    right, *unknown, wrong = await asyncio.gather(
        *(instances(stack, **shown) for shown in ({**operator, **ca}, {}, ca, wrong_token))
    )
    assert (right[0], right[1].count('"instance_id"')) == (0, 2)
    for status, said in unknown:
        assert status == 1
        assert "cannot be reached: it closes the connection; if it has TLS" in said
    assert "refuses this (role agent may not call" in wrong[1]
    assert "degraded" not in stack.log("router")
