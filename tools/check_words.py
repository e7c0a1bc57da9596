"""Finds words that this project no longer uses: `python -m tools.check_words`, part of `make check`.

Each line of tools/retired_words.txt has a regular expression and its replacement, separated by a tab. All tracked text files are
searched, except the changelog (which names old and new words), the license, locks, generated stubs and data.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "tools" / "retired_words.txt"
SKIPPED = ("CHANGELOG.md", "LICENSE", "gen/", "lab/pointsman_lab/data/", "requirements/", "tools/retired_words.txt")


def retired_words(text: str) -> dict[str, str]:
    """Return expression -> replacement. Raises ValueError for a line without both."""
    words = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            expression, tab, instead = line.partition("\t")
            if not tab or not instead:
                raise ValueError(f"no replacement is given: {line!r}")
            words[expression] = instead
    return words


def problems(name: str, text: str, words: dict[str, str]) -> Iterator[str]:
    """Yield one line for each use of a retired word in a file's text."""
    any_word = re.compile("|".join(f"(?:{expression})" for expression in words))
    for number, line in enumerate(text.splitlines(), 1):
        for found in any_word.finditer(line):
            instead = next(words[expression] for expression in words if re.search(expression, found[0]))
            yield f"{name}:{number}: {found[0]!r} is retired: {instead}"


def main() -> int:
    """Print every use of a retired word; return the exit status, 1 if there is one."""
    words = retired_words(WORDS.read_text())
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for name in names.split("\0"):
        path = ROOT / name
        if name and not name.startswith(SKIPPED) and path.is_file() and not path.is_symlink():
            found += problems(name, path.read_text(errors="replace"), words)
    print("\n".join(found) if found else f"words: {len(words)} retired words, none in use")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
