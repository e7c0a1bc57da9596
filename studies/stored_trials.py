"""Files of a study's trials: a line of JSON for each, so that an interrupted study goes on with those that are missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

_T = TypeVar("_T", bound=msgspec.Struct)


def append_trial(file: Path, trial: msgspec.Struct) -> None:
    """Add a trial to the file, which is made if it is missing. Several processes may add to one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+", buffering=0) as lines:
        cut_off = False
        if lines.tell():
            lines.seek(-1, os.SEEK_END)
            cut_off = lines.read(1) != b"\n"
        # One write, so that lines of several processes do not mix.
        lines.write(b"\n" * cut_off + msgspec.json.encode(trial) + b"\n")


def read_trials(file: Path, kind: type[_T]) -> Iterator[_T]:
    """Yield the file's trials; none if it is missing. A line that a kill has cut off is not a trial.

    Raises msgspec.ValidationError if a trial has other fields, as those of another version of the code.
    """
    decoder = msgspec.json.Decoder(kind)
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        try:
            yield decoder.decode(line)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            continue
