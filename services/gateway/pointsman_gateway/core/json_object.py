"""Reads JSON that may be anything: what engines send."""

from __future__ import annotations

from typing import Any

import msgspec


def json_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`; empty if it is no JSON, or no object."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
