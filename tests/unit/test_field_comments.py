"""A record with more than four fields says of each what its name and type do not."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import REPOSITORY

FOLDERS = ("bench", "connector", "lab", "services", "studies")
# Records of so many fields need no comments.
SMALL = 4


def uncommented(text: str) -> Iterator[str]:
    """Yield RECORD.FIELD of each field without a comment on its lines or above, a string below, a description, or its name in
    backticks in the record's docstring."""
    lines = text.splitlines()
    for record in ast.walk(ast.parse(text)):
        if not isinstance(record, ast.ClassDef):
            continue
        fields = [node for node in record.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        below = dict(itertools.pairwise(record.body))
        for field in fields if len(fields) > SMALL else ():
            assert isinstance(field.target, ast.Name)
            name, after = field.target.id, below.get(field)
            own = " ".join(lines[field.lineno - 1 : field.end_lineno])
            said = (
                name.startswith("_")
                or "#" in own
                or "description=" in own
                or lines[field.lineno - 2].lstrip().startswith("#")
                or f"`{name}`" in (ast.get_docstring(record) or "")
                or (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
            )
            if not said:
                yield f"{record.name}.{name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_field_of_a_record_has_a_comment(folder: str) -> None:
    files = sorted(Path(REPOSITORY, folder).rglob("*.py"))
    assert files
    found = {str(file.relative_to(REPOSITORY)): list(uncommented(file.read_text())) for file in files}
    assert {file: fields for file, fields in found.items() if fields} == {}


def test_a_field_without_a_comment_is_found() -> None:
    fields = "    a: int  # s\n    # Of b.\n    b: int\n    c: int\n    d: int = field(\n        # tokens\n    )\n    e: int\n"
    assert list(uncommented(f'class Record:\n    """`e` is one."""\n\n{fields}')) == ["Record.c"]
    assert list(uncommented("class Small:\n    a: int\n    b: int\n    c: int\n    d: int\n")) == []
