"""The measures of one trial. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import percentiles


class Measures(msgspec.Struct, kw_only=True):
    """What one trial measured. Times in s; None where no answer has the measure.

    `session_s`: from a session's first request to its last answer, percentiles over sessions whose requests were all answered.
    `hit_ratio`: share of the prompts' tokens that the engines did not compute, by the engines' own counters. A router that has a
    prompt computed in slices makes engines look its tokens up several times, which is no hit. `cpu_ms`: CPU time of each of the
    router's processes per request. `beside_cpu_ms`: that of programs which only connect the router to the engines. `idle`: share
    of the machine's cores that was idle; the lower, the more the programs disturbed each other.
    """

    requests: int  # all of the draw, answered in time or not
    failed: int  # without a complete answer
    errors: dict[str, int]  # HTTP status, or the error's text up to a colon -> number of failed requests
    sessions: int  # of all requests, answered or not, whose session is known
    span_s: float  # from the first request until the counts after the last one are read
    ttft_s: dict[str, float] | None  # of complete answers; see percentiles() for the keys
    tpot_s: dict[str, float] | None  # of complete answers
    e2e_s: dict[str, float] | None  # of complete answers
    session_s: dict[str, float] | None
    output_tokens: int  # sum over complete answers
    hit_ratio: float | None
    cpu_ms: dict[str, float]
    beside_cpu_ms: float
    engines_cpu_s: float  # CPU time of all engines' processes in the trial
    rss_mb: float  # resident memory of the router's processes at the end, MB (10^6 bytes)
    idle: float

    @property
    def router_cpu_ms(self) -> float:
        """CPU time of all of the router's processes per request, ms."""
        return sum(self.cpu_ms.values())

    @property
    def engines_cpu_ms(self) -> float:
        """CPU time of all engines' processes per request, ms."""
        return 1e3 * self.engines_cpu_s / max(self.requests, 1)


def measure(records: Sequence[RequestRecord], counted: Mapping[str, Any], span_s: float) -> Measures:
    """Return the measures of a trial. `counted` is what Meter.read() returned."""
    good = [record for record in records if record.ok]
    by_session: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        by_session[record.session].append(record)
    whole = [of for of in by_session.values() if all(record.ok for record in of)]
    errors: dict[str, int] = defaultdict(int)
    for record in records:
        if not record.ok:
            errors[str(record.status) if record.status not in (0, 200) else record.error.partition(":")[0]] += 1
    prompts = sum(record.prompt_tokens or 0 for record in good)
    computed = counted["asked"] - counted["cached"]
    per_request = 1e3 / max(len(records), 1)
    return Measures(
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(errors),
        sessions=sum(bool(session) for session in by_session),
        span_s=span_s,
        ttft_s=percentiles([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot_s=percentiles([value for record in good if (value := record.tpot_s) is not None]),
        e2e_s=percentiles([record.e2e_s for record in good]),
        session_s=percentiles([_length_s(of) for of in whole]),
        output_tokens=sum(record.output_tokens or 0 for record in good),
        hit_ratio=max(1 - computed / prompts, 0.0) if prompts and counted["asked"] else None,
        cpu_ms={name: value * per_request for name, value in counted["cpu_s"].items()},
        beside_cpu_ms=counted["beside_cpu_s"] * per_request,
        engines_cpu_s=counted["engines_cpu_s"],
        rss_mb=counted["rss_mb"],
        idle=counted["idle"],
    )


def _length_s(records: Sequence[RequestRecord]) -> float:
    return max(record.t_send + record.e2e_s for record in records) - min(record.t_send for record in records)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return float(np.exp(np.mean(np.log(values))))
