"""The path of this checkout, the version of the project, and the command for the pages that are made from the code."""

from __future__ import annotations

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAKE_PAGES = "run .venv/bin/python -m tools.made_pages"
VERSION: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
