"""Blocks of vLLM's offloading connector, from its events through a real agent to a real router's decision."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_agent.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pointsman_common.core.block_keys import prompt_keys
from pointsman_router.core.placement_types import InstanceState
from tests.support.fakes.agent_peers import FakeEngine
from tests.support.fakes.agent_peers import running as agent_running
from tests.support.kv_events import BLOCK, MODEL, hash_of, store, tokens_of
from tests.support.router import Client
from tests.support.router import running as router_running
from tests.support.waiting import eventually

PATH = tuple(range(1, 41))
KEYS = prompt_keys(tokens_of(PATH), MODEL)
ON_GPU = 10


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    context = zmq.asyncio.Context()
    engines = [FakeEngine(context), FakeEngine(context)]
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()
    context.destroy(linger=0)


def name_of(engine: FakeEngine) -> str:
    return f"127.0.0.1:{engine.port}"


def moved(path: tuple[int, ...], medium: str, locality: str | None = None) -> BlockStored:
    """As a connector names a block that it has copied, without its tokens."""
    return BlockStored(block_hashes=[hash_of(path)], block_size=BLOCK, medium=medium, group_idx=0, locality=locality)


def prefixes(first: int, last: int) -> list[tuple[int, ...]]:
    return [PATH[: at + 1] for at in range(first, last)]


async def explained(client: Client) -> dict[str, fleet_pb2.Candidate]:
    """How a decision on the whole prompt and one more token would see each instance. Nothing is placed: a placement would count
    its prompt as cached on the chosen GPU."""
    asked = placement_pb2.PlacementRequest(request_id="r", model=MODEL, input_tokens=len(PATH) * BLOCK + 1, keys=KEYS)
    answer = await client.fleet.Explain(fleet_pb2.ExplainRequest(request=asked))
    return {candidate.instance_id: candidate for candidate in answer.decision.candidates}


async def test_offloaded_blocks_are_credited_where_they_can_be_loaded(
    engines: list[FakeEngine], tmp_path: Path
) -> None:
    one, other = engines
    async with (
        router_running() as (server, client),
        agent_running(f"{one.url}?storage=s", [f"127.0.0.1:{server.port}"], tmp_path / "one"),
        agent_running(f"{other.url}?storage=s", [f"127.0.0.1:{server.port}"], tmp_path / "other"),
    ):
        await one.publish(store(PATH), *(moved(path, "CPU", "LOCAL") for path in prefixes(0, 30)))
        await one.publish(*(moved(path, "FS", "REMOTE") for path in prefixes(0, len(PATH))))
        gone: list[int | bytes] = [hash_of(path) for path in prefixes(ON_GPU, len(PATH))]
        await one.publish(BlockRemoved(block_hashes=gone, medium="GPU", group_idx=0))
        tiers = server.router.state.lower_tiers

        def both_are_ready() -> bool:
            known = [server.router.state.instances.get(name_of(engine)) for engine in engines]
            return all(instance is not None and instance.state is InstanceState.READY for instance in known)

        await eventually(
            lambda: (
                server.router.state.index.count(name_of(one)) == ON_GPU * BLOCK // 16
                and tiers.count(name_of(one), 2) == 30 * BLOCK // 16
                and tiers.count(name_of(one), 3) == len(PATH) * BLOCK // 16
                and both_are_ready()
            ),
            "the router has the blocks of all tiers",
        )
        seen = await explained(client)
        load = seen[name_of(one)].kv_load
        assert (load.host_tokens, load.storage_tokens) == (20 * BLOCK, 10 * BLOCK)
        assert 0 < load.price_tokens < 30 * BLOCK
        assert load.load_time.ToNanoseconds() > 0
        assert seen[name_of(one)].cached_tokens == len(PATH) * BLOCK - load.price_tokens
        assert seen[name_of(other)].kv_load.storage_tokens == len(PATH) * BLOCK, "both have the same store"

        # Evicted from host memory: the run there ends, and storage continues it.
        gone = [hash_of(path) for path in prefixes(20, 30)]
        await one.publish(BlockRemoved(block_hashes=gone, medium="CPU", group_idx=0, locality="LOCAL"))
        await eventually(lambda: tiers.count(name_of(one), 2) == 20 * BLOCK // 16, "the eviction")
        load = (await explained(client))[name_of(one)].kv_load
        assert (load.host_tokens, load.storage_tokens) == (10 * BLOCK, 20 * BLOCK)

        await one.publish(AllBlocksCleared())
        await eventually(lambda: not tiers.count(name_of(one), 3), "the reset")
        seen = await explained(client)
        assert not any(candidate.HasField("kv_load") for candidate in seen.values())
