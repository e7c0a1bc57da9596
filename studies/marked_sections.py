"""The sections of docs/findings.md and README.md that are made apart from the rest, each between two marks."""

from __future__ import annotations

from pathlib import Path

ADMISSION, DEFAULT, OPENING, TIERS = "admission", "default", "opening", "tiers"
# The sections that other commands than `python -m studies.findings` write.
OF_STUDIES = (ADMISSION, DEFAULT)
# The sections of README.md.
BOARD, ROUTERS = "board", "routers"


def with_section(document: str, name: str, text: str) -> str:
    """Return the document with `text` between the marks of section `name`; without such marks, with the section at its end."""
    begin, end = _marks(name)
    section = "\n".join(filter(None, (begin, text.strip(), end)))
    before, mark, rest = document.partition(begin)
    if not mark:
        return f"{document.rstrip()}\n\n{section}\n"
    return f"{before}{section}{rest.partition(end)[2]}"


def write_section(file: Path, name: str, text: str) -> None:
    """Write `text` as the section `name` of a document, which is made if there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(with_section(file.read_text() if file.exists() else "", name, text))


def write_front_section(page: Path, name: str, text: str) -> None:
    """Write `text` as the section `name` of README.md, if `page` is in docs/ of a checkout whose README.md has such a section."""
    readme = page.absolute().parent.parent / "README.md"
    if readme.exists() and _marks(name)[0] in readme.read_text():
        write_section(readme, name, text)


def section_of(document: str, name: str) -> str:
    """Return the text between the marks of the section `name`; empty without such marks."""
    begin, end = _marks(name)
    return document.partition(begin)[2].partition(end)[0].strip()


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
