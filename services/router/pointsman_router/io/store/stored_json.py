"""Values of the store as JSON, which another version, or somebody else, may have written."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def decoded(text: str | bytes, kind: type[_T]) -> _T:
    """Return a value of the type `kind`. Raises msgspec.MsgspecError if it cannot be read, also if it is nested too deep."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from None
