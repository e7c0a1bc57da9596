"""What is read of an engine's metrics page."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.agent.core.engine_metrics import parse_metrics

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
