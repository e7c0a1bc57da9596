"""What is checked in can be checked out on Windows: no links, no names that it refuses, and the line ends of Linux."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

from tests.support.repository import REPOSITORY

# Microsoft's "Naming Files, Paths, and Namespaces": characters, ends, devices, and the length of a path below a user's folder.
REFUSED = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ](/|$)|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)', re.IGNORECASE)
LONGEST = 160
REGULAR = ("100644", "100755")


def listed(*flags: str) -> list[str]:
    """Return the lines of `git ls-files -z` with these flags."""
    command = ["git", "ls-files", "-z", *flags]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]


def test_each_name_is_one_file_on_windows() -> None:
    assert [line for line in listed("--stage") if not line.startswith(REGULAR)] == []
    names = listed()
    assert len(names) > 1_000
    assert [name for name in names if REFUSED.search(name) or len(name) > LONGEST] == []
    folded = Counter(name.lower() for name in names)
    assert [name for name in names if folded[name.lower()] > 1] == []


def test_text_has_the_line_ends_of_linux_everywhere() -> None:
    described = [re.split(r"\s+", line, maxsplit=3) for line in listed("--eol")]
    assert {index for index, *_ in described} <= {"i/lf", "i/none", "i/-text"}
    assert [line for line in described if line[0] == "i/lf" and not line[3].startswith("eol=lf")] == []
