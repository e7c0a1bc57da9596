"""How much a value holds: the number of different objects that can be reached from it."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

# What belongs to the program, and not to the value.
_PROGRAM = (type, ModuleType, BuiltinFunctionType)


def reachable(root: object) -> dict[str, int]:
    """Type -> how many objects of it `root` leads to, itself among them. Classes and modules are not followed, functions only to
    what they have closed over."""
    seen: dict[int, object] = {}
    pending: list[Any] = [root]
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, _PROGRAM):
            continue
        seen[id(one)] = one
        if isinstance(one, FunctionType):
            pending.extend(cell.cell_contents for cell in one.__closure__ or ())
        elif isinstance(one, MethodType):
            pending.append(one.__self__)
        elif isinstance(one, msgspec.Struct):
            # Without gc=True the collector does not know what they hold.
            pending.extend(getattr(one, name) for name in one.__struct_fields__)
        else:
            pending.extend(gc.get_referents(one))
    counts: dict[str, int] = {}
    for one in seen.values():
        counts[type(one).__name__] = counts.get(type(one).__name__, 0) + 1
    return counts
