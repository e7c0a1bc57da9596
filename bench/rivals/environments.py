"""Environments of the other routers: one for each, under .state/rivals, made from its lock by hash."""

from __future__ import annotations

import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = REPOSITORY / "requirements" / "rivals"
ENVIRONMENTS = REPOSITORY / ".state" / "rivals"
# Timeout of an installation, s: the largest wheel has 75 MB.
INSTALL_S = 900.0


class NotRunnable(RuntimeError):
    """A router cannot run on this machine; the message says why, in words for the page."""


def environment(name: str) -> Path:
    """Return the bin folder of a router's environment; make the environment if its lock has changed or it is not there. Raises
    NotRunnable if it cannot be installed."""
    lock, folder = LOCKS / f"{name}.lock", ENVIRONMENTS / name
    wanted, stamp = sha256(lock.read_bytes()).hexdigest(), folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder / "bin"
    uv = Path(sys.executable).with_name("uv")
    commands = [
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)],
        [str(uv), "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"),
         "--no-deps", "--require-hashes", "-r", str(lock)],
    ]  # fmt: skip
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotRunnable(f"its environment could not be made: {type(error).__name__}") from error
        if done.returncode:
            # The rest of the message may name the index that this machine uses.
            raise NotRunnable(
                f"its environment could not be made: {Path(command[0]).name} ended with {done.returncode}"
            )
    stamp.write_text(wanted)
    return folder / "bin"


def locked_version(name: str, package: str = "") -> str:
    """Return the version of a package (by default, of the lock's name) in a lock."""
    found = re.search(rf"^{re.escape(package or name)}==(\S+)", (LOCKS / f"{name}.lock").read_text(), re.MULTILINE)
    assert found, f"{name}.lock has no {package or name}"
    return found[1]
