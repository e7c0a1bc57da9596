"""What is read of an engine's metrics page."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman_agent.core.engine_metrics import WrongSender, parse_metrics

PAGE = Path(__file__).with_name("vllm_metrics.txt")


def test_a_captured_page() -> None:
    scrape = parse_metrics(PAGE.read_bytes())
    assert scrape.process_start == pytest.approx(1795237827.05)
    assert list(scrape.ranks) == [0]
    sample = scrape.ranks[0]
    assert (sample.block_size, sample.kv_blocks) == (32, 1024)
    assert sample.kv_capacity_tokens == 32_768
    assert sample.generation_tokens > 0
    assert sample.prefix_cache_queries > sample.prefix_cache_hits > 0
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
    'pointsman_kv_wrong_requests_total{sender="http://a:8998"}',
)


@pytest.mark.parametrize("series", COUNTED)
@pytest.mark.parametrize("value", ["+Inf", "-1", "NaN", "1e300"])
def test_a_number_that_cannot_be_sent_is_an_error_of_the_page(series: str, value: str) -> None:
    with pytest.raises(ValueError, match=series.partition("{")[0]):
        parse_metrics(PAGE_OF_ONE + f"{series} {value}\n".encode())


def test_the_sum_of_several_processes_is_checked_too() -> None:
    lines = b'pointsman_kv_wrong_requests_total{sender="x",pid="%d"} 1e19\n'
    assert parse_metrics(PAGE_OF_ONE + lines % 1).wrong_kv == {WrongSender("x"): 10**19}
    with pytest.raises(ValueError, match="pointsman_kv_wrong_requests_total"):
        parse_metrics(PAGE_OF_ONE + lines % 1 + lines % 2)


@pytest.mark.parametrize("text", ["None", "²", "9" * 5_000, "-1", "1e300"])
def test_a_label_that_is_no_number_of_its_field_is_unknown(text: str) -> None:
    labels = f'{{block_size="{text}",engine="{text}",kv_cache_size_tokens="{text}",num_gpu_blocks="{text}"}}'
    announced = f'{{device="NVIDIA H200",max_num_batched_tokens="8192",long_prefill_token_threshold="{text}"}}'
    scrape = parse_metrics(f"vllm:cache_config_info{labels} 1.0\npointsman_engine_info{announced} 1.0\n".encode())
    sample = scrape.ranks[0]
    assert (sample.block_size, sample.kv_blocks, sample.kv_capacity_tokens) == (0, 0, 0)
    assert scrape.long_prefill_token_threshold == 0
