"""Failures that users of other routers reported, as tests of this one; docs/failures_of_others.md lists them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from pointsman_common.core.block_keys import KEY_TOKENS, prompt_keys
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.synthetic_trace import AGENTIC, SMALL, generate, shape_with
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, place, request, state

ROOMY = EngineConfig(max_model_len=200_000, kv_blocks=20_000)


def run(requests: list[TraceRequest], policy: str = "unified", **asked: Any) -> list[RequestRecord]:
    return list(Simulator(requests, SimulationConfig(instances=4, engine=ROOMY, policy=policy, **asked)).run())


def phantoms(records: Sequence[RequestRecord]) -> int:
    """Return the number of requests of which more was predicted as cached than the engine had."""
    return sum(record.lost_tokens > 0 for record in records)


def blind(records: Sequence[RequestRecord]) -> int:
    """Return the number of requests of which the engine had more cached than was predicted."""
    return sum((record.cached_tokens or 0) > (record.predicted_cached_tokens or 0) for record in records)


def test_an_index_that_loses_reports_predicts_what_is_there() -> None:
    """llm-d-router issue 1737: after a gap in an engine's events the index stayed wrong."""
    requests = generate(60, 60.0, 1, SMALL)
    whole, gaps = (run(requests, report_loss=loss) for loss in (0.0, 0.05))
    assert len(whole) == len(gaps) > 200
    assert sum(record.cached_tokens or 0 for record in gaps) > 500_000
    assert (phantoms(whole), blind(whole), phantoms(gaps)) == (0, 0, 0)
    # Decisions between a gap and the end of its resync.
    assert blind(gaps) <= len(gaps) / 100


def test_a_routers_death_leaves_no_decision_blind_and_no_phantom() -> None:
    """sglang pull request 39822: after a restart 337 of 1,958 decisions were blind, and 484 placements phantoms."""
    requests = generate(60, 60.0, 2, SMALL)
    records = run(requests, routers=2, owner_dies_at_s=30.0, takeover_s=1.5, owner_back_after_s=10.0)
    assert all(record.ok for record in records)
    assert sum(record.t_send > 30.0 for record in records) > 100
    assert (phantoms(records), blind(records)) == (0, 0)


def test_an_engines_restart_leaves_no_phantom() -> None:
    """The same pull request: blocks of an engine's earlier life were still credited."""
    rng = random.Random(3)
    router = state()
    prompts = [[rng.randrange(32_000) for _ in range(rng.randrange(2, 40) * KEY_TOKENS)] for _ in range(50)]
    cached: dict[str, set[int]] = {}
    lives = dict.fromkeys("abcd", 0)

    def restart(name: str, now: float) -> None:
        lives[name] += 1
        cached[name] = set(rng.sample(range(len(prompts)), 10 if lives[name] == 1 else rng.randrange(3)))
        keys = {key: None for number in cached[name] for key in prompt_keys(prompts[number], "m")}
        stream = 10 * "abcd".index(name) + lives[name]
        join(router, name, stream, list(keys), now, incarnation=str(lives[name]))

    for name in lives:
        restart(name, 0.0)
    for number in range(1_958):
        now = 1.0 + number / 50
        if not rng.randrange(100):
            restart(rng.choice("abcd"), now)
        asked = rng.randrange(len(prompts))
        answer = place(router, request(f"r{number}", prompt=prompts[asked]), now)
        assert isinstance(answer, ev.Placed)
        credited = answer.decision.cached_tokens
        assert not credited or asked in cached[answer.step.instance_id]
        router.handle(ev.Finished(f"r{number}", "OK"), now)
        # The engine has computed the prompt, and the router credits that until an event should have reported it.
        cached[answer.step.instance_id].add(asked)
        if not number % 100:
            router.check_invariants()


def test_counts_stay_true_however_long_streams_are() -> None:
    """llm-d-router issue 2295: counts of streams older than five minutes were dropped, and 24 % of the requests then waited for
    more than 300 s."""
    rng = random.Random(4)
    router = state()
    for number, name in enumerate("abcd"):
        join(router, name, number)
    ends: dict[str, tuple[float, str]] = {}
    for second in range(2 * 3_600):
        now = float(second)
        for name, (end, _) in list(ends.items()):
            if end <= now:
                router.handle(ev.Finished(name, "OK"), now)
                del ends[name]
        if not second % 20:
            answer = place(router, request(f"r{second}", tokens=rng.randrange(1_000, 100_000)), now)
            assert isinstance(answer, ev.Placed)
            ends[f"r{second}"] = now + math.exp(rng.uniform(0.0, math.log(7_200.0))), answer.step.instance_id
        if not second % 30:
            router.handle(ev.FirstToken(f"r{second - second % 20}"), now)
        router.handle(ev.Tick(), now)
        if not second % 300:
            _check_counts(router, [at for _, at in ends.values()])
    assert max(ends[name][0] for name in ends) > 3_600


def _check_counts(router: RouterState, instances: Sequence[str]) -> None:
    for name in "abcd":
        assert router.reservations.counters(name).num_requests == instances.count(name)


def test_short_requests_pass_long_prefills() -> None:
    """vllm issue 57413: a long prefill blocks every request behind it."""
    short = generate(60, 60.0, 5, SMALL)
    long_shape = shape_with(AGENTIC, {"context_tokens": 90_000, "context_spread": 0.2, "mean_turns": 1.0})
    long = generate(6, 60.0, 6, long_shape)
    alone = _p99_of_short_s(run(short, "foresight"))
    beside, by_unified = (_p99_of_short_s(run([*short, *long], policy)) for policy in ("foresight", "unified"))
    assert beside < 1.25 * alone
    assert by_unified > 5 * alone, "otherwise the long prompts are in nobody's way"


def _p99_of_short_s(records: Sequence[RequestRecord]) -> float:
    waits = sorted(record.ttft_s or math.inf for record in records if (record.prompt_tokens or 0) < 20_000)
    return waits[int(0.99 * len(waits))]
