"""Settings come from flags, environment and secret files, in that order of weight."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import pytest
import typer
from pydantic import Field, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from typer.testing import CliRunner, Result

from pointsman_common.io.settings import (
    Entries,
    InvalidSetting,
    Pairs,
    Targets,
    Tokens,
    add_settings_command,
    reason_with_setting,
)
from pointsman_common.io.tls import TlsSettings


class TrackSettings(BaseSettings):
    """One field of each kind that services have."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_TRACK_")
    REMOVED: ClassVar = {"gauge": "1,435 mm"}

    listen: str = Field("127.0.0.1:1", description="where")
    routers: Entries = Field(default_factory=list, description="who")
    sizes: dict[str, float] = Field(default_factory=dict, description="how large")
    wait_s: float = Field(1.5, gt=0, description="how long")
    insecure: bool = Field(False, description="whether")
    file: Path | None = Field(None, description="which")
    password: SecretStr = Field(SecretStr(""), description="what nobody sees")


class Line:
    """A command line with one command, and what it ran with."""

    def __init__(self) -> None:
        self.ran: list[TrackSettings] = []
        self.app = typer.Typer()
        add_settings_command(self.app, "track", TrackSettings, self.ran.append, help_="Lay a track.")
        self.app.command("other")(lambda: None)  # An app with one command only would not take the command's name.

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(self.app, ["track", *words])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    for field in TrackSettings.model_fields:
        monkeypatch.delenv(f"POINTSMAN_TRACK_{field.upper()}", raising=False)
    return Line()


def test_defaults(line: Line) -> None:
    assert line().exit_code == 0
    assert line.ran == [TrackSettings()]


def test_flags(line: Line) -> None:
    done = line(
        "--listen", "0.0.0.0:2", "--routers", "a:1", "--routers", "b:2", "--wait-s", "2", "--insecure", "--file", "x"
    )
    assert done.exit_code == 0, done.output
    (ran,) = line.ran
    assert (ran.listen, ran.routers, ran.wait_s, ran.insecure, ran.file) == (
        "0.0.0.0:2",
        ["a:1", "b:2"],
        2.0,
        True,
        Path("x"),
    )


def test_environment_and_flags_that_win(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_ROUTERS", " a:1\n  b:2 ")
    monkeypatch.setenv("POINTSMAN_TRACK_WAIT_S", "3")
    monkeypatch.setenv("POINTSMAN_TRACK_INSECURE", "true")
    assert line("--wait-s", "4", "--no-insecure").exit_code == 0
    (ran,) = line.ran
    assert (ran.routers, ran.wait_s, ran.insecure) == (["a:1", "b:2"], 4.0, False)


def test_a_flag_holds_a_list_as_the_environment_does(line: Line) -> None:
    assert line("--routers", "http://a:1?gpus=0,1 b:2", "--routers", "c:3").exit_code == 0
    assert line.ran[0].routers == ["http://a:1?gpus=0,1", "b:2", "c:3"]


def test_no_flag_leaves_the_environment(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_INSECURE", "true")
    assert line().exit_code == 0
    assert line.ran[0].insecure


@pytest.mark.parametrize("value", ["0", "soon"])
def test_a_bad_value_is_told_with_the_flag_that_holds_it(
    line: Line, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_WAIT_S", "1")
    done = line("--wait-s", value)
    assert done.exit_code == 2
    assert done.output.startswith("pointsman track: --wait-s: Input should be ")
    assert line.ran == []


def test_a_bad_value_in_the_environment_is_told_with_the_variable_and_not_shown(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_WAIT_S", "s3cret")
    done = line()
    assert done.exit_code == 2
    assert done.output.startswith("pointsman track: POINTSMAN_TRACK_WAIT_S: Input should be ")
    assert "s3cret" not in done.output


def test_an_unparsable_value_in_the_environment_ends_with_status_2(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_SIZES", "a:1")
    done = line()
    assert (done.exit_code, done.output) == (2, "pointsman track: POINTSMAN_TRACK_SIZES: no JSON text\n")


def test_variables_that_no_setting_reads_are_told_with_the_nearest(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUTER", "LENGTH_M", "GAUGE", "PORT", "SERVICE_HOST", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"POINTSMAN_TRACK_{name}", "1")
    monkeypatch.setenv("POINTSMAN_POINTS_WAIT", "1")
    monkeypatch.setenv("POINTSMAN_TRACK_WAIT_S", "2")
    done = line()
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "pointsman track: POINTSMAN_TRACK_GAUGE has no effect: it is no setting any more; its value is 1,435 mm",
        "pointsman track: POINTSMAN_TRACK_LENGTH_M has no effect: it is no setting",
        "pointsman track: POINTSMAN_TRACK_ROUTER has no effect: it is no setting; is POINTSMAN_TRACK_ROUTERS meant?",
    ]


def test_a_variable_that_all_services_read_may_be_misspelt(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TlsSettings.model_config["env_prefix"] == "POINTSMAN_TLS_"
    monkeypatch.setenv("POINTSMAN_TLS_CRT", "/tls.crt")
    assert (
        line().stderr
        == "pointsman track: POINTSMAN_TLS_CRT has no effect: it is no setting; is POINTSMAN_TLS_CERT meant?\n"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("POINTSMAN_GATWAY_LISTEN", "POINTSMAN_GATEWAY_LISTEN"),
        ("POINTSMAN_ROUTERS_LISTEN", "POINTSMAN_ROUTER_LISTEN"),
        ("POINTSMAN_TOKENS_DIR", "POINTSMAN_TOKEN_DIR"),
        ("POINTSMAN_OPERATER_TOKEN", "POINTSMAN_OPERATOR_TOKEN"),
        # Other parts', programs' own, and those of others.
        ("POINTSMAN_AGENT_LISTEN", ""),
        ("POINTSMAN_API_KEY", ""),
        ("POINTSMAN_TEST_ENGINE_PYTHON", ""),
        ("GATWAY_LISTEN", ""),
    ],
)
def test_the_part_of_a_variable_may_be_misspelt(
    line: Line, given: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(given, "x")
    told = f"pointsman track: {given} has no effect: it is no setting; is {meant} meant?\n" if meant else ""
    assert line().stderr == told


@pytest.mark.parametrize("name", ["TRACK_FILE", "TOKEN_DIR", "TLS_CA"])
@pytest.mark.parametrize("text", ["", "  "])
def test_a_path_that_is_set_to_nothing_is_an_error(
    line: Line, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as the working directory, or as not set: a server would let everybody in."""
    monkeypatch.setenv(f"POINTSMAN_{name}", text)
    done = line()
    told = f"pointsman track: POINTSMAN_{name}: it is set, but empty: give a path, or do not set it\n"
    assert (done.exit_code, done.stderr) == (2, told)
    assert line.ran == []


def test_a_flag_of_a_path_that_is_empty_is_an_error(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_FILE", "a")
    assert line("--file", "").stderr.startswith("pointsman track: --file: it is set, but empty")
    monkeypatch.setenv("POINTSMAN_TRACK_FILE", "")
    assert line("--file", "a").exit_code == 0


def test_a_flag_of_a_former_setting_is_told_with_its_value(line: Line) -> None:
    done = line("--gauge", "1000")
    assert (done.exit_code, done.stderr) == (
        2,
        "pointsman track: --gauge is no setting any more; its value is 1,435 mm\n",
    )
    assert line.ran == []


@pytest.mark.parametrize(("words", "named"), [([], "POINTSMAN_TRACK_LISTEN"), (["--listen", "a:1"], "--listen")])
def test_a_value_that_only_the_command_refuses_is_told_in_the_same_way(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(settings: TrackSettings) -> None:
        raise InvalidSetting(settings, "listen", "is taken")

    monkeypatch.setenv("POINTSMAN_TRACK_LISTEN", "b:2")
    app = typer.Typer()
    add_settings_command(app, "track", TrackSettings, run, help_="Lay a track.")
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.output) == (2, f"pointsman track: {named}: is taken\n")


def test_a_value_without_its_flag_is_told(line: Line) -> None:
    done = line("0.0.0.0:2", "--wait-s", "2")
    assert done.exit_code == 2
    assert "'0.0.0.0:2' stands behind no flag; a value follows its flag, as in --listen VALUE" in " ".join(
        done.output.replace("│", "").split()
    )
    assert line.ran == []


def test_a_list_with_commas_is_told_how_lists_are_written() -> None:
    assert TypeAdapter(Pairs).validate_python("a=/x,y b=/z") == ["a=/x,y", "b=/z"]
    for kind, given in ((Targets, "a:1,b:2"), (Targets, "a:1, b:2"), (Pairs, "a=/x,b=/z")):
        with pytest.raises(ValidationError, match="several are separated by blanks, not by commas"):
            TypeAdapter(kind).validate_python(given)


def test_help_names_every_field_and_its_default(line: Line) -> None:
    text = (
        CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(line.app, ["track", "--help"]).output
    )
    for field in TrackSettings.model_fields:
        assert f"--{field.replace('_', '-')}" in text
    assert "1.5" in text
    assert "--listen may be given as POINTSMAN_TRACK_LISTEN" in text
    assert "--gauge" not in text


def test_secrets_are_not_shown(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TRACK_PASSWORD", "s3cret")
    assert line().exit_code == 0
    assert "s3cret" not in repr(line.ran[0])
    assert line.ran[0].password.get_secret_value() == "s3cret"


def test_token_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_TOKEN", "from-env")
    tokens = Tokens()
    assert tokens.of("agent") == "from-env"
    assert tokens.of("gateway") == ""
    assert "from-env" not in repr(tokens)


def test_token_file_wins_and_loses_its_newline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent").write_text("from-file\n")
    monkeypatch.setenv("POINTSMAN_TOKEN_DIR", str(tmp_path))
    monkeypatch.setenv("POINTSMAN_AGENT_TOKEN", "from-env")
    monkeypatch.setenv("POINTSMAN_OPERATOR_TOKEN", "operator-env")
    tokens = Tokens()
    assert tokens.of("agent") == "from-file"
    assert tokens.of("operator") == "operator-env"
    assert tokens.of("gateway") == ""


def test_rotated_token_file_is_read_again(tmp_path: Path) -> None:
    tokens = Tokens(token_dir=tmp_path)
    (tmp_path / "gateway").write_text("old")
    assert tokens.of("gateway") == "old"
    (tmp_path / "gateway").write_text("new")
    assert tokens.of("gateway") == "new"


def test_of_two_tokens_the_first_is_shown_and_both_are_taken(tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text("new\n\n  old \n")
    reader = Tokens(token_dir=tmp_path).reader("gateway")
    assert reader.accepted == ("new", "old")
    assert reader.shown == "new"
    assert Tokens(token_dir=tmp_path).reader("agent").accepted == ()


@pytest.mark.parametrize("text", ["", "\n", "secret\nb\nc\n"])
def test_a_token_file_of_other_lines_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "gateway").write_text(text)
    with pytest.raises(ValueError, match="gateway: one token is needed") as refused:
        Tokens(token_dir=tmp_path).of("gateway")
    assert "secret" not in str(refused.value)


def test_a_secret_of_a_variable_loses_its_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_TOKEN", "  from-env\n")
    assert Tokens().of("agent") == "from-env"


@pytest.mark.parametrize(("text", "why"), [(" \n", "blank"), ("sec\nret", "no header"), ("secret\u00e9", "no header")])
def test_a_secret_that_no_header_can_have_is_refused_and_not_shown(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_TOKEN", text)
    with pytest.raises(ValueError, match=why) as refused:
        Tokens.from_environment()
    assert "sec" not in str(refused.value).replace("secret, or do not set", "")
    monkeypatch.delenv("POINTSMAN_AGENT_TOKEN")
    if text.strip() and "\n" not in text:
        (tmp_path / "agent").write_text(text)
        with pytest.raises(ValueError, match=f"agent: .*{why}"):
            Tokens(token_dir=tmp_path).of("agent")


def test_what_must_be_given_is_named_as_a_flag_with_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class GivenSettings(BaseSettings):
        model_config = SettingsConfigDict(env_prefix="POINTSMAN_GIVEN_")
        engine_url: str = Field(description="where the engine is")

    monkeypatch.delenv("POINTSMAN_GIVEN_ENGINE_URL", raising=False)
    app = typer.Typer()
    add_settings_command(app, "given", GivenSettings, lambda _: None, help_="Be given.")
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2
    assert (
        done.output
        == "pointsman given: --engine-url (or POINTSMAN_GIVEN_ENGINE_URL) must be given: where the engine is\n"
    )


def test_a_file_that_cannot_be_used_is_told_with_its_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Files(BaseSettings):
        model_config = SettingsConfigDict(env_prefix="POINTSMAN_FILES_")
        keys_file: Path | None = None

    absent = tmp_path / "absent"
    with pytest.raises(FileNotFoundError) as error:
        absent.read_text()
    said = f"--keys-file {absent}: No such file or directory"
    assert reason_with_setting(error.value, Files(keys_file=absent)) == said
    monkeypatch.setenv("POINTSMAN_FILES_KEYS_FILE", str(absent))
    assert reason_with_setting(error.value, Files()) == said.replace("--keys-file", "POINTSMAN_FILES_KEYS_FILE")
    assert reason_with_setting(ValueError("x"), Files()) == "x"
    # As errors of a file's content begin.
    line = ValueError(f"{absent}:1: expected TENANT:KEY")
    assert reason_with_setting(line, Files()) == f"POINTSMAN_FILES_KEYS_FILE {absent}:1: expected TENANT:KEY"


def test_settings_that_do_not_fit_together_are_told_with_what_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class RangeSettings(BaseSettings):
        model_config = SettingsConfigDict(env_prefix="POINTSMAN_RANGE_")
        least: int = Field(1, description="least")
        most_of_all: int = Field(2, description="most")

        @model_validator(mode="after")
        def _in_order(self) -> Self:
            if self.least > self.most_of_all:
                raise ValueError("least must be at most most_of_all")
            return self

    app = typer.Typer()
    add_settings_command(app, "range", RangeSettings, lambda _: None, help_="Be a range.")
    done = CliRunner().invoke(app, ["--least", "3"])
    said = "pointsman range: --least must be at most POINTSMAN_RANGE_MOST_OF_ALL\n"
    assert (done.exit_code, done.output) == (2, said)
