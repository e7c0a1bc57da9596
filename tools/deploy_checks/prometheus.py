"""Cross-checks of Prometheus' configuration with the services of the compose file. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.deploy_checks import compose

Object = dict[str, Any]


def check_targets(prometheus: Object, project: Object) -> list[str]:
    """Return the problems of Prometheus' static targets: each must be a service's port, on one of Prometheus' networks."""
    problems = []
    own = set(project["services"]["prometheus"]["networks"])
    for job, target in targets(prometheus):
        host, _, port = target.rpartition(":")
        served = compose.by_name(project, host)
        if not served:
            problems.append(f"{job}: {host} is no service")
        for service in served:
            if not set(service["networks"]) & own:
                problems.append(f"{job}: {target} is on no network of prometheus")
            elif int(port) not in _ports(service):
                problems.append(f"{job}: {host} does not listen on {port}")
    return problems


def targets(prometheus: Object) -> Iterator[tuple[str, str]]:
    """Yield (job, HOST:PORT) of every static target."""
    for job in prometheus["scrape_configs"]:
        for group in job.get("static_configs", []):
            yield from ((job["job_name"], target) for target in group["targets"])


def _ports(service: Object) -> set[int]:
    variables = service.get("environment", {})
    return {int(str(value).rpartition(":")[2]) for name, value in variables.items() if name.endswith("LISTEN")}
