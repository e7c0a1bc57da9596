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
        item = pending.pop()
        if id(item) in seen or isinstance(item, _PROGRAM):
            continue
        seen[id(item)] = item
        if isinstance(item, FunctionType):
            pending.extend(cell.cell_contents for cell in item.__closure__ or ())
        elif isinstance(item, MethodType):
            pending.append(item.__self__)
        elif isinstance(item, msgspec.Struct):
            # The garbage collector does not track the fields of a Struct without gc=True.
            pending.extend(getattr(item, name) for name in item.__struct_fields__)
        else:
            pending.extend(gc.get_referents(item))
    counts: dict[str, int] = {}
    for reached in seen.values():
        counts[type(reached).__name__] = counts.get(type(reached).__name__, 0) + 1
    return counts
