"""Pages made from templates, and sections of docs/findings.md and README.md that are made apart, each between two marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

ADMISSION, DEFAULT, FETCH, OPENING, TIERS = "admission", "default", "fetch", "opening", "tiers"
# The sections that other commands than `python -m studies.findings` write.
OF_STUDIES = (ADMISSION, DEFAULT, FETCH)
# Those that it writes only if it is given their files.
AGREEMENT, CALIBRATION = "agreement", "calibration"
# The sections of README.md.
BOARD, ROUTERS = "board", "routers"


def filled_template(template: Path, filters: Mapping[str, Callable[..., object]], **facts: Any) -> str:
    """Return the text of a template, with no more than one empty line in a row. Raises jinja2.UndefinedError for a name that is
    not among `facts`."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= filters
    text = environment.from_string(template.read_text()).render(**facts)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


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
