"""Reads JSON that may be anything: what engines send."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def json_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`; empty if it is no JSON, or no object."""
    return json_value(text, dict[str, Any]) or {}


def json_value(text: bytes, kind: type[_T]) -> _T | None:
    """Return the JSON value of the type `kind` in `text`; None if it is no JSON, or another value."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
