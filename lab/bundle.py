"""A run's bundle: a folder with config.json, metrics.jsonl (one request a line) and metrics.summary.json."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lab.records import RequestRecord


class BundleError(ValueError):
    """A folder that is no bundle; the message names file, line and field."""


def write_bundle(
    folder: Path, config: Mapping[str, Any], records: Sequence[RequestRecord], summary: Mapping[str, Any]
) -> None:
    """Write a bundle; `folder` is made when it is missing, its three files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "git_commit": git_commit()}, indent=2) + "\n")
    encoder = msgspec.json.Encoder()
    (folder / "metrics.jsonl").write_bytes(b"".join(encoder.encode(record) + b"\n" for record in records))
    (folder / "metrics.summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def read_records(folder: Path) -> list[RequestRecord]:
    """The requests of a bundle. Raises BundleError when they cannot be read."""
    path = folder / "metrics.jsonl"
    decoder = msgspec.json.Decoder(RequestRecord)
    records = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise BundleError(f"{path}:{number}: {error}") from error
    return records


def git_commit() -> str:
    """The commit of this source tree, "-dirty" with changes; empty where there is no git or no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
