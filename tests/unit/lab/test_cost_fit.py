"""Fits of costs to measured times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_lab.engine.cost_fit import DecodeTime, Fit, FitError, PrefillTime, chunk_size, fit, fit_line
from pointsman_lab.engine.cost_profile import STEP_COSTS, Profile, ProfileError, ProfileFile, read_profile
from pointsman_lab.engine.interface import EngineConfig, EngineRequest
from pointsman_lab.engine.model import EngineModel

COST = st.floats(1e-6, 1e-2)


def prefill(profile: Profile, new: int, cached: int, chunk: int) -> PrefillTime:
    """The time of a prefill in the engine model."""
    config = EngineConfig(max_num_batched_tokens=chunk, max_model_len=16_384, kv_blocks=4_096)
    model = EngineModel(config, profile)
    prompt = list(range(cached + new))
    if cached:
        model.submit(EngineRequest("before", prompt[: cached + 1], 1), 0.0)
        while model.has_work:
            model.step(0.0)
            model.finish_step()
    model.submit(EngineRequest("it", prompt, 1), 0.0)
    times = []
    while model.has_work:
        times.append(model.step(0.0).duration_s)
        model.finish_step()
    seen = PrefillTime(new, cached, chunk, sum(times))
    assert seen.steps == len(times)
    return seen


def decode(profile: Profile, batch: int, context: int) -> DecodeTime:
    kv_tokens = batch * context
    return DecodeTime(
        batch,
        kv_tokens,
        profile.step_s + batch * profile.decode_sequence_s + profile.decode_kv_token_s * kv_tokens,
    )


@settings(max_examples=30)
@given(
    st.builds(
        Profile,
        COST,
        COST.map(lambda cost: cost / 10),
        COST.map(lambda cost: cost / 1e5),
        COST,
        COST.map(lambda cost: cost / 1e3),
        prefill_kv_token_s=COST.map(lambda cost: cost / 1e3),
        wake_s=COST,
    )
)
def test_the_costs_behind_exact_times_are_found(profile: Profile) -> None:
    prefills = [
        prefill(profile, new, cached, 1_024)
        for new, cached in ((64, 0), (500, 0), (3_000, 0), (8_000, 0), (400, 6_400))
    ]
    decodes = [decode(profile, batch, context) for batch, context in ((1, 64), (8, 64), (4, 2_000), (16, 1_000))]
    found = fit([*prefills, *decodes], replace(Profile(), transfer_s=7.0))
    assert found.residual < 1e-4
    for name in STEP_COSTS:
        # A cost that hardly contributes to any of the times cannot be fitted.
        assert getattr(found.profile, name) == pytest.approx(getattr(profile, name), rel=0.02, abs=1e-9), name
    assert found.profile.transfer_s == 7.0


def test_noise_leaves_residuals_and_no_negative_cost() -> None:
    noisy = [
        PrefillTime(100, 0, 512, 0.02),
        PrefillTime(200, 0, 512, 0.03),
        PrefillTime(400, 0, 512, 0.049),
        PrefillTime(400, 400, 512, 0.045),
    ]
    decodes = [DecodeTime(1, 100.0, 0.011), DecodeTime(8, 800.0, 0.010), DecodeTime(8, 8_000.0, 0.012)]
    found = fit([*noisy, *decodes])
    assert 0 < found.residual < 0.1
    assert min(getattr(found.profile, name) for name in STEP_COSTS) == 0.0


def test_a_stall_does_not_bend_the_line() -> None:
    profile = Profile(
        step_s=0.01,
        prefill_token_s=1e-4,
        prefill_pair_s=1e-8,
        decode_sequence_s=1e-3,
        decode_kv_token_s=1e-7,
        prefill_kv_token_s=1e-6,
        wake_s=0.003,
    )
    sizes = ((64, 0), (128, 0), (500, 0), (3_000, 0), (400, 6_400), (1_000, 0), (64, 3_200))
    prefills = [prefill(profile, new, cached, 1_024) for new, cached in sizes]
    decodes = [
        decode(profile, batch, context) for batch, context in ((1, 64), (8, 64), (4, 2_000), (16, 1_000), (1, 4_000))
    ]
    stalled = replace(prefills[2], seconds=prefills[2].seconds * 3)
    found = fit([*prefills[:2], stalled, *prefills[3:], *decodes])
    for name in STEP_COSTS:
        assert getattr(found.profile, name) == pytest.approx(getattr(profile, name), rel=0.02), name


def test_what_is_before_a_chunk_is_fetched_once_for_it() -> None:
    profile = Profile(
        step_s=1.0,
        prefill_token_s=0.0,
        prefill_pair_s=0.0,
        decode_sequence_s=0.0,
        decode_kv_token_s=0.0,
        prefill_kv_token_s=0.01,
    )
    # Reading KV costs the same for a chunk of any size; a decode has its own cost.
    assert [profile.chunk_s(tokens, 300) for tokens in (2, 200, 1)] == pytest.approx([3.0, 3.0, 0.0])
    # Chunks after 112, 312 and 512 tokens.
    seen = prefill(profile, 450, 112, 200)
    assert (seen.steps, seen.before) == (3, 112 + 312 + 512)
    assert seen.seconds == pytest.approx(3 * 1.0 + 0.01 * (112 + 312 + 512))


def test_measurements_say_what_they_are() -> None:
    assert str(DecodeTime(8, 8_000.0, 0.012)) == "decode of 8 over 8000"
    assert str(PrefillTime(400, 100, 512, 0.1)) == "prefill of 400 after 100"


@pytest.mark.parametrize(
    "measured",
    [
        [],
        [PrefillTime(100, 0, 512, 0.02)] * 9,
        [
            PrefillTime(100, 0, 200, 0.02),
            PrefillTime(200, 0, 200, 0.02),
            PrefillTime(300, 0, 200, 0.02),
            PrefillTime(400, 0, 200, 0.02),
        ],
        [PrefillTime(100, 0, 512, 0.0)],
    ],
)
def test_what_cannot_be_fitted_is_said(measured: list[PrefillTime]) -> None:
    with pytest.raises(FitError):
        fit(measured)


def test_a_line() -> None:
    assert fit_line([(0, 1.0), (10, 3.0), (20, 5.0)]) == pytest.approx((1.0, 0.2))
    assert fit_line([(0, 5.0), (10, 3.0)]) == pytest.approx((4.0, 0.0))
    assert fit_line([(0, 0.0), (0, 0.0)]) == (0.0, 0.0)


def test_a_stall_does_not_bend_a_line_either() -> None:
    assert fit_line([(0, 1.0), (10, 3.0), (10, 90.0), (20, 5.0), (30, 7.0)]) == pytest.approx((1.0, 0.2), rel=0.01)


@given(st.sampled_from([64, 256, 512, 2_048, 4_096, 8_192]), st.integers(2, 6), st.sampled_from([16, 32, 64]))
def test_the_chunk_size_shows_in_what_each_step_stores(chunk: int, steps: int, block_size: int) -> None:
    tokens = chunk * steps - 7
    ends = [min(chunk * number, tokens) // block_size for number in range(steps + 1)]
    assert chunk_size([after - before for before, after in pairwise(ends)], block_size) == chunk


def test_one_step_says_nothing_of_the_chunk_size() -> None:
    assert chunk_size([12], 16) is None
    assert chunk_size([], 16) is None
    # No chunk size would lead to such stores.
    assert chunk_size([1, 9, 1], 16) is None


def test_a_profile_file_has_costs_engine_and_remarks(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    written = ProfileFile(costs=Profile(step_s=0.5), engine={"block_size": 32}, about={"url": "u"})
    path.write_bytes(written.encode())
    assert read_profile(path) == written
    for text, wrong in (
        ('{"engine": {"blocks": 3}}', "blocks"),
        ('{"engine": {"block_size": 0}}', "p.json"),
        ('{"about": 3}', "p.json"),
    ):
        path.write_text(text)
        with pytest.raises(ProfileError, match=wrong):
            read_profile(path)


def test_profiles_ship_by_name() -> None:
    assert read_profile(Path("reference")).costs == Profile()
    slow = read_profile(Path("slow")).costs
    assert slow.chunk_s(8_192, 0) == pytest.approx(2 * Profile().chunk_s(8_192, 0))
    # The name of this profile does not change when a cost is added that it does not have.
    assert slow.name != Profile().name == Profile(step_s=0.005).name == "1d87e5a1"
    with pytest.raises(ProfileError, match="nowhere"):
        read_profile(Path("nowhere"))


def test_what_carries_tokens_away_is_paid_by_each_sequence() -> None:
    costs = Profile(step_s=0.01, decode_sequence_s=0.002, decode_kv_token_s=1e-6)
    found = Fit(costs, ())
    took = [(1, 0.0), (1, 0.001), (2, 0.006)]
    streamed_decodes = [DecodeTime(batch, 1_000.0, costs.decode_step_s(batch, 1_000.0) + more) for batch, more in took]
    assert found.with_streaming_cost(streamed_decodes).decode_sequence_s == pytest.approx(0.003)
    assert found.with_streaming_cost(streamed_decodes).step_s == costs.step_s
    # If streaming costs nothing, measurements are now above and now below the fit.
    assert found.with_streaming_cost([DecodeTime(1, 0.0, 0.011)]) == found.with_streaming_cost([]) == costs
