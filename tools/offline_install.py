"""Joins the parts that `make gpu-wheels` made into wheels, checks them, and installs them into an environment, without a network.

    python3 install.py --venv /tmp/pointsman                    # everything, vLLM included
    python3 install.py --venv /tmp/pointsman --only pointsman   # the first parts alone, for a machine that has torch

It lies beside the parts and their manifest.json, and needs nothing but the version of Python that the wheels are for. What is
missing or damaged is named; a second run goes on where the first one stopped, also with parts that have come since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNK = 1 << 20
# Debian's and Ubuntu's packages of the libraries that Mooncake does not bring along.
SYSTEM_LIBRARIES = "libibverbs1 libnuma1 libcurl4"
# torch brings the CUDA libraries that Mooncake uses.
LOAD_MOONCAKE = """
try:
    import torch
except ImportError:
    pass
import mooncake.engine
"""


def sha256_of(file: Path) -> str:
    """Return the hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def intact(file: Path, entry: Mapping[str, Any]) -> bool:
    """Return whether a file is there with the size and the digest that the manifest has."""
    return file.exists() and file.stat().st_size == entry["bytes"] and bool(sha256_of(file) == entry["sha256"])


def join(folder: Path, manifest: Mapping[str, Any], groups: Sequence[str]) -> dict[str, str]:
    """Write the wheels of `groups` to folder/wheels, those that are not yet there. Returns which of the parts that are needed are
    missing or damaged; the wheels that need none of these are written all the same."""
    wheels = folder / "wheels"
    wheels.mkdir(exist_ok=True)
    usable: set[str] = set()
    unusable: dict[str, str] = {}
    begin = 0
    for entry in manifest["files"]:
        end = begin + entry["bytes"]
        first, last = begin // manifest["part_bytes"], max(end - 1, begin) // manifest["part_bytes"]
        file = wheels / entry["name"]
        if entry["group"] in groups and not intact(file, entry):
            parts = manifest["parts"][first : last + 1]
            for part in parts:
                if part["name"] not in usable and part["name"] not in unusable:
                    if intact(folder / part["name"], part):
                        usable.add(part["name"])
                    else:
                        unusable[part["name"]] = "damaged" if (folder / part["name"]).exists() else "missing"
            if all(part["name"] in usable for part in parts):
                _write(file, [folder / part["name"] for part in parts], begin - first * manifest["part_bytes"], entry)
        begin = end
    return unusable


def _write(file: Path, parts: Sequence[Path], offset: int, entry: Mapping[str, Any]) -> None:
    """Write a wheel from the bytes that begin at `offset` of the first part. Raises SystemExit if its digest is another one."""
    unfinished = file.with_name(file.name + ".part")
    left = entry["bytes"]
    with unfinished.open("wb") as out:
        for part in parts:
            with part.open("rb") as stream:
                stream.seek(offset)
                while left and (chunk := stream.read(min(CHUNK, left))):
                    out.write(chunk)
                    left -= len(chunk)
            offset = 0
    if sha256_of(unfinished) != entry["sha256"]:
        sys.exit(f"{file.name} is not what the manifest says, though its parts are: make them anew")
    unfinished.rename(file)


def install(folder: Path, manifest: Mapping[str, Any], groups: Sequence[str], venv: Path) -> None:
    """Make the environment `venv` and install the wheels of `groups`. Without vLLM's it also sees this Python's packages."""
    names = [entry["name"] for entry in manifest["files"] if entry["group"] in groups and entry["group"] != "routers"]
    flags = [] if "vllm" in groups else ["--system-site-packages"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *flags, str(venv)], check=True)
    # pip runs from its own wheel: some systems' Python comes without it.
    (pip,) = (folder / "wheels" / name for name in names if name.startswith("pip-"))
    command = [str(venv / "bin" / "python"), str(pip / "pip"), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, *(str(folder / "wheels" / name) for name in names)], check=True)
    loaded = subprocess.run([command[0], "-c", LOAD_MOONCAKE], capture_output=True, text=True, check=False)
    if loaded.returncode:
        reason = loaded.stderr.strip().rpartition("\n")[2]
        print(f"Mooncake cannot be loaded: {reason}\nit needs the driver, and {SYSTEM_LIBRARIES}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, help="folder of the environment; without it the wheels are only joined and checked"
    )
    parser.add_argument("--only", choices=("pointsman",), help="without vLLM and torch, and without other routers")
    return parser


def main() -> None:
    """Join, check and install; exits with 1 and the names of the parts if some are missing."""
    given = make_parser().parse_args()
    manifest = json.loads((HERE / "manifest.json").read_text())
    groups = (given.only,) if given.only else tuple(dict.fromkeys(entry["group"] for entry in manifest["files"]))
    unusable = join(HERE, manifest, groups)
    if unusable:
        for name, why in unusable.items():
            print(f"{name}: {why}", file=sys.stderr)
        sys.exit(1)
    print(f"{sum(entry['group'] in groups for entry in manifest['files'])} wheels are whole, in {HERE / 'wheels'}")
    if given.venv:
        running = "{}.{}".format(*sys.version_info)
        if running != manifest["python"]:
            sys.exit(f"the wheels are for Python {manifest['python']}, and this is {running}")
        install(HERE, manifest, groups, given.venv)
        print(f"installed: {given.venv}/bin/python")


if __name__ == "__main__":
    main()
