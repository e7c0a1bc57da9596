"""What is read of an engine's metrics page."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman_agent.core.engine_metrics import FIGURES, WrongSender, parse_metrics

PAGE = Path(__file__).with_name("vllm_metrics.txt")


def test_a_captured_page() -> None:
    scrape = parse_metrics(PAGE.read_bytes())
    assert scrape.process_start == pytest.approx(1795237827.05)
    assert list(scrape.ranks) == [0]
    sample = scrape.ranks[0]
    assert (sample.block_size, sample.kv_blocks) == (32, 1024)
    assert sample.kv_capacity_tokens == 32_768
    assert sample.generation_tokens
    assert sample.prefix_cache_queries
    assert sample.prefix_cache_hits
    assert sample.prefix_cache_queries > sample.prefix_cache_hits
    assert sample.cache_config["enable_prefix_caching"] == "True"
    assert not sample.speculative


def test_ranks_are_told_apart_and_oddities_read() -> None:
    scrape = parse_metrics(
        b'vllm:num_requests_running{engine="0",model_name="a}\\"b"} 2.0\n'
        b'vllm:num_requests_running{engine="1",model_name="m"} 3.0\n'
        b'vllm:num_requests_running_total_not{engine="7"} 3.0\n'
        b'vllm:kv_cache_usage_perc{engine="1"} 1e-3\n'
        b'vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1.0\n'
    )
    assert scrape.process_start is None
    assert [(rank, sample.running) for rank, sample in scrape.ranks.items()] == [(0, 2.0), (1, 3.0)]
    assert scrape.ranks[1].kv_usage == 1e-3
    assert scrape.ranks[1].kv_capacity_tokens == 160
    assert scrape.ranks[0].kv_capacity_tokens == 0


def test_an_engine_that_counts_drafts_decodes_speculatively() -> None:
    page = (
        b'vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 0.0\nvllm:num_requests_running{engine="0"} 1.0\n'
    )
    ranks = parse_metrics(page).ranks
    assert (ranks[0].speculative, ranks[1].speculative) == (False, True)


PAGE_OF_ONE = b'vllm:num_requests_running{engine="0"} 1.0\n'
COUNTED = (
    'vllm:num_requests_waiting{engine="0"}',
    'vllm:kv_cache_usage_perc{engine="0"}',
    'vllm:generation_tokens_total{engine="0"}',
    'vllm:num_preemptions_total{engine="0"}',
    'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"}',
    'vllm:sleep_mode_operations_in_flight{operation="sleep"}',
    'vllm:engine_sleep_state{engine="0",sleep_state="awake"}',
    "process_start_time_seconds",
)


@pytest.mark.parametrize("series", COUNTED)
@pytest.mark.parametrize("value", ["+Inf", "NaN", "1e400", "none", "\xff"])
def test_a_value_that_is_no_number_counts_as_missing_and_is_named(series: str, value: str) -> None:
    scrape = parse_metrics(PAGE_OF_ONE + f"{series} {value}\n".encode("latin-1"))
    assert list(scrape.bad) == [series.partition("{")[0]]
    missing = parse_metrics(PAGE_OF_ONE)
    assert (scrape.process_start, scrape.ranks) == (None, missing.ranks)
    assert (scrape.completed, scrape.in_progress) == ({}, frozenset())


@pytest.mark.parametrize(
    "line", ["kv_cache_usage_perc{} -0.3875", "kv_cache_usage_perc{} 1.5", "num_requests_waiting{} -1"]
)
def test_a_number_that_its_field_cannot_hold_is_unknown_and_the_others_count(line: str) -> None:
    scrape = parse_metrics(PAGE_OF_ONE + f"vllm:{line}\n".encode())
    assert scrape.ranks[0].running == 1
    assert {"kv_usage", "waiting"} <= set(scrape.ranks[0].unknown)
    assert len(scrape.bad) == 1


def test_a_series_that_is_missing_is_unknown_and_not_zero() -> None:
    assert parse_metrics(PAGE_OF_ONE).ranks[0].unknown == tuple(name for name in FIGURES if name != "running")
    assert set(parse_metrics(PAGE.read_bytes()).ranks[0].unknown) <= {
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
    }


def test_older_names_are_read() -> None:
    page = (
        b'vllm:gpu_cache_usage_perc{engine="0"} 0.25\n'
        b'vllm:gpu_prefix_cache_queries_total{engine="0"} 40.0\n'
        b'vllm:gpu_prefix_cache_hits_total{engine="0"} 16.0\n'
    )
    sample = parse_metrics(page).ranks[0]
    assert (sample.kv_usage, sample.prefix_cache_queries, sample.prefix_cache_hits) == (0.25, 40, 16)


def test_a_sender_of_wrong_kv_stays_named_without_its_number() -> None:
    lines = b'pointsman_kv_wrong_requests_total{sender="x",pid="%d"} %s\n'
    assert parse_metrics(PAGE_OF_ONE + lines % (1, b"1e19")).wrong_kv == {WrongSender("x"): 10**19}
    for page in (lines % (1, b"NaN"), lines % (1, b"-1"), lines % (1, b"1") + lines % (2, b"+Inf")):
        scrape = parse_metrics(PAGE_OF_ONE + page)
        assert (scrape.wrong_kv, list(scrape.bad)) == ({WrongSender("x"): 1}, ["pointsman_kv_wrong_requests_total"])
    # The sum of several processes is checked, too.
    scrape = parse_metrics(PAGE_OF_ONE + lines % (1, b"1e19") + lines % (2, b"1e19"))
    assert (scrape.wrong_kv, len(scrape.bad)) == ({WrongSender("x"): 10**19}, 1)


@pytest.mark.parametrize("text", ["None", "²", "9" * 5_000, "-1", "1e300"])
def test_a_label_that_is_no_number_of_its_field_is_unknown(text: str) -> None:
    labels = f'{{block_size="{text}",engine="{text}",kv_cache_size_tokens="{text}",num_gpu_blocks="{text}"}}'
    announced = f'{{device="NVIDIA H200",max_num_batched_tokens="8192",long_prefill_token_threshold="{text}"}}'
    scrape = parse_metrics(f"vllm:cache_config_info{labels} 1.0\npointsman_engine_info{announced} 1.0\n".encode())
    sample = scrape.ranks[0]
    assert (sample.block_size, sample.kv_blocks, sample.kv_capacity_tokens) == (0, 0, 0)
    assert scrape.long_prefill_token_threshold == 0
