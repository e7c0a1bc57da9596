"""What the lab is told of the machine of a board: what an engine's steps cost there, and what each router's way to it takes.

Both are measured with one engine that serves nothing else, one request at a time, and never by what the board measures.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rivals.contenders import Contender
from bench.rivals.environments import NotRunnable
from bench.rivals.running import running_router
from pointsman_lab.engine.cost_fit import fit
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.live.profile_command import ProfileSettings, measure
from pointsman_lab.live.replay_command import ReplaySettings
from pointsman_lab.live.request_overhead import measure_overhead
from pointsman_lab.workload.tokenizer import ChatTokenizer
from studies.scoreboard.fleet import EMULATED, emulated_fleet

# How long the engine is measured, s.
PROFILE_S = 60.0
# Lengths of the prompts that are sent through each router, tokens, and how often each is.
LENGTHS, REPEATS = (1_000, 12_000, 36_000), 3
PAUSE_S = 0.2


@dataclass(frozen=True)
class Way:
    """What a request takes outside its engine's steps, the engine's own front end included."""

    request_s: float  # until its first token, s
    prompt_token_s: float  # the same, s per token of the prompt
    streamed_token_s: float  # what each token that is streamed adds to the engine's step, s


@dataclass(frozen=True)
class Costs:
    """The costs of a machine: of a step of an engine of this `speedup` while nobody reads its tokens, and of each router's way,
    by its name."""

    speedup: float
    profile: Profile
    ways: Mapping[str, Way]


def measure_costs(routers: Sequence[Contender], speedup: float, say: Callable[[str], object]) -> Costs:
    """Measure an emulated engine, then each router that can run in front of it: two minutes. Raises ProcessFailure, EngineError
    and FitError."""
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name, emulated_fleet(Path(name), 1, speedup) as fleet:
        url, chunk = fleet.engines[0].url, EMULATED["max_num_batched_tokens"]
        measured = asyncio.run(
            measure(ProfileSettings(url=url, seconds=PROFILE_S, repeats=REPEATS, pause_s=PAUSE_S), chunk)
        )
        found = fit([*measured.prefills, *measured.decodes])
        say(f"costs of the engine: residual {found.residual:.1%}, a step {found.profile.step_s * 1e3:.2f} ms")
        ways = {}
        for router in routers:
            folder = Path(name, router.name.replace(" ", "-"))
            folder.mkdir()
            try:
                router.check()
                with running_router(router, fleet, folder) as running:
                    asked = measure_overhead(
                        ReplaySettings(url=running.url), [url], ChatTokenizer(), LENGTHS, REPEATS, PAUSE_S
                    )
                    over = asyncio.run(asked)
            except NotRunnable as error:
                say(f"costs of {router.name}: {error}")
                continue
            streamed_s = found.with_streaming_cost(over.decodes).decode_sequence_s - found.profile.decode_sequence_s
            ways[router.name] = way = Way(over.request_s, over.prompt_token_s, streamed_s)
            say(
                f"costs of {router.name}: {way.request_s * 1e3:.1f} ms a request, {way.prompt_token_s * 1e6:.2f} us a token of "
                f"the prompt, {way.streamed_token_s * 1e3:.3f} ms a streamed token"
            )
    return Costs(speedup, found.profile, ways)
