"""The shell blocks of README.md and docs/. The words after ```sh are marks: what a command needs that a test does not have.

Blocks without marks are run on a fleet of emulated engines (tests/integration/test_command_line.py). The commands of blocks with
marks are only parsed, each by its own program's parser (command_parsers.py): `gpu` (vLLM), `cluster` (Kubernetes, Docker), `long`
(minutes of work) and `shadow` (another vendor's router in front). tests/integration/test_shadow.py also runs the last kind.
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
    """One block: its page and line, its marks, and its text."""

    where: str
    marks: frozenset[str]
    text: str

    @property
    def commands(self) -> list[str]:
        """The block's command lines, with continued lines joined, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def blocks_of(page: Path) -> list[Block]:
    """Return the shell blocks of a page, in order."""
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
