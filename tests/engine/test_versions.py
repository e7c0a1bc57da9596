"""What Pointsman uses of one engine, past router and gateway: the first file to run on another vLLM, docs/vllm_versions.md.

make test-next NEXT_VLLM_VERSION=0.22.1 NEXT_TORCH_VERSION=2.11.0 TESTS=tests/engine/test_versions.py
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.engine_address import parse_engine_address
from pointsman_agent.io.engine_http import EngineProbe
from pointsman_agent.io.kv_subscriber import KvSubscriber
from pointsman_common.core.vllm_versions import counts_output
from pointsman_connector.step_load import StepLoad
from tests.support.engines.chat_client import user
from tests.support.engines.servers import SERVED_NAME, Engine, EngineSpec, running_engines
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CONTEXT = 2_048  # the longest prompt that is computed here
WORDS = " ".join(f"w{number}" for number in range(150))


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the engine pushes its load."""
    return f"ipc://{tmp_path_factory.mktemp('loads')}/loads"


@pytest.fixture(scope="module")
def engine(model_folder: Path, site: Path, loads: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine with the connector package."""
    spec = EngineSpec("one", max_model_len=CONTEXT, env={"PYTHONPATH": str(site), "POINTSMAN_AGENT_LOADS": loads})
    with running_engines([spec], model_folder, tmp_path_factory.mktemp("version")) as [started]:
        yield started


def chat(engine: Engine, text: str, **more: Any) -> Any:
    body = {"model": SERVED_NAME, "messages": [user(text)], "temperature": 0, "ignore_eos": True, **more}
    return engine.ask("/v1/chat/completions", {"max_tokens": 40, **body})


async def test_events_are_the_cache_and_the_usage_is_theirs(engine: Engine) -> None:
    first = await asyncio.to_thread(chat, engine, WORDS)
    probe = EngineProbe(parse_engine_address(engine.target))
    sources = await probe.sources([0])
    assert sources.by_rank, sources.reason
    blocks = CachedBlocks(SERVED_NAME)
    context = zmq.asyncio.Context()
    subscriber = KvSubscriber(context, sources.by_rank[0], blocks, lambda: None)
    assert await subscriber.start()
    following = asyncio.create_task(subscriber.run())
    again = await asyncio.to_thread(chat, engine, WORDS)
    await asyncio.to_thread(chat, engine, f"other {WORDS}")

    def agree() -> bool:
        return blocks.key_count == engine.cached_keys() > 0

    await asyncio.to_thread(until, agree, within_s=60, what="the keys that the engine has")
    assert (subscriber.counts.undecodable, subscriber.problem, subscriber._unknown) == (0, "", set())
    following.cancel()
    await asyncio.wait([following])
    subscriber.close()
    context.destroy(linger=0)
    prompt = first.json()["usage"]["prompt_tokens"]
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (prompt - 1) // engine.spec.block_size * engine.spec.block_size


async def test_the_engine_tells_its_limits_and_identity(engine: Engine) -> None:
    probe = EngineProbe(parse_engine_address(engine.target))
    scrape, models = await probe.scrape(), await probe.models()
    await probe.alive()
    assert await probe.version()
    assert (models.served_names, models.max_model_len) == ((SERVED_NAME,), CONTEXT)
    assert scrape.max_num_seqs > 0
    assert (scrape.ranks[0].block_size, scrape.ranks[0].kv_capacity_tokens) == (
        engine.spec.block_size,
        engine.spec.kv_capacity_tokens,
    )
    assert scrape.announced_identity["dtype"] == scrape.announced_identity["kv_dtype"] == "float32"
    assert scrape.announced_identity["weights_digest"]
    assert scrape.tokenizer["tokenizer"]


def test_an_output_beyond_the_context_is_cut_and_a_prompt_that_fills_it_refused(engine: Engine) -> None:
    """As EngineTraits.holds has it: vLLM up to 0.31 refuses the former, too."""

    def complete(prompt_tokens: int, max_tokens: int) -> Any:
        body = {"model": SERVED_NAME, "prompt": [100] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
        return engine.ask("/v1/completions", body)

    cut = complete(CONTEXT - 8, 64)
    if counts_output(engine.ask("/version").json()["version"]):
        assert cut.status == 400, cut.text
        cut = complete(CONTEXT - 8, 8)
    assert cut.status == 200, cut.text
    assert cut.json()["usage"]["completion_tokens"] == 8
    assert complete(CONTEXT, 1).status == 400
    assert complete(8, CONTEXT + 1).status == 400


def test_steps_are_pushed(engine: Engine, loads: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as agent:
        agent.linger = 0
        agent.bind(loads)

        def pushed() -> StepLoad | None:
            chat(engine, f"steps {WORDS}")
            newest = None
            while agent.poll(200):
                newest = msgspec.msgpack.decode(agent.recv(), type=StepLoad)
            return newest

        load = until(pushed, within_s=60, what="a step's load")
    assert (load.running, load.waiting, load.prefill_tokens_left) == (0, 0, 0)
    assert load.totals.prefills > 0
    assert load.totals.decode_tokens > 0


def test_an_answer_goes_on(engine: Engine) -> None:
    def events(record: str) -> list[tuple[str, str]]:
        """(comment, text) of each event of a stream after an answer record."""
        reply = chat(engine, WORDS, stream=True, vllm_xargs={"pointsman_answer": record})
        assert reply.status == 200, reply.text
        found, comment = [], ""
        for part in filter(None, reply.text.split("\n\n")):
            if part.startswith(":"):
                comment += re.sub(r"x\d+$", "", part)
            elif part.startswith("data: {"):
                choices = json.loads(part.removeprefix("data: "))["choices"]
                found.append((comment, "".join(choice["delta"].get("content") or "" for choice in choices)))
                comment = ""
        return found

    whole = events("")
    assert any(comment for comment, _ in whole), "the engine tells no token ids"
    for cut in (3, len(whole) // 2):
        rest = events("".join(comment for comment, _ in whole[:cut]))
        assert "".join(text for _, text in rest) == "".join(text for _, text in whole[cut:])
