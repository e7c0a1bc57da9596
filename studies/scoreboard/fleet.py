"""The emulated engines of the scoreboard."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.rivals.engines import Fleet, address_of
from pointsman_common.io.direct_http import open_directly
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatTokenizer
from tests.support.processes.pointsman import flag_words, pointsman_process
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY

START_S = 120.0
EMULATED_MODEL = "pointsman-emulated"
# The fleet of docs/findings.md, half as large: contexts up to 200,000 tokens, KV cache for 500,000.
EMULATED = {"kv_blocks": 31_250, "max_model_len": 200_000, "max_num_batched_tokens": 8_192}


@contextlib.contextmanager
def emulated_fleet(folder: Path, engines: int, speedup: float) -> Iterator[Fleet]:
    """Run emulated engines with empty caches; none is left after the block."""
    ports = [free_port() for _ in range(engines)]
    flags = EMULATED | {"speedup": speedup, "log_level": "warning"}
    parts = [
        pointsman_process(f"engine-{port}", folder, "emulate", *flag_words(flags | {"port": port}), cwd=REPOSITORY)
        for port in ports
    ]
    try:
        for part in parts:
            part.start()
        for part in parts:
            part.wait_ready(lambda log=part.log: "emulated engine" in log.read_text(), within_s=START_S)  # type: ignore[misc]
        yield Fleet(
            [address_of(f"http://127.0.0.1:{port}") for port in ports], EMULATED_MODEL, TOKENIZER_DIR, ChatTokenizer().words,
            16, EMULATED["kv_blocks"], EMULATED["max_model_len"], [part.pid for part in parts],
        )  # fmt: skip
    finally:
        for part in parts:
            if part.alive:
                part.kill()


def reset_caches(fleet: Fleet) -> None:
    """Empty the engines' prefix caches. Raises OSError if an engine refuses."""
    for engine in fleet.engines:
        request = urllib.request.Request(f"{engine.url}/reset_prefix_cache", method="POST")
        open_directly(request, 30).close()
