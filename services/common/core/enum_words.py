"""The words of protobuf's enums without the prefix that all of an enum's names have: LIGHT of ROUTE_CLASS_LIGHT. Pure."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

V = TypeVar("V", bound=int)


@cache
def values(kind: EnumTypeWrapper[V]) -> dict[str, V]:
    """Word -> value; "" is the unspecified one."""
    prefix = _prefix(kind)
    return {name.removeprefix(prefix) if value else "": value for name, value in kind.items()}


def word(kind: EnumTypeWrapper[Any], value: int) -> str:
    """The word of `value`: "" for the unspecified one, the number for one that only a newer peer knows."""
    return _words(kind).get(value, str(value))


@cache
def _words(kind: EnumTypeWrapper[Any]) -> dict[int, str]:
    return {int(value): name for name, value in values(kind).items()}


def _prefix(kind: EnumTypeWrapper[Any]) -> str:
    return str(kind.Name(0)).removesuffix("UNSPECIFIED")
