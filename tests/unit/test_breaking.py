"""What tools/breaking.sh, a part of `make check`, finds in protos that differ from those of the last release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import REPOSITORY

BUF = str(Path(sys.executable).with_name("buf"))
PROTO = Path("protos/example/v1/example.proto")
RELEASED = """syntax = "proto3";
package example.v1;
enum Kind { KIND_UNSPECIFIED = 0; KIND_HEAVY = 1; KIND_LIGHT = 2; }
message Ask { string id = 1; uint32 tokens = 2; Kind kind = 3; }
message Answer { string id = 1; }
message Note { string text = 1; }
service Example {
  rpc Place(Ask) returns (Answer);
  rpc Watch(Ask) returns (stream Answer);
}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the rules of this checkout, one proto, and its released form of version 1.0.0."""
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    (tmp_path / "pyproject.toml").write_text('version = "1.1.0.dev0"\n')
    (tmp_path / PROTO).parent.mkdir(parents=True)
    (tmp_path / PROTO).write_text(RELEASED)
    (tmp_path / "protos/released").mkdir()
    release(tmp_path, "1.0.0")
    return tmp_path


def release(checkout: Path, version: str) -> None:
    """Add the protos as those of the version, as a release does."""
    command = [BUF, "build", "--exclude-source-info", "-o", f"protos/released/v{version}.binpb"]
    subprocess.run(command, cwd=checkout, check=True, timeout=60)


def check(checkout: Path) -> tuple[int, str]:
    """The exit status of tools/breaking.sh, and what it prints."""
    done = subprocess.run(
        [REPOSITORY / "tools/breaking.sh"],
        cwd=checkout,
        env={"BUF": BUF, "PATH": "/usr/bin:/bin", "HOME": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("", ""),
        ("kind = 3;", "kind = 3; bytes keys = 4;"),
        ("KIND_LIGHT = 2;", "KIND_LIGHT = 2; KIND_HELD = 3;"),
        ("rpc Place", "rpc Explain(Ask) returns (Answer);\n  rpc Place"),
        ("message Note", "message More { string text = 1; }\nmessage Note"),
    ],
    ids=["nothing", "field", "enum value", "rpc", "message"],
)
def test_what_is_added_breaks_nothing(checkout: Path, was: str, becomes: str) -> None:
    (checkout / PROTO).write_text(RELEASED.replace(was, becomes, 1))
    assert check(checkout) == (0, "")


@pytest.mark.parametrize(
    ("was", "becomes", "named"),
    [
        (" uint32 tokens = 2;", "", 'field "2" with name "tokens" on message "Ask"'),
        ("uint32 tokens = 2;", 'reserved 2; reserved "tokens";', 'field "2" with name "tokens" on message "Ask"'),
        ("uint32 tokens = 2;", "uint32 tokens = 4;", 'field "2" with name "tokens" on message "Ask"'),
        ("uint32 tokens = 2;", "uint32 size = 2;", 'Field "2" on message "Ask" changed name'),
        ("uint32 tokens = 2;", "string tokens = 2;", 'Field "2" with name "tokens" on message "Ask" changed type'),
        ("uint32 tokens = 2;", "uint64 tokens = 2;", 'Field "2" with name "tokens" on message "Ask" changed type'),
        (
            "uint32 tokens",
            "repeated uint32 tokens",
            'Field "2" with name "tokens" on message "Ask" changed cardinality',
        ),
        (
            "uint32 tokens = 2;",
            "oneof size { uint32 tokens = 2; }",
            'Field "2" with name "tokens" on message "Ask" moved',
        ),
        (" KIND_LIGHT = 2;", "", 'enum value "2" on enum "Kind"'),
        ("KIND_LIGHT = 2;", "KIND_LIGHT = 3;", 'enum value "2" on enum "Kind"'),
        ("KIND_LIGHT", "KIND_SMALL", 'Enum value "2" on enum "Kind" changed name'),
        ("message Note { string text = 1; }\n", "", 'message "Note"'),
        ("  rpc Place(Ask) returns (Answer);\n", "", 'RPC "Place" on service "Example"'),
        ("Place(Ask)", "Place(Note)", 'RPC "Place" on service "Example" changed request type'),
        ("returns (Answer)", "returns (Note)", 'RPC "Place" on service "Example" changed response type'),
        ("stream Answer", "Answer", 'RPC "Watch" on service "Example" changed'),
        ("service Example", "service Other", 'service "Example"'),
        ("package example.v1", "package example.v2", "example.v1"),
    ],
)
def test_each_kind_of_break_is_found(checkout: Path, was: str, becomes: str, named: str) -> None:
    assert was in RELEASED
    (checkout / PROTO).write_text(RELEASED.replace(was, becomes, 1))
    status, said = check(checkout)
    assert status != 0
    assert named in said


def test_the_newest_release_is_compared(checkout: Path) -> None:
    (checkout / PROTO).write_text(RELEASED.replace("kind = 3;", "kind = 3; bytes keys = 4;"))
    release(checkout, "1.10.0")
    release(checkout, "1.9.0")
    (checkout / PROTO).write_text(RELEASED)
    status, said = check(checkout)
    assert status != 0
    assert 'field "4" with name "keys" on message "Ask"' in said


def test_a_release_has_its_own_protos(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text('version = "1.1.0"\n')
    (checkout / PROTO).write_text(RELEASED.replace("kind = 3;", "kind = 3; bytes keys = 4;"))
    status, said = check(checkout)
    assert status == 1
    assert "protos/released/v1.1.0.binpb is not made of these protos" in said
    release(checkout, "1.1.0")
    assert check(checkout) == (0, "")
