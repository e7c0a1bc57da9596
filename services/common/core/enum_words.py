"""The words of protobuf's enums without the prefix that all of an enum's names have: LIGHT of ROUTE_CLASS_LIGHT. Pure.

`kind` is an enum of a generated module, such as fleet_pb2.RouteClass.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def values(kind: Any) -> dict[str, Any]:
    """Word -> value; "" is the unspecified one."""
    prefix = str(kind.Name(0)).removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix) if value else "": value for name, value in kind.items()}


def word(kind: Any, value: int) -> str:
    """The word of `value`: "" for the unspecified one, the number for one that only a newer peer knows."""
    return _words(kind).get(value, str(value))


@cache
def _words(kind: Any) -> dict[int, str]:
    return {value: name for name, value in values(kind).items()}
