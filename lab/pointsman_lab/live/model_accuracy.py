"""Comparison of a live run with its simulation, which shows how accurate the model is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_lab.engine.block_cache import extend_hashes, root_hash
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.chat_maker import ChatMaker
from pointsman_lab.workload.tokenizer import ChatTokenizer
from pointsman_lab.workload.traces import TraceRequest, id_span

# Largest error that is acceptable, relative to live.
GOAL = 0.15
# The compared times: label, field of RequestRecord, percentile.
TIMES = (("TTFT p50", "ttft_s", 50), ("TTFT p90", "ttft_s", 90), ("E2E p50", "e2e_s", 50), ("E2E p90", "e2e_s", 90))


class LiveComparison(msgspec.Struct, frozen=True):
    """One metric of one load in both runs, in s or tokens."""

    metric: str
    live: float
    simulated: float

    @property
    def error(self) -> float | None:
        """Error of the simulation relative to live; None if live is 0 and the simulation is not."""
        if not self.live:
            return None if self.simulated else 0.0
        return self.simulated / self.live - 1


class _StoredComparison(msgspec.Struct):
    live: float
    simulated: float


def with_unique_ids(requests: Sequence[TraceRequest], number: int) -> list[TraceRequest]:
    """Return the trace with session and block ids that no other `number` has, so that no earlier run has its prompts cached."""
    first = number * id_span(requests)
    return [
        msgspec.structs.replace(
            request,
            session_id=f"{number}-{request.session}",
            hash_ids=tuple(first + block for block in request.hash_ids),
        )
        for request in requests
    ]


def as_sent(requests: Sequence[TraceRequest], chats: ChatMaker, tokenizer: ChatTokenizer) -> list[TraceRequest]:
    """Return the trace as a replay of `requests` sends it: lengths and block ids of its actual tokens, with the chat template."""
    root = root_hash(0)
    made = []
    for request in requests:
        ids = tokenizer.encode(tokenizer.render(chats.messages(request)))
        hashes: list[int] = []
        extend_hashes(hashes, root, ids, KEY_TOKENS)
        made.append(
            msgspec.structs.replace(
                request,
                input_length=len(ids),
                output_length=chats.tokens(request.output_length),
                hash_ids=tuple(hashes),
                block_size=KEY_TOKENS,
            )
        )
    return made


def smallest_engine(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the limits that both engines meet, with the larger blocks. Simulated instances are all alike."""
    block_size = max(one["block_size"], other["block_size"])
    tokens = min(engine["kv_blocks"] * engine["block_size"] for engine in (one, other))
    least = {name: min(one[name], other[name]) for name in one.keys() & other.keys()}
    return least | {"block_size": block_size, "kv_blocks": tokens // block_size}


def compare_runs(
    live: Sequence[RequestRecord], simulated: Sequence[RequestRecord], block_size: int
) -> list[LiveComparison]:
    """Compare TIMES (s) and cached tokens of two runs of one trace. Simulated hits are rounded down to the live engines'
    blocks."""
    found = []
    for metric, name, share in TIMES:
        values = [
            [time for record in run if record.ok and (time := getattr(record, name)) is not None]
            for run in (live, simulated)
        ]
        found.append(
            LiveComparison(metric, *(float(np.percentile(figures, share)) if figures else 0.0 for figures in values))
        )
    cached = [sum(record.cached_tokens or 0 for record in live if record.ok)]
    cached.append(sum((record.cached_tokens or 0) // block_size * block_size for record in simulated if record.ok))
    found.append(LiveComparison("cached tokens", *map(float, cached)))
    return found


def table(loads: Sequence[tuple[str, Sequence[LiveComparison]]]) -> str:
    """Return a Markdown table with a row for each metric of each load."""
    lines = ["| load | figure | live | simulated | error |", "|---|---|---|---|---|"]
    for load, comparisons in loads:
        for comparison in comparisons:
            values = [
                f"{value:,.0f}" if comparison.metric == "cached tokens" else f"{value * 1e3:,.0f} ms"
                for value in (comparison.live, comparison.simulated)
            ]
            error = "-" if comparison.error is None else f"{comparison.error:+.1%}"
            lines.append(f"| {load} | {comparison.metric} | {' | '.join(values)} | {error} |")
    return "\n".join(lines) + "\n"


def largest_error(loads: Sequence[tuple[str, Sequence[LiveComparison]]]) -> float:
    """Return the largest absolute error; infinite if an error is None, 0 without comparisons."""
    errors = [comparison.error for _, comparisons in loads for comparison in comparisons]
    return max((float("inf") if error is None else abs(error) for error in errors), default=0.0)


def from_json(stored: dict[str, Any]) -> list[tuple[str, list[LiveComparison]]]:
    """Return the loads from which to_json() made `stored`. Raises msgspec.ValidationError for anything else."""
    kept = msgspec.convert(stored, dict[str, dict[str, _StoredComparison]])
    return [
        (load, [LiveComparison(metric, figures.live, figures.simulated) for metric, figures in found.items()])
        for load, found in kept.items()
    ]


def to_json(loads: Sequence[tuple[str, Sequence[LiveComparison]]]) -> dict[str, Any]:
    """Return the loads as JSON-ready objects: load -> metric -> live, simulated, error."""
    return {
        load: {
            comparison.metric: {"live": comparison.live, "simulated": comparison.simulated, "error": comparison.error}
            for comparison in comparisons
        }
        for load, comparisons in loads
    }
