"""The section of docs/findings.md that `pointsman study admission` writes and `pointsman findings` keeps. Pure."""

from __future__ import annotations

BEGIN, END = "<!-- admission -->", "<!-- end of admission -->"


def with_section(document: str, text: str) -> str:
    """Return the document with `text` between the section's marks; unchanged without marks."""
    before, mark, rest = document.partition(BEGIN)
    if not mark:
        return document
    return f"{before}{BEGIN}\n{text.strip()}\n{END}{rest.partition(END)[2]}"


def section_of(document: str) -> str:
    """Return the text between the section's marks; empty without marks."""
    return document.partition(BEGIN)[2].partition(END)[0].strip()
