"""What the tests in containers say of a machine that cannot run a Docker engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.containers import machine


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all programs that are needed, which do nothing, on a machine that has everything else."""
    for name in machine.PROGRAMS:
        _replace(tmp_path / name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None)
    monkeypatch.setattr(machine, "mirror", lambda: "http://packages.example")
    monkeypatch.setattr(machine, "_apt_settings", list)
    return tmp_path


def _replace(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_a_machine_with_everything_can(programs: Path) -> None:
    machine.check()


def test_a_kernel_without_netfilter_is_a_reason(programs: Path) -> None:
    said = "iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument"
    _replace(programs / "unshare", f"echo '{said}' >&2; exit 4")
    with pytest.raises(machine.Unavailable, match=r"^the kernel refuses: iptables v1\.8\.9"):
        machine.check()


def test_a_probe_that_says_nothing_is_a_reason(programs: Path) -> None:
    _replace(programs / "unshare", "exit 4")
    with pytest.raises(machine.Unavailable, match=r"^the kernel refuses: status 4$"):
        machine.check()


def test_the_probe_tries_netfilter() -> None:
    assert "iptables -t nat " in machine.PROBE
    assert "nft add rule " in machine.PROBE


@pytest.mark.parametrize("name", machine.PROGRAMS)
def test_a_missing_program_is_named(programs: Path, name: str) -> None:
    (programs / name).unlink()
    with pytest.raises(machine.Unavailable, match=f"^missing programs: {name} "):
        machine.check()


def test_what_cannot_be_forwarded_is_a_reason(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(machine.Unavailable, match="ip_forward cannot be written"):
        machine.check()


def test_others_than_root_cannot(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(machine.Unavailable, match="only root"):
        machine.check()


def test_a_failed_installation_is_tried_again(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PAUSE_S", 0.0)
    tried = tmp_path / "tried"
    _replace(programs / "mmdebstrap", f"echo x >> {tried}; read first < {tried}; test -f {tmp_path}/mirror-is-back")
    with pytest.raises(subprocess.CalledProcessError):
        machine.install("suite", (), tmp_path / "root")
    assert tried.read_text() == "x\n" * machine.ATTEMPTS
    (tmp_path / "mirror-is-back").touch()
    machine.install("suite", (), tmp_path / "root")
