"""HTTP/1.1 by external sets of requests (tests/support/http_cases): an ambiguous request is refused and its connection closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fakes.gateway_peers import MODEL, stack
from tests.support.http_cases import WANTS, HttpCase, answers_in, ask, fault, load
from tests.support.processes.gateway import gateway_running, logged_url, ready

AT_ONCE = 20
PATIENCE_S = 30.0


async def test_the_gateway_does_what_every_case_wants(tmp_path: Path) -> None:
    async with stack(tmp_path, engines=1) as up:
        async with gateway_running({"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address}) as (_, log):
            url = await logged_url(log)
            await ready(url)
            port, room = int(url.rpartition(":")[2]), asyncio.Semaphore(AT_ONCE)

            async def judged(case: HttpCase) -> str:
                async with room:
                    seen = await ask(port, case, PATIENCE_S)
                wrong = fault(case, seen)
                return wrong and f"{case.id} ({case.want}): {wrong}: {seen}"

            assert [problem for problem in await asyncio.gather(*map(judged, load(MODEL))) if problem] == []
        assert not [line for line in log if b"Traceback" in line or b'"error"' in line]


def test_the_cases_are_whole() -> None:
    cases = load(MODEL)
    assert len({case.id for case in cases}) == len(cases) > 200
    assert {case.want for case in cases} == set(WANTS)
    assert not [case.id for case in cases if b"${" in case.send or not case.rfc or not case.source]


@pytest.mark.parametrize(
    ("data", "head", "ended", "found"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", False, False, [200]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na", False, True, []),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", True, False, [200]),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", False, False, []),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", False, True, [200]),
        (b"HTTP/1.1 204 No\r\n\r\nHTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n", False, False, [204, 400]),
    ],
)
def test_whole_answers_are_found(data: bytes, head: bool, ended: bool, found: list[int]) -> None:
    assert answers_in(data, head=head, ended=ended) == found
