"""The token ids of an answer beside its stream, as an engine with the connector package tells and continues them. Pure.

The format is that of connector/pointsman_connector/answer_record.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pointsman_gateway.core.api.continuable import RECORD_FIELD

_RECORD = re.compile(r"[:\d,.]*")
_IDS = re.compile(r"\d+")


class BegunAnswer(NamedTuple):
    """What a client has of an answer: its token ids, and whether it is complete but for the usage."""

    ids: tuple[int, ...]
    complete: bool


def begun_answer(body: Mapping[str, Any]) -> BegunAnswer | None:
    """Return the answer that a request continues; None if it does not even ask for ids. Raises ValueError for another text."""
    fields = body.get("vllm_xargs")
    record = fields.get(RECORD_FIELD) if isinstance(fields, dict) else None
    if not isinstance(record, str):
        return None
    if not _RECORD.fullmatch(record):
        raise ValueError("not an answer record")
    return BegunAnswer(tuple(map(int, _IDS.findall(record))), "." in record)


def with_comment(ids: Sequence[int], events: bytes, *, complete: bool) -> bytes:
    """Return events behind the SSE comment that tells their ids."""
    count = events.count(b"\n\n")
    number = f"x{count}" if count > 1 else ""
    return f":{','.join(map(str, ids))}{'.' if complete else ''}{number}\n\n".encode() + events
