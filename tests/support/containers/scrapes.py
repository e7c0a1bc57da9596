"""What a Prometheus in the engine says of its targets and rules."""

from __future__ import annotations

from tests.support.containers.docker_host import DockerHost
from tests.support.waiting import until

URL = "http://127.0.0.1:9090"
# Twice the interval of scrapes in deploy/telemetry/prometheus.yaml, and some seconds for a busy machine.
WITHIN_S = 60.0


def all_are_scraped(host: DockerHost) -> None:
    """Wait until each target was scraped without an error. Fails if a rule has one."""
    states: dict[str, str] = {}

    def scraped() -> bool:
        targets = host.get_json(f"{URL}/api/v1/targets")["data"]["activeTargets"]
        states.update({target["labels"]["job"]: f"{target['health']} {target['lastError']}" for target in targets})
        return set(states.values()) == {"up "}

    until(scraped, within_s=WITHIN_S, what=f"a scrape of each target, {states}")
    assert set(states) == {f"pointsman-{part}" for part in ("router", "gateway", "agent")}
    groups = host.get_json(f"{URL}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert not [rule["name"] for rule in rules if rule["health"] == "err"]
