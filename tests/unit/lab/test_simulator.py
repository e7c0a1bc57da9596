"""The simulator: virtual time by hand, and the router's own rules at work."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from msgspec import structs

from pointsman_common.core.key_report_types import Tier
from pointsman_lab.engine.cost_profile import Profile, ProfileError, load_profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.engine.prompt_content import NamedPrompt
from pointsman_lab.experiments.latency_bounds import LatencyBound
from pointsman_lab.experiments.simulate_command import SimulateSettings, run
from pointsman_lab.report.bundle import read_records
from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import summarise
from pointsman_lab.simulation.config import SimulationConfig, SimulationError
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.block_names import PromptBlocks
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.trace_files import save_trace
from pointsman_lab.workload.traces import TraceRequest, shared_prefix
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult, Step, StepKind
from pointsman_router.core.policy.base import Policy, SettingError
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import StateSettings
from tests.support.lab_values import PLAIN, OneAtATime, Passed, ask


def simulate(requests: list[TraceRequest], **asked: Any) -> list[RequestRecord]:
    simulator = Simulator(requests, SimulationConfig(**asked))
    records = simulator.run()
    simulator.router.check_invariants()
    assert len(records) == len(requests)
    assert len(simulator.router.reservations) == 0
    return records


def test_a_sessions_times_by_hand() -> None:
    turns = [ask("a", 1, 5.0, [1], 100), ask("a", 2, 6.0, [1, 2], 130, think_s=3.0)]
    first, second = simulate(turns, instances=1, profile=PLAIN)
    # 100 new tokens, then a second one; turn 2 was due while turn 1 still ran, and finds what turn 1 filled: 96 of its tokens.
    assert (first.t_send, first.ttft_s, first.e2e_s) == pytest.approx((0.0, 2.0, 3.0))
    assert (second.t_send, second.cached_tokens) == pytest.approx((3.0, 96))
    assert second.ttft_s == pytest.approx(1.34)
    thought = simulate(turns, instances=1, profile=PLAIN, timing="think")[1]
    assert thought.t_send == pytest.approx(6.0)


def test_a_turn_goes_on_from_the_answer_before_it() -> None:
    turns = [ask("a", 1, 0.0, [1], 100, output=40), ask("a", 2, 90.0, [1, 2, 3], 200, output=20)]
    turns += [
        ask("a", 3, 180.0, [1, 2, 3], 230, output=1),
        ask("a", 4, 270.0, [1, 2, 3], 225),
        ask("a", 5, 360.0, [1, 9], 260),
    ]
    other = ask("b", 1, 450.0, [1, 2, 3], 200)
    records = simulate([*turns, other], instances=1, profile=PLAIN)
    # Turn 1 leaves 139 computed tokens (no engine computes the KV of its last one), of which 8 blocks are full; turn 2 219, of
    # which 13 are. Turn 4 is shorter than turn 3, so it cannot go on from it; turn 5 goes on from the first block only, and
    # another session can have said something else after the blocks that the trace names: it finds those.
    assert [record.cached_tokens for record in records] == [0, 128, 208, 192, 64, 192]
    assert records[1].ttft_s == pytest.approx(1.72)
    floor = LatencyBound([turns, [other]], SimulationConfig(profile=PLAIN)).run()
    assert [record.cached_tokens for record in floor] == [0, 128, 208, 192, 64, 192]
    synthetic_sessions = simulate([*turns, other], instances=1, profile=PLAIN, prompts_include_answers=False)
    assert [record.cached_tokens for record in synthetic_sessions] == [0, 64, 192, 192, 64, 192]


def test_a_session_without_a_name_is_known_by_its_prefix_as_at_the_gateway() -> None:
    turns = [ask("a", 1, 0.0, [1, 2], 128), ask("b", 1, 0.0, [3, 4], 128)]
    turns += [ask("a", 2, 60.0, [1, 2, 5], 200), ask("b", 2, 60.0, [3, 4, 6], 200)]
    simulator = Simulator(turns, SimulationConfig(instances=2, profile=PLAIN, unnamed_share=1.0))
    simulator.run()
    sessions = [entry[1] for entry in simulator.router.affinity.newest(60.0)]
    assert len(sessions) == 2
    assert all("/s-" in session for session in sessions)


def test_two_prompts_at_once_go_to_two_instances_and_a_session_comes_back() -> None:
    turns = [ask("a", 1, 0.0, [1, 2], 128), ask("b", 1, 0.0, [3, 4], 128)]
    turns += [ask("a", 2, 60.0, [1, 2, 5], 200), ask("b", 2, 60.0, [3, 4, 6], 200)]
    records = {(record.session, record.turn): record for record in simulate(turns, instances=2)}
    assert records["a", 1].instance != records["b", 1].instance
    for session in "ab":
        assert records[session, 2].instance == records[session, 1].instance
        assert records[session, 2].cached_tokens == 128


def test_a_run_is_repeatable_and_affinity_beats_round_robin() -> None:
    requests = generate(20, 30.0, seed=5)
    unified = simulate(requests, instances=4)
    assert unified == simulate(requests, instances=4)
    spread = simulate(requests, instances=4, policy="round_robin")
    assert summarise(unified)["hit_ratio"] > summarise(spread)["hit_ratio"] + 0.1
    assert summarise(unified)["failed"] == summarise(spread)["failed"] == 0


def test_what_the_router_predicts_is_what_the_engine_finds() -> None:
    # One request at a time, so that nothing is evicted or stored between decision and admission.
    requests = [ask(f"s{number}", 1, 100.0 * number, [number % 3, 7 + number % 2], 128) for number in range(12)]
    simulator = Simulator(requests, SimulationConfig(instances=3))
    records = simulator.run()
    for record in records:
        request = simulator.router.requests.get(f"{record.session}#1")
        assert request is not None
        assert (decision := request.decision) is not None
        assert (decision.decision_id, decision.cached_tokens) == (record.decision, record.cached_tokens)
    assert sum(record.cached_tokens or 0 for record in records) > 0


def test_an_over_long_prompt_fails_alone() -> None:
    engine = EngineConfig(kv_blocks=100, max_model_len=200)
    records = simulate([ask("a", 1, 0.0, [], 500), ask("a", 2, 1.0, [], 50)], engine=engine)
    assert [(record.status, record.ok) for record in records] == [(400, False), (200, True)]


def test_an_answer_ends_at_the_engines_context() -> None:
    engine, long = EngineConfig(kv_blocks=100, max_model_len=200), ask("a", 1, 0.0, [], 190, output=100)
    [record] = simulate([long], engine=engine, instances=1)
    bound = SimulationConfig(engine=engine, policy="floor", instances=1)
    [least] = LatencyBound([[long]], bound).run()
    assert (record.output_tokens, least.output_tokens) == (10, 10)
    assert least.e2e_s <= record.e2e_s


@pytest.mark.parametrize("block_size", [64, 24, 8])
def test_names_are_shared_where_ids_are(block_size: int) -> None:
    def names(session: str, ids: list[int], length: int) -> tuple[int, ...]:
        request = structs.replace(ask(session, 1, 0, ids, length), block_size=block_size)
        made = prompts.prompt_of(request)
        assert (made.length, len(made.names), len(set(made.names))) == (length, length // 16, length // 16)
        return tuple(made.names)

    prompts = PromptBlocks()
    ids = list(range(10, 10 + 192 // block_size))
    one, other = names("a", ids, 197), names("b", [*ids[:-1], 99], 192)
    assert shared_prefix(one, other) == (192 - block_size) // 16
    assert shared_prefix(one, names("c", ids, 197)) == 12
    # Beyond the trace's blocks, a prompt's blocks are its own.
    assert (
        shared_prefix(names("d", ids, 192 + min(block_size - 1, 32)), names("e", ids, 192 + min(block_size - 1, 32)))
        == 12
    )
    assert prompts.new_names()[0] not in {*one, *other}


@pytest.mark.parametrize("block_size", [64, 24, 8])
def test_names_of_answers_are_those_of_the_next_prompt(block_size: int) -> None:
    def make(turn: int, ids: list[int], length: int, output: int) -> NamedPrompt:
        request = structs.replace(ask("a", turn, 0, ids, length, output), block_size=block_size)
        made = prompts.prompt_of(request, last=False)
        whole = [*made.names, *made.answer]
        assert (len(made.names), len(whole), len({*whole})) == (
            length // 16,
            (length + output) // 16,
            (length + output) // 16,
        )
        return made

    prompts = PromptBlocks()
    ids = list(range(10, 10 + 800 // block_size))
    first = make(1, ids[: 200 // block_size], 200, 90)
    second = make(2, ids[: 400 // block_size], 400, 150)
    assert [*second.names[: 290 // 16]] == [*first.names, *first.answer]
    # If a part of an answer is left out (reasoning), which part is unknown: the next prompt shares the previous prompt only.
    third = make(3, ids[: 500 // block_size], 500, 10)
    assert third.names[: 400 // 16] == second.names
    assert third.names[400 // 16] != second.answer[0]
    fourth = make(4, ids[: 510 // block_size], 510, 10)
    assert [*fourth.names[: 510 // 16]] == [*third.names, *third.answer]
    assert shared_prefix(make(5, [*ids[:3], 7, 8], 600, 10).names, third.names) == 3 * block_size // 16


def test_names_are_forgotten_with_what_no_cache_holds() -> None:
    prompts = PromptBlocks(tokens=4 * 64)
    shared = tuple(prompts.prompt_of(ask("a", 1, 0, [1, 2], 128)).names)
    for number in range(20):
        # The first block is used all the time, the second one never again.
        other = tuple(prompts.prompt_of(ask("b", number + 1, 0, [1, 10 + number], 128)).names)
        assert other[:4] == shared[:4]
        assert len(prompts) <= 4
    last = tuple(prompts.prompt_of(ask("a", 2, 0, [1, 2], 128)).names)
    assert last[:4] == shared[:4]
    assert not {*last[4:]} & {*shared[4:]}
    assert len(prompts) == 4


def test_what_cannot_be_simulated_is_refused() -> None:
    requests = [ask("a", 1, 0.0, [], 10)]
    with pytest.raises(SettingError, match="nonsense"):
        Simulator(requests, SimulationConfig(policy="nonsense"))
    with pytest.raises(SimulationError, match="block_size"):
        Simulator(requests, SimulationConfig(engine=EngineConfig(block_size=32)))


def test_the_command_writes_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(tmp_path / "t.jsonl", generate(3, 5.0, seed=1))
    run(SimulateSettings(trace=tmp_path / "t.jsonl", out=tmp_path / "run", policy="unified:decode_weight=0.02"))
    assert all(record.ok for record in read_records(tmp_path / "run"))
    for wrong in (
        {"trace": tmp_path / "none"},
        {"policy": "nonsense"},
        {"policy_settings": "[]"},
        {"policy_settings": "{"},
        {"policy": "unified:decode_weight=-1"},
    ):
        with pytest.raises(typer.Exit) as refused:
            run(SimulateSettings(**({"trace": tmp_path / "t.jsonl", "out": tmp_path / "run"} | wrong)))
        assert refused.value.exit_code == 2
    assert "nonsense" in capsys.readouterr().err


PASSING = Profile(
    step_s=1.0,
    prefill_token_s=0.01,
    prefill_pair_s=0.0,
    decode_sequence_s=0.0,
    decode_kv_token_s=0.0,
    transfer_s=0.25,
    transfer_token_s=0.01,
    layerwise_tail_s=0.125,
)


@dataclass(frozen=True)
class Sliced(Policy):
    """Prompts of more than 64 tokens: their first 64 alone, then all, on the first instance."""

    name: ClassVar[str] = "sliced"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        first = view.eligible()[0].instance_id
        serve = Step(StepKind.SERVE, first, "whole")
        if request.input_tokens <= 64:
            return PolicyResult((serve,), "small")
        return PolicyResult((Step(StepKind.PREFILL, first, "slice", prefix_tokens=64), serve), "sliced")


def test_a_slice_waits_for_the_one_before_and_finds_its_work() -> None:
    [record] = simulate([ask("a", 1, 0.0, [1, 2], 128)], instances=2, policy=Sliced(), profile=PLAIN)
    # The slice: one step of 64 tokens. The rest: another one of 64, then the second token.
    # What the slice computed is no cache hit.
    assert (record.ttft_s, record.e2e_s) == pytest.approx((1.64 + 1.64, 4.28))
    assert (record.instance, record.mode, record.cached_tokens) == ("i0", "COLOCATED", 0)


def test_small_requests_get_in_between_slices() -> None:
    engine = EngineConfig(max_num_batched_tokens=64)
    turns = [ask("a", 1, 0.0, [1, 2, 3, 4], 256), ask("b", 1, 0.5, [9], 64, output=1)]
    records = {
        record.session: record for record in simulate(turns, instances=1, policy=Sliced(), profile=PLAIN, engine=engine)
    }
    # b comes while a's slice is computed and goes before a's remaining three chunks.
    assert records["b"].ttft_s == pytest.approx(2 * 1.64 - 0.5)
    whole = {record.session: record for record in simulate(turns, instances=1, profile=PLAIN, engine=engine)}
    # Unsliced, b shares the step after a's four chunks with a's second token, and its last token takes one more.
    assert whole["b"].ttft_s == pytest.approx(4 * 1.64 + 1.63 + 1.0 - 0.5)


def test_what_a_slice_computed_is_no_hit_of_host_memory_either() -> None:
    engine = EngineConfig(kv_blocks=20, host_blocks=100, max_num_batched_tokens=64, max_model_len=300)
    # The small prompts move the slice's blocks into host memory before the rest of a's prompt finds them there.
    small = [ask(f"b{number}", 1, 0.5, [9 + number], 64, output=1) for number in range(5)]
    turns = [ask("a", 1, 0.0, [1, 2, 3, 4], 256), *small]
    (*_, sliced) = simulate(turns, instances=1, policy=Sliced(), profile=PLAIN, engine=engine)
    assert (sliced.session, sliced.cached_tokens, sliced.host_tokens) == ("a", 0, 0)


@pytest.mark.parametrize(("layerwise", "transfer_s"), [(False, 0.25 + 1.0), (True, 0.25)])
def test_kv_passes_to_another_instance(layerwise: bool, transfer_s: float) -> None:
    [record] = simulate(
        [ask("a", 1, 0.0, [1], 100)], instances=2, policy=Passed(), profile=PASSING, layerwise=layerwise
    )
    # 100 tokens on i0 (1 + 1 s), their KV (pushed meanwhile: 1.25 s less the prefill's second), one token on i1.
    assert record.ttft_s == pytest.approx(2.0 + transfer_s + 1.0)
    assert (record.instance, record.mode, record.cached_tokens) == ("i1", "OFFLOAD", 0)


def test_only_what_the_answering_instance_lacks_is_moved() -> None:
    turns = [ask("a", 1, 0.0, [1, 2], 128), ask("a", 2, 60.0, [1, 2], 129, output=1)]
    second = simulate(turns, instances=2, policy=Passed(), profile=PASSING)[1]
    # All but a token is cached on both sides.
    assert (second.ttft_s, second.cached_tokens) == pytest.approx((1.0 + 0.26 + 1.0, 128))


def test_a_held_request_is_placed_when_something_ends() -> None:
    turns = [ask("a", 1, 0.0, [1], 64), ask("b", 1, 0.25, [2], 64, output=1), ask("c", 1, 0.25, [3], 32, output=1)]
    records = {record.session: record for record in simulate(turns, instances=1, policy=OneAtATime(), profile=PLAIN)}
    # a: 1.64 + 1 s. Then the shorter prompt of the two that wait, then the other.
    assert records["c"].ttft_s == pytest.approx(2.64 - 0.25 + 1.32)
    assert records["b"].ttft_s == pytest.approx(2.64 - 0.25 + 1.32 + 1.64)


def test_a_hold_that_expires_is_placed_all_the_same() -> None:
    turns = [ask("a", 1, 0.0, [1], 64, output=60), ask("b", 1, 0.25, [2], 64, output=1)]
    records = {record.session: record for record in simulate(turns, instances=1, policy=OneAtATime(3.0), profile=PLAIN)}
    # Held until the tick at 3.5 s; a's step under way ends at 3.64 s.
    assert records["b"].ttft_s == pytest.approx(3.64 + 1.64 - 0.25)


def full(**changes: Any) -> StateSettings:
    return StateSettings(
        limits=SaturationLimits(max_requests=1), queue=QueueSettings(size=0), retry_after_s=2.0, **changes
    )


def test_a_refused_client_comes_back_when_it_was_told_to() -> None:
    turns = [ask("a", 1, 0.0, [1], 64, output=4), ask("b", 1, 0.25, [2], 64, output=1)]
    records = {record.session: record for record in simulate(turns, instances=1, profile=PLAIN, router=full())}
    # a ends at 4.64 s; b asks at 0.25, 2.25, 4.25 and 6.25 s.
    assert (records["b"].status, records["b"].ttft_s) == pytest.approx((200, 6.0 + 1.64))
    given_up = {
        record.session: record for record in simulate(turns, instances=1, profile=PLAIN, router=full(), retries=1)
    }
    assert (given_up["b"].status, given_up["b"].e2e_s) == pytest.approx((429, 2.0))
    assert "at its limit" in given_up["b"].error


def test_asking_and_tokenising_take_their_time() -> None:
    [record] = simulate([ask("a", 1, 0.0, [1], 100)], instances=1, profile=PLAIN, tokenise_token_s=0.03)
    assert record.ttft_s == pytest.approx(3.0 + 2.0)
    # PLAIN prefills 100 tokens in 2 s. What every request pays is no draw: each pays the same.
    turns = [ask(f"s{number}", 1, 50.0 * number, [], 100, output=1) for number in range(3)]
    paid: dict[str, Any] = {"instances": 1, "profile": PLAIN, "frontend_s": 0.5, "tokenise_token_s": 0.03}
    floor = LatencyBound([[turn] for turn in turns], SimulationConfig(**paid)).run()
    for records in (simulate(turns, **paid), floor):
        assert [record.ttft_s for record in records] == pytest.approx([0.5 + 3.0 + 2.0] * 3)
    turns = [ask(f"s{number}", 1, 50.0 * number, [], 100, output=1) for number in range(200)]
    asked = {"instances": 1, "profile": PLAIN, "placement_s": 1.0}
    records = simulate(turns, **asked)
    waits = [(record.ttft_s or 0.0) - 2.0 for record in records]
    assert 0.8 < sum(waits) / len(waits) < 1.2
    assert simulate(turns, **asked) == records
    assert simulate(turns, **asked, seed=1) != records


def test_late_reports_leave_the_router_with_what_it_knows_itself() -> None:
    requests = generate(20, 30.0, seed=5)
    prompt, late = simulate(requests, instances=4), simulate(requests, instances=4, report_delay_s=3.0)
    assert prompt != late
    assert sum(record.cached_tokens or 0 for record in late) > 0.8 * sum(record.cached_tokens or 0 for record in prompt)


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_lost_reports_are_made_good_by_snapshots(delay_s: float) -> None:
    requests = generate(30, 60.0, seed=5)
    simulator = Simulator(requests, SimulationConfig(instances=2, report_loss=0.3, report_delay_s=delay_s))
    records = simulator.run()
    simulator.router.check_invariants()
    assert all(record.ok for record in records)
    assert sum(instance.sync.resyncs for instance in simulator.router.instances.records()) > 0
    assert sum(record.cached_tokens or 0 for record in records) > 0


@pytest.mark.parametrize("shared_storage", [False, True])
def test_what_is_below_an_engines_cache_is_loaded_and_reported(shared_storage: bool) -> None:
    engine = EngineConfig(kv_blocks=6_250, host_blocks=9_000, max_model_len=100_000)
    asked: dict[str, Any] = {"instances": 2, "engine": engine, "shared_storage": shared_storage}
    requests = generate(25, 300.0, seed=5)
    simulator = Simulator(requests, SimulationConfig(**asked, report_loss=0.2))
    records = [record for record in simulator.run() if record.ok]
    assert all(record.host_tokens + record.storage_tokens <= (record.cached_tokens or 0) for record in records)
    assert sum(record.host_tokens for record in records) > 0
    assert (sum(record.storage_tokens for record in records) > 0) == shared_storage
    stored = set()
    for instance in simulator._fleet.instances.values():
        # The last transfers have ended by then.
        while instance.model.next_transfer_end is not None:
            simulator._event_queue.run_next()
        keys, offloading = instance.agent.keys, instance.model.offloading
        assert offloading is not None
        assert keys.keys(Tier.HOST) == set(offloading.host.hashes())
        assert keys.key_count == sum(len(keys.keys(tier)) for tier in Tier)
        stored |= set(keys.keys(Tier.STORAGE))
        in_storage = offloading._storage or set()
        assert stored <= in_storage
    assert stored == in_storage
    # The router takes credit for them.
    assert sum(record.predicted_cached_tokens or 0 for record in records) > sum(
        (record.cached_tokens or 0) - record.host_tokens - record.storage_tokens for record in records
    )
    unknown = Simulator(requests, SimulationConfig(**asked, tiers_reported=False))
    assert sum(record.host_tokens for record in unknown.run()) > 0
    assert all(not instance.agent.keys.keys(Tier.HOST) for instance in unknown._fleet.instances.values())


@pytest.mark.parametrize("wrong", [{"report_loss": 1.0}, {"report_delay_s": -1.0}, {"shared_storage": True}])
def test_impossible_links_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SimulationError, match=next(iter(wrong))):
        Simulator([ask("a", 1, 0.0, [], 10)], SimulationConfig(**wrong))


def test_a_profile_file_sets_what_steps_cost(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"step_s": 1, "prefill_token_s": 0.5}')
    assert load_profile(path) == Profile(step_s=1.0, prefill_token_s=0.5)
    for text, wrong in (("{", "p.json"), ('{"steps": 1}', "steps"), ('{"step_s": -1}', "step_s"), ("[]", "p.json")):
        path.write_text(text)
        with pytest.raises(ProfileError, match=wrong):
            load_profile(path)
    with pytest.raises(ProfileError, match="none"):
        load_profile(tmp_path / "none.json")


def test_instances_are_sampled_once_a_second() -> None:
    samples: list[InstanceSample] = []
    requests = [ask("a", 1, 0.0, [1, 2], 128), ask("b", 1, 0.0, [3, 4], 128), ask("a", 2, 8.0, [1, 2], 130)]
    Simulator(requests, SimulationConfig(instances=1, profile=PLAIN), samples.append).run()
    assert [sample.t for sample in samples[:6]] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    # a's prompt is a step of 2.28 s, then b's and a's second token another; b ends 1 s after that.
    first, second, idle = samples[0], samples[2], samples[5]
    assert (first.num_requests, first.pending_prefill_tokens, first.running, first.keys) == (2, 256, 1, 0)
    assert (second.num_requests, second.pending_prefill_tokens, second.ongoing_decode_tokens) == (2, 128, 128)
    assert (second.running, second.keys) == (2, 8)
    assert (idle.num_requests, idle.running, idle.sessions, idle.keys) == (0, 0, 2, 16)
    assert samples[-1].prefix_hits == 128


def test_engines_without_events_are_known_by_placements_alone() -> None:
    turns = [ask("a", 1, 0.0, [1], 100), ask("a", 2, 50.0, [1, 2], 130)]
    simulator = Simulator(turns, SimulationConfig(instances=2, profile=PLAIN, policy="auto", exact_prefixes=False))
    first, second = simulator.run()
    assert second.instance == first.instance
    assert second.predicted_cached_tokens == 96
    facts = simulator.router.views.facts("simulated", 200.0)
    assert (facts.instances, facts.exact) == (2, 0)


def test_producers_answer_no_requests() -> None:
    requests = generate(8, 5.0, 1)
    config = SimulationConfig(instances=3, producers=1, policy="auto", profile=PLAIN)
    simulator = Simulator(requests, config)
    assert {record.instance for record in simulator.run()} == {"i0", "i1"}
    facts = simulator.router.views.facts("simulated", 0.0)
    assert facts.instances == 2
    with pytest.raises(SimulationError, match="producers"):
        SimulationConfig(instances=2, producers=2)
