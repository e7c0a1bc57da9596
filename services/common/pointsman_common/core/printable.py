"""Texts of others, made safe to be shown in a terminal and to be sent as UTF-8."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with U+FFFD in place of each character that is not printable: control characters, which terminals obey, and
    halves of surrogate pairs, which no UTF-8 has."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)
