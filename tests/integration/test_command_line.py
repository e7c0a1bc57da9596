"""`pointsman up` with emulated engines, and every command that queries the fleet, those of the pages included."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from pointsman_cli import doctor
from pointsman_cli.doctor_findings import Finding
from pointsman_cli.doctor_redis import redis_finding
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from tests.support.docs.command_parsers import command_line
from tests.support.docs.shell_blocks import BLOCKS, PAGES, Block
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import Process, free_port
from tests.support.processes.redis import redis_answers, redis_command
from tests.support.repository import REPOSITORY

READY_WITHIN_S = 90.0
# For outside addresses. Nothing listens there, so what is sent through it to the fleet fails.
PROXY = {"http_proxy": f"http://127.0.0.1:{free_port()}"}
# Replacements for the programs that the pages' commands call. They do not check grpcurl's own flags.
SHIMS = {
    "pointsman": f'PYTHONPATH={REPOSITORY} exec {sys.executable} -m pointsman_cli.main "$@"',
    "grpcurl": """data=()
while [[ $1 == -* ]]; do
  case $1 in -plaintext) shift ;; -d) data=(-d "$2"); shift 2 ;; *) echo "grpcurl $1?"; exit 2 ;; esac
done
if [ "$2" = list ]; then asked="--list-services http://$1"; else asked="http://$1/$2"; fi
exec buf curl --protocol grpc --http2-prior-knowledge "${data[@]}" $asked""",
}


@dataclass
class Fleet:
    """A running fleet's addresses, and a way to run commands against it."""

    gateway: str
    router: str
    console: str
    metrics: str
    agent_metrics: str
    engines: list[str]
    tree: Process
    log: Path

    def ask(self, *arguments: str, status: int = 0) -> str:
        """What a `pointsman` command prints; its exit status must be `status`."""
        command, environment = pointsman_command(*arguments), os.environ | PROXY
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, env=environment)
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("up")
    engines = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    started = []
    for number, url in enumerate(engines):
        port = url.rpartition(":")[2]
        flags = ["--port", port, "--speedup", "50"]
        started.append(
            Process(f"engine{number}", pointsman_command("emulate", *flags), folder / f"e{number}.log", cwd=REPOSITORY)
        )
    gateway, router, console, metrics, agent = (f"127.0.0.1:{free_port()}" for _ in range(5))
    flags = ["--listen", gateway, "--router-listen", router, "--router-metrics", metrics, "--agent-metrics", agent]
    flags += ["--console", console, "--state-dir", str(folder / "agent")]
    flags += [part for url in engines for part in ("--engine", url)]
    log = folder / "decisions.jsonl"
    environment = PROXY | {"POINTSMAN_ROUTER_DECISION_LOG_FILE": str(log)}
    up = Process("up", pointsman_command("up", *flags), folder / "up.log", env=environment, cwd=REPOSITORY)
    started.append(up)
    try:
        for process in started:
            process.start()
        up.wait_ready(lambda: "OpenAI API" in up.log.read_text(), within_s=READY_WITHIN_S)
        yield Fleet(f"http://{gateway}", router, f"http://{console}", metrics, agent, engines, up, log)
    finally:
        for process in reversed(started):
            process.stop(within_s=40)


def test_up_serves_and_its_decisions_can_be_questioned(fleet: Fleet) -> None:
    with openai.OpenAI(base_url=f"{fleet.gateway}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": "set the points " * 40}],
            max_tokens=4,
            extra_headers={"X-Session-ID": "asked"},
        )
    decision, instance = answer.headers["X-Pointsman-Decision"], answer.headers["X-Pointsman-Instance"]
    listed = json.loads(fleet.ask("instances", "--router", fleet.router, "--json"))
    assert {instance["instance"]["url"] for instance in listed["instances"]} == set(fleet.engines)
    assert all(instance["state"] == "INSTANCE_STATE_READY" for instance in listed["instances"])
    assert instance in fleet.ask("instances", "--router", fleet.router)
    assert decision in fleet.ask("decisions", "--router", fleet.router, "--session", "asked")
    explained = fleet.ask("explain", decision, "--router", fleet.router)
    assert "least_load_x_work" in explained
    assert instance in explained
    assert "the engine said: 0 cached" in explained
    assert "NOT_FOUND" in _failed("explain", "nothing", "--router", fleet.router)


def test_a_prompt_in_a_file_is_explained_and_not_sent(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("where would this go " * 30)
    before = fleet.ask("decisions", "--router", fleet.router, "--json")
    explained = json.loads(fleet.ask("explain", "--prompt", str(file), "--gateway", fleet.gateway, "--json"))
    assert explained["outcome"] == "DECISION_OUTCOME_DRY_RUN"
    assert len(explained["candidates"]) == 2
    assert fleet.ask("decisions", "--router", fleet.router, "--json") == before


def test_the_doctor_finds_a_sound_fleet_sound_and_says_what_is_wrong(fleet: Fleet) -> None:
    flags = ["--router", fleet.router, "--gateway", fleet.gateway]
    healthy = fleet.ask("doctor", *flags)
    assert "FAIL" not in healthy
    assert "warn" not in healthy
    assert "its tokens equal the engine's" in healthy
    assert fleet.ask("doctor", "--router", fleet.router).count(f"gateway {fleet.gateway}") == 1, "the router knows it"
    nowhere = f"127.0.0.1:{free_port()}"
    sick = fleet.ask(
        "doctor", "--router", nowhere, "--gateway", f"http://{nowhere}", "--redis-url", f"redis://{nowhere}", status=1
    )
    assert sick.count("FAIL") == 3
    assert "routers that use it place degraded" in sick


def test_the_doctor_asks_redis_as_the_user_that_the_secrets_are_made_for(tmp_path: Path) -> None:
    secrets, port = tmp_path / "secrets", free_port()
    subprocess.run([REPOSITORY / "deploy/make-secrets.sh", secrets], check=True, capture_output=True)
    policy = ("--maxmemory-policy", "noeviction")
    flags = ("--aclfile", str(secrets / "redis-users.acl"), *policy, "--save", "")
    server = Process("redis", redis_command(port, tmp_path, *flags), tmp_path / "redis.log")
    server.start()
    try:
        server.wait_ready(lambda: redis_answers(port), within_s=READY_WITHIN_S)
        url = f"redis://pointsman:{(secrets / 'redis-password').read_text()}@127.0.0.1:{port}/0"
        said = redis_finding(url)
        assert (said.level, said.found.partition(", ")[2]) == (Finding.OK, "noeviction")
        refused = redis_finding(f"redis://pointsman:wrong@127.0.0.1:{port}/0")
        assert refused.found.startswith("AuthenticationError: it refuses the user or password in redis_url")
        assert redis_finding(f"redis://127.0.0.1:{port}/0").advice == "give redis_url a user and its password"
    finally:
        server.kill()


def test_the_console_is_where_up_says(fleet: Fleet) -> None:
    assert f"console      {fleet.console}" in fleet.tree.log.read_text()
    with urllib.request.urlopen(fleet.console, timeout=10) as page:
        assert "<title>Pointsman</title>" in page.read().decode()


def test_draining_by_command(fleet: Fleet) -> None:
    name = fleet.engines[0].removeprefix("http://")
    assert "is DRAINING" in fleet.ask("drain", name, "--router", fleet.router)
    assert "is READY" in fleet.ask("drain", name, "--router", fleet.router, "--resume")


@pytest.fixture(scope="module")
def filled_in(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Text of the pages (a regular expression) -> its value in this fleet, after some turns of session s1."""
    decision = instance = ""
    with openai.OpenAI(base_url=f"{fleet.gateway}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        for turn in range(3):
            answer = client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": "which way does the train go? " * (40 + turn)}],
                max_tokens=4,
                extra_headers={"X-Session-ID": "s1"},
            )
            decision, instance = answer.headers["X-Pointsman-Decision"], answer.headers["X-Pointsman-Instance"]
    prompt = tmp_path_factory.mktemp("pages") / "prompt"
    prompt.write_text("where would this go " * 30)
    token = prompt.with_name("gateway")
    token.write_text("old")  # without a newline at the end, as make-secrets.sh writes it
    return {
        r"127\.0\.0\.1:50051\b": fleet.router,
        r"127\.0\.0\.1:8001\b": instance,
        r"127\.0\.0\.1:8080\b": fleet.gateway.removeprefix("http://"),
        r"127\.0\.0\.1:9100\b": fleet.metrics,
        r"127\.0\.0\.1:9101\b": fleet.agent_metrics,
        r"127\.0\.0\.1:9102\b": fleet.console.removeprefix("http://"),
        r"\bDECISION\b": decision,
        r"\bINSTANCE\b": instance,
        r"\bMODEL\b": model,
        r"\bPROMPT_FILE\b": str(prompt),
        r"\bsecrets/gateway\b": str(token),
        r"\bDECISION_LOG\b": str(fleet.log),
    }


RUN = [block for block in BLOCKS if not block.marks]


@pytest.mark.parametrize("block", RUN, ids=[block.where for block in RUN])
def test_the_pages_commands_work_as_written(
    block: Block,
    fleet: Fleet,
    filled_in: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "\n".join(block.commands)
    for written, here in filled_in.items():
        text = re.sub(written, here.replace("\\", r"\\"), text)
    monkeypatch.setenv("POINTSMAN_ROUTER", fleet.router)
    monkeypatch.setenv("POINTSMAN_GATEWAY", fleet.gateway)
    monkeypatch.chdir(tmp_path)
    commands = text.splitlines()
    try:
        if all(re.fullmatch(r"pointsman [^|<>$;&]*", command) for command in commands):
            for command in commands:
                # In this process: a separate one would need a second for its imports.
                status = 0
                with contextlib.suppress(SystemExit):
                    status = command_line().main(shlex.split(command)[1:], prog_name="pointsman", standalone_mode=False)
                assert not status, f"{command}: {capsys.readouterr()}"
                assert capsys.readouterr().out.strip(), f"{command}: no output"
            return
        for name, body in SHIMS.items():
            shim = tmp_path / name
            shim.write_text(f"#!/bin/bash\n{body}\n")
            shim.chmod(0o755)
        path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], env={**os.environ, "PATH": path}, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip(), "no output"
    finally:
        if "set-policy" in text:
            fleet.ask("set-policy", DEFAULT_POLICY, "--router", fleet.router)


SHOWN = re.compile(
    r"^\$ pointsman (instances|decisions|explain)( [^\n]*)?\n(.*?)(?=^\$|^```)", re.DOTALL | re.MULTILINE
)


def test_the_answers_that_the_pages_show_have_todays_columns(fleet: Fleet, filled_in: dict[str, str]) -> None:
    asked = {"instances": (), "decisions": (), "explain": (filled_in[r"\bDECISION\b"],)}
    columns = {}
    for name, arguments in asked.items():
        lines = fleet.ask(name, *arguments, "--router", fleet.router).splitlines()
        columns[name] = next(
            line.split() for line in lines if line.split()[:1] in (["instance"], ["decision"], ["candidate"])
        )
    shown = [found for page in PAGES for found in SHOWN.findall(page.read_text()) if "verify" not in found[1]]
    assert {name for name, *_ in shown} >= {"decisions", "explain"}
    for name, flags, answer in shown:
        assert columns[name] in [line.split() for line in answer.splitlines()], f"pointsman {name}{flags}"


def test_up_ends_with_the_reason_when_a_part_cannot_start(fleet: Fleet, tmp_path: Path) -> None:
    ended = _up_elsewhere(fleet, tmp_path, "--policy", "nonsense", status=2)
    assert ended.stderr.startswith("pointsman up: --policy: no policy 'nonsense'; there are ")
    assert len(ended.stderr.splitlines()) == 1


def test_up_beside_another_fleet_starts_nothing_and_names_the_addresses_that_are_taken(
    fleet: Fleet, tmp_path: Path
) -> None:
    taken = {"listen": fleet.gateway.removeprefix("http://"), "router-listen": fleet.router}
    taken |= {"console": fleet.console.removeprefix("http://"), "agent-metrics": fleet.agent_metrics}
    ended = _up_elsewhere(fleet, tmp_path, *(word for name, at in taken.items() for word in (f"--{name}", at)))
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == [
        f"pointsman up: --{name} {taken[name]}: another process listens there"
        for name in ("listen", "router-listen", "console", "agent-metrics")
    ]
    assert not list(tmp_path.iterdir())


def _up_elsewhere(fleet: Fleet, folder: Path, *flags: str, status: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `pointsman up` at free addresses, unless `flags` set others; its exit status must be `status`."""
    own = [part for name in ("--listen", "--router-listen") for part in (name, f"127.0.0.1:{free_port()}")]
    own += [part for name in ("--router-metrics", "--agent-metrics", "--console") for part in (name, "")]
    ended = subprocess.run(
        pointsman_command("up", "--engine", fleet.engines[0], "--state-dir", str(folder), *own, *flags),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=REPOSITORY,
    )
    assert ended.returncode == status
    return ended


def test_an_agent_whose_address_is_taken_says_so(fleet: Fleet, tmp_path: Path) -> None:
    flags = ["--engines", fleet.engines[0], "--routers", fleet.router, "--state-dir", str(tmp_path)]
    said = _failed("agent", *flags, "--metrics-listen", fleet.agent_metrics)
    assert said.splitlines()[-1].startswith("pointsman agent: ")
    assert "another process listens there" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_the_doctor_names_an_engine_that_the_agent_beside_it_cannot_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, router, agent, elsewhere = (f"127.0.0.1:{free_port()}" for _ in range(4))
    up = {
        "router": ["--listen", router, "--metrics-listen", ""],
        # It reports to another router: this one would be told of the engine, and tell by itself.
        "agent": ["--engines", f"http://{dead}", "--routers", elsewhere, "--metrics-listen", agent],
    }
    up["agent"] += ["--state-dir", str(tmp_path / "state")]
    monkeypatch.setattr(doctor, "AGENT", f"http://{agent}")
    parts = [Process(name, pointsman_command(name, *flags), tmp_path / f"{name}.log") for name, flags in up.items()]
    try:
        for part in parts:
            part.start()
        up_ = parts[1]
        findings: list[Finding] = []

        def named() -> bool:
            findings[:] = [
                finding
                for finding in doctor.examine(router, f"http://{dead}")
                if finding.check.startswith("agent http")
            ]
            return bool(findings)

        up_.wait_ready(named, within_s=READY_WITHIN_S)
        [finding] = findings
        assert (finding.level, finding.check) == (Finding.FAIL, f"agent http://{agent}: http://{dead}")
        assert "connection refused" in finding.found
    finally:
        for part in reversed(parts):
            part.stop(within_s=40)


def _failed(*arguments: str) -> str:
    ended = subprocess.run(pointsman_command(*arguments), capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert ended.returncode == 1
    return ended.stderr
