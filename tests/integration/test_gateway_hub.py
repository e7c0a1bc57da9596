"""A gateway that is told nothing of tokenizers: it gets them where its engines have them from."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.common.core.block_keys import prompt_keys
from pointsman.gateway.io.routing import model_pools
from tests.support.fakes.gateway_peers import MODEL, Stack, stack
from tests.support.fakes.hub import SHA, FakeHub
from tests.support.gateway_requests import CHAT
from tests.support.processes.gateway import gateway_running, ready, told_url
from tests.support.waiting import eventually

ID = "maker/tiny-coder"


@asynccontextmanager
async def gateway(up: Stack, hub: str, folder: Path, token: str = "", **settings: str) -> AsyncIterator[str]:
    """A gateway process with a hub and a folder for what it gets from there, and nothing else; its URL."""
    environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, **settings}
    others = {"HF_ENDPOINT": hub, "HF_HOME": str(folder), "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    async with gateway_running(environment, **others) as (_, log):
        yield await told_url(log)


async def health(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
        found: dict[str, Any] = (await answer.json())["models"].get(MODEL, {})
        return found


async def until(url: str, **wanted: object) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        told = await health(url)
        return told if told.items() >= wanted.items() else None

    found: dict[str, Any] = await eventually(there, f"{wanted} in /health")
    return found


@asynccontextmanager
async def hub_stack(tmp_path: Path, root: str = ID) -> AsyncIterator[tuple[Stack, FakeHub]]:
    async with stack(tmp_path, engines=1) as up, FakeHub({ID: tmp_path / "model"}).serve() as hub:
        (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
        up.router.pools[0].model_root = root
        yield up, hub


async def test_what_the_engine_serves_comes_from_the_hub_and_is_kept(tmp_path: Path) -> None:
    async with hub_stack(tmp_path) as (up, hub):
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await ready(url)
            await until(url, exact=True)
            async with aiohttp.ClientSession() as http:
                await (await http.post(f"{url}/v1/chat/completions", json=CHAT)).read()
            assert list(up.router.places[-1].keys) == prompt_keys(up.engines[0].tokenizer.chat(CHAT), MODEL)
        assert not [path for path in hub.asked if path.endswith(".safetensors")]
        hub.broken, asked = True, len(hub.asked)
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)
        assert len(hub.asked) == asked, "what is kept is not asked for"


async def test_a_hub_that_is_away_is_asked_again_and_said(tmp_path: Path) -> None:
    async with hub_stack(tmp_path) as (up, hub):
        hub.broken = True
        async with gateway(up, hub.url, tmp_path / "home") as url:
            told = await until(url, tokenizer="inexact")
            assert ID in told["reason"]
            hub.broken = False
            await until(url, exact=True)


async def test_a_hub_that_never_answers_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def find(source: str) -> Path:
        assert answers.wait(60)
        return Path(source)

    monkeypatch.setattr(model_pools, "find_tokenizer", find)
    monkeypatch.setattr(model_pools, "LOAD_S", 0.2)
    monkeypatch.setattr(model_pools, "ASK_HUB_AGAIN_S", (0.1,))
    async with stack(tmp_path, ready=False) as up:
        told = await until(up.url, tokenizer="inexact")
        assert "has not come" in told["reason"]
        await ready(up.url)
        answers.set()
        await until(up.url, exact=True)


async def test_a_download_that_broke_off_is_made_whole(tmp_path: Path) -> None:
    async with hub_stack(tmp_path) as (up, hub):
        hub.without = "tokenizer_config.json"
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, tokenizer="inexact")
            assert any(path.endswith("/tokenizer.json") for path in hub.asked)
            hub.without = ""
            await until(url, exact=True)


async def test_a_gated_model_needs_the_token(tmp_path: Path) -> None:
    async with hub_stack(tmp_path) as (up, hub):
        hub.token = "hf_secret"
        async with gateway(up, hub.url, tmp_path / "home") as url:
            assert "HF_TOKEN" in (await until(url, tokenizer="inexact"))["reason"]
        async with gateway(up, hub.url, tmp_path / "home", token="hf_secret") as url:
            await until(url, exact=True)


@pytest.mark.parametrize(("revision", "exact"), [(SHA, True), ("gone", False)])
async def test_a_revision_can_be_pinned(tmp_path: Path, revision: str, exact: bool) -> None:
    pinned = {"TOKENIZERS": f"{MODEL}={ID}@{revision}"}
    async with (
        hub_stack(tmp_path, "/models/only/the/engine/has") as (up, hub),
        gateway(up, hub.url, tmp_path / "home", **pinned) as url,
    ):
        await until(url, tokenizer="exact" if exact else "inexact")


async def test_a_folder_that_only_the_engine_has_is_said(tmp_path: Path) -> None:
    async with hub_stack(tmp_path, "/models/only/the/engine/has") as (up, hub):
        async with gateway(up, hub.url, tmp_path / "home") as url:
            assert "mount it" in (await until(url, tokenizer="inexact"))["reason"]
        assert hub.asked == []


async def test_an_engine_that_changes_its_model_is_followed(tmp_path: Path) -> None:
    async with hub_stack(tmp_path, "maker/another") as (up, hub), gateway(up, hub.url, tmp_path / "home") as url:
        await until(url, tokenizer="inexact")
        up.router.pools[0].model_root = ID
        up.router.pools[0].instances[0].incarnation = "2"
        await up.router.tell_fleet()
        await until(url, exact=True)
