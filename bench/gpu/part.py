"""What each part is given, and how it tells its figures: the process that `python -m bench gpu` starts for it."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure
from bench.gpu.device import CPU, CUDA, SIZES, SMALLEST, Device
from bench.gpu.results import append_figures
from pointsman_common.io.logs import configure_logs

# Exit status of a part that has stored what it did, and has more to do.
MORE = 3


@dataclass
class PartRun:
    """A part that runs."""

    device: Device  # with its sizes
    folder: Path  # for logs and models; gone afterwards
    state: Path  # folder for what the next run of this part goes on from
    vllm: bool  # whether the engines' environment has vLLM
    ends: float  # monotonic time at which the part is ended from outside
    file: Path  # for its figures

    def add(self, *figures: Figure) -> None:
        """Tell figures, which are kept whatever happens afterwards."""
        append_figures(self.file, figures)
        for figure in figures:
            ratio = "" if figure.ratio is None else f", {figure.ratio:.2f} of {figure.baseline:,.4g}"
            print(f"{figure.metric}: {figure.value:,.4g} {figure.unit}{ratio}", flush=True)

    def left_s(self) -> float:
        """Return the time that is left, s."""
        return self.ends - time.monotonic()


def part_words(parser: argparse.ArgumentParser) -> None:
    """Add the options that the command passes on to parts."""
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA, help="cpu: everything at small sizes")
    parser.add_argument("--smallest", action="store_true", help="on a CPU: in the form that tests run")
    parser.add_argument("--eager", action="store_true", help="on a card: without compiled models and CUDA graphs")
    parser.add_argument("--protocol", default="tcp", help="Mooncake's protocol: tcp, rdma, ...")


def device_of(given: argparse.Namespace) -> Device:
    """Return the device that these options name."""
    return Device(given.device, SMALLEST if given.smallest else SIZES[given.device], given.eager, given.protocol)


def run_part(part: Callable[[PartRun], bool | Coroutine[object, object, bool]]) -> None:
    """Run a part, which returns whether it has done everything, and exit: 0, MORE, or 1 with a traceback."""
    parser = argparse.ArgumentParser(description="a part of `python -m bench gpu`")
    part_words(parser)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    ends = time.monotonic() + given.seconds
    configure_logs("bench", "error")
    # Engines are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended at the time limit"))
    with tempfile.TemporaryDirectory(prefix="pointsman-gpu-") as folder:
        run = PartRun(device_of(given), Path(folder), given.state, given.vllm, ends, given.figures)
        done = part(run)
        complete = asyncio.run(done) if inspect.iscoroutine(done) else done
    sys.exit(0 if complete else MORE)
