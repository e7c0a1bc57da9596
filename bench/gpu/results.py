"""The result of a part: one JSON file, of which a run that is repeated knows whether it has to run the part again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from bench.figures import Figure

COMPLETE, UNFINISHED, FAILED, LATE = "complete", "unfinished", "failed", "late"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """On what a part has run. Results of equal settings need not be made again."""

    device: str  # "cuda" or "cpu"
    card: str  # its name; of a CPU the number of cores
    driver: str = ""  # of the card
    memory_gb: float = 0.0  # of the card, 10^9 bytes
    versions: Mapping[str, str]  # packages of the engines' environment -> version
    commit: str  # of this checkout, 12 characters; what is only written to docs/ makes no other
    smallest: bool = False  # whether in the form that tests run
    options: str = ""  # how the command was told to start engines, if other than by default


class PartResult(msgspec.Struct, kw_only=True):
    """What came of one part."""

    part: str  # a letter
    # COMPLETE; UNFINISHED: it has stored what it did, and goes on when it is run again; FAILED; LATE: ended at its time limit.
    status: str
    setting: Setting  # on what it ran
    date: str  # YYYY-MM-DD
    seconds: float  # how long it ran
    figures: list[Figure]  # all that were measured, also those before a failure
    problem: str = ""  # the last lines of a part that failed or was late


def file_of(folder: Path, part: str, device: str) -> Path:
    """Return the file of a part's result."""
    return folder / f"{part}.{device}.json"


def load(file: Path) -> PartResult | None:
    """Return the result in a file; None without a file, and for one of another version of this code."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=PartResult)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def save(file: Path, result: PartResult) -> None:
    """Write a result, in lines that differ where results do."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def loaded(folder: Path, device: str, parts: Iterable[str]) -> list[PartResult]:
    """Return the results of a kind of device that there are, in the order of `parts`."""
    found = (load(file_of(folder, part, device)) for part in parts)
    return [result for result in found if result is not None]


def append_figures(file: Path, figures: Iterable[Figure]) -> None:
    """Add figures to the file of a part that runs: a line each."""
    with file.open("ab") as lines:
        for figure in figures:
            lines.write(msgspec.json.encode(figure) + b"\n")


def read_figures(file: Path) -> Iterator[Figure]:
    """Yield the figures of a part that has ended, in whatever way: a line that was cut off is none. One that was measured again
    takes the place of the one before."""
    found: dict[str, Figure] = {}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            figure = msgspec.json.decode(line, type=Figure)
        except msgspec.DecodeError:
            continue
        found[figure.metric] = figure
    yield from found.values()
