"""The addresses of instances whose URLs have names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from pointsman_gateway.core.request.request_events import Target
from pointsman_gateway.io.ext_proc import addresses
from pointsman_gateway.io.ext_proc.addresses import Addresses

ENGINE = Target("e", "http://engine:8000", incarnation="1")


class Names:
    """What the loop's getaddrinfo answers, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {"engine": "10.0.0.1"}
        self.asked = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._ask)

    async def _ask(self, host: str, port: None, **_: Any) -> list[Any]:
        self.asked += 1
        await asyncio.sleep(0)
        answer = self.answers.get(host, socket.gaierror("unknown"))
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (answer, 0))]


async def test_addresses_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = Names(monkeypatch), Addresses()
    assert found.known(Target("a", "http://10.0.0.9:80")) == ("10.0.0.9", 80)
    assert await found.of(Target("a", "http://[fd00:0::1]:80")) == ("fd00::1", 80)
    assert names.asked == 0


async def test_a_name_is_looked_up_once_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = Names(monkeypatch), Addresses()
    assert found.known(ENGINE) == ("", 8000)
    assert set(await asyncio.gather(*(found.of(ENGINE) for _ in range(50)))) == {("10.0.0.1", 8000)}
    assert found.known(ENGINE) == ("10.0.0.1", 8000)
    assert names.asked == 1


async def test_the_address_of_before_counts_while_it_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = Names(monkeypatch), Addresses()
    await found.of(ENGINE)
    monkeypatch.setattr(addresses, "KNOWN_S", 0.0)
    monkeypatch.setattr(addresses, "FAILED_S", 0.0)
    found._known = {name: (address, 0.0) for name, (address, _) in found._known.items()}
    names.answers["engine"] = socket.gaierror("the name server is away")
    for _ in range(3):
        assert await found.of(ENGINE) == ("10.0.0.1", 8000)
        await asyncio.gather(*found._lookups.values())
    names.answers["engine"] = "10.0.0.2"
    await found.of(ENGINE)
    await asyncio.gather(*found._lookups.values())
    assert await found.of(ENGINE) == ("10.0.0.2", 8000)


async def test_another_process_behind_the_name_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = Names(monkeypatch), Addresses()
    await found.of(ENGINE)
    names.answers["engine"] = "10.0.0.2"
    assert await found.of(Target("e", "http://engine:8000", incarnation="2")) == ("10.0.0.2", 8000)


@pytest.mark.parametrize("failure", [socket.gaierror("unknown"), UnicodeError("label too long"), TimeoutError()])
async def test_a_name_without_an_address(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = Names(monkeypatch), Addresses()
    names.answers["engine"] = failure
    assert await found.of(ENGINE) == ("", 8000)
