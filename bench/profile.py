"""Where the CPU time of each process goes in a trial of coding sessions, and what a fleet costs without traffic.

Samples are taken by py-spy with native frames, of `pointsman up` (the processes `serve` and `agent`), and of router, gateway and
agent as processes of their own, in front of four emulated engines. A sample belongs to the component of its innermost frame of
Pointsman's own code, for example `gateway/core/tokens`, and within it to what runs in the end: that frame's module, or a library.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import stack
from bench.figures import Figure
from bench.many_agents import AgentsProcess
from bench.rivals.contenders import Part
from bench.rivals.process_cpu import cpu_s
from bench.rivals.running import RunningRouter
from tests.support.processes.pointsman import (
    flag_words,
    plane_process,
    pointsman_command,
    pointsman_process,
    wait_until_it_serves,
)
from tests.support.processes.process import Process, free_port

ENGINES, SPEEDUP = 4, 8.0
# As the scoreboard's engines: contexts up to 200,000 tokens, KV cache for 500,000.
EMULATED = {"kv_blocks": 31_250, "max_model_len": 200_000, "max_num_batched_tokens": 8_192, "speedup": SPEEDUP}
SESSIONS, SPAN_S = 24, 60.0
SAMPLES_PER_S = 200
READY_S = 120.0
# Components, and what runs in one, that have less than this share of a process are summed up.
LEAST_SHARE = 0.02
IDLE_FLEETS = (4, 64, 1_000)
IDLE_S, SETTLE_S = 10.0, 5.0

_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>.*?)(:\d+)?\)$")
_OWN = re.compile(r"pointsman_(?P<part>\w+)/(?P<module>.*)\.py$")
# Innermost frames of threads that wait, which py-spy cannot tell from busy ones in native code. The second pattern is a call from
# libc to libc, whose functions have no names, as waiting for a lock is.
_WAITS = re.compile(
    r"^(epoll_p?wait|p?poll|p?select|(clock_)?nanosleep|syscall|pthread_cond_(timed)?wait|sem_\w*wait) \(libc\b"
)
_WAITS_WITHIN = re.compile(r"(^|;)[^;]* \(libc\b[^;]*;0x\w+ \(libc\b[^;]*$")
_LIBRARY = re.compile(r"(?:site-packages|python3\.\d+)/(?P<name>\w+)")


def profile() -> list[Figure]:
    """profile_PROCESS_COMPONENT_ms: CPU time of a request, by samples; baseline is the process's. idle_*: CPU time of a second
    without traffic."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for apart in (False, True):
            figures += _trial(Path(folder) / f"{apart}", apart)
    return figures + [asyncio.run(_idle(instances)) for instances in IDLE_FLEETS]


# ---- a trial ----


def _trial(folder: Path, apart: bool) -> list[Figure]:
    folder.mkdir()
    trace = folder / "trace.jsonl.gz"
    generate = ("trace", "generate", "--sessions", str(SESSIONS), "--span-s", str(SPAN_S), str(trace))
    subprocess.run(pointsman_command(*generate), check=True, stdout=subprocess.DEVNULL)
    with contextlib.ExitStack() as running:
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            flags = EMULATED | {"port": port, "log_level": "warning"}
            engine = pointsman_process(f"engine-{port}", folder, "emulate", flags=flags)
            engine.start()
            running.callback(engine.kill)
            engine.wait_ready(lambda log=engine.log: "emulated engine" in log.read_text(), within_s=READY_S)  # type: ignore[misc]
        url, processes = (_apart if apart else _together)(running, folder, ports)
        router = RunningRouter(url, [(Part(process.name, process.argv), process) for process in processes])
        pids = {name: found[0] for name, found in router.processes().items() if name != "up"}
        before = {name: cpu_s([pid]) for name, pid in pids.items()}
        with _sampled(pids, folder) as samples:
            _replay(trace, url, folder)
            spent = {name: cpu_s([pid]) - before[name] for name, pid in pids.items()}
        requests = sum(1 for _ in (folder / "run" / "metrics.jsonl").open())
    figures = []
    for name, file in samples.items():
        own_ms = spent[name] / requests * 1e3
        for component, (share, most) in components(file.read_text().splitlines()).items():
            note = (
                f"CPU of a request, {requests} of coding sessions{', processes apart' if apart else ''}; most in {most}"
            )
            figures.append(Figure(f"profile_{name}_{component}_ms", own_ms * share, "ms", own_ms, note))
    return figures


def _together(running: contextlib.ExitStack, folder: Path, ports: Sequence[int]) -> tuple[str, list[Process]]:
    listen = f"127.0.0.1:{free_port()}"
    plane = plane_process(folder, listen, f"127.0.0.1:{free_port()}", ports)
    plane.start()
    running.callback(plane.kill)
    wait_until_it_serves(plane, READY_S)
    return f"http://{listen}", [plane]


def _apart(running: contextlib.ExitStack, folder: Path, ports: Sequence[int]) -> tuple[str, list[Process]]:
    port, router_at = free_port(), f"127.0.0.1:{free_port()}"
    engines = [f"http://127.0.0.1:{engine}" for engine in ports]
    of_part: dict[str, dict[str, object]] = {
        "router": {"listen": router_at, "metrics_listen": ""},
        "agent": {"engines": engines, "routers": router_at, "state_dir": folder / "agent", "metrics_listen": ""},
        "gateway": {"listen": f"127.0.0.1:{port}", "routers": router_at},
    }
    processes = [pointsman_process(part, folder, part, flags=flags) for part, flags in of_part.items()]
    for process in processes:
        process.start()
        running.callback(process.kill)
    asyncio.run(stack.wait_until_ready(port))
    return f"http://127.0.0.1:{port}", processes


def _replay(trace: Path, url: str, folder: Path) -> None:
    flags = {"trace": trace, "url": url, "timing": "think", "time-scale": 1 / SPEEDUP, "out": folder / "run"}
    subprocess.run(pointsman_command("replay", *flag_words(flags)), check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _sampled(pids: Mapping[str, int], folder: Path) -> Iterator[dict[str, Path]]:
    """Sample processes inside the block; yield the files that have the samples after it."""
    program = Path(sys.executable).with_name("py-spy")
    files = {name: folder / f"{name}.samples" for name in pids}
    samplers = [
        subprocess.Popen(
            [program, "record", "--native", "--format", "raw", "--rate", str(SAMPLES_PER_S),
             "--pid", str(pid), "--output", files[name]],
            stdout=subprocess.DEVNULL,
        )
        for name, pid in pids.items()
    ]  # fmt: skip
    try:
        yield files
    finally:
        for sampler in samplers:
            sampler.send_signal(signal.SIGINT)
        ended = [sampler.wait(timeout=READY_S) for sampler in samplers]
    for name, status in zip(pids, ended, strict=True):
        if status:
            raise RuntimeError(f"no samples of {name}: py-spy may trace no processes of this user")


# ---- samples ----


def components(samples: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Return the share of busy samples of each component, and what has most of it.

    `samples`: lines of py-spy's raw format: a stack's frames from the outermost on, separated by semicolons, and their number."""
    counts: Counter[str] = Counter()
    within: dict[str, Counter[str]] = {}
    for line in samples:
        stack_, _, number = line.rpartition(" ")
        if _WAITS_WITHIN.search(stack_) or _WAITS.match(stack_.rpartition(";")[2]):
            continue
        component, leaf = _place(stack_.split(";"))
        counts[component] += int(number)
        within.setdefault(component, Counter())[leaf] += int(number)
    total = counts.total()
    shares: dict[str, tuple[float, str]] = {}
    rest: Counter[str] = Counter()
    for component, count in counts.most_common():
        if count < LEAST_SHARE * total:
            rest[component] += count
            continue
        most = [f"{leaf} {leaf_count / total:.0%}" for leaf, leaf_count in within[component].most_common(4)]
        shares[component] = count / total, ", ".join(most)
    if rest:
        shares["rest"] = rest.total() / total, ", ".join(name for name, _ in rest.most_common(4))
    return shares


def _place(frames: Sequence[str]) -> tuple[str, str]:
    """Return the component of a stack, and what runs in the end."""
    leaf = ""
    for frame in reversed(frames):
        if (parsed := _FRAME.match(frame)) is None:
            leaf = leaf or frame
            continue
        file = parsed["file"]
        if (own := _OWN.search(file)) is not None:
            folder, _, module = f"{own['part']}/{own['module']}".rpartition("/")
            return folder, leaf or module
        library = _LIBRARY.search(file)
        leaf = leaf or (library["name"] if library else Path(file).name)
    return "outside", leaf


# ---- without traffic ----


async def _idle(instances: int) -> Figure:
    """idle_INSTANCES_ms: CPU time of a router for a fleet that only reports its loads, each second."""
    async with stack.router() as (address, served), AgentsProcess.running(address) as agents:
        await agents.join(instances, 1_000, 1)
        await asyncio.sleep(SETTLE_S)
        began, before = time.perf_counter(), cpu_s(served.pids)
        await asyncio.sleep(IDLE_S)
        idle_ms = (cpu_s(served.pids) - before) / (time.perf_counter() - began) * 1e3
    note = f"a router's CPU in a second without traffic, {instances:,} instances that report their load once a second"
    return Figure(f"idle_{instances}_ms", idle_ms, "ms", None, note)
