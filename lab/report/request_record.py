"""One request of a run, replayed or simulated. Pure."""

from __future__ import annotations

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """One replayed request. Times in s: t_send from the replay's start, ttft_s and e2e_s from the sending."""

    session: str
    turn: int
    instance: str = ""
    decision: str = ""
    # Of the decision, where the run could ask: its mode, the request's class, the reason in a word, and the rule by which the
    # answering instance was found (session_affinity, least_load_x_work, offload, migrate, ...).
    mode: str = ""
    route_class: str = ""
    reason: str = ""
    rule: str = ""
    # Cached tokens as that decision predicted them; `cached_tokens` are those that the engine found when it began.
    predicted_cached_tokens: int | None = None
    # The HTTP status, 0 when there was none; `error` is empty for a complete answer.
    status: int = 0
    error: str = ""
    t_send: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and not self.error

    @property
    def lost_tokens(self) -> int:
        """Tokens that were cached when it was placed and no longer when it began, as far as both are known."""
        if self.predicted_cached_tokens is None or self.cached_tokens is None:
            return 0
        return max(self.predicted_cached_tokens - self.cached_tokens, 0)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)
