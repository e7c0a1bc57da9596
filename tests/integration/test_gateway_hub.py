"""A gateway without configured tokenizers: it gets them from the hub that its engines use."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import huggingface_hub
import pytest
import tqdm
from huggingface_hub import constants
from huggingface_hub.utils import _http

from pointsman_common.core.block_keys import prompt_keys
from pointsman_gateway.io import tokenizer_files
from pointsman_gateway.io.routing import model_pools, pool_check
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from tests.support.fakes.gateway_peers import MODEL, Peers, gateway_before, peers, stack
from tests.support.fakes.hub import SHA, FakeHub
from tests.support.gateway_requests import CHAT
from tests.support.processes.gateway import gateway_running, logged_url, ready
from tests.support.tiny_tokenizer import CHATML, make_tokenizer
from tests.support.waiting import eventually

ID = "maker/tiny-coder"


@asynccontextmanager
async def gateway(up: Peers, hub: str, folder: Path, **settings: Any) -> AsyncIterator[str]:
    """Run a gateway in this process, with a hub and a folder for the files from it; yields its URL."""
    with pytest.MonkeyPatch.context() as patch:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        # The library's thread for progress bars would outlive the test, and between retries the library waits for up to 8 s.
        patch.setattr(tqdm.tqdm, "monitor_interval", 0)
        patch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100)))
        patch.setattr(pool_check, "ASK_HUB_AGAIN_S", (0.2, 1.0))
        async with gateway_before(up, **settings) as (_, url):
            yield url
        huggingface_hub.close_session()


@asynccontextmanager
async def process(
    up: Peers, hub: str, folder: Path, token: str = "", proxy: str = "", **settings: str
) -> AsyncIterator[str]:
    """Like gateway(), but a process with only these variables."""
    environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, **settings}
    others = {"HF_ENDPOINT": hub, "HF_HOME": str(folder), "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    others |= {"HTTP_PROXY": proxy, "http_proxy": proxy} if proxy else {}
    async with gateway_running(environment, **others) as (_, log):
        yield await logged_url(log)
    for line in log:
        json.loads(line)


async def health(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
        found: dict[str, Any] = (await answer.json())["models"].get(MODEL, {})
        return found


async def until(url: str, **wanted: object) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        state = await health(url)
        return state if state.items() >= wanted.items() else None

    found: dict[str, Any] = await eventually(there, f"{wanted} in /health")
    return found


async def fetched_by_an_engine(hub: str, cache: Path, call: str, *args: str) -> None:
    """Call the hub's library in a separate process, because the library leaves connections open."""
    code = f"import sys, huggingface_hub as hub; hub.{call}(*sys.argv[3:], endpoint=sys.argv[1], cache_dir=sys.argv[2])"
    command = (sys.executable, "-c", code, hub, str(cache), *args)
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | {"HF_HUB_OFFLINE": "0"})
    assert await process.wait() == 0


@asynccontextmanager
async def peers_and_hub(tmp_path: Path, root: str = ID, engines: int = 1) -> AsyncIterator[tuple[Peers, FakeHub]]:
    async with peers(tmp_path, engines) as up, FakeHub({ID: tmp_path / "model"}).serve() as hub:
        (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
        up.router.pools[0].model_root = root
        yield up, hub


async def test_what_the_engine_serves_comes_from_the_hub_and_is_kept(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        async with process(up, hub.url, tmp_path / "home") as url:
            await ready(url)
            await until(url, exact=True)
            async with aiohttp.ClientSession() as http:
                await (await http.post(f"{url}/v1/chat/completions", json=CHAT)).read()
            assert list(up.router.places[-1].keys) == prompt_keys(up.engines[0].tokenizer.chat(CHAT), MODEL)
        assert not [path for path in hub.asked if path.endswith(".safetensors")]
        hub.broken, asked = True, len(hub.asked)
        async with process(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)
        assert len(hub.asked) == asked, "cached files are not requested again"


async def test_a_hub_that_is_away_is_asked_again_and_said(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        hub.broken = True
        async with gateway(up, hub.url, tmp_path / "home") as url:
            state = await until(url, tokenizer="inexact")
            assert ID in state["reason"]
            hub.broken = False
            await until(url, exact=True)


async def test_a_hub_that_never_answers_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def find(source: str, *_: object, **__: object) -> Path:
        assert answers.wait(60)
        return Path(source)

    monkeypatch.setattr(model_pools, "find_tokenizer", find)
    monkeypatch.setattr(model_pools, "LOAD_S", 0.2)
    monkeypatch.setattr(pool_check, "ASK_HUB_AGAIN_S", (0.1,))
    async with stack(tmp_path, ready=False) as up:
        state = await until(up.url, tokenizer="inexact")
        assert "has not come" in state["reason"]
        await ready(up.url)
        answers.set()
        await until(up.url, exact=True)


async def test_a_download_that_broke_off_is_made_whole(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        hub.without = "tokenizer_config.json"
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, tokenizer="inexact")
            assert any(path.endswith("/tokenizer.json") for path in hub.asked)
            hub.without = ""
            await until(url, exact=True)


async def test_what_an_engine_fetched_of_a_model_is_made_whole(tmp_path: Path) -> None:
    """Engines fetch files one by one, so a cache with tokenizer.json may lack the chat template without a sign of it."""
    async with peers_and_hub(tmp_path) as (up, hub):
        cache = tmp_path / "home" / "hub"
        await fetched_by_an_engine(hub.url, cache, "hf_hub_download", ID, "tokenizer.json")
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await ready(url)
            await until(url, exact=True)
            async with aiohttp.ClientSession() as http:
                await (await http.post(f"{url}/v1/chat/completions", json=CHAT)).read()
            assert list(up.router.places[-1].keys) == prompt_keys(up.engines[0].tokenizer.chat(CHAT), MODEL)


async def test_what_an_engine_has_in_its_cache_is_not_downloaded(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        engines = tmp_path / "engines"
        await fetched_by_an_engine(hub.url, engines / "hub", "snapshot_download", ID)
        asked, engines_own = len(hub.asked), {"ENGINE_CACHE": str(engines), "HUB_OWNERS": "somebody"}
        hub.broken = True
        async with process(up, hub.url, tmp_path / "home", **engines_own) as url:
            await until(url, exact=True)
        assert len(hub.asked) == asked


@pytest.mark.parametrize("newer", [True, False], ids=["newer", "same"])
async def test_engines_that_differ_are_compared_with_what_the_hub_has_now(tmp_path: Path, newer: bool) -> None:
    async with peers_and_hub(tmp_path) as (up, hub), gateway(up, hub.url, tmp_path / "home") as url:
        await until(url, exact=True)
        if newer:
            hub.sha = SHA[::-1]
            folder = make_tokenizer(tmp_path / "model", CHATML.replace("assistant", "pointsman"))
            up.engines[0].tokenizer = load_tokenizer(folder)
        else:
            up.engines[0].token_shift = 1
        asked = len(hub.asked)
        up.router.pools[0].instances[0].incarnation = "2"
        await up.router.tell_fleet()
        if newer:
            await eventually(lambda: any(SHA[::-1] in path for path in hub.asked[asked:]))
            await until(url, exact=True)
        else:
            await until(url, reason="text probe 0 (add_special_tokens=true) differs")
            # The hub is asked once for each incarnation.
            asked = len(hub.asked)
            await up.router.tell_fleet()
            await asyncio.sleep(0)
            assert len(hub.asked) == asked
        async with aiohttp.ClientSession() as http:
            await (await http.post(f"{url}/v1/chat/completions", json=CHAT)).read()
        keys = prompt_keys(up.engines[0].tokenizer.chat(CHAT), MODEL) if newer else []
        assert list(up.router.places[-1].keys) == keys


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({"hub_owners": "somebody"}, False),
        ({"hub_owners": "somebody maker"}, True),
        ({"hub_owners": ID}, True),
        ({"hub_owners": "somebody", "tokenizers": f"{MODEL}={ID}"}, True),
    ],
    ids=["others", "owner", "model", "named"],
)
async def test_only_some_owners_may_be_downloaded_from(tmp_path: Path, settings: dict[str, str], exact: bool) -> None:
    async with peers_and_hub(tmp_path) as (up, hub), gateway(up, hub.url, tmp_path / "home", **settings) as url:
        state = await until(url, tokenizer="exact" if exact else "inexact")
        assert exact or ("hub_owners" in state["reason"] and hub.asked == [])


def test_a_tokenizer_of_any_size_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = [SimpleNamespace(file_size=tokenizer_files.MAX_DOWNLOAD_BYTES), SimpleNamespace(file_size=1)]

    def download(*_: object, **given: object) -> object:
        if given.get("local_files_only"):
            raise FileNotFoundError
        assert given["dry_run"], "nothing is downloaded"
        return planned

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    with pytest.raises(tokenizer_files.TokenizerNotFound, match="bytes"):
        tokenizer_files.find_tokenizer(ID)


async def test_a_gated_model_needs_the_token(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        hub.token = "hf_secret"
        async with process(up, hub.url, tmp_path / "home") as url:
            assert "HF_TOKEN" in (await until(url, tokenizer="inexact"))["reason"]
        async with process(up, hub.url, tmp_path / "home", token="hf_secret") as url:
            await until(url, exact=True)


@pytest.mark.parametrize(("revision", "exact"), [(SHA, True), ("gone", False)])
async def test_a_revision_can_be_pinned(tmp_path: Path, revision: str, exact: bool) -> None:
    pinned = {"tokenizers": f"{MODEL}={ID}@{revision}"}
    async with (
        peers_and_hub(tmp_path, "/models/only/the/engine/has") as (up, hub),
        gateway(up, hub.url, tmp_path / "home", **pinned) as url,
    ):
        await until(url, tokenizer="exact" if exact else "inexact")


async def test_a_folder_that_only_the_engine_has_is_said(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path, "/models/only/the/engine/has") as (up, hub):
        async with gateway(up, hub.url, tmp_path / "home") as url:
            assert "mount it" in (await until(url, tokenizer="inexact"))["reason"]
        assert hub.asked == []


async def test_an_engine_that_changes_its_model_is_followed(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path, "maker/another") as (up, hub), gateway(up, hub.url, tmp_path / "home") as url:
        await until(url, tokenizer="inexact")
        up.router.pools[0].model_root = ID
        up.router.pools[0].instances[0].incarnation = "2"
        await up.router.tell_fleet()
        await until(url, exact=True)


async def test_an_engine_that_changes_its_model_while_it_is_silent_is_followed(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        instance = up.router.pools[0].instances[0]
        there, instance.url = instance.url, "http://127.0.0.1:1"
        second = make_tokenizer(tmp_path / "second", CHATML.replace("assistant", "pointsman"))
        hub.models["maker/second"], up.engines[0].tokenizer = second, load_tokenizer(second)
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, reason="no instance answers /tokenize")
            instance.url, instance.incarnation = there, "2"
            up.router.pools[0].model_root = "maker/second"
            await up.router.tell_fleet()
            await until(url, exact=True)


async def test_the_hub_is_asked_through_a_proxy(tmp_path: Path) -> None:
    """Only the hub: routers and engines are reached without the proxy."""
    async with peers_and_hub(tmp_path) as (up, hub):
        async with process(up, "http://hub.example", tmp_path / "home", proxy=hub.url) as url:
            await until(url, exact=True)
        assert {path.split("/")[1] for path in hub.asked} == {"api", "maker"}, "no router's address"


async def test_the_revision_that_the_engine_tells_is_had(tmp_path: Path) -> None:
    """The hub's main has moved on since the engine started."""
    old = SHA[::-1]
    async with peers_and_hub(tmp_path, f"{ID}@{old}") as (up, hub):
        hub.others[old] = hub.models[ID]
        hub.models[ID] = make_tokenizer(tmp_path / "newer", CHATML.replace("assistant", "pointsman"))
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)
        assert not [path for path in hub.asked if "main" in path]


async def test_while_the_hub_is_away_what_is_kept_of_another_revision_will_do(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path) as (up, hub):
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)
        hub.broken, newer = True, SHA[::-1]
        up.router.pools[0].model_root = f"{ID}@{newer}"
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)
            # The cached revision does not do if its tokens differ from the engine's: the hub is asked until it answers.
            hub.others[newer] = make_tokenizer(tmp_path / "newer", CHATML.replace("assistant", "pointsman"))
            up.engines[0].tokenizer = load_tokenizer(hub.others[newer])
            up.router.pools[0].instances[0].incarnation = "2"
            await up.router.tell_fleet()
            await until(url, exact=False)
            hub.broken = False
            await until(url, exact=True)


@pytest.mark.parametrize("revision", ["../../etc", "a/../b", "/etc", "a b", "x" * 201, ".", "a//b", "a\n"])
def test_a_revision_leads_out_of_no_cache(revision: str) -> None:
    with pytest.raises(tokenizer_files.TokenizerNotFound, match="no revision"):
        tokenizer_files.find_tokenizer(f"{ID}@{revision}")


@pytest.mark.parametrize("revision", ["v1+cu12", "release#2", "refs/pr/4"])
def test_revisions_have_any_name(revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tokenizer_files, "_cached", lambda repository, asked, cache: tmp_path if asked == revision else None
    )
    assert tokenizer_files.find_tokenizer(f"{ID}@{revision}") == tmp_path


A, B = f"{ID}@{'a' * 40}", f"{ID}@{'b' * 40}"


@asynccontextmanager
async def two_revisions(tmp_path: Path) -> AsyncIterator[tuple[Peers, FakeHub, Path]]:
    """Two engines of revision A, of which a test restarts the first with B, whose template differs; also yields B's folder."""
    async with peers_and_hub(tmp_path, A, engines=2) as (up, hub):
        newer = make_tokenizer(tmp_path / "newer", CHATML.replace("assistant", "pointsman"))
        hub.others |= {A.partition("@")[2]: hub.models[ID], B.partition("@")[2]: newer}
        yield up, hub, newer


async def restart(up: Peers, tokenizer: Path | None, root: str) -> None:
    """Give the first engine another incarnation and this tokenizer; the pool's model root becomes `root`."""
    if tokenizer is not None:
        up.engines[0].tokenizer = load_tokenizer(tokenizer)
    up.router.pools[0].instances[0].incarnation += "+"
    up.router.pools[0].model_root = root
    await up.router.tell_fleet()


async def test_engines_of_two_revisions_are_not_exact_until_all_have_one(tmp_path: Path) -> None:
    async with two_revisions(tmp_path) as (up, hub, newer), gateway(up, hub.url, tmp_path / "home") as url:
        await until(url, exact=True)
        await restart(up, newer, B)
        await until(url, tokenizer="inexact")
        up.engines[1].tokenizer = load_tokenizer(newer)
        up.router.pools[0].instances[1].incarnation += "+"
        await up.router.tell_fleet()
        await until(url, exact=True)


@pytest.mark.parametrize("away", [True, False], ids=["away", "refused"])
@pytest.mark.parametrize("same", [True, False], ids=["same tokens", "others"])
async def test_a_revision_that_cannot_be_had_costs_only_its_engines(tmp_path: Path, away: bool, same: bool) -> None:
    async with two_revisions(tmp_path) as (up, hub, newer), gateway(up, hub.url, tmp_path / "home") as url:
        await until(url, exact=True)
        if away:
            hub.broken = True
        else:
            del hub.others[B.partition("@")[2]]
            hub.models[ID] = tmp_path  # main has no tokenizer files
        asked = len(hub.asked)
        await restart(up, None if same else newer, B)
        await eventually(lambda: len(hub.asked) > asked, "the hub is asked for it")
        if same:
            await until(url, exact=True)
            return
        await until(url, tokenizer="inexact")
        # The canary leaves; the hub stays as it is.
        canary = up.router.pools[0].instances[0]
        up.router.pools[0].model_root = A
        kept = up.router.pools[0].instances[1]
        del up.router.pools[0].instances[:]
        up.router.pools[0].instances.append(kept)
        await up.router.tell_fleet()
        await until(url, exact=True)
        assert canary.url != kept.url


async def test_what_was_kept_of_one_commit_serves_where_another_is_refused(tmp_path: Path) -> None:
    """A cache that was filled by commit ids does not record which commit is main."""
    async with two_revisions(tmp_path) as (up, hub, _):
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)
        hub.token, up.router.pools[0].model_root = "hf_secret", B
        async with gateway(up, hub.url, tmp_path / "home") as url:
            await until(url, exact=True)


async def test_a_revision_that_the_hub_does_not_know_is_replaced_by_main(tmp_path: Path) -> None:
    async with peers_and_hub(tmp_path, f"{ID}@master") as (up, hub), gateway(up, hub.url, tmp_path / "home") as url:
        await until(url, exact=True)
