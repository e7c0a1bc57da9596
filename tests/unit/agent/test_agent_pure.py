"""Metrics page, engine addresses, batch order, process identity, settings and state files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.agent.identity import Identity, Seen
from services.agent.metrics import parse_metrics
from services.agent.persist import SEQ_JUMP, StateFile, capture, revive
from services.agent.sequence import Sequence, Verdict
from services.agent.settings import AgentSettings
from services.agent.shadow import Shadow, Tier
from services.agent.target import connect_address, offset_port, parse_target
from tests.unit.agent.test_agent_shadow import store

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


def test_addresses_with_options() -> None:
    target = parse_target(
        "http://127.0.0.1:8000/?events=tcp://127.0.0.1:5557&replay=tcp://127.0.0.1:5558&advertise=http://10.0.0.7:9000&gpus=0,3"
    )
    assert target.url == "http://127.0.0.1:8000"
    assert (target.instance_id(None), target.instance_id(1)) == ("10.0.0.7:9000", "10.0.0.7:9000/1")
    assert (target.events, target.replay, target.gpus) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", (0, 3))
    assert parse_target("https://host").instance_id(None) == "host:443"
    assert parse_target("http://[::1]:8000").instance_id(None) == "[::1]:8000"


@pytest.mark.parametrize(
    ("text", "kv", "bootstrap"),
    [
        ("http://h", "", ""),
        ("http://h?kv=nixl", "nixl", ""),
        ("http://h?kv=mooncake", "mooncake", ""),
        ("http://h?bootstrap=http://b:1", "", "http://b:1"),
        ("http://h?kv=mooncake&bootstrap=http://b:1/", "mooncake", "http://b:1"),
    ],
)
def test_how_an_engine_passes_kv_on(text: str, kv: str, bootstrap: str) -> None:
    target = parse_target(text)
    assert (target.kv, target.bootstrap) == (kv, bootstrap)
    assert target.kv_role == "both"


def test_what_an_engine_computes_with() -> None:
    target = parse_target("http://h?hardware=h200&long-prefill=4096")
    assert (target.hardware, target.long_prefill) == ("h200", 4_096)
    assert (parse_target("http://h").hardware, parse_target("http://h").long_prefill) == ("", 0)


def test_what_an_engine_wants_of_a_transfer() -> None:
    assert parse_target("http://h?kv=mooncake&kv-role=producer").kv_role == "producer"
    assert parse_target("http://h?kv=nixl&kv-role=consumer").kv_role == "consumer"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:8000",
        "http://",
        "http://h?evnts=tcp://a:1",
        "http://h?replay=tcp://a:1",
        "http://h:x",
        "http://h?gpus=a",
        "http://h?kv=carrier-pigeon",
        "http://h?kv=nixl&bootstrap=http://b:1",
        "http://h?kv=mooncake&bootstrap=b:1",
        "http://h?kv=mooncake&kv-role=kv_both",
        "http://h?kv-role=both",
        "http://h?kv=mooncake&decode-first=1",
        "http://h?long-prefill=-1",
        "http://h?long-prefill=4k",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"engine|query|[Pp]ort|int"):
        parse_target(text)


def test_event_addresses() -> None:
    assert connect_address("tcp://*:5557", "10.0.0.1") == "tcp://10.0.0.1:5557"
    assert connect_address("tcp://[::]:5557", "[::1]") == "tcp://[::1]:5557"
    assert connect_address("tcp://10.0.0.9:5557", "h") == "tcp://10.0.0.9:5557"
    assert connect_address(None, "h") == ""
    assert offset_port("tcp://h:5557", 2) == "tcp://h:5559"
    assert offset_port("", 2) == ""


@given(st.data())
def test_any_mix_of_live_loss_and_replay_applies_each_batch_once_in_order(data: st.DataObject) -> None:
    """A publisher of 30 batches; live ones get lost at random, replays reach back to a bounded buffer."""
    lost = data.draw(st.sets(st.integers(0, 29)))
    buffer = data.draw(st.integers(1, 30))
    sequence = Sequence()
    applied: list[int] = []
    skipped: set[int] = set()

    def take(seq: int) -> None:
        sequence.done(seq)
        applied.append(seq)

    for seq in sorted(set(range(30)) - lost):
        verdict = sequence.live(seq)
        if verdict is Verdict.HOLE:
            for old in range(max(sequence.applied, 0, seq + 1 - buffer), seq + 1):
                replayed = sequence.replayed(old)
                if replayed is Verdict.HOLE:
                    skipped.update(range(sequence.applied + 1, old))
                    sequence.skip_to(old)
                if replayed is not Verdict.DUPLICATE:
                    take(old)
            verdict = sequence.live(seq)
            assert verdict is Verdict.DUPLICATE
        if verdict is Verdict.APPLY:
            take(seq)
    assert applied == sorted(set(applied))
    assert set(applied) | skipped >= set(range(30)) - lost
    assert not skipped & set(applied)


def test_a_number_that_does_not_grow_is_a_restart() -> None:
    sequence = Sequence()
    assert sequence.live(0) is Verdict.APPLY
    sequence.done(0)
    assert sequence.live(0) is Verdict.RESTART


def test_an_identity_stays_changes_and_alternates() -> None:
    identity = Identity()
    assert [identity.observe(start, 0, 0) for start in (1.0, 1.0, 2.0, 2.0)] == [
        Seen.NEW,
        Seen.SAME,
        Seen.NEW,
        Seen.SAME,
    ]
    assert identity.observe(1.0, 0, 0) is Seen.ALTERNATING
    assert identity.observe(2.0, 0, 0) is Seen.ALTERNATING
    looks = [identity.observe(2.0, 0, 0) for _ in range(61)]
    assert looks.count(Seen.NEW) == 1
    assert looks[-1] is Seen.SAME


def test_a_process_that_does_not_tell_its_start_is_followed_by_its_counters() -> None:
    identity = Identity()
    assert identity.observe(None, 10, 10) is Seen.NEW
    assert identity.anonymous
    assert identity.observe(None, 11, 10) is Seen.SAME
    for _ in range(10):
        identity.observe(None, 11, 11)
    assert identity.observe(None, 0, 0) is Seen.NEW
    assert not identity.alternating


def test_anonymous_processes_that_take_turns_are_seen_too() -> None:
    identity = Identity()
    looks = [identity.observe(None, tokens, 0) for tokens in (10, 500, 10, 500, 11, 501, 11, 501, 11)]
    assert looks[-1] is Seen.ALTERNATING


def test_state_round_trip(tmp_path: Path) -> None:
    shadow = Shadow("tiny")
    rng = random.Random(3)
    for _ in range(50):
        path = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 5)))
        shadow.apply([store(path, medium=rng.choice(["GPU", "CPU"]), ownership=rng.choice([None, "disk"]))])
    file = StateFile(tmp_path / "deep" / "er", "10.0.0.7:8000/1")
    assert file.load() is None
    for clean in (True, False):
        file.save(capture(shadow, clean=clean, process="p", incarnation="i", applied=49, applied_digest=7))
        state = file.load()
        assert state is not None
        assert (state.process, state.incarnation, state.applied, state.applied_digest) == ("p", "i", 49, 7)
        again = revive(state, capacity_blocks=0)
        again.check()
        assert again.latest_seq == shadow.latest_seq + (0 if clean else SEQ_JUMP)
        assert again.oldest_seq == again.latest_seq + 1
        assert (again.key_count, again.digest) == (shadow.key_count, shadow.digest)
        assert {tier: set(again.keys(tier)) for tier in Tier} == {tier: set(shadow.keys(tier)) for tier in Tier}
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_ENGINES", "http://a:1 http://b:2")
    monkeypatch.setenv("POINTSMAN_AGENT_ROUTERS", "r:50051")
    settings = AgentSettings()
    assert settings.engines == ["http://a:1", "http://b:2"]
    assert settings.routers == ["r:50051"]


@pytest.mark.parametrize(
    ("engines", "routers", "field"),
    [
        ([], ["r:1"], "engines"),
        (["a:1"], ["r:1"], "engines"),
        (["http://a:1", "http://a:1/"], ["r:1"], "engines"),
        (["http://a:1"], [], "routers"),
        (["http://a:1"], ["r"], "routers"),
    ],
)
def test_settings_that_cannot_work_name_the_field(engines: list[str], routers: list[str], field: str) -> None:
    with pytest.raises(ValidationError) as error:
        AgentSettings(engines=engines, routers=routers)
    assert error.value.errors()[0]["loc"] == (field,)
