"""The compose file passes, and each kind of mistake in a copy of it is refused with a line that names it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import check_deploy
from tools.deploycheck import compose

Project = dict[str, Any]
FILE = check_deploy.DEPLOY / "compose/compose.yaml"
EXAMPLE = FILE.with_name(".env.example").read_text()


@pytest.fixture(scope="module")
def secret_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return check_deploy.make_secrets(tmp_path_factory.mktemp("deploy") / "secrets")


@pytest.fixture
def project() -> Project:
    parsed: Project = yaml.safe_load(FILE.read_text())
    return parsed


def test_compose_file_is_sound() -> None:
    assert check_deploy.check_compose(FILE) == []


def test_compose_file_with_tls_is_sound() -> None:
    assert check_deploy.check_compose(FILE, FILE.with_name("tls.yaml")) == []


def test_files_are_merged_as_compose_does() -> None:
    below = {
        "a": {"command": ["x"], "volumes": ["v:/one", "./w:/two:ro"], "networks": ["n"], "environment": {"A": "1"}}
    }
    above = {"a": {"command": ["y"], "volumes": ["./u:/two:ro"], "networks": ["m"], "environment": {"B": "2"}}, "b": {}}
    assert compose.merge(below, above) == {
        "a": {
            "command": ["y"],
            "volumes": ["v:/one", "./u:/two:ro"],
            "networks": ["n", "m"],
            "environment": {"A": "1", "B": "2"},
        },
        "b": {},
    }


def misspell_setting(project: Project) -> None:
    project["services"]["router"]["environment"]["POINTSMAN_ROUTER_POLICE"] = "unified"


def set_variable_of_another_service(project: Project) -> None:
    project["services"]["gateway"]["environment"]["POINTSMAN_AGENT_LOG_LEVEL"] = "info"


def set_bad_value(project: Project) -> None:
    project["services"]["gateway"]["environment"]["POINTSMAN_GATEWAY_ROUTERS"] = "router"


def leave_the_network(project: Project) -> None:
    project["services"]["gateway"]["networks"].remove("control")


def dial_nobody(project: Project) -> None:
    project["services"]["agent"]["environment"]["POINTSMAN_AGENT_ROUTERS"] = "route:50051"


def forget_a_token(project: Project) -> None:
    project["services"]["agent"]["secrets"].clear()


def use_unknown_secret(project: Project) -> None:
    project["services"]["redis"]["secrets"].append("redis-tls")


def name_unmade_secret(project: Project) -> None:
    project["secrets"]["api-keys"]["file"] = "./secrets/keys"


def use_latest(project: Project) -> None:
    project["services"]["redis"]["image"] = "redis:latest"


def keep_capabilities(project: Project) -> None:
    del project["services"]["vllm"]["cap_drop"]


def never_restart(project: Project) -> None:
    project["services"]["redis"]["restart"] = "no"


def lose_health_check(project: Project) -> None:
    del project["services"]["router"]["healthcheck"]


def publish_everywhere(project: Project) -> None:
    project["services"]["gateway"]["ports"] = ["8080:8080"]


def wait_for_another_profile(project: Project) -> None:
    project["services"]["router"].pop("profiles", None)
    project["services"]["agent-emulated"]["depends_on"]["vllm"] = {"condition": "service_healthy"}


def add_undocumented_variable(project: Project) -> None:
    project["services"]["vllm"]["command"].append("--seed=${SEED:-0}")


def change_a_default(project: Project) -> None:
    project["services"]["router"]["environment"]["POINTSMAN_ROUTER_POLICY"] = "${POLICY:-lpwl}"


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (misspell_setting, "router: `pointsman router` does not read POINTSMAN_ROUTER_POLICE"),
        (set_variable_of_another_service, "gateway: `pointsman gateway` does not read POINTSMAN_AGENT_LOG_LEVEL"),
        (set_bad_value, "gateway: POINTSMAN_GATEWAY_ROUTERS: "),
        (leave_the_network, "gateway: POINTSMAN_GATEWAY_ROUTERS: router:50051 is on no network of this service"),
        (dial_nobody, "agent: POINTSMAN_AGENT_ROUTERS: route is no service"),
        (forget_a_token, "agent: no token file agent is mounted in POINTSMAN_TOKEN_DIR=/run/secrets"),
        (use_unknown_secret, "redis: no secret redis-tls"),
        (name_unmade_secret, "secret api-keys: make-secrets.sh does not make ./secrets/keys"),
        (use_latest, "redis: the image needs a tag other than latest"),
        (keep_capabilities, "vllm: all capabilities must be dropped"),
        (never_restart, "redis: no restart policy"),
        (lose_health_check, "gateway: waits for the health of router, which has no health check"),
        (publish_everywhere, "gateway: port 8080:8080 is published on every interface"),
        (wait_for_another_profile, "agent-emulated: depends on vllm, which not all of its profiles start"),
        (add_undocumented_variable, "variable SEED is not in .env.example"),
        (change_a_default, "variable POLICY: the default is 'lpwl', .env.example says 'unified'"),
    ],
)
def test_mistake_is_refused(
    project: Project, secret_files: set[str], mistake: Callable[[Project], None], expected: str
) -> None:
    broken = copy.deepcopy(project)
    mistake(broken)
    problems = compose.check(broken, EXAMPLE, secret_files)
    assert any(expected in line for line in problems), problems
    assert all("\n" not in line for line in problems)


def test_unexplained_and_unused_variables_are_refused(project: Project, secret_files: set[str]) -> None:
    problems = compose.check(project, EXAMPLE + "\nSPARE=1\n", secret_files)
    assert problems == [".env.example: SPARE is not explained", ".env.example: SPARE is used nowhere"]


def test_schema_refuses_an_unknown_field(tmp_path: Path) -> None:
    copied = tmp_path / "compose.yaml"
    copied.write_text(FILE.read_text().replace("    healthcheck:", "    healthchek:", 1))
    shutil.copy(FILE.with_name(".env.example"), tmp_path)
    problems = check_deploy.check_compose(copied)
    assert len(problems) == 1
    assert "healthchek" in problems[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${A}-${B:-b}-${C-c}", "1-b-c"),
        ("$${A}", "${A}"),
        ("${EMPTY:-full}", "full"),
    ],
)
def test_interpolation(text: str, expected: str) -> None:
    assert compose.interpolate([{"key": text}], {"A": "1", "EMPTY": ""}) == [{"key": expected}]
