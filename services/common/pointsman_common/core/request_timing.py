"""Timestamps of a request: fields that a gateway writes to its breakdown file and that readers of the file parse. Pure."""

from __future__ import annotations

import msgspec


class RequestTiming(msgspec.Struct, kw_only=True):
    """Timestamps of one request in their order, unix s; None for an event that did not happen or was not reported."""

    t_recv: float | None = None  # its handler began, before it read the body
    t_placed: float | None = None  # start of the first step, at the router's answer
    t_prefill_sent: float | None = None  # start of the first step before the SERVE step
    t_prefill_done: float | None = None  # end of the last step before it
    t_sent: float | None = None  # start of the SERVE step; of the last one, if several were tried
    t_first_token: float | None = None  # first byte of a stream, or the whole of another answer
    t_done: float | None = None  # end of the attempt
