"""Prefill on one real engine, answer from another, the KV fetched by vLLM's own NixlConnector, from CPU memory over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman_cli.doctor_findings import EngineAccess, Finding
from pointsman_cli.doctor_kv import answers
from tests.support.engines.chat_client import complete, fresh_words
from tests.support.engines.fetching import assert_fetched, fetching
from tests.support.engines.offloading import (
    assert_offloaded,
    assert_same,
    decided,
    in_step,
    offloading,
    unnoticed,
    with_cache_on,
)
from tests.support.engines.servers import NIXL, Engine, EngineSpec, running_engines
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import WITHIN_S, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two engines that fetch KV from each other."""
    specs = [EngineSpec(name, kv_transfer=NIXL) for name in ("n1", "n2")]
    with running_engines(specs, model_folder, tmp_path_factory.mktemp("nixl")) as engines:
        yield engines


@pytest.fixture(scope="module")
def nixl_plane(pair: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that offloads, when each engine has fetched KV from the other: vLLM waits 5 s for the answer to an engine's
    first request to another one, which may take longer on a busy machine."""
    # On a busy machine KV takes longer than the gateway's default.
    patient = {"--transfer-timeout-s": WITHIN_S}
    with offloading(pair, tmp_path_factory.mktemp("nixl-plane"), gateway_flags=patient).running() as plane:
        for engine in pair:
            until(partial(fetches, engine, plane), within_s=WITHIN_S, what=f"KV at {engine.spec.name}")
        yield plane


def fetches(engine: Engine, plane: ControlPlane) -> bool:
    """Whether an answer of the engine, with KV of another one, comes without a failed step."""
    with plane.client() as client:
        answer = complete(client, with_cache_on(engine, plane) + fresh_words(40), max_tokens=1)
    return not decided(plane, answer.decision_id).notes


@pytest.mark.parametrize("number", [33, 500, 3_500])
def test_an_offloaded_answer_is_the_colocated_one(nixl_plane: ControlPlane, pair: list[Engine], number: int) -> None:
    with in_step(nixl_plane) as plane, plane.client() as client:
        for stream in (True, False):
            assert_offloaded(plane, client, pair, number, stream=stream)


def test_the_doctor_compares_answers(nixl_plane: ControlPlane, pair: list[Engine]) -> None:
    pool = [nixl_plane.instance(engine).instance for engine in pair]
    found = [(finding.level, finding.found) for finding in answers(pool, EngineAccess())]
    assert found == [(Finding.OK, "an answer from transferred KV is the one without")] * 2


async def test_a_cached_prefix_is_fetched_from_its_owner(nixl_plane: ControlPlane, pair: list[Engine]) -> None:
    n1, n2 = pair
    async with fetching(n1, n2, agent_pb2.KV_PROTOCOL_NIXL) as fetch:
        await assert_fetched(fetch)


def test_p_is_gone(nixl_plane: ControlPlane, pair: list[Engine]) -> None:
    """The last test: P does not come back."""
    plane, (p, d) = nixl_plane, pair
    prompt = with_cache_on(d, plane) + fresh_words(300)
    with plane.client() as client, unnoticed(plane):
        p.process.kill()
        answer = complete(client, prompt, max_tokens=8)
    assert answer.instance_id == d.instance_id
    (note,) = decided(plane, answer.decision_id).notes
    assert note.startswith("prefill_failed: ")
    assert_same(d, prompt, answer.text, 8)
