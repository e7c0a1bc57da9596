"""Checks everything under deploy/ that can be checked without a Docker engine or a cluster.

    .venv/bin/python -m tools.check_deploy

Renders the kustomizations with throw-away secrets and the Helm chart, validates every object against the Kubernetes schemas and
the compose file against the Compose schema, checks Prometheus' configuration and rules with promtool, compares environment
variables with the settings classes, and lints the Dockerfiles. Prints one line per problem, and exits with status 1 if there is
one. A missing tool is a problem.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import yaml

from tools import generate_telemetry as derived
from tools.deploy_checks import compose, gateway_api, helm, k8s, keda, prometheus, prometheus_operator, strict_schemas
from tools.deploy_checks.kubectl import ToolMissing, ensure_kubectl

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/pointsman"
# Values of the chart, a file for each overlay.
VALUES = DEPLOY / "helm/values"
BIN = Path(sys.executable).parent
# Kubernetes versions to validate against: the oldest one that the README supports, and the newest one that the pinned validator
# has.
KUBERNETES = ("1.29", "1.37")


# Groups of custom resources, and the schemas of their kinds.
CUSTOM: dict[str, Mapping[str, strict_schemas.Object]] = {
    "monitoring.coreos.com": prometheus_operator.SPECS,
    "keda.sh": keda.SPECS,
    "inference.networking.k8s.io": gateway_api.SPECS,
    "gateway.networking.k8s.io": gateway_api.SPECS,
}
# Overlay, components added to it, and the values of the chart that do the same, after those of the overlay's file.
COMPONENTS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    (
        "ha",
        ("external-redis", "tls", "ingress"),
        {
            "redis": {"kind": "external"},
            "tls": {"enabled": True},
            "ingress": {"enabled": True, "host": "llm.example.com"},
        },
    ),
    ("gateway-api", ("tls", "two-routers"), {"router": {"replicas": 2}, "tls": {"enabled": True}}),
    (
        "external-engines",
        ("engine-service", "tls", "monitoring"),
        {
            "engines": {"existing": {"addresses": [], "service": "models/vllm:8000"}},
            "monitoring": {"enabled": True},
            "tls": {"enabled": True},
        },
    ),
    (
        "gpu-per-node",
        ("tls", "nvidia-runtime"),
        {"engines": {"runtimeClassName": "nvidia"}, "tls": {"enabled": True}},
    ),
    ("gpu", ("kv-transfer", "rdma"), {"engines": {"kvTransfer": {"enabled": True, "protocol": "rdma"}}}),
    ("single-node", ("autoscaling-keda",), {"engines": {"autoscaling": {"by": "keda"}}}),
    ("single-node", ("autoscaling-hpa",), {"engines": {"autoscaling": {"by": "hpa"}}}),
)
# Components with certificates that make-certificates.sh creates.
CERTIFIED = {"tls", "picker"}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command; return it with its output as text. A missing program has status 127 and a message as stderr."""
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess([], 127, "", f"{command[0]} is missing: install the dev dependencies")


def make_secrets(folder: Path) -> set[str]:
    """Create throw-away secrets in `folder` with make-secrets.sh; return the files' names. Raises RuntimeError if the script
    fails."""
    made = run(DEPLOY / "make-secrets.sh", folder)
    if made.returncode:
        raise RuntimeError(f"make-secrets.sh: {made.stderr.strip()}")
    return {file.name for file in folder.iterdir()}


def _made_by_scripts(folder: str, names: list[str]) -> set[str]:
    """Return the names to leave out of a copy: secrets, certificates and .env, which the user has made."""
    return {
        name for name in names if name in ("secrets", ".env") or (name == "tls" and Path(folder).name != "components")
    }


def render(
    kustomization: Path, *components: str, files: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Return the objects of a kustomization under deploy/ as kustomize renders them, with throw-away secrets.

    `components`: names of components of deploy/k8s to add after its own. `files`: path below deploy/ -> content that replaces the
    file's. Raises ToolMissing and RuntimeError.
    """
    return [item for item in yaml.safe_load_all(_rendered(kustomization, components, tuple(files.items()))) if item]


@functools.cache
def _rendered(kustomization: Path, components: tuple[str, ...], files: tuple[tuple[str, str], ...]) -> str:
    kubectl = ensure_kubectl()
    with tempfile.TemporaryDirectory() as folder:
        deploy = Path(folder, "deploy")
        shutil.copytree(DEPLOY, deploy, ignore=_made_by_scripts)
        for path, content in files:
            (deploy / path).write_text(content)
        make_secrets(deploy / "k8s/base/secrets")
        copy = deploy / kustomization.relative_to(DEPLOY)
        own = yaml.safe_load((copy / "kustomization.yaml").read_text()).get("components", [])
        for name in CERTIFIED & {*components, *(Path(path).name for path in own)}:
            certified = run(DEPLOY / "make-certificates.sh", deploy / "k8s/components" / name / "tls")
            if certified.returncode:
                raise RuntimeError(f"make-certificates.sh: {certified.stderr.strip()}")
        for name in components:
            file = copy / "kustomization.yaml"
            parsed = yaml.safe_load(file.read_text())
            parsed["components"].append(f"../../components/{name}")
            file.write_text(yaml.safe_dump(parsed))
        rendered = run(kubectl, "kustomize", copy)
    if rendered.returncode:
        raise RuntimeError(" ".join(rendered.stderr.split()))
    return rendered.stdout


def check_k8s(kustomization: Path, *components: str) -> list[str]:
    """Return the problems of a kustomization with `components` added."""
    try:
        objects = render(kustomization, *components)
    except (ToolMissing, RuntimeError) as error:
        return [f"kustomize: {error}"]
    problems = [line for item in objects for line in schema_problems(item)]
    return problems or k8s.check(objects)


def check_chart(overlay: str, *components: str, values: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Return the problems of the chart with the values of `overlay` and `values`, which do what `components` do: Helm's, those of
    its objects' schemas, and of its objects together with those that the chart leaves to the user."""
    given = (yaml.safe_load((VALUES / f"{overlay}.yaml").read_text()), values)
    try:
        problems = helm.lint(CHART, *given)
        objects = helm.template(CHART, *given)
        others = helm.left_to_the_user(render(DEPLOY / "k8s/overlays" / overlay, *components))
    except (ToolMissing, RuntimeError) as error:
        return [f"helm: {error}"]
    problems += [line for item in objects for line in schema_problems(item)]
    return problems or k8s.check([*others, *objects])


def schema_problems(item: dict[str, Any]) -> list[str]:
    """Return the violations of one object's schema; unknown fields and unknown kinds are problems."""
    return list(_schema_problems(json.dumps(item, sort_keys=True)))


# Overlays and charts have many objects in common.
@functools.cache
def _schema_problems(text: str) -> tuple[str, ...]:
    item = json.loads(text)
    name = f"{item.get('kind')}/{item.get('metadata', {}).get('name')}"
    if (specs := CUSTOM.get(str(item.get("apiVersion")).partition("/")[0])) is not None:
        return tuple(f"{name}: {problem}" for problem in strict_schemas.problems(item, specs))
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return (f"{name}: {'.'.join(map(str, error.path))}: {error.message} (Kubernetes {version})",)
        except kubernetes_validate.SchemaNotFoundError as error:
            return (f"{name}: {error.message}",)
    return ()


def check_compose(file: Path, *above: Path) -> list[str]:
    """Return the problems of the compose file merged with the files `above`. Folders that scripts create may be missing."""
    schema = run(
        BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "--output-format", "json", file, *above
    )  # fmt: skip
    if schema.returncode:
        try:
            found = json.loads(schema.stdout)
        except ValueError:
            return [" ".join((schema.stderr or schema.stdout).split())]
        errors = [*found.get("errors", []), *found.get("parse_errors", [])]
        return [f"{e.get('path', '')}: {' '.join(str(e.get('message', e)).split())}" for e in errors]
    with tempfile.TemporaryDirectory() as folder:
        made = make_secrets(Path(folder, "secrets"))
    example = file.with_name(".env.example").read_text()
    parsed = yaml.safe_load(file.read_text())
    for other in above:
        parsed = compose.merge(parsed, yaml.safe_load(other.read_text()))
    project = compose.interpolate(parsed, compose.example_env(example)[0])
    missing = [
        f"{name}: {path} does not exist"
        for name, path in compose.mounted_files(project)
        if not file.parent.joinpath(path).exists() and not path.startswith("./tls/")
    ]
    optional = "".join(other.read_text() for other in sorted(file.parent.glob("*.yaml")))
    return [*missing, *compose.check(parsed, example, made, optional)]


def check_telemetry(folder: Path, compose_file: Path) -> list[str]:
    """Return the problems of Prometheus' configuration and rules, and of the files that tools.generate_telemetry writes."""
    checked = (
        run("promtool", "check", "config", "--syntax-only", *sorted(folder.glob("prometheus.*yaml"))),
        run("promtool", "check", "rules", *folder.glob("rules/*.yaml")),
    )
    problems = [" ".join((check.stderr or check.stdout).split()) for check in checked if check.returncode]
    for path, content in derived.written(folder).items():
        if not (folder / path).exists() or (folder / path).read_text() != content:
            problems.append(f"{path} is not what `python -m tools.generate_telemetry` writes")
    project = yaml.safe_load(compose_file.read_text())
    return problems + prometheus.check_targets(yaml.safe_load((folder / "prometheus.yaml").read_text()), project)


def check_dockerfile(file: Path) -> list[str]:
    """Return the problems of a Dockerfile: hadolint's, and COPY sources that are not in the repository."""
    lint = run(BIN / "hadolint", "--no-color", "--format", "json", file)
    if lint.returncode == 127:
        return [lint.stderr]
    problems = [f"line {e['line']}: {e['code']} {e['message']}" for e in json.loads(lint.stdout or "[]")]
    if lint.returncode and not problems:
        problems.append(lint.stderr.strip())
    for sources in re.findall(r"^COPY (?!--)(.+) \S+$", file.read_text(), re.MULTILINE):
        problems += [f"COPY {source}: no such file here" for source in sources.split() if not (ROOT / source).exists()]
    return problems


def main() -> int:
    """Run all checks; return the exit status."""
    checks = {
        str(overlay.relative_to(ROOT)): check_k8s(overlay) for overlay in sorted((DEPLOY / "k8s/overlays").iterdir())
    }
    for overlay, components, values in COMPONENTS:
        name = f"deploy/k8s/overlays/{overlay}"
        checks[f"{name} with {', '.join(components)}"] = check_k8s(ROOT / name, *components)
        same = f"{CHART.relative_to(ROOT)} as {overlay} with {', '.join(components)}"
        checks[same] = check_chart(overlay, *components, values=values)
    for file in sorted(VALUES.iterdir()):
        checks[f"{CHART.relative_to(ROOT)} with {file.relative_to(ROOT)}"] = check_chart(file.stem)
    compose_file = DEPLOY / "compose/compose.yaml"
    checks[str(compose_file.relative_to(ROOT))] = check_compose(compose_file)
    tls = compose_file.with_name("tls.yaml")
    offload = compose_file.with_name("offload.yaml")
    for above in ((tls,), (offload,), (offload, tls)):
        checks[" and ".join(str(overlay.relative_to(ROOT)) for overlay in above)] = check_compose(compose_file, *above)
    checks["deploy/telemetry"] = check_telemetry(DEPLOY / "telemetry", compose_file)
    for file in sorted((DEPLOY / "docker").glob("*Dockerfile")):
        checks[str(file.relative_to(ROOT))] = check_dockerfile(file)
    for what, problems in checks.items():
        for problem in problems:
            print(f"{what}: {problem}", file=sys.stderr)
    bad = sum(map(len, checks.values()))
    print(f"deploy: {len(checks)} parts checked, {bad} problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
