"""The size of a value: the number of different objects that can be reached from it."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

# Types that belong to the program, not to the value.
_PROGRAM = (type, ModuleType, BuiltinFunctionType)


def reachable(root: object) -> dict[str, int]:
    """Return type -> number of its objects that can be reached from `root`, including `root`. Classes and
    modules are not followed, and of functions only the closures are."""
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
            # The garbage collector does not track the fields of a Struct without gc=True.
            pending.extend(getattr(one, name) for name in one.__struct_fields__)
        else:
            pending.extend(gc.get_referents(one))
    counts: dict[str, int] = {}
    for one in seen.values():
        counts[type(one).__name__] = counts.get(type(one).__name__, 0) + 1
    return counts
