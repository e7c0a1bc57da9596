"""Cross-checks of the compose file: variables, references between services, and the rules of this project. Pure.

Input are the parsed file and the text of .env.example. The schema is checked by check-jsonschema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tools.deploy_checks import service_environment as services

Object = dict[str, Any]
# ${NAME}, ${NAME:-default} and so on; $$ is an escaped dollar sign.
VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\})")
# Variables that Compose itself reads.
OWN_VARIABLES = {"COMPOSE_PROFILES", "COMPOSE_FILE"}
# Services without a health check, and why.
UNPROBED = {"otel-collector": "its image has no program that could probe it"}


def example_env(text: str) -> tuple[dict[str, str], list[str]]:
    """Return (variables of an .env file, problems): each variable must have a comment above it, in the same paragraph. A variable
    directly after "#" counts."""
    variables: dict[str, str] = {}
    problems = []
    explained = False
    for line in text.splitlines():
        if line.startswith("# "):
            explained = True
        elif not line.strip():
            explained = False
        else:
            name, _, value = line.removeprefix("#").partition("=")
            variables[name] = value
            if not explained:
                problems.append(f".env.example: {name} is not explained")
    return variables, problems


def interpolate(value: Any, variables: dict[str, str]) -> Any:
    """Return `value` with ${...} replaced as Compose does."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda m: "$" if m["escaped"] else variables.get(m["name"]) or m["default"] or "", value)
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: interpolate(item, variables) for key, item in value.items()}
    return value


def merge(below: Any, above: Any, key: str = "") -> Any:
    """Merge two compose files: mappings are merged, commands and tests replaced, volumes replaced if they have the same mount
    point, and other lists joined. Source: the Compose specification, 13-merge."""
    if isinstance(below, dict) and isinstance(above, dict):
        both = {name: merge(below[name], above[name], name) for name in below.keys() & above.keys()}
        return {**below, **above, **both}
    if isinstance(below, list) and isinstance(above, list) and key not in ("command", "entrypoint", "test"):
        if key == "volumes":
            targets = {volume.split(":")[1] for volume in above}
            below = [volume for volume in below if volume.split(":")[1] not in targets]
        return [*below, *above]
    return above


def check(raw: Object, example: str, secret_files: set[str], optional: str = "") -> list[str]:
    """Return all problems of a compose file. `secret_files`: names of the files that make-secrets.sh creates. `optional`: text of
    further files; a variable of .env.example may be used there alone."""
    variables, problems = example_env(example)
    problems += _variables(raw, variables, optional)
    project = interpolate(raw, variables)
    for name, service in project["services"].items():
        problems += _references(name, service, project)
        problems += _cut_off(name, service)
        problems += _rules(name, service)
        if _command(service) and services.subcommand_of(str(service.get("image", ""))):
            problems += _check_environment(name, service, project)
    for name, secret in project.get("secrets", {}).items():
        folder, _, file = secret["file"].rpartition("/")
        if folder != "./secrets" or file not in secret_files:
            problems.append(f"secret {name}: make-secrets.sh does not make {secret['file']}")
    used: dict[str, set[str]] = {key: set() for key in ("secrets", "networks", "volumes")}
    for service in project["services"].values():
        used["secrets"] |= {_source(s) for s in service.get("secrets", [])}
        used["networks"] |= set(service.get("networks", []))
        used["volumes"] |= {str(v).split(":")[0] for v in service.get("volumes", [])}
    problems += _builds(project["services"])
    for kind, names in used.items():
        problems += [f"{kind}: {name} is used by no service" for name in project.get(kind, {}) if name not in names]
    return problems


def _variables(raw: Object, example: dict[str, str], optional: str) -> Iterator[str]:
    seen = set()
    for match in VARIABLE.finditer(_text(raw)):
        name = match["name"]
        if name is None:
            continue
        seen.add(name)
        if name not in example:
            yield f"variable {name} is not in .env.example"
        elif (match["default"] or "") != example[name]:
            yield f"variable {name}: the default is {match['default'] or ''!r}, .env.example says {example[name]!r}"
    seen |= {match["name"] for match in VARIABLE.finditer(optional)}
    for name in sorted(set(example) - seen - OWN_VARIABLES):
        yield f".env.example: {name} is used nowhere"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(map(_text, value.values()))
    return "\n".join(map(_text, value)) if isinstance(value, list) else str(value)


def _references(name: str, service: Object, project: Object) -> Iterator[str]:
    for network in service.get("networks", []):
        if network not in project.get("networks", {}):
            yield f"{name}: no network {network}"
    for secret in service.get("secrets", []):
        if _source(secret) not in project.get("secrets", {}):
            yield f"{name}: no secret {_source(secret)}"
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        if not source.startswith((".", "/")) and source not in project.get("volumes", {}):
            yield f"{name}: no volume {source}"
    for other, how in service.get("depends_on", {}).items():
        target = project["services"].get(other)
        if target is None:
            yield f"{name}: depends on {other}, which is no service"
        elif how["condition"] == "service_healthy" and "healthcheck" not in target:
            yield f"{name}: waits for the health of {other}, which has no health check"
        elif target.get("profiles") and set(service.get("profiles", [])) - set(target["profiles"]):
            yield f"{name}: depends on {other}, which not all of its profiles start"


def _rules(name: str, service: Object) -> Iterator[str]:
    image, _, tag = str(service.get("image", "")).rpartition(":")
    if not image or tag == "latest":
        yield f"{name}: the image needs a tag other than latest"
    if service.get("restart") not in ("unless-stopped", "always"):
        yield f"{name}: no restart policy"
    if service.get("cap_drop") != ["ALL"] or "no-new-privileges:true" not in service.get("security_opt", []):
        yield f"{name}: all capabilities must be dropped, and no new privileges given"
    if "healthcheck" not in service and name not in UNPROBED:
        yield f"{name}: no health check"
    if not service.get("networks"):
        yield f"{name}: it must name its networks, or it is on the default one with everybody"
    for port in service.get("ports", []):
        if str(port).count(":") < 2:
            yield f"{name}: port {port} is published on every interface"


def _builds(services: Object) -> Iterator[str]:
    """Yield a problem for each image that several services of one profile would build, each for itself, and for each that other
    services build, but none of a profile that needs it."""
    builders: dict[tuple[str, str], list[str]] = {}
    for name, service in services.items():
        for profile in service.get("profiles", [""]):
            builders.setdefault((service["image"], profile), []).extend([name] if "build" in service else [])
    built = {image for (image, _), names in builders.items() if names}
    for (image, profile), names in builders.items():
        if image in built and len(names) != 1:
            yield f"profile {profile}: {image} must be built by one service, not by {len(names)}: {', '.join(names)}"


def _cut_off(name: str, service: Object) -> Iterator[str]:
    """Yield a problem if the service's drain time is not shorter than its grace period, so that it would be killed while it
    drains."""
    timeouts_s = [str(service.get("environment", {}).get("POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S", "0"))]
    timeouts_s += [word.partition("=")[2] for word in _command(service) if word.startswith("--shutdown-timeout=")]
    needed, grace = max(map(int, timeouts_s)), str(service.get("stop_grace_period", "10s"))
    if needed and not (grace.removesuffix("s").isdigit() and needed < int(grace.removesuffix("s"))):
        yield f"{name}: ends in up to {needed} s, and is killed after {grace}"


def names(name: str, service: Object) -> Iterator[str]:
    """Yield the host names by which other services reach this one."""
    yield name
    networks = service.get("networks", [])
    if isinstance(networks, dict):
        for how in networks.values():
            yield from (how or {}).get("aliases", [])


def by_name(project: Object, host: str) -> list[Object]:
    """Return the services that `host` names; several if services of different profiles share a name."""
    return [service for name, service in project["services"].items() if host in names(name, service)]


def mounted_files(project: Object) -> Iterator[tuple[str, str]]:
    """Yield (service, path relative to the compose file) of every mounted file and folder of the repository."""
    for name, service in project["services"].items():
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                yield name, volume.split(":")[0]


def _check_environment(name: str, service: Object, project: Object) -> list[str]:
    command = _command(service)[0]
    files = {f"/run/secrets/{s['target'] if isinstance(s, dict) else s}" for s in service.get("secrets", [])}
    env = {key: str(value) for key, value in service.get("environment", {}).items()}
    # Variables that the entry point sets from files.
    late = set(re.findall(r"\b(POINTSMAN_\w+)=", " ".join(service.get("entrypoint", []))))
    checked = services.ServiceEnvironment(name, command, service["image"], env, frozenset(files), frozenset(late))
    problems = services.check(checked)
    for variable, host, port in services.dialed_addresses(checked) if not problems else ():
        target = project["services"].get(host)
        if target is None:
            problems.append(f"{name}: {variable}: {host} is no service")
        elif not set(target["networks"]) & set(service["networks"]):
            problems.append(f"{name}: {variable}: {host}:{port} is on no network of this service")
        elif target.get("profiles") and set(service.get("profiles", [])) - set(target["profiles"]):
            problems.append(f"{name}: {variable}: {host} is not started by all profiles of this service")
    return problems


def _command(service: Object) -> list[str]:
    command = service.get("command", [])
    return command if isinstance(command, list) else str(command).split()


def _source(secret: Any) -> str:
    return str(secret["source"] if isinstance(secret, dict) else secret)
