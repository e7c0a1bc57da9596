"""make-secrets.sh, and the Redis user list that it makes, on a real Redis."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError, NoPermissionError

from pointsman_router.core import events_and_effects as ev
from pointsman_router.io.store.redis_address import RedisAddress
from pointsman_router.io.store.redis_store import RedisStore
from tests.support.processes.redis import redis_server
from tools.check_deploy import DEPLOY, make_secrets, run


def test_secrets_are_random_and_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert make_secrets(first) == make_secrets(second)
    before = {file.name: file.read_text() for file in first.iterdir()}
    assert all(len(before[name]) >= 40 for name in ("agent", "gateway", "operator", "redis-password", "api-keys"))
    assert len({before[name] for name in ("agent", "gateway", "operator", "redis-password")}) == 4
    assert all(before[name] != (second / name).read_text() for name in before)
    make_secrets(first)
    assert {file.name: file.read_text() for file in first.iterdir()} == before


def test_certificates_are_kept_and_good_for_their_service(tmp_path: Path) -> None:
    def make() -> dict[Path, bytes]:
        made = run(DEPLOY / "make-certificates.sh", tmp_path)
        assert made.returncode == 0, made.stderr
        return {file: file.read_bytes() for file in tmp_path.rglob("*.pem")}

    before = make()
    assert {file.parent.name for file in before} == {
        "authority",
        "redis",
        "router",
        "gateway",
        "agent",
        "operator",
        "picker",
    }
    folder = (tmp_path / "agent").stat().st_ino
    (tmp_path / "agent/cert.pem").unlink()
    changed = {file for file, content in make().items() if content != before[file]}
    assert {file.parent.name for file in changed} == {"agent"}
    assert (tmp_path / "agent").stat().st_ino == folder, "containers have mounted the folder"
    for name in ("router", "agent"):
        cert = tmp_path / name / "cert.pem"
        checked = run("openssl", "verify", "-CAfile", tmp_path / name / "ca.pem", "-verify_hostname", name, cert)
        assert checked.returncode == 0, checked.stderr
        assert run("openssl", "verify", "-CAfile", tmp_path / name / "ca.pem", "-verify_hostname", "x", cert).returncode
    assert stat.S_IMODE((tmp_path / "authority/ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize("script", ["make-secrets.sh", "make-certificates.sh"])
def test_a_script_says_how_it_is_called(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, status in ((("--help",), 0), (("-h",), 0), (("--force",), 2), ((), 2), (("a", "b"), 2)):
        done = run(DEPLOY / script, *words)
        said = done.stdout if not status else done.stderr
        assert (done.returncode, said) == (status, f"usage: {DEPLOY / script} FOLDER\n")
    assert not list(tmp_path.iterdir())


def test_a_redis_of_ones_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = tmp_path / "redis-url"
    make_secrets(tmp_path)
    assert "@redis:6379/" in url.read_text()
    monkeypatch.setenv("REDIS_URL", "rediss://me:secret@elsewhere:6380/1")
    make_secrets(tmp_path)
    monkeypatch.delenv("REDIS_URL")
    make_secrets(tmp_path)
    assert url.read_text() == "rediss://me:secret@elsewhere:6380/1"


def test_rotation_changes_one_secret_and_what_follows_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    before = {file.name: file.read_text() for file in folder.iterdir()}
    (folder / "redis-password").unlink()
    make_secrets(folder)
    changed = {file.name for file in folder.iterdir() if file.read_text() != before[file.name]}
    assert changed == {"redis-password", "redis-url", "redis-users.acl"}


def test_folder_is_closed_and_password_is_not_in_the_user_list(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "redis-password").read_text() not in (folder / "redis-users.acl").read_text()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until another process reaches a state; the test's own timeout limits the wait."""
    while not await condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.02)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(URL with the user and password that the router is given, URL without)."""
    make_secrets(tmp_path / "secrets")
    with redis_server(tmp_path, None, "--save", "", "--aclfile", str(tmp_path / "secrets/redis-users.acl")) as (
        bare,
        _,
    ):
        url = (tmp_path / "secrets/redis-url").read_text()
        yield url.replace("redis:6379/0", bare.removeprefix("redis://")), bare


async def test_strangers_may_only_ping(redis_url: tuple[str, str]) -> None:
    async with redis.asyncio.Redis.from_url(redis_url[1]) as stranger:
        assert await stranger.ping()
        with pytest.raises(NoPermissionError):
            await stranger.get("pointsman:{default:m}:lease")
    wrong = redis_url[0].replace("@", "x@", 1)
    async with redis.asyncio.Redis.from_url(wrong) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()


async def test_router_may_keep_its_state_and_is_no_administrator(redis_url: tuple[str, str]) -> None:
    events: list[object] = []
    store = RedisStore(
        RedisAddress((redis_url[0],)), router_id="a", fleet="default", lease_s=2.0, settle_s=5.0, affinity_ttl_s=60.0,
        on_event=events.append, on_owners=lambda: None, snapshot=lambda pool: iter(()),
        merge_config=lambda before, own, stored: stored or own,
    )  # fmt: skip
    store.compete_for(["m"])
    running = asyncio.create_task(store.run())
    try:
        async with redis.asyncio.Redis.from_url(redis_url[0], decode_responses=True) as client:

            async def owns() -> bool:
                # The lease alone is not enough: what is recorded before the pool is read is not written.
                return any(isinstance(event, ev.PoolTaken) for event in events)

            async def kept() -> bool:
                return await client.hget("pointsman:{default:m}:affinity", "session") == "engine:8000"

            await until(owns)
            store.record([ev.SessionOwnerSet("session", "engine:8000", "m")])
            await until(kept)
            execute: Any = client.execute_command
            for command in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["ACL", "LIST"]):
                with pytest.raises(NoPermissionError):
                    await execute(*command)
            with pytest.raises(NoPermissionError):
                await client.get("somebody-else")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not any(isinstance(event, ev.StoreState) for event in events), "Redis refused a command of the store"
