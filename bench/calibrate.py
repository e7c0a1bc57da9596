"""Runs `pointsman calibrate` on two real engines of one kind behind a control plane.

`python -m bench.calibrate FOLDER [flags of pointsman calibrate]` takes about seven minutes, and reports how accurate the lab's
engine model is on this machine. It writes logs, profile, bundles, calibration.json and calibration.md to FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.engines.servers import EngineSpec, make_model, running_engines
from tests.support.processes.control_plane import ControlPlane
from tests.support.processes.pointsman import pointsman_command
from tests.support.repository import REPOSITORY


def main() -> None:
    """Start engines and control plane, calibrate, and end all processes."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model")
    cores = sorted(os.sched_getaffinity(0))
    # Each engine is bound to a core, as vLLM's guide for CPUs recommends. Unbound engines would slow each other down, which the
    # simulation does not model.
    specs = [EngineSpec(name, core=cores[at % len(cores)]) for at, name in enumerate("ab")]
    # The agent's default interval, which is simulated. The shorter one of the tests would use part of the two cores.
    unhurried = {"--scrape-interval-s": 1.0}
    with (
        running_engines(specs, model, folder) as engines,
        ControlPlane(engines, folder, agent_flags=unhurried).running() as plane,
    ):
        flags = ["--url", plane.gateway_url, "--router", plane.router_address, "--tokenizer", str(model)]
        flags += [part for engine in engines for part in ("--engines", engine.url)]
        command = pointsman_command("calibrate", *flags, "--out", str(folder), *sys.argv[2:])
        token = {"POINTSMAN_OPERATOR_TOKEN": plane.tokens["operator"]}
        subprocess.run(command, cwd=REPOSITORY, env=os.environ | token, check=True)


if __name__ == "__main__":
    main()
