"""The agent's process code over real sockets, with a fake engine and a fake router."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq.asyncio

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.kv_events import BlockRemoved
from pointsman_agent.io import engine_monitor, report_to_router
from pointsman_agent.io.instance_monitor import InstanceMonitor
from pointsman_agent.io.state_file import StateFile
from pointsman_common.core.block_keys import prompt_keys
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, running
from tests.support.kv_events import BLOCK, MODEL, hash_of, store, tokens_of
from tests.support.waiting import eventually


def keys_of(*paths: tuple[int, ...]) -> set[int]:
    """The keys of whole chains."""
    return {key for path in paths for key in prompt_keys(tokens_of(path), "tiny")}


def knows(router: FakeRouter, name: str, keys: set[int]) -> bool:
    return router.keys(name) == keys


def has_streams(router: FakeRouter, count: int) -> bool:
    return len(router.streams) == count


def name_of(engine: FakeEngine) -> str:
    return f"127.0.0.1:{engine.port}"


async def test_hello_snapshot_deltas_load_and_bookmarks(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    await engine.publish(store((1, 2)))
    engine.running = 3
    async with running(engine.url, [router.address], tmp_path):
        name = name_of(engine)
        await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first snapshot")
        hello = router.streams[0].hello
        assert hello.instance.incarnation == "1000.000"
        assert (hello.instance.model, hello.instance.model_root) == ("tiny", "/models/tiny")
        assert (hello.instance.block_size, hello.instance.kv_capacity_tokens) == (32, 3200)
        assert hello.instance.max_model_len == 4096
        assert not hello.instance.HasField("data_parallel_rank")
        assert router.streams[0].kinds[0] == "load"
        assert router.streams[0].loads[0].healthy
        assert router.streams[0].loads[0].running == 3
        await engine.publish(store((1, 2, 3), first=2))
        await engine.publish(store((4,)), BlockRemoved(block_hashes=[hash_of((1, 2, 3))], medium="GPU"))
        await eventually(lambda: router.keys(name) == keys_of((1, 2), (4,)), "the deltas")
        engine.running = 5
        await eventually(lambda: router.streams[0].loads[-1].running == 5, "a new load")
        await eventually(lambda: router.consistency_checks > 1, "consistency_checks")
    assert len(router.streams) == 1
    assert router.streams[0].goodbye is None


async def test_two_routers_are_told_alike(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    second = FakeRouter()
    await second.start()
    try:
        async with running(engine.url, [router.address, second.address], tmp_path):
            await engine.publish(store((1, 2)))
            for fake_router in (router, second):
                await eventually(partial(knows, fake_router, name_of(engine), keys_of((1, 2))), "both know")
        assert second.problems == []
    finally:
        await second.stop()


async def test_a_gap_is_healed_by_replay(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((1,)), "the first block")
        await engine.publish(store((1, 2), first=1), mute=True)
        await engine.publish(store((1, 2, 3), first=2))
        await eventually(
            lambda: router.keys(name_of(engine)) == keys_of((1, 2, 3)), "the missed block and the one after"
        )
    assert router.streams[0].kinds.count("snapshot_begin") == 1


async def test_a_gap_that_the_buffer_no_longer_has_drops_what_was_known(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((1,)), "the first block")
        await engine.publish(store((2,)), mute=True)
        engine.buffer.clear()
        await engine.publish(store((3,)), store((1, 9), first=1))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((3,)), "only what came after the gap")


async def test_without_a_replay_socket_a_gap_drops_what_was_known(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    engine.replay_port = False
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name_of(engine)) == set(), "an empty snapshot")

        # A subscriber that joins late does not receive earlier messages, so publish until one arrives.
        letter = 0
        while not router.keys(name_of(engine)):
            letter += 1
            await engine.publish(store((letter,)))
            await asyncio.sleep(0.05)
        await engine.publish(store((901,)), mute=True)
        await engine.publish(store((902,)))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((902,)), "only what came after the gap")


async def test_an_engine_restart_is_another_incarnation(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    async with running(engine.url, [router.address], tmp_path):
        name = name_of(engine)
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name) == keys_of((1,)), "the first life")
        await engine.stop()
        await eventually(lambda: not router.streams[0].loads[-1].healthy, "unhealthy while it is away")
        engine.process_start = 2000.0
        engine.generation_tokens = 0
        await engine.start()
        await eventually(lambda: len(router.streams) == 2, "another hello")
        await eventually(lambda: router.keys(name) == set(), "an empty cache")
        assert router.streams[0].goodbye is None, "so that a model with one engine stays known"
        assert router.streams[1].hello.instance.incarnation == "2000.000"
        assert router.streams[1].hello.latest_seq == 0
        await engine.publish(store((2,)))
        await eventually(lambda: router.keys(name) == keys_of((2,)), "the second life")


async def test_an_engine_that_restarts_stays_until_its_next_incarnation_is_reported(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    """Its agent waits for KV events that it cannot read. Meanwhile the instance stays, with no keys."""
    async with running(engine.url, [router.address], tmp_path):
        name = name_of(engine)
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name) == keys_of((1,)), "the first life")
        await engine.stop()
        engine.process_start, engine.answers_replays = 2000.0, False
        await engine.start()
        await eventually(lambda: engine.replays > 1, "the agent asks for the events")
        await eventually(lambda: router.keys(name) == set(), "the keys are dropped")
        assert not router.streams[0].ended
        assert len(router.streams) == 1
        await eventually(lambda: len(router.streams) == 2, "another hello")
        assert router.streams[0].goodbye is None
        assert router.streams[1].hello.instance.incarnation == "2000.000"


async def test_an_engine_that_restarts_with_another_model_leaves_at_once(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name_of(engine)) == set(), "the first life")
        await engine.stop()
        engine.process_start, engine.model = 2000.0, "other"
        await engine.start()
        await eventually(lambda: len(router.streams) == 2, "another hello")
        assert router.streams[0].goodbye == "another model is served"
        assert router.streams[1].hello.instance.model == "other"


async def test_events_that_start_over_are_another_incarnation(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(engine.url, [router.address], tmp_path):
        name = name_of(engine)
        await engine.publish(store((1,)))
        await engine.publish(store((2,)))
        await eventually(lambda: router.keys(name) == keys_of((1,), (2,)), "the first life")
        engine.rewind()
        await engine.publish(store((3,)))
        await eventually(lambda: router.keys(name) == keys_of((3,)), "the second life")
        assert router.streams[0].goodbye is None
        incarnations = [stream.hello.instance.incarnation for stream in router.streams]
        assert incarnations[0] == "1000.000"
        assert incarnations[1].startswith("1000.000-")


async def test_an_agent_restart_resumes_without_a_snapshot(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    name = name_of(engine)
    await engine.publish(store((1, 2)))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first agent")
    await engine.publish(store((1, 2, 3), first=2))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((1, 2, 3)), "the second agent")
        await eventually(lambda: router.consistency_checks > 0, "a consistency_check")
    assert [stream.kinds.count("snapshot_begin") for stream in router.streams] == [1, 0]
    assert router.streams[0].hello.instance.incarnation == router.streams[1].hello.instance.incarnation


async def test_an_agent_that_died_restores_but_sends_a_snapshot(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    name = name_of(engine)
    await engine.publish(store((1, 2)))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first agent")
        await eventually(lambda: any(tmp_path.glob("*.blocks")), "a save")
        saved = next(tmp_path.glob("*.blocks"))  # noqa: ASYNC240
        early = saved.read_bytes()
        await engine.publish(store((3,)))
        await eventually(lambda: router.keys(name) == keys_of((1, 2), (3,)), "what the saved file does not know")
    saved.write_bytes(early)
    engine.buffer = engine.buffer[-1:]
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 2, "the second agent")
        await eventually(lambda: router.keys(name) == keys_of((1, 2), (3,)), "restored, and one batch replayed")
    assert router.streams[1].kinds.count("snapshot_begin") == 1


async def test_a_saved_state_that_the_publisher_does_not_confirm_is_dropped(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    name = name_of(engine)
    await engine.publish(store((1, 2)))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first agent")
    engine.rewind()
    await engine.publish(store((5,)))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((5,)), "the other lifetime only")
    assert len({stream.hello.instance.incarnation for stream in router.streams}) == 2


async def test_a_process_without_a_start_time_resumes_and_restarts(
    context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path
) -> None:
    engine = FakeEngine(context, process_start=None)
    await engine.start()
    try:
        name = name_of(engine)
        await engine.publish(store((1, 2)))
        async with running(engine.url, [router.address], tmp_path):
            await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first agent")
        async with running(engine.url, [router.address], tmp_path):
            await eventually(lambda: len(router.streams) == 2 and len(router.streams[1].loads) > 2, "the second agent")
            assert router.streams[1].kinds.count("snapshot_begin") == 0
            engine.generation_tokens = 0
            await engine.stop()
            await engine.start()
            await eventually(lambda: len(router.streams) == 3 and router.keys(name) == set(), "another lifetime")
        incarnations = [stream.hello.instance.incarnation for stream in router.streams]
        assert incarnations[0] == incarnations[1] != incarnations[2]
    finally:
        await engine.stop()


async def test_a_router_restart_is_followed_by_hello_and_a_snapshot(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    name = name_of(engine)
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name) == keys_of((1,)), "before")
        await router.stop()
        router.pairs.clear()
        router.seqs.clear()
        await engine.publish(store((2,)))
        await router.start()
        await eventually(lambda: router.keys(name) == keys_of((1,), (2,)), "after")
    assert router.streams[-1].kinds.count("snapshot_begin") == 1


async def test_a_resync_brings_a_snapshot(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((1,)), "the first snapshot")
        router.streams[0].answers.put_nowait(pb.ReportResponse(resync=pb.Resync(reason="digest")))
        await eventually(lambda: router.streams[0].kinds.count("snapshot_end") == 2, "the second snapshot")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "block size 24 is no multiple of 16"),
        (grpc.StatusCode.ABORTED, "a newer stream reports this instance"),
    ],
    ids=["refused", "displaced"],
)
async def test_a_refusal_is_retried_slowly_and_reported(
    engine: FakeEngine,
    router: FakeRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: grpc.StatusCode,
    reason: str,
) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_TOKEN", "secret")
    # A refused stream is not reopened. With these delays, a second attempt would come before what the test waits for.
    monkeypatch.setattr(report_to_router, "FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(report_to_router, "LAST_RETRY_S", 0.0)
    engine.block_size = 24
    router.refuse = (code, reason)
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 1, "one attempt")
        looks = engine.generation_tokens
        engine.running = 9
        await engine.publish(store((1,)))
        await eventually(lambda: engine.replays > 0 and looks > 0, "the agent goes on")
    assert len(router.streams) == 1
    assert router.streams[0].hello.instance.block_size == 24
    assert router.streams[0].metadata["authorization"] == "Bearer secret"


async def test_a_load_balancer_is_refused(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 1, "the first process")
        engine.process_start = 2000.0
        await eventually(lambda: len(router.streams) == 2, "the second process")
        engine.process_start = 1000.0
        await eventually(lambda: router.streams[1].goodbye is not None, "goodbye")
        assert "several processes" in (router.streams[1].goodbye or "")


async def test_several_groups_are_reported_with_sparse_prefixes(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    full: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": BLOCK,
    }
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1, 2, 3), **full), store((1, 2, 3), **window))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((1, 2, 3)), "all prefixes")
        await eventually(lambda: router.streams[-1].hello.instance.sparse_prefixes, "another hello")
        await engine.publish(BlockRemoved([hash_of((1,)), hash_of((1, 2))], "GPU", group_idx=1))
        # Before the last block there is no hit, so of its keys only the last is reported.
        last = prompt_keys(tokens_of((1, 2, 3)), MODEL)[-1]
        await eventually(lambda: router.keys(name_of(engine)) == {last}, "the only hit")
    # The next agent restores the groups from its file.
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name_of(engine)) == {last}, "the restored hit")
        instance = router.streams[-1].hello.instance
        assert (instance.sparse_prefixes, instance.prefix_mode) == (True, pb.PREFIX_MODE_EXACT)
        await engine.publish(BlockRemoved([hash_of((1, 2))], "GPU", group_idx=0))
        await eventually(lambda: router.keys(name_of(engine)) == set(), "no hit")


async def test_groups_of_unknown_kinds_are_reported_as_no_prefix_knowledge(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: router.keys(name_of(engine)) == keys_of((1,)), "the first snapshot")
        await engine.publish(store((2,), group_idx=1))
        await eventually(lambda: len(router.streams) == 2, "another hello")
        instance = router.streams[1].hello.instance
        assert "several KV cache groups" in instance.prefix_reason
        assert instance.events_unusable
        await eventually(lambda: router.keys(name_of(engine)) == set(), "no keys")


@asynccontextmanager
async def engine_of_ranks(
    context: zmq.asyncio.Context, *ranks: int, process_start: float | None = 1000.0
) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(context, process_start=process_start)
    engine.ranks = [*ranks]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def test_each_rank_is_an_instance(context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path) -> None:
    async with engine_of_ranks(context, 0, 1) as engine:
        async with running(engine.url, [router.address], tmp_path):
            await eventually(lambda: sum(len(stream.loads) for stream in router.streams) > 3, "loads")
        hellos = {stream.hello.instance.instance_id: stream.hello.instance for stream in router.streams}
        assert set(hellos) == {f"{name_of(engine)}/0", f"{name_of(engine)}/1"}
        assert [hellos[name].data_parallel_rank for name in sorted(hellos)] == [0, 1]
        loads = {stream.hello.instance.data_parallel_rank: stream.loads[-1].running for stream in router.streams}
        assert loads == {0: 0, 1: 1}


async def test_ranks_are_prepared_together(
    context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay of each may take seconds that do not come."""
    all_wait, prepare = asyncio.Barrier(2), InstanceMonitor.prepare

    async def together(monitor: InstanceMonitor) -> None:
        await all_wait.wait()
        await prepare(monitor)

    monkeypatch.setattr(InstanceMonitor, "prepare", together)
    async with engine_of_ranks(context, 0, 1) as engine, running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 2, "both ranks")


async def test_a_page_that_lacks_a_rank_is_not_another_process(
    context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "RANKS_GONE_AFTER", 10_000)
    async with (
        engine_of_ranks(context, 0, 1, process_start=None) as engine,
        running(engine.url, [router.address], tmp_path),
    ):
        await eventually(lambda: len(router.streams) == 2, "both ranks")
        for ranks in ([0], [0, 1]):
            engine.ranks = ranks
            scrapes = engine.scrapes
            await eventually(lambda since=scrapes: engine.scrapes > since + 2, "scrapes")  # type: ignore[misc]
        assert len(router.streams) == 2
        assert not any(stream.ended for stream in router.streams)


async def test_ranks_of_a_second_node_are_selected_by_their_index_there(
    context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path
) -> None:
    """With hybrid load balancing a server has some of the deployment's ranks: its labels are the ranks in the deployment, and it
    answers 400 to a header above the number of its own ranks."""
    async with engine_of_ranks(context, 2, 3) as engine:
        async with running(engine.url, [router.address], tmp_path):
            await eventually(lambda: len(router.streams) == 2, "hellos")
        ranks = {
            stream.hello.instance.instance_id: stream.hello.instance.data_parallel_rank for stream in router.streams
        }
        assert ranks == {f"{name_of(engine)}/2": 0, f"{name_of(engine)}/3": 1}


async def test_a_restart_makes_every_rank_a_new_incarnation(
    context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path
) -> None:
    async with engine_of_ranks(context, 0, 1) as engine:
        async with running(engine.url, [router.address], tmp_path):
            await eventually(lambda: len(router.streams) == 2, "hellos")
            await engine.stop()
            engine.process_start = 2000.0
            await engine.start()
            await eventually(lambda: len(router.streams) == 4, "hellos of the next process")
        lives = [(stream.hello.instance.instance_id, stream.hello.instance.incarnation) for stream in router.streams]
        names = [f"{name_of(engine)}/{rank}" for rank in (0, 1)]
        assert set(lives) == {(name, incarnation) for name in names for incarnation in ("1000.000", "2000.000")}


async def test_a_restored_file_is_clean_no_more(engine: FakeEngine, router: FakeRouter, tmp_path: Path) -> None:
    """Otherwise, after an agent that dies before its first save, the next agent would reuse numbers that routers have seen."""
    name = name_of(engine)
    file = StateFile(tmp_path, name)
    cleans = []
    await engine.publish(store((1,)))
    for agent in range(2):
        async with running(engine.url, [router.address], tmp_path, save_interval_s=600):
            await eventually(partial(has_streams, router, agent + 1), "hello")
            await eventually(lambda: router.keys(name) == keys_of((1,)), "the keys")
            state = file.load()
            cleans.append(state and state.clean)
        state = file.load()
        cleans.append(state and state.clean)
    assert cleans == [None, True, False, True]


async def test_a_full_disk_costs_what_is_saved_and_not_the_agent(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved state that cannot be marked as used is not restored: a later agent would reuse numbers that routers have seen."""
    name = name_of(engine)
    await engine.publish(store((1, 2)))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first agent")

    def full(self: StateFile, state: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for agent in (2, 3):
        with monkeypatch.context() as disk:
            disk.setattr(StateFile, "save", full)
            await engine.publish(store((1, 2, agent), first=2))
            async with running(engine.url, [router.address], tmp_path):
                await eventually(partial(has_streams, router, agent), "another agent")
                known = keys_of(*((1, 2, number) for number in range(2, agent + 1)))
                await eventually(partial(knows, router, name, known), "all that the engine has cached")
    await engine.publish(store((1, 2, 4), first=2))
    async with running(engine.url, [router.address], tmp_path):
        known |= keys_of((1, 2, 4))
        await eventually(lambda: router.keys(name) == known, "an agent with room again, and the first one's state")
    assert [stream.kinds.count("snapshot_begin") for stream in router.streams] == [1, 1, 1, 1]
    assert len({stream.hello.instance.incarnation for stream in router.streams}) == 1


async def test_an_engine_that_is_not_up_yet_is_waited_for(
    context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path
) -> None:
    engine = FakeEngine(context)
    await engine.start()
    await engine.stop()
    async with running(engine.url, [router.address], tmp_path):
        await engine.start()
        await eventually(lambda: len(router.streams) == 1, "hello")
    await engine.stop()


@pytest.mark.parametrize("interval_ms", [0, 60_000])
async def test_an_agent_of_a_busy_engine_restarts_without_a_snapshot(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, interval_ms: int
) -> None:
    name = name_of(engine)

    def saved_blocks() -> int:
        state = StateFile(tmp_path, name).load()
        return len(state.blocks) if state is not None else 0

    await engine.publish(store((1, 2)))
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: router.keys(name) == keys_of((1, 2)), "the first agent")
        router.streams[0].answers.put_nowait(pb.ReportResponse(pace=pb.Pace(key_interval_ms=interval_ms)))
        await eventually(router.streams[0].answers.empty, "the pace")
        await engine.publish(store((1, 3), first=1))
        await eventually(lambda: router.keys(name) == keys_of((1, 2), (1, 3)), "a change at once")
        await engine.publish(store((1, 4), first=1))
        await eventually(lambda: saved_blocks() == 4, "the agent has a change that waits")
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: len(router.streams) == 2, "the second agent's stream")
        await eventually(lambda: router.keys(name) == keys_of((1, 2), (1, 3), (1, 4)), "the second agent")
    assert [stream.kinds.count("snapshot_begin") for stream in router.streams] == [1, 0]


async def test_a_name_that_moves_is_followed_at_the_next_scrape(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = FakeEngine(engine.context, process_start=2000.0, host="127.0.0.2")
    moved.port = engine.port
    for source in (engine, moved):
        source.replay_port, source.events_address = False, "inproc://none"
    await moved.start()
    address = engine.host
    ask = socket.getaddrinfo

    def answer(host: Any, *how: Any, **more: Any) -> Any:
        return ask(address if host == "engine.test" else host, *how, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    try:
        async with running(f"http://engine.test:{engine.port}", [router.address], tmp_path):
            await eventually(lambda: router.streams, "the first engine")
            assert router.streams[0].hello.instance.incarnation == "1000.000"
            address, before = moved.host, engine.scrapes
            # The first engine still answers at its address.
            await eventually(lambda: len(router.streams) == 2, "the engine at the new address")
            assert router.streams[1].hello.instance.incarnation == "2000.000"
            assert engine.scrapes - before <= 1
    finally:
        await moved.stop()


async def test_an_engine_at_an_ipv6_address(context: zmq.asyncio.Context, router: FakeRouter, tmp_path: Path) -> None:
    engine = FakeEngine(context, host="::1")
    await engine.start()
    try:
        async with running(engine.url, [router.address], tmp_path):
            await engine.publish(store((1, 2)))
            # Its events are announced as tcp://*:PORT.
            await eventually(lambda: router.keys(f"[::1]:{engine.port}") == keys_of((1, 2)), "its keys")
        assert router.streams[0].hello.instance.url == f"http://[::1]:{engine.port}"
    finally:
        await engine.stop()
