"""Commands of `pointsman` as processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes.process import Process


def pointsman_command(*words: str) -> list[str]:
    """`pointsman WORDS...`, by this environment's Python."""
    return [sys.executable, "-m", "pointsman.cli.main", *words]


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """A flag for each setting, under its name as a setting, with or without dashes; for a list one for each of its values."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.removeprefix("--").replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            words += [flag, str(one)]
    return words


def pointsman_process(
    name: str,
    folder: Path,
    command: str,
    *words: str,
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Process:
    """`pointsman COMMAND FLAGS WORDS...`, not started; its log is FOLDER/NAME.log."""
    argv = pointsman_command(command, *flag_words(flags or {}), *words)
    return Process(name, argv, folder / f"{name}.log", env or {}, cwd)
