"""The compose file passes, and each kind of mistake in a copy of it is refused with a line that names it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import VERSION
from tools import check_deploy
from tools.deploy_checks import compose

Project = dict[str, Any]
FILE = check_deploy.DEPLOY / "compose/compose.yaml"
EXAMPLE = FILE.with_name(".env.example").read_text()
OFFLOAD = FILE.with_name("offload.yaml").read_text()


@pytest.fixture(scope="module")
def secret_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return check_deploy.make_secrets(tmp_path_factory.mktemp("deploy") / "secrets")


@pytest.fixture
def project() -> Project:
    parsed: Project = yaml.safe_load(FILE.read_text())
    return parsed


def test_compose_file_is_sound() -> None:
    assert check_deploy.check_compose(FILE) == []


@pytest.mark.parametrize("names", [["tls.yaml"], ["offload.yaml"], ["offload.yaml", "tls.yaml"]])
def test_compose_file_with_others_on_top_is_sound(names: list[str]) -> None:
    assert check_deploy.check_compose(FILE, *map(FILE.with_name, names)) == []


def test_each_gpu_profile_starts_as_many_instances_and_one_agent_for_them(project: Project) -> None:
    for profile, count in (("gpu", 1), ("gpu2", 2), ("gpu4", 4), ("gpu8", 8)):
        started = {
            name: service for name, service in project["services"].items() if profile in service.get("profiles", [])
        }
        engines = {
            name: service["environment"]["CUDA_VISIBLE_DEVICES"] for name, service in started.items() if "vllm" in name
        }
        assert engines == {f"vllm-{number}": f"${{GPUS_{number}:-{number}}}" for number in range(count)}
        (agent,) = [service for name, service in started.items() if name.startswith("agent")]
        assert agent["environment"]["POINTSMAN_AGENT_ENGINES"].count("http://") == count


def test_engines_push_their_steps_to_where_their_agent_listens(project: Project) -> None:
    services = project["services"]
    engines = [service for name, service in services.items() if name.startswith("vllm-")]
    agents = [service for name, service in services.items() if name.startswith("agent") and name != "agent-emulated"]
    assert {engine["environment"]["POINTSMAN_AGENT_LOADS"] for engine in engines} == {"tcp://agent:9108"}
    assert {agent["environment"]["POINTSMAN_AGENT_STEP_LOADS_LISTEN"] for agent in agents} == {"tcp://0.0.0.0:9108"}
    assert all("agent" in agent["networks"]["engine"]["aliases"] for agent in agents)


def test_engines_of_compose_can_be_put_to_sleep(project: Project) -> None:
    for given, expected in (({}, "0"), ({"VLLM_SERVER_DEV_MODE": "1"}, "1")):
        services = compose.interpolate(project, given)["services"]
        assert {services[f"vllm-{n}"]["environment"].get("VLLM_SERVER_DEV_MODE") for n in range(8)} == {expected}


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


def run_in_another_image(project: Project) -> None:
    project["services"]["gateway"]["image"] = project["services"]["router"]["image"]


def keep_capabilities(project: Project) -> None:
    del project["services"]["vllm-0"]["cap_drop"]


def never_restart(project: Project) -> None:
    project["services"]["redis"]["restart"] = "no"


def lose_health_check(project: Project) -> None:
    del project["services"]["router"]["healthcheck"]


def publish_everywhere(project: Project) -> None:
    project["services"]["gateway"]["ports"] = ["8080:8080"]


def wait_for_another_profile(project: Project) -> None:
    project["services"]["router"].pop("profiles", None)
    project["services"]["agent-emulated"]["depends_on"]["vllm-0"] = {"condition": "service_healthy"}


def dial_an_engine_of_another_profile(project: Project) -> None:
    environment = project["services"]["agent"]["environment"]
    environment["POINTSMAN_AGENT_ENGINES"] += " http://vllm-1:8000"


def kill_too_soon(project: Project) -> None:
    del project["services"]["vllm-0"]["stop_grace_period"]


def build_twice(project: Project) -> None:
    services = project["services"]
    services["emulated-1"]["build"] = services["emulated-0"]["build"]


def build_nowhere(project: Project) -> None:
    project["services"]["vllm-0"]["profiles"].remove("gpu8")


def add_undocumented_variable(project: Project) -> None:
    project["services"]["vllm-0"]["command"].append("--seed=${SEED:-0}")


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
        (run_in_another_image, f"gateway: the image pointsman-router:{VERSION} has not what `pointsman gateway` needs"),
        (keep_capabilities, "vllm-0: all capabilities must be dropped"),
        (never_restart, "redis: no restart policy"),
        (lose_health_check, "gateway: waits for the health of router, which has no health check"),
        (publish_everywhere, "gateway: port 8080:8080 is published on every interface"),
        (wait_for_another_profile, "agent-emulated: depends on vllm-0, which not all of its profiles start"),
        (
            dial_an_engine_of_another_profile,
            "agent: POINTSMAN_AGENT_ENGINES: vllm-1 is not started by all profiles of this service",
        ),
        (kill_too_soon, "vllm-0: ends in up to 300 s, and is killed after 10s"),
        (
            build_twice,
            f"profile emulated: pointsman-lab:{VERSION} must be built by one service, not by 2: emulated-0, emulated-1",
        ),
        (build_nowhere, f"profile gpu8: pointsman-engine:{VERSION} must be built by one service, not by 0: "),
        (add_undocumented_variable, "variable SEED is not in .env.example"),
        (change_a_default, "variable POLICY: the default is 'lpwl', .env.example says 'auto'"),
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
    problems = compose.check(project, EXAMPLE + "\nSPARE=1\n", secret_files, OFFLOAD)
    assert problems == [".env.example: SPARE is not explained", ".env.example: SPARE is used nowhere"]


def test_a_copy_of_the_example_takes_the_images_of_the_tree() -> None:
    assert VERSION in EXAMPLE
    assert not [line for line in EXAMPLE.splitlines() if VERSION in line and not line.startswith("#")]


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
