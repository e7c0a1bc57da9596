"""Cost of code in steps of the interpreter, which is the same on every machine and under any load."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class Steps:
    """Counts the interpreter's steps (opcodes) inside the block, in `count`."""

    def __enter__(self) -> Steps:
        self.count = 0
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self._trace
