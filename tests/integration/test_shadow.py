"""Shadow mode beside a real nginx: its figures are those that the same requests really get, and clients do not notice it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from pointsman.router.v1 import placement_pb2, placement_pb2_grpc
from pointsman_common.io.settings import Tokens
from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings, start
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from pointsman_router.io.main import RouterServer
from pointsman_router.io.settings import RouterSettings
from pointsman_shadow.io.fleet_queries import FleetQueries, ServedModel
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import Process, free_port
from tests.support.router import Client, Report

DOCS = Path(__file__).parents[2] / "docs" / "shadow.md"
MODEL = "pointsman-emulated"
KV_TOKENS = 64_000
SESSIONS, TURNS, ANSWER = 10, 5, 24


@dataclass
class Talk:
    """What a client received: prompt and cached tokens, summed over its answers."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: int = 0


async def converse(url: str, sessions: int = SESSIONS, turns: int = TURNS, salt: str = "") -> Talk:
    """Run conversations that start one after the other over one system prompt; each turn includes the answers before it."""
    talk = Talk()

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.15)
        messages = [{"role": "system", "content": f"{salt} You help. " + "Be brief and exact. " * 80}]
        for turn in range(turns):
            messages.append(
                {"role": "user", "content": f"Session {number} turn {turn}: " + "a b c d e f g h " * (20 + number)}
            )
            body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER, "ignore_eos": True}
            async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                completion = await answer.json()
            usage = completion["usage"]
            talk.prompt_tokens += usage["prompt_tokens"]
            talk.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            talk.answers += 1
            messages.append({"role": "assistant", "content": completion["choices"][0]["message"]["content"]})
            await asyncio.sleep(0.1)

    async with aiohttp.ClientSession() as client:
        await asyncio.gather(*map(one, range(sessions)))
    return talk


@pytest.fixture
async def engines() -> AsyncIterator[list[EmulatedEngine]]:
    running = [await start(EmulateSettings(port=0, kv_blocks=KV_TOKENS // 16, max_model_len=32_000)) for _ in range(3)]
    yield running
    for process in running:
        await process.stop()


class Docs:
    """The page's code blocks, with this test's addresses and files."""

    def __init__(self, folder: Path, engines: list[EmulatedEngine]) -> None:
        self.shadow, self.front, self.router = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self._own = {
            "127.0.0.1:8080": self.front,
            "127.0.0.1:8090": self.shadow,
            "127.0.0.1:50051": self.router,
            **{f"127.0.0.1:800{n}": engine.url.removeprefix("http://") for n, engine in enumerate(engines)},
            "lab/pointsman_lab/data": str(Path("lab/pointsman_lab/data").absolute()),
        }
        self._folder = folder

    def blocks(self, language: str) -> list[str]:
        """All blocks of a language."""
        text = DOCS.read_text()
        for name, own in self._own.items():
            assert name in text
            text = text.replace(name, own)
        return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)

    def commands(self, *beginning: str) -> list[list[str]]:
        """The words of every `pointsman` command that begins with `beginning`."""
        lines = "\n".join(self.blocks("sh shadow")).replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pointsman ")]
        return [command for command in words if tuple(command[: len(beginning)]) == beginning]

    def process(self, name: str, words: list[str], *more: str) -> Process:
        """A command's process."""
        return Process(name, pointsman_command(*words, *more), self._folder / f"{name}.log", cwd=self._folder)

    async def run(self, words: list[str]) -> str:
        """Run a command that must end by itself with status 0; return its output."""
        argv = pointsman_command(*words)
        child = await asyncio.create_subprocess_exec(*argv, cwd=self._folder, stdout=PIPE, stderr=PIPE)
        out, err = await child.communicate()
        assert child.returncode == 0, (words, err.decode())
        return out.decode()

    def nginx(self) -> Process:
        """An nginx that has both formats of the log."""
        log, server = self.blocks("nginx")
        folder = self._folder
        server = server.replace("access_log shadow.jsonl", f"access_log {folder}/access.jsonl shadow_bodies; "
                                f"access_log {folder}/shadow.jsonl")  # fmt: skip
        paths = "".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        main = f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
        http = f"http {{ {paths} client_body_buffer_size 1m; {log} {server} }}"
        (folder / "nginx.conf").write_text(main + http)
        executable = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/opt/homebrew/bin")
        assert executable, "Debian's nginx is needed"
        argv = [executable, "-c", str(folder / "nginx.conf"), "-e", f"{folder}/error.log"]
        return Process("nginx", argv, folder / "nginx.log")


async def answered(url: str, ready: Callable[[dict[str, Any]], bool] = bool, within_s: float = 60.0) -> dict[str, Any]:
    """The JSON at `url`, once it is `ready`."""
    status: dict[str, Any] = {}
    try:
        async with asyncio.timeout(within_s), aiohttp.ClientSession() as client:
            while not ready(status):
                await asyncio.sleep(0.1)
                with contextlib.suppress(aiohttp.ClientError, ValueError):
                    async with client.get(url) as answer:
                        status = await answer.json(content_type=None) if answer.status == 200 else {}
    except TimeoutError:
        raise AssertionError(f"{url} is not as it should be: {status}") from None
    return status


async def test_it_says_what_really_comes(engines: list[EmulatedEngine], tmp_path: Path) -> None:
    docs = Docs(tmp_path, engines)
    (router,), (agent,), (alone, beside_router) = (
        docs.commands(*words) for words in (("router",), ("agent",), ("shadow", "serve"))
    )
    gateway_address = f"127.0.0.1:{free_port()}"
    shadow, later = docs.process("shadow", beside_router), docs.process("later", alone)
    others = [
        docs.nginx(),
        docs.process("router", router),
        docs.process("agent", agent, "--state-dir", str(tmp_path / "agent")),
    ]
    pointsman = docs.process("gateway", ["gateway", "--listen", gateway_address, "--routers", docs.router])
    report_url, front, gateway = f"http://{docs.shadow}/report", f"http://{docs.front}", f"http://{gateway_address}"
    try:
        for process in (shadow, *others):
            process.start()
        await answered(report_url, lambda status: len(status.get("models", {}).get(MODEL, {}).get("engines", ())) == 3)
        as_it_is = await converse(front)
        assert as_it_is.answers == SESSIONS * TURNS
        # Nothing but the clients' requests has reached an engine's model.
        assert sum(engine.model.counters.prefix_cache_queries for engine in engines) == as_it_is.prompt_tokens
        now = (await answered(report_url, lambda status: bool(status) and status["now"]["placed"] == as_it_is.answers))[
            "now"
        ]
        # The cached tokens computed from the engines' KV events equal those that the engines reported in their answers, but for
        # the requests about which a busy machine's shadow asks when their own prompts are already cached.
        assert now["actual_cached_tokens"] == pytest.approx(as_it_is.cached_tokens, rel=0.1)
        assert now["would_be_cached_tokens"] > now["actual_cached_tokens"]
        async with aiohttp.ClientSession() as client, client.get(f"http://{docs.shadow}/metrics") as answer:
            page = await answer.text()
        assert "pointsman_shadow_prompt_tokens_total" in page
        assert 'pointsman_shadow_excluded_total{reason="backlog"} 0.0' in page
        shadow.stop()
        log, record = ((tmp_path / name).read_bytes() for name in ("access.jsonl", "shadow-record.jsonl"))

        # A shadow that hangs or is dead does not affect clients.
        later.start()
        pointsman.start()
        await answered(report_url)
        os.kill(later.pid, signal.SIGSTOP)
        assert (await converse(front, 3, 2, "hangs")).answers == 6
        os.kill(later.pid, signal.SIGCONT)
        later.kill()
        assert (await converse(front, 3, 2, "dead")).answers == 6

        # The same conversations through Pointsman.
        for engine in engines:
            assert engine.model.reset_prefix_cache()
        await answered(f"{gateway}/health", lambda status: status.get("status") == "ok")
        really = await converse(gateway)
    finally:
        for process in (shadow, later, pointsman, *others):
            if process.alive:
                process.stop()
    said = {line.partition("  ")[0]: line.split() for line in shadow.log.read_text().splitlines()}
    (tmp_path / "shadow-record.jsonl").write_bytes(record)
    (tmp_path / "access.jsonl").write_bytes(log)
    of_log, *of_record = docs.commands("shadow", "read")
    first = [of_log, *of_record, *docs.commands("trace"), *docs.commands("simulate")]
    # Each command runs in a process, all at once. The log's command and the record's last one also write their figures.
    out_files = {id(of_log): "log.json", id(of_record[-1]): "record.json"}
    printed = await asyncio.gather(
        *(docs.run([*words, *(["--out", out_files[id(words)]] if id(words) in out_files else [])]) for words in first)
    )
    assert len(printed) == 5
    (verify,) = docs.commands("decisions", "verify")
    assert "50 of 50 decisions are the same" in await docs.run(verify)
    table = {line.partition("  ")[0]: line.split() for line in printed[len(of_record)].splitlines()}
    assert f"{MODEL}, 3 engines: 50 requests, {as_it_is.prompt_tokens:,} prompt tokens" in table
    # The same figures as the running shadow reported.
    assert table["as it was placed"][:5] == said["as it was placed"][:5]
    assert table[f"by Pointsman ({DEFAULT_POLICY})"][:4] == said[f"by Pointsman ({DEFAULT_POLICY})"][:4]
    found = [json.loads((tmp_path / name).read_text())["models"][MODEL] for name in ("log.json", "record.json")]
    gain = really.cached_tokens - as_it_is.cached_tokens
    assert gain > 0
    for model in found:
        assert (model["requests"], model["placement_known"], model["keyed"], model["failed"]) == (50, 50, 50, 0)
        # The recorded placement in the model and in the engines; then the gain that is predicted, and the real one.
        assert model["recorded"]["cached_tokens"] == pytest.approx(as_it_is.cached_tokens, rel=0.01)
        # Engines that share two cores with clients are slower than their model, so some loads and placements differ. A session
        # that begins on another engine misses a whole system prompt. The gain itself is larger than such differences.
        assert model["counterfactual"]["cached_tokens"] == pytest.approx(really.cached_tokens, abs=gain / 2)
        assert model["saved_tokens"] > gain / 2
    compared = [json.loads(line) for line in (tmp_path / "compared.jsonl").read_text().splitlines()]
    assert (
        sum(comparison["recorded"]["cached_tokens"] for comparison in compared) == found[1]["recorded"]["cached_tokens"]
    )
    assert {comparison["recorded"]["instance"] for comparison in compared} == {
        engine.url.removeprefix("http://") for engine in engines
    }
    # The recorded files contain no text of a request.
    assert all(
        "brief" not in (tmp_path / name).read_text()
        for name in ("shadow-record.jsonl", "compared.jsonl", "would-be.jsonl")
    )


async def test_its_token_is_an_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(agent_token="A", gateway_token="G", operator_token="O", observer_token="S", token_dir=None)
    server = RouterServer(RouterSettings(listen="127.0.0.1:0", metrics_listen=""), tokens)
    await server.start()
    models_seen: asyncio.Queue[dict[str, ServedModel]] = asyncio.Queue()
    monkeypatch.setenv("POINTSMAN_OBSERVER_TOKEN", "S")
    questions = FleetQueries(["127.0.0.1:1", f"127.0.0.1:{server.port}"], 0.05, "unified", {})
    watching = asyncio.create_task(questions.watch(models_seen.put))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            observer = Client(channel, "S")
            await Report(Client(channel, "A"), observer).join("10.0.0.1:8000")
            async with asyncio.timeout(10):
                while not (models := await models_seen.get()):
                    pass
            assert models["m"].engines.names == ("10.0.0.1:8000",)
            request = placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=100)
            now = await questions.ask(request)
            assert now is not None
            assert (now.instance, dict(now.cached)) == ("10.0.0.1:8000", {"10.0.0.1:8000": 0})
            place = placement_pb2_grpc.PlacementServiceStub(channel).Place
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await place(placement_pb2.PlaceRequest(request=request), metadata=observer.metadata)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not list(server.router.state.reservations)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await questions.close()
        await server.stop()
