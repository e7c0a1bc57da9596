"""Names of protobuf enum values without the prefix that all names of the enum share: LIGHT for ROUTE_CLASS_LIGHT. Pure.

`kind` is an enum of a generated module, such as fleet_pb2.RouteClass.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def values(kind: Any) -> dict[str, Any]:
    """Return a map from word to value; "" is the word of the unspecified value."""
    prefix = str(kind.Name(0)).removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix) if value else "": value for name, value in kind.items()}


def word(kind: Any, value: int) -> str:
    """Return the word of `value`: "" for the unspecified value, the number itself for a value that only a newer peer defines."""
    return _words(kind).get(value, str(value))


@cache
def _words(kind: Any) -> dict[int, str]:
    return {value: name for name, value in values(kind).items()}
