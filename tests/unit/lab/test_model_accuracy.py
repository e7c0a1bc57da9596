"""The measures by which a live run and its simulation are compared."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pointsman_lab.live.model_accuracy import (
    LiveComparison,
    as_sent,
    compare_runs,
    from_json,
    largest_error,
    smallest_engine,
    table,
    to_json,
    with_unique_ids,
)
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.tokenizer import ChatTokenizer
from pointsman_lab.workload.traces import TraceRequest

TOKENIZER = ChatTokenizer()


def turn(session: str, number: int, blocks: tuple[int, ...], length: int) -> TraceRequest:
    return TraceRequest(
        timestamp_ms=number * 1e3,
        session_id=session,
        turn=number,
        input_length=length,
        output_length=20,
        hash_ids=blocks,
        block_size=64,
    )


TRACE = [turn("a", 1, (1, 2), 128), turn("a", 2, (1, 2, 3), 200), turn("b", 1, (1, 4), 150)]


def record(ttft_s: float, e2e_s: float, cached: int, status: int = 200) -> RequestRecord:
    return RequestRecord(session="a", turn=1, status=status, ttft_s=ttft_s, e2e_s=e2e_s, cached_tokens=cached)


def test_what_is_compared() -> None:
    live = [record(0.1, 1.0, 96), record(0.3, 3.0, 0), record(9.0, 9.0, 999, status=500)]
    simulated = [record(0.2, 1.0, 111), record(0.2, 3.0, 31)]
    found = {metric.metric: metric for metric in compare_runs(live, simulated, 32)}
    assert (found["TTFT p50"].live, found["TTFT p50"].simulated) == pytest.approx((0.2, 0.2))
    assert found["TTFT p90"].error == pytest.approx(0.2 / 0.28 - 1)
    assert found["E2E p90"].error == pytest.approx(0.0)
    # 111 are three blocks of 32, 31 are none.
    assert (found["cached tokens"].live, found["cached tokens"].simulated) == (96, 96)


def test_what_the_table_and_the_file_say() -> None:
    loads = [
        ("1 requests/s", [LiveComparison("TTFT p50", 0.2, 0.25), LiveComparison("cached tokens", 1000, 990)]),
        ("2 requests/s", [LiveComparison("cached tokens", 0, 0)]),
    ]
    assert largest_error(loads) == pytest.approx(0.25)
    assert "| 1 requests/s | TTFT p50 | 200 ms | 250 ms | +25.0% |" in table(loads)
    assert "| 1 requests/s | cached tokens | 1,000 | 990 | -1.0% |" in table(loads)
    assert from_json(to_json(loads)) == loads
    assert to_json(loads)["2 requests/s"]["cached tokens"] == {"live": 0, "simulated": 0, "error": 0.0}
    assert largest_error([("x", [LiveComparison("cached tokens", 0, 5)])]) == float("inf")
    assert "| - |" in table([("x", [LiveComparison("cached tokens", 0, 5)])])


def test_simulated_engines_can_what_all_live_ones_can() -> None:
    small = {"block_size": 64, "kv_blocks": 127, "max_model_len": 4_096, "max_num_batched_tokens": 512}
    large = {"block_size": 32, "kv_blocks": 1_023, "max_model_len": 8_192}
    both = {"block_size": 64, "kv_blocks": 127, "max_model_len": 4_096}
    assert smallest_engine(small, large) == smallest_engine(large, small) == both
    assert smallest_engine(large, large) == large


def test_every_run_has_a_trace_of_its_own() -> None:
    negative = [replace(request, hash_ids=tuple(-1 - block for block in request.hash_ids)) for request in TRACE]
    for trace in (TRACE, negative):
        _has_blocks_of_its_own(trace)


def _has_blocks_of_its_own(trace: list[TraceRequest]) -> None:
    first, second = with_unique_ids(trace, 1), with_unique_ids(trace, 2)
    blocks = [{block for request in of for block in request.hash_ids} for of in (trace, first, second)]
    assert blocks[0].isdisjoint(blocks[1])
    assert blocks[1].isdisjoint(blocks[2])
    assert {request.session for request in first}.isdisjoint(request.session for request in second)
    assert first[0].hash_ids[0] == first[2].hash_ids[0], "what was shared stays shared"


def test_what_is_simulated_has_the_tokens_that_are_sent() -> None:
    chats = ChatMaker(TRACE, TOKENIZER.words, 0.5)
    sent = as_sent(TRACE, chats, TOKENIZER)
    for request, original in zip(sent, TRACE, strict=True):
        ids = TOKENIZER.encode(TOKENIZER.render(chats.messages(original)))
        assert request.input_length == len(ids)
        assert len(request.hash_ids) == len(ids) // 16
        assert (request.output_length, request.block_size) == (10, 16)
    first, second, other = (request.hash_ids for request in sent)
    # A turn's prompt ends with the template's generation prompt; all before that is in the next turn's prompt.
    assert second[: len(first) - 1] == first[:-1]
    assert other[0] == first[0]
    assert other[-1] not in first
