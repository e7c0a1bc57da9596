"""Interpreters of Python beside the one of these tests: those of this machine, else Debian's, each in a root of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.containers import machine
from tests.support.repository import REPOSITORY
from tests.support.wheel import UV

# The suites of Debian that have a version of Python; no release has 3.12.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
# Makes folders of this machine visible below a root ($1) at the same path, and runs a command there in this folder.
ENTER = """
root=$1 folder=$PWD
shift
mount -t tmpfs tmpfs "$root/tmp"
for shared in /proc /dev $SHARED; do
  mkdir -p "$root$shared"
  mount --rbind "$shared" "$root$shared"
done
exec chroot "$root" env -C "$folder" "$@"
"""


class NoPython(Exception):
    """There is no such interpreter; the message says why."""


@dataclass(frozen=True)
class Python:
    """An interpreter. `root`: of the Debian that has it; None: it is this machine's."""

    path: str
    root: Path | None = None

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs `words` where the interpreter is. Temporary files, this checkout and uv's cache have the
        same paths there."""
        plain = [str(word) for word in words]
        return plain if self.root is None else ["unshare", "--mount", "sh", "-ec", ENTER, "sh", str(self.root), *plain]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of such a command."""
        if self.root is None:
            return dict(given)
        shared = {tempfile.gettempdir(), str(REPOSITORY), _uv_cache()}
        # Files of a cache in another mount cannot be linked.
        return {**given, "SHARED": " ".join(sorted(shared)), "UV_CACHE_DIR": _uv_cache(), "UV_LINK_MODE": "copy"}


def find(version: str, state: Path) -> Python:
    """Return an interpreter of `version`, as 3.13. A Debian that has to be installed for it stays in `state`. Raises NoPython."""
    if path := _on_this_machine(version):
        return Python(path)
    if version not in SUITES:
        raise NoPython(f"this machine has no Python {version}, and no Debian has one")
    try:
        return Python(f"/usr/bin/python{version}", _root(version, state))
    except machine.Unavailable as why:
        raise NoPython(f"this machine has no Python {version}, and cannot install Debian's: {why}") from None


def _on_this_machine(version: str) -> str:
    """Return the path of an interpreter that PATH or pyenv has; empty if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [str(python.parent) for python in pyenv.glob(f"versions/*/bin/python{version}")]
    asked = subprocess.run(
        [str(UV), "python", "find", "--system", "--no-python-downloads", version],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": os.pathsep.join([*folders, os.environ["PATH"]])},
        cwd="/",
    )
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _root(version: str, state: Path) -> Path:
    """Return the folder of a Debian with a version of Python, which is made if it is missing. Raises machine.Unavailable."""
    if os.geteuid() != 0:
        raise machine.Unavailable("only root can use it")
    if missing := [name for name in ("mmdebstrap", "unshare") if not shutil.which(name)]:
        raise machine.Unavailable(f"missing programs: {', '.join(missing)}")
    if not machine.mirror():
        raise machine.Unavailable(machine.NO_MIRROR)
    state.mkdir(parents=True, exist_ok=True)
    root = state / f"root-{version}"
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            part, settings = state / f"part-{version}", state / "uv.toml"
            settings.write_text(machine.uv_settings())
            hook = f'mkdir -p "$1/etc/uv"; cp {settings} "$1/etc/uv"'
            try:
                # Wheels have no C++ library of their own; every Debian with apt has it.
                machine.install(
                    SUITES[version], (f"python{version}", f"python{version}-venv", "libstdc++6"), part, hook
                )
            except subprocess.CalledProcessError as error:
                raise machine.Unavailable(f"mmdebstrap ended with status {error.returncode}") from error
            part.rename(root)
    machine.copy_names(root)
    return root


def _uv_cache() -> str:
    return subprocess.run([str(UV), "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
