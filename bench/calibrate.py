"""Two real engines of one kind, a control plane before them, and `pointsman calibrate` over both.

`python -m bench.calibrate FOLDER [flags of pointsman calibrate]` takes some seven minutes and says how true the lab's
engine model is on this machine. Logs, profile, bundles, calibration.json and calibration.md are left in FOLDER.
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
    """Start everything, calibrate, end everything."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model")
    cores = sorted(os.sched_getaffinity(0))
    # As vLLM's guide for CPUs has it; engines that wander take from each other what no simulation knows.
    specs = [EngineSpec(name, core=cores[at % len(cores)]) for at, name in enumerate("ab")]
    # The agent's own default, which is what is simulated: the tests' haste would take its share of the two cores.
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
