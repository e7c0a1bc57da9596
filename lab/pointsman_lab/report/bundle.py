"""Reads and writes a run's bundle, a folder of the same format for replays and simulations.

| file | content |
|---|---|
| config.json | the run's settings and the commit of this source tree |
| metrics.jsonl | one request per line (`RequestRecord`) |
| metrics.summary.json | the summary of the requests (`pointsman_lab.report.run_summary.summarise`) |
| timeline.jsonl | one sample of one instance per line (`InstanceSample`) |
| cache.json | each instance's cache at the end, and its hits during the run |
| gpu_util.csv | the GPUs over time; the header alone if no instance reports GPUs |
| breakdown.json | the latency breakdown of each request (`pointsman_lab.live.latency_breakdown`), and each part's percentiles |

A simulation writes the first three files and the timeline. A replay without a router writes the first three. A replay with a
router writes all files, but no timeline if it has no samples.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.traces import UNREADABLE

GPU_COLUMNS = ("time_s", "instance", "gpu", "utilisation", "memory_used_bytes", "memory_total_bytes")
T = TypeVar("T")


class BundleError(ValueError):
    """The folder is not a valid bundle; the message names file, line and field."""


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle."""

    config: Mapping[str, Any]  # the run's settings, with git_commit
    records: Sequence[RequestRecord]  # in the order of metrics.jsonl
    summary: Mapping[str, Any]  # of summarise(); of a trial its Measures
    samples: Sequence[InstanceSample] = ()  # by time; empty if the run took none
    caches: Mapping[str, Any] | None = None  # None if the run had no router to read them from
    breakdown: Mapping[str, Any] | None = None  # None if the run had no router to read it from


def write_bundle(
    folder: Path,
    config: Mapping[str, Any],
    records: Sequence[RequestRecord],
    summary: Mapping[str, Any],
    samples: Sequence[InstanceSample] = (),
    caches: Mapping[str, Any] | None = None,
    breakdown: Mapping[str, Any] | None = None,
) -> None:
    """Write a bundle into `folder`, which is created if missing. Replaces or removes the files of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, bytes] = {
        "config.json": _json({**config, "git_commit": git_commit()}),
        "metrics.jsonl": _lines(records),
        "metrics.summary.json": _json(summary),
    }
    if samples:
        files["timeline.jsonl"] = _lines(samples)
    if caches is not None:
        files["cache.json"] = _json(caches)
        files["gpu_util.csv"] = _gpu_csv(samples)
    if breakdown is not None:
        files["breakdown.json"] = _json(breakdown)
    for name in ("timeline.jsonl", "cache.json", "gpu_util.csv", "breakdown.json"):
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle. Raises BundleError if a required file is missing, or a file cannot be read or parsed."""
    return Bundle(
        config=_read_json(folder / "config.json"),
        records=read_records(folder),
        summary=_read_json(folder / "metrics.summary.json"),
        samples=_read_lines(folder / "timeline.jsonl", InstanceSample) if (folder / "timeline.jsonl").exists() else (),
        caches=_read_json(folder / "cache.json") if (folder / "cache.json").exists() else None,
        breakdown=_read_json(folder / "breakdown.json") if (folder / "breakdown.json").exists() else None,
    )


def read_records(folder: Path) -> list[RequestRecord]:
    """Read the requests of a bundle. Raises BundleError if they cannot be read."""
    return _read_lines(folder / "metrics.jsonl", RequestRecord)


def git_commit(folder: Path = Path(__file__).parent) -> str:
    """Return the commit of a folder's source tree (default: of this one), with "-dirty" if it has changes; empty without git or a
    checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _gpu_csv(samples: Sequence[InstanceSample]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(GPU_COLUMNS)
    for sample in samples:
        for gpu in sample.gpus:
            row = (sample.t, sample.instance, gpu.index, gpu.utilisation, gpu.memory_used, gpu.memory_total)
            writer.writerow(row)
    return text.getvalue().encode()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _lines(items: Sequence[msgspec.Struct]) -> bytes:
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(item) + b"\n" for item in items)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        why = (
            "its run has not ended, or it is the folder of no run"
            if path.parent.is_dir()
            else "there is no such folder"
        )
        raise BundleError(f"{path}: cannot be read: {why}") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except UNREADABLE as error:
        raise BundleError(f"{path}: {error}") from error


def _read_lines(path: Path, kind: type[T]) -> list[T]:
    decoder = msgspec.json.Decoder(kind)
    items = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        try:
            items.append(decoder.decode(line))
        except UNREADABLE as error:
            raise BundleError(f"{path}:{number}: {error}") from error
    return items
