"""The meaning of each reason and route class of decisions, in one clause, for `pointsman explain`, the console and docs. Pure."""

from __future__ import annotations

from pointsman_router.core.placement_types import HEAVY_NEW_TOKENS, LIGHT_CACHE_RATIO, LIGHT_NEW_TOKENS

# Meaning by code. Decisions, filters and metrics use the codes. A code means the same in all policies.
REASONS = {
    # The session or the load
    "session_affinity": "kept on its session's instance",
    "least_load_x_work": "lowest load x work, that is open requests x tokens to compute",
    "ceiling_changed_choice": "lowest load x work of the instances that are not far busier than the others",
    "best_cache_hit": "the instance that has most of the prompt cached",
    "least_requests": "fewest open requests",
    "least_cost": "fewest estimated seconds of work",
    "least_decode": "fewest tokens in decode, since the request is HEAVY",
    "cache_and_load": "fewest new tokens, plus a share of the load",
    "lmetric": "lowest load x work; an idle instance counts as 0",
    "lmetric1": "lowest load x work, this request counted in",
    "lpwl": "fewest tokens to compute",
    "linear": "lowest load, less what is cached",
    "round_robin": "next instance in turn",
    "random": "chosen at random",
    # Whether another instance prefills for the one that answers
    "heavy": "HEAVY, so another instance prefills",
    "prefill_idle_decode_busy": "another instance has time to prefill, and decodes run where the answer comes from",
    "decode_idle": "no offload, since no decode runs there that a prefill would slow down",
    "transfer_dominates": "no offload, since the KV transfer would take longer than it saves",
    "prefill_overloaded": "no offload, since the instance that would prefill has too much to do",
    "below_threshold": "too few new tokens to split it over two instances",
    "no_other_instance": "no other instance can prefill for it",
    "no_kv_transfer": "the two engines cannot transfer KV, so one instance does all",
    "remote_prefill": "many tokens are not cached, so another instance prefills",
    "pd_threshold": "more uncached tokens than the threshold, so another instance prefills",
    "migrate": "prefilled on its session's instance, answered by a lighter one",
    "host_idle": "no move, since few tokens are in decode where the prompt is computed",
    "no_lighter_instance": "no move, since no instance that can take its KV is much lighter",
    "offload": "prefill and answer on two instances",
    # When, and how much of it
    "at_once": "lowest predicted time to first token; placed at once",
    "held": "waits for the instance with the lowest predicted time to first token",
    "slice": "lowest predicted time to first token; a slice of the prompt goes first",
    "fetch": "lowest predicted time to first token; another instance sends the cached prefix first",
    "awaits_kv": "waits for its prefix, which another request already fetches there",
    "last_part": "lowest predicted time to first token; the whole rest of the prompt goes",
    "next_step_came_too_late": "one instance does all that was left, since the next step came too late",
    "colocated_after_failure": "one instance does it all, since a step of the plan failed",
    "recovered": "placed by an earlier router, from which this one took over",
    # Which policy `auto` takes for a pool
    "times_predictable": "times can be predicted, by KV events and a learned prefill curve",
    "few_exact_prefixes": "fewer than half of the instances report KV events that can be used",
    "curve_not_learned": "the prefill curve of most instances is not learned yet",
    "few_instances": "the pool has so few instances that the longest waits vary much",
    "prefills_short": "the mean prefill is so short that prefills hardly wait for each other",
    "prefills_long": "the mean prefill is so long that slices of prompts would slow down all answers",
    # Other routers' scores
    "kv_cost": "lowest cost in KV blocks, to prefill and in decode",
    "kv_softmax": "drawn at random, low costs in KV blocks more often",
    "imbalanced": "fewest open requests, since the instances differ much",
    "prefix_match": "the longest cached prefix",
    "weighted_score": "best sum of short queue, free KV and cached share",
    "exploit": "the longest cached prefix, since it saves more than it costs",
    "explore": "least work, new tokens and evictions, since no cached prefix saves enough",
}

# Meaning by route class (core/placement_types.py): how much of the prompt the instance that prefills must compute.
ROUTE_CLASSES = {
    "LIGHT": f"under {LIGHT_NEW_TOKENS:,} new tokens, or over {LIGHT_CACHE_RATIO:.0%} of the prompt cached",
    "MEDIUM": f"{LIGHT_NEW_TOKENS:,} new tokens or more, and at most {LIGHT_CACHE_RATIO:.0%} of the prompt cached",
    "HEAVY": f"{HEAVY_NEW_TOKENS:,} new tokens or more",
}


def explained(reason: str) -> str:
    """Return a reason's code and meaning, as in "session_affinity: kept on its session's instance"; only the code if it is
    unknown."""
    return f"{reason}: {REASONS[reason]}" if reason in REASONS else reason
