"""The opening of docs/findings.md says what the document's tables say, and is the one that is checked in."""

from __future__ import annotations

import re

import pytest

from studies.findings.cells import BASE, OURS
from studies.findings.opening import TableCell, plots, read_tables, router_table, with_opening
from studies.marked_sections import ROUTERS, section_of
from tests.support.repository import REPOSITORY

PAGE = REPOSITORY / "docs/findings.md"
HEADER = "| policy | TTFT p50 s | TTFT p90 s | E2E p90 s | TPOT p90 ms |\n|---|---|---|---|---|\n"
SMALL = f"""# Findings
<!-- opening -->
what stood there before
<!-- end of opening -->

## agentic: light
{HEADER}| `floor` | 0.10 | 1.00 | 2.0 | 5 |
| `foresight` | 0.20 (=) | 2.00 (-3.05 ± 0.50) | 3.0 (=) | 1,012 (+2 ± 1) |
| `unified` | 0.30 | 5.05 | 4.0 | 10 |
| `round_robin` | 9.00 (+8.70 ± 0.10) | 80.00 (+74.95 ± 1.00) | 90.0 (=) | 99 (=) |

A remark.

## agentic: full
{HEADER}| `foresight` | 0.20 (=) | 3.00 (=) | 3.0 (=) | 12 |
| `unified` | 0.30 | 5.00 | 4.0 | 10 |
| `round_robin` | 9.00 | 90.00 | 90.0 | 99 |

## `foresight`
| cell | closed | goal | `pooled` closes |
|---|---|---|---|
| agentic, light | 75% | 75% | 92% |
| chat, overloaded | 95% | - | - |

### Another table
| `foresight` | of other columns |
|---|---|
| as it is | 1 |
"""


def test_tables_are_read_as_they_stand() -> None:
    tables = read_tables(SMALL)
    assert list(tables.loads) == [("agentic", "light"), ("agentic", "full")]
    light = tables.loads["agentic", "light"]
    assert light[OURS]["TTFT p90 s"] == TableCell(2.0, "-3.05 ± 0.50")
    assert light[OURS]["TPOT p90 ms"].mean == 1012.0
    assert light[BASE]["TTFT p90 s"] == TableCell(5.05, "")
    assert tables.closed == {"agentic, light": (75.0, 92.0), "chat, overloaded": (95.0, None)}


def test_gains_are_given_in_seconds_and_not_in_bold_where_chance_may_do_it() -> None:
    text = with_opening(SMALL)
    assert "| light | `foresight` | **3.1 s** (± 0.50) | 5.1 -> 2.0 s | 4.0 -> 3.0 s (=) | 10 -> 1,012 ms |" in text
    assert "| coding agents, recorded | full | `foresight` | 2.0 s (=) | 5.0 -> 3.0 s (=) |" in text
    assert "what stood there before" not in text
    assert with_opening(text) == text


def test_routers_of_today_are_ordered_by_the_middle_load() -> None:
    table = router_table(read_tables(SMALL))
    assert re.findall(r"\| `(\w+)` \| (\S+ s) \| (\S+ s) \|", table) == [
        ("round_robin", "80.0 s", "90.0 s"),
        ("unified", "5.1 s", "5.0 s"),
        ("foresight", "2.0 s", "3.0 s"),
    ]
    assert router_table(read_tables("# Findings\n")) == ""


def test_the_page_opens_with_what_its_tables_say() -> None:
    page = PAGE.read_text()
    assert with_opening(page) == page, "python -m studies.findings --opening-only"
    for name, drawn in plots(page).items():
        remedy = f"{name}: python -m studies.findings --opening-only"
        (text, numbers), (drawn_text, drawn_numbers) = _numbers(PAGE.with_name(name).read_text()), _numbers(drawn)
        assert text == drawn_text, remedy
        # In points; the last digits depend on the processor.
        assert numbers == pytest.approx(drawn_numbers, abs=0.001), remedy


def _numbers(svg: str) -> tuple[str, list[float]]:
    """Return a plot without its fractions, and those."""
    pattern = r"-?\d+\.\d+"
    return re.sub(pattern, "#", svg), [float(found) for found in re.findall(pattern, svg)]


def test_readme_shows_the_pages_table_and_plot() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    remedy = "python -m studies.findings --opening-only"
    assert section_of(readme, ROUTERS) == router_table(read_tables(PAGE.read_text())).strip(), remedy
    assert "](docs/findings_ttft.svg)" in readme
