"""CPU time and memory of the router's pure core: decisions and the prefix index."""

from __future__ import annotations

import multiprocessing
import random
import resource
import time
from array import array
from pathlib import Path

from bench.figures import Figure, percentile
from bench.full_cache_fleet import KEYS_PER_INSTANCE, PROMPT_TOKENS, filled, long_prompt
from pointsman_common.core.block_keys import digest_of
from pointsman_common.core.key_report_types import Delta, SnapshotBegin, SnapshotEnd
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.key_report_receiver import ReportSync
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerTiers

GOAL_DECIDE_US = 150.0
GOAL_FORESIGHT_US = 500.0
# Open requests of each instance of a busy fleet, in prefill and in decode.
OPEN_PREFILLS, OPEN_DECODES = 3, 8
GOAL_INDEX_MB = 1_000.0
GOAL_EVENTS_PER_S = 200_000.0
ROUNDS = 400


def decide() -> list[Figure]:
    """Return CPU time per decision with its reservation: 130k-token prompt, full caches, on 8, 64 and 1,000 instances."""
    keys = array("Q", long_prompt())  # the type in which requests from gateways have their keys
    figures = []
    # Fewer keys on 1,000 instances, so that the case fits a small machine. A decision reads only the prompt's keys.
    for instances, count in ((8, KEYS_PER_INSTANCE), (64, KEYS_PER_INSTANCE), (1_000, 4_500)):
        state = filled(instances, keys, count)
        times = []
        for number in range(ROUNDS):
            request = PlacementRequest(f"r{number}", "m", PROMPT_TOKENS, keys, session_id=f"s{number % 50}")
            started = time.process_time()
            state.handle(ev.PlaceRequested(request, "g"), 1.0)
            times.append((time.process_time() - started) * 1e6)
            state.handle(ev.Finished(f"r{number}", "OK"), 1.0)
        suffix = "" if instances == 64 else f"_{instances}"
        goal = GOAL_DECIDE_US if instances == 64 else None
        for name, share in (("", 0.5), ("_p99", 0.99)):
            note = f"{instances} instances, 8,125 keys; CPU, with the reservation; baseline is the goal"
            figures.append(Figure(f"decide_us{name}{suffix}", percentile(times, share), "us", goal, note))
    return figures


def foresight() -> list[Figure]:
    """Return CPU time per decision of `foresight` on 64 busy instances, light and heavy, with its reservation or hold."""
    keys = array("Q", long_prompt())
    state = filled(64, keys)
    names = [f"i{number:04d}" for number in range(64)]
    for name in names:
        others = tuple(other for other in names if other != name)
        for number in range(OPEN_DECODES + OPEN_PREFILLS):
            busy = PlacementRequest(f"{name} {number}", "m", 20_000, exclude=others)
            state.handle(ev.PlaceRequested(busy, "g"), 0.0)
            if number < OPEN_DECODES:
                state.handle(ev.FirstToken(busy.request_id), 0.0)
    state.handle(ev.PolicySet(make_policy("foresight")), 0.0)
    figures = []
    for case, asked in (("light", keys), ("heavy", array("Q", long_prompt(1)))):
        times = []
        for number in range(ROUNDS):
            request = PlacementRequest(f"r{number}", "m", PROMPT_TOKENS, asked, sliceable_tokens=PROMPT_TOKENS)
            started = time.process_time()
            state.handle(ev.PlaceRequested(request, "g"), 1.0)
            times.append((time.process_time() - started) * 1e6)
            state.handle(ev.Finished(f"r{number}", "CANCELLED"), 1.0)
        note = f"64 instances, each with {OPEN_PREFILLS} prefills and {OPEN_DECODES} decodes, 8,125 keys; baseline is the goal"
        for name, share in (("", 0.5), ("_p99", 0.99)):
            figures.append(
                Figure(f"decide_foresight_{case}_us{name}", percentile(times, share), "us", GOAL_FORESIGHT_US, note)
            )
    return figures


def index() -> list[Figure]:
    """Return the memory of 4 M keys over 64 instances, and the rate at which key events are applied."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        megabytes = pool.apply(_index_mb)
    return [
        Figure("index_mb", megabytes, "MB", GOAL_INDEX_MB, "4,000,000 keys over 64 instances; baseline is the goal"),
        Figure(
            "index_events_per_s",
            _events_per_s(),
            "keys/s",
            GOAL_EVENTS_PER_S,
            "deltas of 64 keys in and out; baseline is the goal",
        ),
    ]


def _index_mb() -> float:
    rng = random.Random(0)
    before = _rss_mb()
    kept = PrefixIndex()
    for number in range(64):
        kept.add(f"i{number}", [rng.getrandbits(64) for _ in range(KEYS_PER_INSTANCE)])
    assert len(kept) == 64 * KEYS_PER_INSTANCE
    return _rss_mb() - before


def _rss_mb() -> float:
    # Not ru_maxrss: a child process inherits the high-water mark of its parent.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _events_per_s() -> float:
    sync = ReportSync("a", PrefixIndex(), LowerTiers())
    sync.handle(SnapshotBegin(0))
    sync.handle(SnapshotEnd(0, 0, digest_of(1, ())))
    rng = random.Random(0)
    batches = [[rng.getrandbits(64) for _ in range(64)] for _ in range(2_000)]
    started = time.process_time()
    for seq, batch in enumerate(batches):
        old = batches[seq - 1_000] if seq >= 1_000 else []
        assert not sync.handle(Delta(seq + 1, 1, batch, old))
    spent = time.process_time() - started
    return (len(batches) + len(batches) - 1_000) * 64 / spent
