"""What others claim about policies, and what the trials say to it. Pure.

A claim is told with the figures that bear on it and with why it may be so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from lab.findings_figures import BASE, TPOT, TTFT, Cell, difference_of, mean_of, plain, ratio_of, told, values_of

PEERS = ("dynamo_kv", "sglang_cache_aware", "llmd_default", "aibrix_prefix", "preble")

Say = Callable[[Mapping[str, Cell]], list[str]]


def _by_load(first: Mapping[str, Cell], policy: str, base: str = BASE, metric: str = TTFT) -> list[str]:
    said = []
    for load, cell in first.items():
        difference, ratio = difference_of(cell, policy, metric, base), ratio_of(cell, policy, metric, base)
        if difference is not None and ratio is not None:
            said.append(f"{load}: {ratio - 1:+.0%}{told(difference)} s, {difference.verdict}")
    return said


def _spread(first: Mapping[str, Cell]) -> list[str]:
    said = []
    for load, cell in first.items():
        values = list(values_of(cell, BASE, TTFT).values())
        if len(values) > 1:
            said.append(f"{load}: ±{statistics.stdev(values) / statistics.fmean(values):.0%}")
    return said


def _worst(first: Mapping[str, Cell]) -> list[str]:
    said = []
    for load, cell in first.items():
        ratios = {name: ratio for name in plain(cell) if (ratio := ratio_of(cell, name, TTFT)) is not None}
        ranked = sorted(ratios, key=lambda name: -ratios[name])[:3]
        if ranked:
            said.append(f"{load}: " + ", ".join(f"`{name}` {ratios[name]:.1f} x" for name in ranked))
    return said


def _shares(policy: str) -> Say:
    def say(first: Mapping[str, Cell]) -> list[str]:
        found = [(load, mean_of(cell, policy, "offloads")) for load, cell in first.items()]
        return [f"{load}: {share:.1%} of all answers" for load, share in found if share is not None]

    return say


def _best_peer(first: Mapping[str, Cell]) -> list[str]:
    said = []
    for load, cell in first.items():
        peers = [name for name in PEERS if name in cell]
        if peers:
            best = min(peers, key=lambda name: ratio_of(cell, name, TTFT) or float("inf"))
            said.append(f"{load}: `{best}`{told(difference_of(cell, best, TTFT))} s")
    return said


def _against(policy: str, base: str = BASE, metric: str = TTFT) -> Say:
    return lambda first: _by_load(first, policy, base, metric)


CLAIMS: Sequence[tuple[str, Sequence[tuple[str, Say]], str]] = (
    (
        "One run proves nothing: it differs by 7 % from the next.",
        (("Standard deviation of `unified`'s TTFT p90 over the draws", _spread),),
        "Here the draws move when sessions start, which a repetition on one cluster does not; within a draw "
        "the lab repeats itself to "
        "the bit. Differences are therefore taken draw by draw.",
    ),
    (
        "`unified` with factor 1.3 and decode weight 0.01 (A + B') is better than with 2.0 and 0.",
        (("The first setting's TTFT p90 against the default's", _against("unified (of 2.0, dw 0)")),),
        "The stricter gate leaves an owner sooner. That pays where owners are really crowded; where they are "
        "not, it only costs cache.",
    ),
    (
        "Both affinity and load are needed: policies that see one of them lose.",
        (
            ("`sticky` (affinity alone)", _against("sticky")),
            ("`least_requests` (load alone)", _against("least_requests")),
            ("The three worst, as multiples of `unified`", _worst),
        ),
        "Spreading a session over the fleet computes its context again on every instance, and the copies evict "
        "each other; most of a "
        "blind policy's time is prefill that had been done already.",
    ),
    (
        "Without affinity, `lmetric` falls behind `unified`.",
        (
            ("`lmetric`", _against("lmetric")),
            ("`lmetric1`, its published form", _against("lmetric1")),
            ("`lpwl`, without the number of requests", _against("lpwl")),
        ),
        "`lmetric` multiplies by the number of requests, so an idle instance scores 0 whatever it would have "
        "to compute. The published "
        "form adds one and does not. `lpwl` needs no gate while caches are ample: exact knowledge of what is new on each "
        "instance is affinity enough. Saturated, every leaving of a cache evicts another one.",
    ),
    (
        "Elastic offload: most HEAVY requests at low load, almost none when saturated.",
        (
            ("`elastic` (cost) offloads", _shares("elastic")),
            ("`elastic` (heuristic) offloads", _shares("elastic (heuristic)")),
        ),
        "The cost decider spares only decodes: it offloads where the cache's owner decodes while another "
        "instance has nothing open. When "
        "all is idle there is nothing to spare, and when all is busy nobody to take it, so its share need not "
        "fall from the start.",
    ),
    (
        "Offload and migration pay queue, prefill, transfer and a second start; they rarely win.",
        (
            ("`adaptive_offload` (always)", _against("adaptive_offload")),
            ("`elastic`", _against("elastic")),
            ("`elastic`, TPOT p90", _against("elastic", metric=TPOT)),
            ("`migrate`", _against("migrate")),
            ("`migrate` (cache_rich)", _against("migrate (cache_rich)")),
        ),
        "An offloaded prefix is held twice, and what it evicts is computed again later. Always to offload "
        "shows that price in full; a "
        "policy that seldom does is hard to tell from `unified`.",
    ),
    (
        "Other routers' scores, given our exact knowledge, against `unified`.",
        (("The best of them by TTFT p90", _best_peer), *((f"`{name}`", _against(name)) for name in PEERS)),
        "They are compared by their scores alone: at home they also work with older and rougher knowledge. "
        "Those that weigh the tokens "
        "still to be prefilled come near `lpwl`; those that look at a cache first and at load only beyond a "
        "threshold leave queues "
        "standing behind long prompts.",
    ),
)

NOT_TRIED = """Not reproduced here: that counters only scraped once a second cost a router 20 to 48 % of its TTFT p90 (Pointsman
counts what it places itself, so none of its policies lives on scraped counters alone), and that a cold prefill multiplies
the TPOT of decodes beside it (that is the engine model's assumption, not its result)."""


def claims_text(first: Mapping[str, Cell]) -> str:
    lines = ["## What is claimed, and what the lab says"]
    for claim, asked, why in CLAIMS:
        said = [(label, say(first)) for label, say in asked]
        if any(found for _, found in said):
            lines += ["", f"**{claim}**", ""]
            lines += [f"- {label}: {'; '.join(found)}." for label, found in said if found]
            lines += ["", why]
    return "\n".join([*lines, "", NOT_TRIED])
