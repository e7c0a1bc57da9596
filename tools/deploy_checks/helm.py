"""Renders and lints the Helm chart with the pinned Helm, and compares its objects with those of an overlay."""

from __future__ import annotations

import copy
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.deploy_checks.kubectl import ensure_helm

Object = dict[str, Any]
NAMESPACE = "pointsman"
# Labels that only Helm's objects have.
HELM_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")
# Objects that only the overlays make, and what does it with the chart.
LEFT_TO_THE_USER = {
    "Namespace": "Helm makes it (--create-namespace), or it exists; the notes say which labels it needs",
    "Secret": "the chart takes them by name, so that no key is in the values or in Helm's record of the release",
}
# Keys by which the objects of a list are found, the first that all have; such lists are compared without their order.
KEYS = ("name", "mountPath", "containerPort", "path")


def template(chart: Path, *values: Mapping[str, Any], namespace: str = NAMESPACE) -> list[Object]:
    """Return the objects of the chart with `values`, of which later ones win. Raises ToolMissing, and RuntimeError with Helm's
    message."""
    return [item for item in yaml.safe_load_all(_helm("template", chart, values, namespace)) if item]


def lint(chart: Path, *values: Mapping[str, Any]) -> list[str]:
    """Return Helm's complaints about the chart with `values`. Raises ToolMissing."""
    try:
        _helm("lint", chart, values, NAMESPACE)
    except RuntimeError as error:
        return [str(error)]
    return []


def notes(chart: Path, *values: Mapping[str, Any]) -> str:
    """Return what Helm prints after an installation with `values`; without a cluster, so no Secret is found. Raises ToolMissing
    and RuntimeError."""
    return _helm("install", chart, values, NAMESPACE).partition("\nNOTES:\n")[2]


def _helm(command: str, chart: Path, values: Sequence[Mapping[str, Any]], namespace: str) -> str:
    words: dict[str, list[str | Path]] = {
        "template": ["pointsman", chart],
        "lint": ["--strict", "--quiet", chart],
        "install": ["pointsman", "--dry-run=client", chart],
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, mapping in enumerate(values):
            file = Path(folder, f"{number}.yaml")
            file.write_text(yaml.safe_dump(dict(mapping)))
            words[command] += ["--values", file]
        # Helm keeps plugins and repositories in the user's folders; none is used here.
        environment = {"HOME": folder, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [ensure_helm(), command, *words[command], "--namespace", namespace],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(" ".join((done.stdout + done.stderr).split()))
    return done.stdout


def left_to_the_user(overlay: list[Object]) -> list[Object]:
    """Return the objects of an overlay that the chart leaves to the user, under the names by which the chart knows them."""
    found = copy.deepcopy([item for item in overlay if item["kind"] in LEFT_TO_THE_USER])
    for item in found:
        item["metadata"]["name"] = _without_hash(item)
    return found


def differences(overlay: list[Object], chart: list[Object]) -> list[str]:
    """Return how the objects of `chart` differ from those of `overlay`, a line for each: KIND/NAME PATH: OVERLAY -> CHART."""
    old, new = _comparable(overlay), _comparable(chart)
    lines = [f"{name}: only in the overlay" for name in sorted(old.keys() - new.keys())]
    lines += [f"{name}: only in the chart" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        lines += [f"{name} {line}" for line in _differences("", old[name], new[name])]
    return lines


def _comparable(objects: list[Object]) -> dict[str, Any]:
    """Return KIND/NAME -> object, without what LEFT_TO_THE_USER says, Helm's labels, kustomize's hashes in names, and the hashes
    of settings with which the chart rolls pods instead."""
    generated = {str(o["metadata"]["name"]): _without_hash(o) for o in objects if o["kind"] in ("ConfigMap", "Secret")}
    found = {}
    for item in objects:
        if item["kind"] in LEFT_TO_THE_USER:
            continue
        plain = _plain(item, generated)
        for label in HELM_LABELS:
            plain["metadata"].get("labels", {}).pop(label, None)
        template_metadata = plain.get("spec", {}).get("template", {}).get("metadata", {})
        if template_metadata.get("annotations", {}).keys() == {"checksum/settings"}:
            del template_metadata["annotations"]
        if plain["kind"] == "ConfigMap":
            # A file of YAML is its content, without comments.
            plain["data"] = {
                key: yaml.safe_load(text) if key.endswith(".yaml") else text for key, text in plain["data"].items()
            }
        found[f"{plain['kind']}/{plain['metadata']['name']}"] = plain
    return found


def _without_hash(item: Object) -> str:
    """Return the name of an object without kustomize's hash."""
    return re.sub("-[0-9a-z]{10}$", "", item["metadata"]["name"])


def _plain(value: Any, generated: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item, generated) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, generated) for item in value]
    return generated.get(value, value) if isinstance(value, str) else value


def _differences(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, list) and isinstance(new, list):
        old, new = _by_key(old), _by_key(new)
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in [*old, *(key for key in new if key not in old)]:
            lines += _differences(f"{path}.{key}", old.get(key), new.get(key))
        return lines
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def _by_key(items: list[Any]) -> dict[Any, Any]:
    for key in KEYS:
        if items and all(isinstance(item, dict) and isinstance(item.get(key), str | int) for item in items):
            return {item[key]: item for item in items}
    return dict(enumerate(items))
