"""`make gpu-wheels`: the wheels that `python -m bench gpu` needs on a machine with a GPU and without a network, in parts.

    .venv/bin/python -m tools.gpu_wheels --python 3.12 --cuda 13 --vllm 0.32.0 --mooncake 0.3.13.post1 --plan

The versions are resolved for that machine by uv and fetched by pip, both from their own indexes; a wheel that is already there
with the right digest is not fetched again. All wheels, one after the other, are cut into parts of one size. `install.py` beside
the parts (tools/offline_install.py) joins, checks and installs them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools import offline_install

ROOT = Path(__file__).resolve().parent.parent
PART_BYTES = 60_000_000
# What pip fetches at once, unless one wheel is larger.
BATCH_BYTES = 200_000_000
# The newest C library that the wheels may need: that of Ubuntu 22.04. Older ones are enough for most.
GLIBC_MINOR = 35
# Of wheels that the machine can use, the best first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
# The other routers that the benchmark compares with. Dynamo and SMG are left out: they are larger than all of the rest but vLLM.
ROUTERS = ("vllm-router", "sglang-router")
# Groups of files, in the order of the parts: what runs with a torch that is there, what engines need, and the other routers.
POINTSMAN, VLLM, OTHERS = "pointsman", "vllm", "routers"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the plan."""

    name: str  # of the file
    package: str  # as pip is asked for it: NAME==VERSION
    bytes: int
    sha256: str  # hex digest
    group: str  # POINTSMAN, VLLM or OTHERS


def engine_packages(cuda: int, vllm: str, mooncake: str) -> list[str]:
    """Return the requirements of the engines, in which those with CUDA in their name are for this version of it."""
    return [f"vllm=={vllm}", "nixl", f"nixl-cu{cuda}", *transfer_packages(cuda, mooncake)]


def transfer_packages(cuda: int, mooncake: str) -> list[str]:
    """Return the requirement of Mooncake's transfer engine."""
    return [f"mooncake-transfer-engine{'-cuda13' if cuda >= 13 else ''}=={mooncake}"]


def tags_of(python: str) -> list[Tag]:
    """Return the tags of wheels that the machine can use, the best first."""
    version = tuple(map(int, python.split(".")))
    platforms = [*PLATFORMS, "linux_x86_64"]
    short = f"cp{version[0]}{version[1]}"
    return [*cpython_tags(version, [short], platforms), *compatible_tags(version, short, platforms)]


def resolve(
    requirements: Iterable[str], python: str, *flags: str, constraints: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return the packages of a resolution for that machine, as a pylock.toml lists them. Raises CalledProcessError."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, lines in (("asked.in", requirements), ("held.in", constraints)):
            (folder / file).write_text("".join(f"{line}\n" for line in lines))
        command = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", *flags, folder / "asked.in",
                   "--constraint", folder / "held.in", "--python-version", python, "--only-binary", ":all:",
                   "--python-platform", f"x86_64-manylinux_2_{GLIBC_MINOR}", "--output-file", folder / "pylock.toml"]  # fmt: skip
        subprocess.run([str(word) for word in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        packages: list[dict[str, Any]] = tomllib.loads((folder / "pylock.toml").read_text())["packages"]
        return packages


def best_wheel(package: dict[str, Any], tags: Sequence[Tag], group: str) -> Wheel:
    """Return the wheel of a locked package that pip would choose. Raises SystemExit if there is none."""
    found: list[tuple[int, Wheel]] = []
    for wheel in package.get("wheels", ()):
        name = wheel.get("name") or wheel["url"].rpartition("/")[2].partition("#")[0].replace("%2B", "+")
        ranks = [tags.index(tag) for tag in parse_wheel_filename(name)[3] if tag in tags]
        if ranks:
            pinned = f"{package['name']}=={package['version']}"
            found.append((min(ranks), Wheel(name, pinned, wheel["size"], wheel["hashes"]["sha256"], group)))
    if not found:
        sys.exit(f"{package['name']} {package['version']} has no wheel for this Python and system")
    return min(found, key=lambda ranked: ranked[0])[1]


def plan(python: str, cuda: int, vllm: str, mooncake: str, have: Iterable[str] = ()) -> list[Wheel]:
    """Return the wheels that the machine needs, without those of the packages in `have` (lines NAME==VERSION, as pip freeze
    prints them)."""
    # The helpers of the tests, which start engines, import pytest.
    own = ["pip", "pytest", "uv", *transfer_packages(cuda, mooncake)]
    everything = resolve([*own, *engine_packages(cuda, vllm, mooncake)], python, "pyproject.toml", "--extra", "all")
    check_cuda([package["name"] for package in everything], cuda)
    held = [f"{package['name']}=={package['version']}" for package in everything]
    light = {package["name"] for package in resolve(own, python, "pyproject.toml", "--extra", "all", constraints=held)}
    tags, there = tags_of(python), {_canonical(line) for line in have if "==" in line}
    wheels = [best_wheel(package, tags, POINTSMAN if package["name"] in light else VLLM) for package in everything]
    for router in ROUTERS:
        locked = resolve((), python, f"requirements/rivals/{router}.lock", "--no-deps")
        wheels += [best_wheel(package, tags, OTHERS) for package in locked]
    unique = {
        wheel.name: wheel
        for wheel in reversed(wheels)
        if _canonical(wheel.package) not in there or wheel.group == OTHERS
    }
    return sorted(unique.values(), key=lambda wheel: ((POINTSMAN, VLLM, OTHERS).index(wheel.group), wheel.bytes))


def _canonical(pinned: str) -> str:
    """Return NAME==VERSION with the name as pip compares it and without the version's local part (2.13.0+cu130)."""
    name, _, version = pinned.strip().partition("==")
    return f"{canonicalize_name(name)}=={version.partition('+')[0]}"


def check_cuda(packages: Iterable[str], cuda: int) -> None:
    """Raise SystemExit if torch's CUDA libraries are for another version. From 13 on their names have no number."""
    numbers = {
        int(found[1]) for name in packages if (found := re.fullmatch(r"nvidia-cublas(?:-cu(\d+))?", name)) and found[1]
    }
    if (numbers or {13}) != {cuda}:
        sys.exit(
            f"the index has this vLLM for CUDA {min(numbers or {13})}: name another one for CUDA {cuda}, "
            "as in UV_DEFAULT_INDEX and PIP_INDEX_URL"
        )


def batches(wheels: Iterable[Wheel]) -> Iterator[list[Wheel]]:
    """Yield the wheels in groups that pip fetches at once: what it has fetched is there only when it ends."""
    batch: list[Wheel] = []
    for wheel in wheels:
        packages = {before.package.partition("==")[0] for before in batch}
        full = sum(before.bytes for before in batch) + wheel.bytes > BATCH_BYTES
        if batch and (full or wheel.package.partition("==")[0] in packages):
            yield batch
            batch = []
        batch.append(wheel)
    if batch:
        yield batch


def fetch(wheels: Iterable[Wheel], folder: Path, python: str) -> None:
    """Have pip fetch the wheels that are not in `folder`. Raises SystemExit if a file is not the one that was planned."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in wheels if not offline_install.intact(folder / wheel.name, asdict(wheel))]
    for batch in batches(missing):
        subprocess.run([*command, *(wheel.package for wheel in batch)], check=True)
        for wheel in batch:
            if not offline_install.intact(folder / wheel.name, asdict(wheel)):
                sys.exit(f"{wheel.package}: pip has fetched another file than {wheel.name}")


def built(folder: Path) -> list[Wheel]:
    """Return the wheels in `folder` that `make dist` has built, as a part of the plan."""
    return [
        Wheel(
            file.name,
            "==".join(file.name.split("-")[:2]),
            file.stat().st_size,
            offline_install.sha256_of(file),
            POINTSMAN,
        )
        for file in sorted(folder.glob("pointsman*.whl"))
    ]


def split(
    wheels: Sequence[Wheel], folder: Path, out: Path, about: dict[str, object], part_bytes: int = PART_BYTES
) -> None:
    """Write the wheels of `folder` to `out` in parts, with manifest.json and install.py. A part that is there is written anew."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*"):
        old.unlink()
    parts: list[dict[str, object]] = []
    rest = b""

    def end_part(bytes_: bytes) -> None:
        file = out / f"part-{len(parts):04}"
        file.write_bytes(bytes_)
        parts.append({"name": file.name, "bytes": len(bytes_), "sha256": offline_install.sha256_of(file)})

    for wheel in wheels:
        with (folder / wheel.name).open("rb") as stream:
            while chunk := stream.read(part_bytes - len(rest)):
                rest += chunk
                if len(rest) == part_bytes:
                    end_part(rest)
                    rest = b""
    if rest:
        end_part(rest)
    files = [asdict(wheel) for wheel in wheels]
    manifest = {**about, "part_bytes": part_bytes, "parts": parts, "files": files}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(ROOT / "tools" / "offline_install.py", out / "install.py")


def table(wheels: Sequence[Wheel]) -> str:
    """Return the plan as text: the largest wheels, and for each group the number and the sum of all, in MB (10^6 bytes)."""
    lines = [f"{wheel.bytes / 1e6:9.1f} MB  {wheel.name}" for wheel in sorted(wheels, key=lambda wheel: -wheel.bytes)]
    for group in (POINTSMAN, VLLM, OTHERS):
        sizes = [wheel.bytes for wheel in wheels if wheel.group == group]
        lines.append(f"{sum(sizes) / 1e6:9.1f} MB  {len(sizes)} wheels: {group}")
    total = sum(wheel.bytes for wheel in wheels)
    return "\n".join([*lines, f"{total / 1e6:9.1f} MB  {len(wheels)} wheels, {-(-total // PART_BYTES)} parts"])


def main() -> None:
    """Plan, fetch and cut."""
    parser = argparse.ArgumentParser(
        "python -m tools.gpu_wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (("python", "of that machine, as in 3.12"), ("vllm", "version"), ("mooncake", "version")):
        parser.add_argument(f"--{name}", required=True, help=what)
    parser.add_argument("--cuda", required=True, type=int, help="major version of CUDA")
    parser.add_argument("--have", type=Path, help="output of `pip freeze` there: what it has is left out")
    parser.add_argument("--built", type=Path, default=ROOT / "dist", help="folder of the project's own wheels")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".state" / "gpu-wheels", help="folder for the wheels and their parts"
    )
    parser.add_argument("--commit", default="", help="what the wheels are built from, for the manifest")
    parser.add_argument(
        "--plan", action="store_true", help="print which wheels these are and how large, and fetch nothing"
    )
    given = parser.parse_args()
    have = given.have.read_text().splitlines() if given.have else ()
    planned = plan(given.python, given.cuda, given.vllm, given.mooncake, have)
    print(table(planned))
    if given.plan:
        return
    own = built(given.built)
    wheels = given.out / "wheels"
    fetch(planned, wheels, given.python)
    for wheel in own:
        shutil.copy(given.built / wheel.name, wheels)
    about = {"commit": given.commit, "python": given.python, "cuda": given.cuda, "vllm": given.vllm}
    split([*own, *planned], wheels, given.out / "parts", about)
    print(f"{given.out / 'parts'}: copy this folder to the machine, and run its install.py there")


if __name__ == "__main__":
    main()
