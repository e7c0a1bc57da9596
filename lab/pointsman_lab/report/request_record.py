"""One request of a run, replayed or simulated. Pure."""

from __future__ import annotations

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request of a replay or simulation. Times in s: t_send from the run's start, ttft_s and e2e_s from t_send."""

    session: str  # as the trace names it
    turn: int  # as the trace has it, from 1
    instance: str = ""  # id of the one that it was last sent to; empty: none, or a replay without a gateway
    decision: str = ""  # id; in a simulation that of the first decision; empty: none
    # From the decision, empty if the run did not read it: mode, route class, reason, and the rule that chose the answering
    # instance (session_affinity, least_load_x_work, offload, migrate, ...).
    mode: str = ""
    route_class: str = ""  # LIGHT, MEDIUM or HEAVY
    reason: str = ""  # one word, as the policy gives it
    rule: str = ""  # in the same form
    # Cached tokens that the decision predicted. `cached_tokens` are those that the engine found when it began, of which
    # `host_tokens` were in host memory and `storage_tokens` in storage; only simulations know these two.
    predicted_cached_tokens: int | None = None
    # HTTP status, 0 without a response; `error` is empty for a complete answer.
    status: int = 0
    error: str = ""  # for people: the server's message, or what went wrong at the client
    t_send: float = 0.0  # when it was first sent; retries do not change it
    # Time that the request waited until it was admitted, s.
    parked_s: float = 0.0
    ttft_s: float | None = None  # None: no token arrived
    e2e_s: float = 0.0  # to the end, successful or not
    prompt_tokens: int | None = None  # as the engine counted them; None: not reported
    cached_tokens: int | None = None  # without what the request's own earlier steps computed; None: not reported
    host_tokens: int = 0  # 0 in replays
    storage_tokens: int = 0  # 0 in replays
    output_tokens: int | None = None  # as the engine counted them; None: not reported

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.status == 200 and not self.error

    @property
    def lost_tokens(self) -> int:
        """Tokens that were predicted as cached at the placement and not cached when the engine began; 0 if either is unknown."""
        if self.predicted_cached_tokens is None or self.cached_tokens is None:
            return 0
        return max(self.predicted_cached_tokens - self.cached_tokens, 0)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)
