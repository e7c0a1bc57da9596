"""Operators' commands with unusable arguments: a message and exit status 2, without a traceback."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import typer
from google.protobuf import timestamp_pb2
from typer.testing import CliRunner, Result

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_cli import all_routers, fleet_commands, router_call
from pointsman_cli.doctor_findings import EngineAccess, Finding
from pointsman_common.io.auth import bearer
from pointsman_common.io.tls import server_context
from tests.support.certificates import Authority
from tests.support.pages import serving

COMMANDS = (
    ["instances"],
    ["decisions"],
    ["explain", "r-1"],
    ["drain", "a"],
    ["cordon", "a"],
    ["uncordon", "a"],
    ["weight", "a", "0.1"],
    ["what-if", "--policy", "sticky"],
    ["set-policy", "sticky"],
    ["doctor"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=[words[0] for words in COMMANDS])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TLS_CA": "nowhere.pem"}, "nowhere.pem"),
        ({"TLS_CA": "garbage.pem"}, "TLS to router"),
        ({"TLS_CERT": "garbage.pem"}, "belong together"),
        ({"TLS_CERT": "garbage.pem", "TLS_KEY": "garbage.pem"}, "TLS to router"),
        ({"TOKEN_DIR": "tokens"}, "the operator's token"),
        (
            {"TOKEN_DIR": "none"},
            "none: it has none of the files agent, gateway, operator, observer: write a token into one",
        ),
    ],
)
def test_what_cannot_be_used_is_said(
    command: list[str], variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "garbage.pem").write_text("no certificate")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/operator").write_bytes(b"\xff\xfe")
    (tmp_path / "none").mkdir()
    for name, file in variables.items():
        monkeypatch.setenv(f"POINTSMAN_{name}", str(tmp_path / file))
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, [*command, "--router", "127.0.0.1:1"])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    assert done.output.startswith("pointsman: ")
    assert said in done.output


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_folder_of_tokens_is_not_one_without_tokens(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TOKEN_DIR", text)
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["instances", "--router", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "POINTSMAN_TOKEN_DIR: it is set, but empty: give a path, or do not set it" in done.output


def test_a_route_class_that_there_is_not_is_said() -> None:
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["decisions", "--route-class", "warm"])
    assert done.exit_code == 2
    assert done.output == "pointsman: --route-class warm: one of LIGHT, MEDIUM, HEAVY is needed\n"


@pytest.mark.parametrize(
    ("files", "variables", "shown"),
    [
        (["observer"], [], "observer of the folder"),
        ([], ["OBSERVER"], "OBSERVER of the environment"),
        (["observer", "operator"], [], "operator of the folder"),
        (["observer"], ["OPERATOR"], "OPERATOR of the environment"),
        (["agent"], [], ""),
    ],
)
def test_who_has_an_observer_s_token_alone_shows_that(
    files: list[str], variables: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_TOKEN_DIR", str(tmp_path))
    for role in files:
        (tmp_path / role).write_text(f"{role} of the folder\n")
    for role in variables:
        monkeypatch.setenv(f"POINTSMAN_{role}_TOKEN", f"{role} of the environment")
    assert router_call.credentials() == bearer(shown)


def decided(reason: str, *steps: tuple[str, str], **fields: Any) -> fleet_pb2.Decision:
    decision = fleet_pb2.Decision(decision_id="r-1", reason=reason, **fields)
    for number, (instance_id, step_reason) in enumerate(steps):
        decision.steps.add(
            index=number, reason=step_reason, kind=placement_pb2.STEP_KIND_SERVE
        ).instance.instance_id = instance_id
    return decision


def test_explain_says_first_where_it_went_and_why_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    light = fleet_pb2.ROUTE_CLASS_LIGHT
    decision = decided("session_affinity", ("a", "session_affinity"), input_tokens=14, route_class=light)
    fleet_commands._print_decision(decision)
    first, _, tokens, *_ = lines = capsys.readouterr().out.splitlines()
    assert first == "r-1  a  session_affinity: kept on its session's instance"
    assert "-> LIGHT (under 5,000 new tokens, or over 50% of the prompt cached)" in tokens
    assert "step 0: SERVE on a (session_affinity)" in lines


def test_explain_says_what_an_engine_does_not_report(capsys: pytest.CaptureFixture[str]) -> None:
    decision = decided("session_affinity", ("a", "session_affinity"))
    for name, kv_usage, unknown in (("a", 0.0, ["kv_usage"]), ("b", 0.25, [])):
        decision.candidates.add(instance_id=name, kv_usage=kv_usage, unknown=unknown)
    fleet_commands._print_decision(decision)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "?" in next(row for row in rows if row[:2] == ["->", "a"])
    assert "25%" in next(row for row in rows if row[:1] == ["b"])


def test_explain_tells_what_is_unknown_of_an_end_from_zero(capsys: pytest.CaptureFixture[str]) -> None:
    unknown, none = decided("hot", ("a", "hot")), decided("hot", ("a", "hot"))
    unknown.finished.SetInParent()
    none.finished.cached_tokens, none.finished.http_status, none.finished.timings.done_ms = 0, 200, 9.0
    said = []
    for decision in (unknown, none):
        fleet_commands._print_decision(decision)
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said == [
        "the engine said: nothing about cached tokens; TTFT -",
        "the engine said: 0 cached; TTFT -, done after 9.0 ms, HTTP 200",
    ]


def test_explain_says_why_a_plan_has_its_form_and_how_its_instance_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet_commands._print_decision(decided("decode_idle", ("a", "least_load_x_work")))
    out = capsys.readouterr().out
    assert out.startswith(
        "r-1  a  decode_idle: no offload, since no decode runs there that a prefill would slow down\n"
    )
    assert "(least_load_x_work: lowest load x work, that is open requests x tokens to compute)" in out
    fleet_commands._print_decision(decided("held"))
    assert capsys.readouterr().out.startswith("r-1  held  held: waits for the instance")
    fleet_commands._print_decision(decided("of_a_later_version", ("p", ""), ("d", ""), ("d", "")))
    assert capsys.readouterr().out.startswith("r-1  p -> d  of_a_later_version\n")


def shown(monkeypatch: pytest.MonkeyPatch, decision: fleet_pb2.Decision, *flags: str) -> str:
    """Return what `pointsman decisions` prints of a decision."""
    answer = fleet_pb2.ListDecisionsResponse(decisions=[decision])
    monkeypatch.setattr(fleet_commands, "newest_decisions", lambda *_: answer)
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["decisions", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("session", ["[/closes]", "[bold]", "agent:cat:1"])
def test_names_of_clients_and_instances_are_shown_as_they_are(
    session: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = decided("hot", ("[fd00::1]:8000", "hot"), session_id=session, notes=["prefill_failed:[fd00::2]:8000"])
    decision.candidates.add(instance_id="[fd00::1]:8000")
    listed = shown(monkeypatch, decision)
    assert session in listed
    assert "[fd00::1]:8000" in listed
    fleet_commands._print_decision(decision)
    out = capsys.readouterr().out
    assert f"session {session} " in out
    assert "step 0: SERVE on [fd00::1]:8000 (hot)" in out
    assert "(prefill_failed:[fd00::2]:8000)" in out
    assert ["->", "[fd00::1]:8000"] in [line.split()[:2] for line in out.splitlines()]


@pytest.mark.parametrize("command", [["decisions", "--since"], ["decisions", "--until"], ["drain", "a", "--wait"]])
@pytest.mark.parametrize("seconds", ["nan", "-5", "-inf"])
def test_seconds_that_are_none_are_refused(command: list[str], seconds: str) -> None:
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, [*command, seconds, "--router", "127.0.0.1:1"])
    assert done.exit_code == 2, done.exception
    assert "0 or more, is needed" in done.output


@pytest.mark.parametrize("seconds", ["inf", "1e30"])
def test_decisions_may_be_of_any_age(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "r-1" in shown(monkeypatch, decided("hot"), "--since", seconds)


@pytest.mark.parametrize(("margin", "text"), [(0.42, "0.42"), (4016.0, "4,016"), (999.7, "1,000"), (0.0, "0")])
def test_margins_in_seconds_are_no_zeros(
    margin: float, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = decided("hot", runner_up="b", margin=margin, figures={"wait_s": margin})
    assert text in shown(monkeypatch, decision).split()
    fleet_commands._print_decision(decision)
    lines = capsys.readouterr().out.splitlines()
    assert f"compared wait_s {text}" in lines
    assert f"runner-up b, margin {text}" in lines


def test_times_of_decisions_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XXX-5:30")
    time.tzset()
    try:
        made = timestamp_pb2.Timestamp(seconds=1_700_000_000, nanos=125_000_000)
        assert "03:43:20.125" in shown(monkeypatch, decided("hot", time=made))
    finally:
        monkeypatch.undo()
        time.tzset()


def dry_run(*flags: str) -> Result:
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["explain", *flags])
    assert isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    (tmp_path / "prompt").write_text("hello")
    return str(tmp_path / "prompt")


def test_a_dry_run_trusts_the_fleets_authority(prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "authority")
    signed = authority.sign("gateway")
    body = b'{"decision": {"decisionId": "dry-run"}}'
    with serving(lambda _: (200, body), server_context(signed.cert, signed.key, None)) as url:
        said = dry_run("--prompt", prompt, "--model", "m", "--gateway", url).output
        assert f"{url}/v1/completions: its certificate is not trusted: set POINTSMAN_TLS_CA (" in said
        monkeypatch.setenv("POINTSMAN_TLS_CA", str(authority.ca))
        assert fleet_commands._dry_run(url, Path(prompt), "m", "").decision_id == "dry-run"
        monkeypatch.setenv("POINTSMAN_TLS_CA", prompt)
        unusable = dry_run("--prompt", prompt, "--model", "m", "--gateway", url)
    assert unusable.exit_code == 2
    assert "no certificates in PEM" in unusable.output


@pytest.mark.parametrize("gateway", ["http://[::1", "host:port", "ftp://host:1", "two words:1", "http://"])
def test_an_address_that_is_none_is_refused(gateway: str, prompt: str) -> None:
    done = dry_run("--prompt", prompt, "--gateway", gateway)
    assert done.exit_code == 2
    assert "HOST:PORT" in done.output


def test_a_prompt_or_a_session_that_cannot_be_sent_is_refused(tmp_path: Path, prompt: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    done = dry_run("--prompt", str(tmp_path / "bytes"), "--model", "m")
    assert (done.exit_code, "UTF-8" in done.output) == (2, True)
    done = dry_run("--prompt", prompt, "--model", "m", "--session", "caf\u00e9 \n")
    assert (done.exit_code, "printable ASCII" in done.output) == (2, True)


def test_a_key_with_a_line_feed_is_sent_without_it_and_no_key_is_shown(
    prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_API_KEY", "secret\n")
    with serving(lambda _: (200, b"{}")) as url:
        assert "no gateway" in dry_run("--prompt", prompt, "--model", "m", "--gateway", url).output
    monkeypatch.setenv("POINTSMAN_API_KEY", "sec\nret")
    done = dry_run("--prompt", prompt, "--model", "m")
    assert (done.exit_code, "ret" in done.output) == (2, False)


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"data": 1}', b'{"decision": 1}', b'{"decision": {"time": "x"}}']
)
@pytest.mark.parametrize("model", [[], ["--model", "m"]])
def test_what_answers_like_no_gateway_is_told_as_such(body: bytes, model: list[str], prompt: str) -> None:
    with serving(lambda _: (200, body)) as url:
        done = dry_run("--prompt", prompt, "--gateway", url, *model)
    assert done.exit_code == 1
    assert "no gateway" in done.output or "no JSON object" in done.output


def test_decisions_of_several_short_pages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fleet:
        def ListDecisions(self, asked: fleet_pb2.ListDecisionsRequest, **_: Any) -> fleet_pb2.ListDecisionsResponse:
            assert asked.filter.tenant == "t"
            number = int(asked.page_token or 9)
            made = [
                fleet_pb2.Decision(decision_id=f"r-{at}") for at in range(number, number - min(asked.page_size, 2), -1)
            ]
            return fleet_pb2.ListDecisionsResponse(decisions=made, next_page_token=str(number - len(made)))

    routers = all_routers.Routers({"r": "router:1"}, {}, "r")
    monkeypatch.setattr(all_routers, "reachable_routers", lambda _: routers)
    monkeypatch.setattr(
        all_routers, "ask", lambda _, method, asked, timeout_s: method(Fleet())(asked, timeout=timeout_s)
    )
    wanted = fleet_pb2.ListDecisionsRequest(filter=fleet_pb2.DecisionFilter(tenant="t"), page_size=5)
    listed = all_routers.newest_decisions("router:1", wanted).decisions
    assert [decision.decision_id for decision in listed] == ["r-9", "r-8", "r-7", "r-6", "r-5"]


def test_instances_that_only_their_pools_owner_knows_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fleet(*known: tuple[str, str, int]) -> fleet_pb2.ListInstancesResponse:
        answer = fleet_pb2.ListInstancesResponse()
        for name, model, requests in known:
            status = answer.instances.add(num_requests=requests)
            status.instance.instance_id, status.instance.model = name, model
        return answer

    # The agents of b and d do not reach the router that is asked, and that of x does not reach the owner of m.
    answers = {
        "asked:1": fleet(("a", "m", 0), ("c", "own", 1), ("x", "m", 0)),
        "owner:1": fleet(("a", "m", 5), ("b", "m", 7), ("d", "own", 9)),
    }
    routers = all_routers.Routers({"r1": "asked:1", "r2": "owner:1"}, {"m": "r2", "own": "r1"}, "r1")
    monkeypatch.setattr(all_routers, "routers_of", lambda _: routers)
    monkeypatch.setattr(all_routers, "_list_instances", lambda router, _: answers[router])
    listed = [
        (status.instance.instance_id, status.num_requests)
        for status in all_routers.instances_of("asked:1")[0].instances
    ]
    assert listed == [("a", 5), ("b", 7), ("c", 1), ("x", 0)]


@pytest.mark.parametrize(
    ("flags", "told"), [([], ["m", "other"]), (["--model", "alias"], ["m"]), (["--model", "m"], ["m"])]
)
def test_the_policy_of_a_pool_is_told_by_any_name_of_its_model(
    flags: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fleet_pb2.ListInstancesResponse(policy=fleet_pb2.Policy(name="auto"))
    for model in ("m", "other")[: len(told)]:
        answer.instances.add().instance.model = model
    policies = {name: fleet_pb2.PoolPolicy(name="unified") for name in ("m", "other")}
    pools = [fleet_pb2.PoolStatus(model=name, policy=policy) for name, policy in policies.items()]
    replicas = fleet_pb2.ListReplicasResponse(pools=pools)
    monkeypatch.setattr(fleet_commands, "instances_of", lambda *_: (answer, []))
    monkeypatch.setattr(fleet_commands, "orders_of", lambda _: [])
    monkeypatch.setattr(all_routers, "reachable_routers", lambda _: all_routers.Routers({"r": "r:1"}, {}, "r"))
    monkeypatch.setattr(all_routers, "ask", lambda *_: replicas)
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["instances", *flags], catch_exceptions=False)
    assert [line.partition(":")[0] for line in done.output.splitlines() if ": unified" in line] == told


def test_doctor_sends_no_key_that_a_header_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineAccess] = []

    def examine(*given: Any) -> list[Finding]:
        asked.append(given[-1])
        return []

    monkeypatch.setattr(fleet_commands, "examine", examine)
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    monkeypatch.setenv("POINTSMAN_GATEWAY_ENGINE_API_KEY", "secret\n")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    assert [access.api_key for access in asked] == ["secret"]
    monkeypatch.setenv("POINTSMAN_GATEWAY_ENGINE_API_KEY", "sec\nret")
    done = CliRunner().invoke(app, ["doctor"])
    assert (done.exit_code, "ret" in done.output, len(asked)) == (2, False, 1)


def test_an_instance_without_a_report_has_no_load_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = fleet_pb2.ListInstancesResponse()
    for name in ("new", "idle"):
        answer.instances.add(state=fleet_pb2.INSTANCE_STATE_READY).instance.instance_id = name
    answer.instances[1].load.healthy = True
    monkeypatch.setattr(fleet_commands, "instances_of", lambda *_: (answer, []))
    monkeypatch.setattr(fleet_commands, "orders_of", lambda _: [])
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["instances"], catch_exceptions=False)
    rows = [line.split() for line in done.output.splitlines()]
    assert rows[1][5:8] == ["-", "-", "-"]
    assert rows[2][5:8] == ["0", "0", "0%"]


def test_what_terminals_obey_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding(Finding.WARN, "a engine", "answers 500: \x1b[2J\x1b]0;owned\x07 [red]busy\nnow")
    monkeypatch.setattr(fleet_commands, "examine", lambda *_: [found])
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    done = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert "answers 500: \ufffd[2J\ufffd]0;owned\ufffd [red]busy now" in done.output
