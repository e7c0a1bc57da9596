"""Everything that the READMEs and docs/ name exists: files, tests, settings, policies, and commands that cannot be run here."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import json_format
from pydantic_settings import BaseSettings

from pointsman.router.v1 import fleet_pb2
from pointsman_cli import main as command_line
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core.placement_types import FleetView
from pointsman_router.core.policy.base import settings_of
from tests.support.docs import command_parsers
from tests.support.docs.shell_blocks import BLOCKS, MARKS, PAGES, Block
from tests.support.repository import MAKE_PAGES, REPOSITORY
from tests.support.router_values import candidate, request
from tools import made_pages

DOCS = REPOSITORY / "docs"
RULES = REPOSITORY / "deploy/telemetry/rules"
ids = [str(page.relative_to(REPOSITORY)) for page in PAGES]
# New files count before they are added to git, too.
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
TRACKED = subprocess.run(LISTED, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
# Pages that GitHub and other programs look for.
DOOR = [REPOSITORY / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "llms.txt")]
NAMING_FILES = [name for name in TRACKED if Path(name).name == "README.md" or re.fullmatch(r"docs/[^/]+\.md", name)]
marked = [block for block in BLOCKS if block.marks]


@pytest.mark.parametrize("page", [*PAGES, *DOOR], ids=[*ids, *(page.name for page in DOOR)])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = {link.partition("#")[0] for link in links if "://" not in link} - {""}
    assert [link for link in local if not (page.parent / link).exists()] == []


def _anchors(page: Path) -> set[str]:
    """Return the fragments that lead into a page, as GitHub makes them of its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    made = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("name", [name for name in TRACKED if name.endswith(".md")])
def test_links_to_headings_lead_to_one(name: str) -> None:
    page = REPOSITORY / name
    links = re.findall(r"\]\(([^)\s]+\.md|)#([^)\s]+)\)", page.read_text())
    local = {(file, fragment) for file, fragment in links if "://" not in file}
    lost = [
        f"{file}#{fragment}"
        for file, fragment in sorted(local)
        if fragment not in _anchors(page.parent / file if file else page)
    ]
    assert lost == []


def test_a_cell_of_a_table_is_a_phrase() -> None:
    # Two or three tests' names fit; what needs more is text below the table.
    long = []
    for page in (name for name in TRACKED if name.endswith(".md")):
        rows = re.findall(r"^\|.*\|$", (REPOSITORY / page).read_text(), re.MULTILINE)
        cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        long += [(page, cell) for cell in cells if len(cell) > 240]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_tests_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()))
    assert [f"{file}::{test}" for file, test in sorted(named) if not _has(REPOSITORY / file, test)] == []


@pytest.mark.parametrize("page", NAMING_FILES)
def test_the_source_files_that_are_named_exist(page: str) -> None:
    folder = Path(page).parent
    below = [Path(name) for name in TRACKED if Path(name).is_relative_to(folder)]
    # A page about any part may name a test by its file's name alone.
    tests = {Path(name).name for name in TRACKED if name.startswith("tests/") and Path(name).name.startswith("test_")}
    # A part's page names its files from its package on, as its first lines say.
    package = folder / f"pointsman_{folder.name}"
    inside = {str(file.relative_to(package)) for file in below if file.is_relative_to(package)}
    known = {
        *TRACKED,
        *(str(file.relative_to(folder)) for file in below),
        *inside,
        *(file.name for file in below),
        *tests,
    }
    named = set(re.findall(r"`([\w./-]+\.py)(?:::\w+)?`", (REPOSITORY / page).read_text()))
    assert named - known == set()


def test_the_files_of_the_walks_exist() -> None:
    section = (DOCS / "architecture.md").read_text().partition("\n## Five walks\n")[2].partition("\n## ")[0]
    walks = section.split("\n### ")[1:]
    assert len(walks) == 5
    for walk in walks:
        files = re.findall(r"`([\w.-]+/[\w./-]+)`", walk)
        assert len(files) >= len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) > 3
        assert set(files) <= set(TRACKED), walk
    way = re.findall(r"^\| \d+ \| `([\w./-]+)` \| \d+ \| `([\w./-]+)` \|$", section, re.MULTILINE)
    assert 0 < len(way) <= 12
    assert {file for row in way for file in row} <= set(TRACKED)


def _has(file: Path, test: str) -> bool:
    if not file.is_file():
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return not test or any(isinstance(node, kinds) and node.name == test for node in ast.parse(file.read_text()).body)


def test_each_row_of_the_failure_table_names_a_test() -> None:
    text = (DOCS / "operating.md").read_text()
    table = text.partition("## When something fails")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+`", row)] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_messages_that_are_shown_are_messages(page: Path) -> None:
    for shown in re.findall(r"^```json\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        json_format.Parse(shown, fleet_pb2.GetDecisionResponse())


def test_the_names_of_messages_types_and_alerts_exist() -> None:
    folders = ("services", "lab", "connector", "tests/support")
    sources = [file for part in folders for file in (REPOSITORY / part).rglob("*.py")]
    files = [*(REPOSITORY / "protos").rglob("*.proto"), *sources, *RULES.iterdir()]
    code = "\n".join(file.read_text() for file in files)
    for page in set(DOCS.glob("*.md")) - {DOCS / "findings.md"}:
        named = set(re.findall(r"`([A-Z][a-z]+[A-Z]?\w+)`", page.read_text()))
        assert {name for name in named if not re.search(rf"\b{name}\b", code)} == set(), page


def test_the_policy_that_contributors_copy_chooses_what_it_says() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    code = re.search(r"^   ```python\n(.*?)^   ```", page, re.DOTALL | re.MULTILINE)
    assert code is not None
    module = ModuleType("fewest_tokens")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(textwrap.dedent(code[1]), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    view = FleetView((candidate("a", ongoing_tokens=2), candidate("b", ongoing_tokens=1)))
    result = module.FewestTokens().choose(request(), view, random.Random(0))
    assert [step.instance_id for step in result.steps] == ["b"]
    assert f"`{result.reason}`" in module.FewestTokens.__doc__
    assert settings_of(module.FewestTokens)
    assert f'`"{result.reason}": "' in page


def test_the_commands_for_contributors_are_understood() -> None:
    page = re.sub(r"^ +", "", (REPOSITORY / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    blocks = re.findall(r"^```sh[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    commands = [re.sub(r"(^|\s)#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    commands += re.findall(r"`((?:make|\.venv/bin/python -m pytest) [^`]+)`", page)
    # The parser knows the program, not how a module of the environment is run.
    commands = [command.replace(".venv/bin/python -m pytest", "pytest") for command in commands]
    assert len(commands) > 10
    assert [said for command in commands if (said := command_parsers.problem(command))] == []


def test_every_policy_has_its_row() -> None:
    rules = (DOCS / "policies.md").read_text().partition("\n## Rules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", rules, re.MULTILINE)
    assert sorted(rows) == sorted(POLICIES), MAKE_PAGES


def test_what_is_made_from_the_code_is_that_of_the_code() -> None:
    for page, content in made_pages.written().items():
        assert page.read_text() == content, f"{page.name}: {MAKE_PAGES}"


def test_a_page_loses_nothing_but_what_stands_between_its_marks() -> None:
    page = "before\n<!-- made: reasons -->\nold\n<!-- end -->\nafter\n<!-- made: rules -->\n<!-- end -->\n"
    made = made_pages.with_sections(page)
    assert re.sub(r"^\|.*\n", "", made, flags=re.MULTILINE) == page.replace("old\n", "")
    assert "| `unified` |" in made.partition("after")[2]
    assert "| `session_affinity` |" in made.partition("after")[0]
    assert made_pages.with_sections(made) == made
    with pytest.raises(KeyError, match="unknown"):
        made_pages.with_sections("<!-- made: unknown -->\n<!-- end -->\n")


def test_the_pages_that_change_are_told(tmp_path: Path) -> None:
    old, same = tmp_path / "old.md", tmp_path / "same.md"
    old.write_text("before")
    same.write_text("as ever")
    assert made_pages.write({old: "after", same: "as ever"}) == [old]
    assert (old.read_text(), same.read_text()) == ("after", "as ever")


def test_every_metric_of_dashboards_and_alerts_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    series = {name for name, kind in rows if kind != "histogram"}
    series |= {f"{name}_{end}" for name, kind in rows if kind == "histogram" for end in ("bucket", "sum", "count")}
    files = [*RULES.iterdir(), *(RULES.parent / "grafana/dashboards").iterdir()]
    named = set(re.findall(r"\bpointsman_(?:router|gateway|agent)_\w+", "\n".join(file.read_text() for file in files)))
    assert len(named) > 50
    assert named - series == set()


def test_the_variables_that_are_named_exist() -> None:
    command_parsers.command_line()  # Imports all modules with settings, also the lab's.
    known = {
        f"{kind.model_config['env_prefix']}{name.upper()}"
        for kind in BaseSettings.__subclasses__()
        for name in kind.model_fields
    }
    known |= set(re.findall(r"`(POINTSMAN_\w+)`", (DOCS / "settings.md").read_text()))
    known |= set(
        re.findall(r"^#?(POINTSMAN_\w+)=", (REPOSITORY / "deploy/compose/.env.example").read_text(), re.MULTILINE)
    )
    for page in PAGES:
        named = set(re.findall(r"\bPOINTSMAN_[A-Z][A-Z_]*[A-Z]\b", page.read_text()))
        assert named - known - {"POINTSMAN_COMMAND_NAME"} == set(), page


def test_every_variable_that_the_services_read_is_on_the_page() -> None:
    page = (DOCS / "settings.md").read_text()
    code = "\n".join(
        file.read_text() for root in ("services", "connector") for file in (REPOSITORY / root).rglob("*.py")
    )
    named = set(re.findall(r"\bPOINTSMAN_[A-Z_]*[A-Z]\b", code)) - {"POINTSMAN_COMMAND_NAME"}
    assert {name for name in named if name not in page} == set()


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    commands = command_parsers.command_line().commands
    assert {name: " ".join(command.help.partition("\n\n")[0].split()) for name, command in commands.items()} == {
        name: command.line for name, command in command_line.COMMANDS.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_whose_answers_are_shown_are_understood(page: Path) -> None:
    shown = re.findall(r"^\$ (pointsman .*)$", page.read_text(), re.MULTILINE)
    assert [said for command in shown if (said := command_parsers.problem(command))] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_within_the_text_are_understood(page: Path) -> None:
    named = set(re.findall(r"`((?:pointsman|python -m bench|python -m studies|make) [^`<>]+)`", page.read_text()))
    shown = {command for command in named if not re.search(r"\b[A-Z]{2,}\b|\.\.\.", command)}
    said = [command_parsers.problem(command) for command in sorted(shown)]
    # Text may name a command without its arguments, and a group of commands.
    assert [error for error in said if error and not re.search("MissingParameter|NoArgsIsHelp", error)] == []


def test_only_known_marks_are_used() -> None:
    assert {mark for block in BLOCKS for mark in block.marks} <= MARKS


@pytest.mark.parametrize("block", marked, ids=[block.where for block in marked])
def test_commands_that_need_more_than_a_test_has_are_understood(block: Block) -> None:
    assert [said for command in block.commands if (said := command_parsers.problem(command))] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "pointsman instance",
        "pointsman instances --rooter a:1",
        "pointsman simulate --policy",
        "kubectl -n pointsman scale statefulset/engine --replicas 2",
        "kubectl -n pointsman rollout stat statefulset/router",
        "kubectl apply -k deploy/k8s/overlays/huge",
        "docker compose up -d gatevay",
        "make trouble",
        "python -m bench decides",
        "python -m bench gpu --device tpu",
        "python parts/install.py --environment x",
        "pytest tests/unit/test_nowhere.py",
        "deploy/make-money.sh",
        "poinstman instances",
    ],
)
def test_what_is_wrong_is_found(wrong: str) -> None:
    assert command_parsers.problem(wrong)
