"""A gateway that lets one real engine fetch what another has cached, as a scripted router plans it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from tests.support.engines.chat_client import complete, fresh_words
from tests.support.engines.offloading import assert_tie
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.fakes.gateway_peers import Peers, Stack, fake_router, gateway_before, until_ready
from tests.support.fakes.offloading_peers import fetches_by_outcome, reported_steps, slicing
from tests.support.processes.control_plane import client_of

# Tokens of a prompt that are fetched: whole blocks.
PREFIX = 640
OUTPUT = 8


@dataclass
class Fetching:
    """A gateway with a router that lets `target` fetch the first PREFIX tokens of every prompt from `source`, and answer."""

    source: Engine
    target: Engine
    up: Stack

    async def answer(self, http: aiohttp.ClientSession, prompt: str) -> tuple[str, int]:
        """Return the answer to a prompt, and the cached tokens that the client is told of."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
        async with http.post(f"{self.up.url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers["X-Pointsman-Instance"] == self.target.instance_id
            answer: dict[str, Any] = await reply.json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def answers(self, *prompts: str) -> list[tuple[str, int]]:
        """Return the answers to prompts that are sent at once."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            answers = await asyncio.gather(*(self.answer(http, prompt) for prompt in prompts))
        await self.up.router.until(lambda: not self.up.router.reserved)
        return answers

    def done(self) -> tuple[list[str], dict[str, int]]:
        """Return the errors of the steps ("": none), and the fetches by outcome."""
        return [error for _, error in reported_steps(self.up)], fetches_by_outcome(self.up)


@asynccontextmanager
async def fetching(
    source: Engine,
    target: Engine,
    protocol: agent_pb2.KvProtocol.ValueType = agent_pb2.KV_PROTOCOL_MOONCAKE,
    *,
    layerwise: bool = False,
    **settings: Any,
) -> AsyncIterator[Fetching]:
    """Run the gateway, with these settings, and the router inside the block. `layerwise`: both requests of a fetch are sent at
    once."""
    refs = [
        placement_pb2.InstanceRef(
            instance_id=engine.instance_id,
            url=engine.url,
            incarnation="1",
            kv_transfer=agent_pb2.KvTransfer(
                protocol=protocol, bootstrap_url=f"http://127.0.0.1:{engine.bootstrap_port}", layerwise=layerwise
            ),
        )
        for engine in (source, target)
    ]
    pool = placement_pb2.Pool(
        model=SERVED_NAME,
        model_root=str(source.model),
        max_model_len=source.spec.max_model_len,
        instances=refs,
    )
    router = fake_router([pool])
    await router.start()
    try:
        async with gateway_before(Peers(router, []), **settings) as (gateway, url):
            await until_ready(gateway)
            up = Stack(router, [], url, gateway)
            slicing(up, PREFIX, at=1, fetches=1)
            plain = placement_pb2.Step(index=1, kind=placement_pb2.STEP_KIND_SERVE, instance=refs[1])
            router.after_failure = lambda _: placement_pb2.Placement(decision_id="d", step=plain, last=True)
            yield Fetching(source, target, up)
    finally:
        await router.stop()


def forks(number: int) -> list[str]:
    """Prompts that share their first PREFIX tokens and go on alone."""
    shared = fresh_words(PREFIX)
    return [shared + fresh_words(60) for _ in range(number)]


def own_answer(engine: Engine, prompt: str) -> str:
    """The engine's own answer. Then it has the prompt cached."""
    with client_of(engine.url) as direct:
        return complete(direct, prompt, max_tokens=OUTPUT).text


def assert_right(engine: Engine, prompt: str, text: str) -> None:
    """The answer is the engine's own, except for ties."""
    expected = own_answer(engine, prompt)
    if text != expected:
        assert_tie(engine, prompt, expected, text)


async def assert_fetched(fetch: Fetching, *, hits: int = PREFIX) -> None:
    """A prompt is answered as by the source alone, with its prefix from there. Of that the source has all cached, or nothing,
    which is what the client is told as a cache hit."""
    (prompt,) = forks(1)
    if hits:
        own_answer(fetch.source, prompt)
    outcome = "cached" if hits else "computed"
    _, before = fetch.done()
    ((text, cached),) = await fetch.answers(prompt)
    assert_right(fetch.source, prompt, text)
    assert cached == hits
    errors, outcomes = fetch.done()
    assert errors[-1] == ""
    assert outcomes == before | {outcome: before.get(outcome, 0) + 1}
    finished = fetch.up.router.finished[-1]
    assert (finished.cached_tokens, finished.own_cached_tokens) == (PREFIX, PREFIX - hits)
