"""Strict schemas of the parts of the Prometheus operator's kinds that this project uses: any other name is an error. Pure.

Source of the names: the operator's API reference, monitoring.coreos.com/v1.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Object = dict[str, Any]


def _exactly(required: Object, **optional: Object) -> Object:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


TEXT: Object = {"type": "string", "minLength": 1}
DURATION: Object = {"type": "string", "pattern": r"^\d+(ms|s|m|h|d)$"}
LABELS: Object = {"type": "object", "additionalProperties": {"type": "string"}}
RELABELING = _exactly(
    {"targetLabel": TEXT}, sourceLabels={"type": "array", "items": TEXT}, replacement=TEXT, regex=TEXT, action=TEXT
)
ENDPOINT = _exactly(
    {"port": TEXT},
    interval=DURATION,
    path=TEXT,
    scheme={"enum": ["http", "https"]},
    honorLabels={"type": "boolean"},
    relabelings={"type": "array", "items": RELABELING},
)
RULE = _exactly({"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS}, **{"for": DURATION})
GROUP = _exactly({"name": TEXT, "rules": {"type": "array", "items": RULE}})
SPECS: dict[str, Object] = {
    "ServiceMonitor": _exactly(
        {
            "selector": _exactly({"matchLabels": LABELS}),
            "endpoints": {"type": "array", "items": ENDPOINT, "minItems": 1},
        }
    ),
    "PrometheusRule": _exactly({"groups": {"type": "array", "items": GROUP, "minItems": 1}}),
}


def schema_problems(item: Object) -> list[str]:
    """Return the schema violations of one object of the operator's kinds."""
    if item["kind"] not in SPECS:
        return [f"no schema for {item['kind']}"]
    errors = jsonschema.Draft202012Validator(SPECS[item["kind"]]).iter_errors(item.get("spec"))
    return [f"spec.{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
