"""What aiperf, an outside load client, is given: a trace in its form, and a tokenizer where it looks for a download."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from pointsman_lab.workload.traces import TraceRequest, by_session
from tests.support.repository import REPOSITORY

AIPERF = REPOSITORY / ".venv-aiperf/bin/aiperf"
# aiperf's name for the tokenizer. It loads none from a plain folder, only from a folder that looks like a download.
TOKENIZER = "local/tok"
# Pause between two turns unless another one is asked for, ms.
PAUSE_MS = 50.0


def deltas(
    requests: Sequence[TraceRequest],
    pause_ms: Callable[[TraceRequest], float] = lambda turn: PAUSE_MS,
    time_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Convert a trace to aiperf's mooncake_trace: later turns have only what is new after the previous answer. A turn that begins
    anew, with less than that, has one token. Start times are multiplied by `time_scale`; `pause_ms`: the pause before a turn."""
    lines: list[dict[str, Any]] = []
    for session, turns in by_session(requests).items():
        line: dict[str, Any] = {"timestamp": turns[0].timestamp_ms * time_scale}
        before = 0
        for number, turn in enumerate(turns):
            if number:
                line = {"delay": pause_ms(turn)}
            line |= {"session_id": session, "input_length": max(turn.input_length - before, 1)}
            lines.append(line | {"output_length": turn.output_length})
            before = turn.input_length + turn.output_length
        first = lines[-len(turns)]
        # Whole blocks are shared as in the trace; a partial last block belongs to the session alone.
        rest = [10**6 + len(lines)] * bool(turns[0].input_length % turns[0].block_size)
        first["hash_ids"] = [*turns[0].whole_blocks, *rest]
    return lines


def hub_cache(folder: Path, tokenizer: Path = TOKENIZER_DIR) -> Path:
    """Copy a tokenizer to where a download of it would be; returns the cache's folder."""
    model = folder / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0")
    shutil.copytree(tokenizer, model / "snapshots" / "0")
    return folder
