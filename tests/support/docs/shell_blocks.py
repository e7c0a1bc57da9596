"""The shell blocks of README.md and docs/: the words after ```sh say what a command needs that a test has not.

Unmarked blocks are run on a fleet of emulated engines (tests/integration/test_command_line.py). Those marked `gpu` (vLLM),
`cluster` (Kubernetes, Docker) or `long` (minutes of work) are parsed, command by command, by what would parse them
(parsed.py), and so are those that need a router of another make in front (`shadow`), which
tests/integration/test_shadow.py also runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
MARKS = {"gpu", "cluster", "long", "shadow"}
_BLOCK = re.compile(r"^```sh(?P<marks>[^\n]*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block: where it is, its marks, and its text."""

    where: str
    marks: frozenset[str]
    text: str

    @property
    def commands(self) -> list[str]:
        """Its command lines, continued ones joined, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def blocks_of(page: Path) -> list[Block]:
    """The shell blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            f"{page.relative_to(REPOSITORY)}:{text.count(chr(10), 0, found.start()) + 1}",
            frozenset(found["marks"].split()),
            found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
