"""Studies: what makes docs/findings.md and docs/scoreboard.md, and what the defaults were chosen by. Run from a checkout."""

from __future__ import annotations

from pathlib import Path

# Recorded traces. The folder is beside the repository on the machines where the project is developed.
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
