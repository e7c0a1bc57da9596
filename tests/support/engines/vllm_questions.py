"""Questions to vLLM's own modules, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.engines.servers import ENGINE_PYTHON
from tests.support.repository import REPOSITORY

HERE = Path(__file__).parent


class Vllm:
    """The process of inside_vllm.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, code: str, asked: Any) -> Any:
        """What `code` makes of `asked`, both JSON values: it calls them `asked` and `answer`. AssertionError when it raises."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"code": code, "asked": asked}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        reply = json.loads(line)
        assert "answer" in reply, f"{reply['error']}\n{self._log.read_text()}"
        return reply["answer"]


@contextmanager
def asking_vllm(log: Path) -> Iterator[Vllm]:
    """The process, for the block; modules of this folder, and the connector, can be imported there."""
    environment = os.environ | {
        "PYTHONPATH": f"{HERE}:{REPOSITORY / 'connector'}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [ENGINE_PYTHON, HERE / "inside_vllm.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    with process:
        try:
            yield Vllm(process, log)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)
