"""When a request came to what: the moments that a gateway's log of breakdowns tells, and readers of it look for. Pure."""

from __future__ import annotations

import msgspec


class RequestTiming(msgspec.Struct, kw_only=True):
    """A request's moments in their order, in unix s; None where it did not come to that, or nobody told. `prefill_*` are of steps
    before the SERVE, the first's beginning and the last's end."""

    t_recv: float | None = None
    t_placed: float | None = None
    t_prefill_sent: float | None = None
    t_prefill_done: float | None = None
    t_sent: float | None = None
    t_first_token: float | None = None
    t_done: float | None = None
