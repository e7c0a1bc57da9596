"""Parses another router's access log: one JSON object per line. These fields are read.

| field | |
|---|---|
| `time` | time at which the line was written, which is the request's end: unix s, or an ISO 8601 text |
| `duration_s` | time from the request's arrival to its end, s (nginx: `$request_time`) |
| `id`, or `custom_id` | the X-Request-ID of the mirrored request that the line belongs to |
| `path` (or `url`), `body` | as received; `body` as text (as nginx escapes it) or as an object |
| `model`, `prompt_token_ids` | instead of a body |
| `messages`, `prompt` or `input`, and all other fields of a body | instead of a body: the line is the body |
| `session` | the client's name for its conversation |
| `upstream` | HOST:PORT that answered (nginx: `$upstream_addr`; the last of several that were tried) |
| `status` | HTTP status |
| `usage` | as in the engine's answer; or `cached_tokens`, `output_tokens` as separate fields |
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import msgspec

from pointsman_shadow.core.pending_requests import RequestOutcome

COMPLETIONS = "/v1/completions"
# Maximum time of a line: the end of the year 9999, unix s.
MAX_TIME = 253_402_300_799.0
# Maximum number of tokens of a prompt or an answer, more than any model's context. The model of an engine names each block.
MAX_TOKENS = 20_000_000
# The field of a body's prompt -> the path that it is for, where a line is a body without a path.
_PATHS = {"messages": "/v1/chat/completions", "input": "/v1/responses", "prompt": COMPLETIONS}
_ANTHROPIC = "/v1/messages"


class LineError(ValueError):
    """A line cannot be used. The message names the field."""


class LogLine(msgspec.Struct, kw_only=True):
    """One line with its fields as in the log. An empty text means that the field is missing."""

    time: float | str | None = None  # of the request's end: unix s, as number or text, or ISO 8601; None: missing
    duration_s: float | str = 0.0  # from arrival to `time`, s; "" and "-" count as 0
    id: str = ""  # X-Request-ID of the mirrored request
    path: str = ""  # as received; its query is cut off when it is used
    body: str | dict[str, Any] = ""  # JSON, as text or as an object
    url: str = ""  # the path in OpenAI's batch files
    custom_id: str = ""  # the id in OpenAI's batch files
    model: str = ""  # only used with `prompt_token_ids`
    messages: msgspec.Raw = msgspec.Raw()  # this and the next three are of a line that is a body itself; empty: missing
    prompt: msgspec.Raw = msgspec.Raw()  # of a completion
    input: msgspec.Raw = msgspec.Raw()  # of OpenAI's Responses
    system: msgspec.Raw = msgspec.Raw()  # of Anthropic's Messages
    prompt_token_ids: list[int] | None = None  # in place of path and body; None: missing
    session: str = ""  # the client's name, used as X-Session-ID
    upstream: str = ""  # HOST:PORT that answered; of several the last counts
    status: int | str = 0  # HTTP status; 0, "" and "-": unknown
    usage: dict[str, Any] | None = None  # the object of the engine's answer, of any API; None: missing
    cached_tokens: int | None = None  # counts before those in `usage`; None: missing
    output_tokens: int | None = None  # counts before those in `usage`; None: missing

    @property
    def ended_at(self) -> float:
        """Time of the request's end, unix s. Raises LineError."""
        if self.time is None:
            raise LineError("time: missing")
        try:
            found = float(self.time)
        except ValueError:
            try:
                found = datetime.fromisoformat(str(self.time)).timestamp()
            except ValueError:
                raise LineError(f"time: {self.time!r} is neither unix seconds nor ISO 8601") from None
        if not 0 <= found <= MAX_TIME:
            raise LineError(f"time: {self.time!r} is not in the years 1970 to 9999")
        return found

    @property
    def arrived_at(self) -> float:
        """Time of the request's arrival, unix s. Raises LineError."""
        duration_s = _number("duration_s", self.duration_s) or 0.0
        if not 0 <= duration_s <= self.ended_at:
            raise LineError(f"duration_s: {self.duration_s!r} is negative, or longer than `time`")
        return self.ended_at - duration_s

    @property
    def request(self) -> tuple[str, bytes] | None:
        """Path and body of the request; None if the line does not have them. Raises LineError."""
        if self.prompt_token_ids is not None:
            if not self.model:
                raise LineError("model: missing beside prompt_token_ids")
            return COMPLETIONS, msgspec.json.encode({"model": self.model, "prompt": self.prompt_token_ids})
        if not self.body or not self.path:
            return None
        body = self.body.encode() if isinstance(self.body, str) else msgspec.json.encode(self.body)
        return self.path.partition("?")[0], body

    @property
    def end(self) -> RequestOutcome:
        """Outcome of the request. Raises LineError."""
        usage = self.usage or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if not isinstance(details, dict):
            details = {}
        cached, output = self.cached_tokens, self.output_tokens
        if cached is None:
            cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
        if output is None:
            output = usage.get("completion_tokens", usage.get("output_tokens"))
        return RequestOutcome(
            status=int(_number("status", self.status) or 0),
            instance=upstream_of(self.upstream),
            output_tokens=_tokens(output),
            cached_tokens=_tokens(cached),
        )


_decoder = msgspec.json.Decoder(LogLine)


def read_line(line: bytes) -> LogLine:
    """Parse one line. Raises LineError, which names the field."""
    try:
        found = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(str(error)) from None
    found.id, found.path = found.id or found.custom_id, found.path or found.url
    if not found.body and found.prompt_token_ids is None:
        field = next((field for field in _PATHS if bytes(getattr(found, field))), "")
        if field:
            found.body = line.decode(errors="replace")
            found.path = found.path or (_ANTHROPIC if bytes(found.system) else _PATHS[field])
    return found


def upstream_of(text: str) -> str:
    """Return HOST:PORT of the engine that answered; "" for none.

    Of several addresses in nginx's `$upstream_addr` the last counts ("a:1, b:2"; "a:1 : b:2" after a redirect inside nginx).
    """
    last = text.replace(" : ", ",").rpartition(",")[2].strip()
    return "" if last == "-" else last.removeprefix("http://").removeprefix("https://").partition("/")[0]


def _number(name: str, value: float | int | str) -> float | None:
    """Return a finite number; None for a missing one. Raises LineError."""
    if value in ("", "-"):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # no number, or an integer that no float holds
        number = math.nan
    if not math.isfinite(number):
        raise LineError(f"{name}: {value!r} is not a number")
    return number


def _tokens(value: object) -> int | None:
    """Return a number of tokens; None for what cannot be one, such as the -1 of logs that do not know it."""
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
