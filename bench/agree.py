"""Runs `pointsman agree` on two real engines of one kind.

`python -m bench.agree FOLDER [flags of pointsman agree]` takes about half an hour. It writes the runs, the engines' logs and
agreement.md to FOLDER, and makes the missing runs of a FOLDER that has some.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.engines.servers import EngineSpec, make_model, running_engines
from tests.support.processes.pointsman import pointsman_command
from tests.support.repository import REPOSITORY

# Tokens of an engine's KV cache: fewer than the sessions under way have at the higher load.
KV_CAPACITY_TOKENS = 8_192
# Lengths, times and loads, for the speed of a small model on one core. Flags take precedence.
DEFAULTS = {
    "POINTSMAN_AGREE_TOKEN_SCALE": "0.08",
    "POINTSMAN_AGREE_TIME_SCALE": "0.25",
    "POINTSMAN_AGREE_RATES": "0.5 3",
    "POINTSMAN_AGREE_SESSIONS": "20",
    "POINTSMAN_AGREE_SPAN_S": "22",
    "POINTSMAN_AGREE_PROFILE_SECONDS": "60",
    "POINTSMAN_AGREE_PROFILE_REPEATS": "1",
}


def main() -> None:
    """Start the engines, compare, and end all processes."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model")
    cores = sorted(os.sched_getaffinity(0))
    # Each engine is bound to a core, as vLLM's guide for CPUs recommends. Unbound engines would slow each other down, which the
    # simulation does not model.
    specs = [
        EngineSpec(name, kv_capacity_tokens=KV_CAPACITY_TOKENS, core=cores[at % len(cores)])
        for at, name in enumerate("ab")
    ]
    with running_engines(specs, model, folder) as engines:
        flags = [part for engine in engines for part in ("--engines", engine.url)]
        flags += ["--tokenizer", str(model), "--out", str(folder), *sys.argv[2:]]
        subprocess.run(pointsman_command("agree", *flags), cwd=REPOSITORY, env=DEFAULTS | os.environ, check=True)


if __name__ == "__main__":
    main()
