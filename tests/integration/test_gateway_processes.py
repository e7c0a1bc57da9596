"""`--processes 2`: two gateways for the router, one address and one page of metrics for everybody else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from tests.support.fakes.gateway_peers import Stack, stack
from tests.support.gateway_requests import CHAT
from tests.support.processes.gateway import gateway_process, gateway_running
from tests.support.waiting import eventually


async def figures(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def children(pid: int) -> list[int]:
    """The process ids of the gateways among a parent's children. Another child tracks the resources that they share."""
    pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def files_in(folder: str) -> list[Path]:
    """What processes that share an address have in the folder for temporary files."""
    return list(Path(folder).glob("pointsman-gateway-*/*"))


def serving_ids(log: list[bytes]) -> list[str]:
    return [message["gateway_id"] for message in map(json.loads, log) if message["event"] == "gateway serves"]


async def chat(url: str, key: str = "") -> int:
    """Send a chat on a new connection, which either gateway may accept; returns the status."""
    headers = {"x-api-key": key} if key else {}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{url}/v1/chat/completions", json=CHAT) as answer,
    ):
        await answer.read()
        return answer.status


async def both_are_ready(up: Stack, log: list[bytes], times: int) -> str:
    await eventually(lambda: len(serving_ids(log)) == times)
    (url,) = {json.loads(line)["url"] for line in log if b'"url"' in line}
    while True:
        shown = await figures(url)
        if (
            shown["pointsman_gateway_processes"] == 2
            and shown.get('pointsman_gateway_tokenizer_exact{model="tiny"}') == 1
        ):
            return str(url)
        await asyncio.sleep(0.05)


async def test_processes_share_an_address_and_are_counted_as_one(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        addresses = {"LISTEN": "127.0.0.1:0", "EXT_PROC_LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address}
        environment = addresses | {"PROCESSES": "2", "GATEWAY_ID": "gw"}
        async with gateway_running(environment) as (process, log):
            url = await both_are_ready(up, log, 2)
            await up.router.until(lambda: {hello.gateway_id[:4] for hello in up.router.hellos} >= {"gw-0", "gw-1"})
            assert [await chat(url) for _ in range(20)] == [200] * 20
            counted = 'pointsman_gateway_requests_total{model="tiny",route="/v1/chat/completions",status="200"}'
            for _ in range(5):
                assert (await figures(url))[counted] == 20
            ports = [json.loads(line)["port"] for line in log if b"gateway serves proxies" in line]
            assert ports == ports[:1] * 2
            os.kill(children(process.pid)[0], signal.SIGKILL)
            url = await both_are_ready(up, log, 3)
            assert (await figures(url))[counted] == 20
            assert sorted(serving_ids(log)) in (["gw-0", "gw-0", "gw-1"], ["gw-0", "gw-1", "gw-1"])
            while await chat(url) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            left = children(process.pid)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            assert gone(left)
        assert sum(b"a gateway process died" in line for line in log) == 1
        assert not re.search(rb"Traceback", b"".join(log))


async def test_processes_end_with_their_parent_and_leave_no_files(tmp_path: Path) -> None:
    # The path of a Unix socket has at most 107 bytes, which pytest's folder may take.
    with TemporaryDirectory(prefix="p") as folder:
        async with stack(tmp_path) as up:
            environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, "PROCESSES": "2"}
            async with gateway_running(environment, TMPDIR=folder) as (process, log):
                await both_are_ready(up, log, 2)
                assert files_in(folder)
                left = children(process.pid)
                process.kill()
                await process.wait()
                await eventually(lambda: gone(left))
        assert not files_in(folder)


async def test_a_second_signal_ends_the_drain_after_the_parents_death(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        up.engines[0].hold = asyncio.Event()
        environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, "PROCESSES": "2"}
        async with gateway_running(environment) as (process, log), aiohttp.ClientSession() as http:
            url = await both_are_ready(up, log, 2)
            stream = await http.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True})
            await stream.content.readline()
            left = children(process.pid)
            process.kill()
            try:
                await eventually(lambda: sum(gone([pid]) for pid in left) == 1)
                (draining,) = (pid for pid in left if not gone([pid]))
                for _ in range(2):
                    os.kill(draining, signal.SIGTERM)
                    await asyncio.sleep(1.1)  # sooner, the second would count as the first
                await eventually(lambda: gone(left), within_s=10.0)
            finally:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            assert b'"code":502' in await stream.read()


@pytest.mark.parametrize("setting", ["LISTEN", "EXT_PROC_LISTEN"])
async def test_an_address_that_is_taken_is_said_in_one_line(tmp_path: Path, setting: str) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, reuse_port=True)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        process = await gateway_process({"LISTEN": "127.0.0.1:0", setting: f"127.0.0.1:{port}", "PROCESSES": "2"})
        try:
            async with asyncio.timeout(30):
                _, text = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 1
    assert text.startswith(b"pointsman gateway: ")
    assert b"another process listens there" in text
    assert len(text.splitlines()) == 1


async def test_processes_hold_a_keys_limits_as_one(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        limited = {"API_KEYS": "acme:k1 requests_per_minute=4;acme:k2"}
        environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, "PROCESSES": "2", **limited}
        async with gateway_running(environment) as (_, log):
            url = await both_are_ready(up, log, 2)
            # A minute's limit may be used at once; what refills while this machine is slow is counted, too.
            began = asyncio.get_running_loop().time()
            statuses = [await chat(url, "k1") for _ in range(16)]
            took_s = asyncio.get_running_loop().time() - began
            assert set(statuses) == {200, 429}
            assert 4 <= statuses.count(200) <= 4 + 1 + 4 * took_s / 60
            assert await chat(url, "k2") == 200
