"""Strict schemas of the parts of the Prometheus operator's kinds that this project uses: any other name is an error. Pure.

Source of the names: the operator's API reference, monitoring.coreos.com/v1.
"""

from __future__ import annotations

from tools.deploy_checks.strict_schemas import TEXT, Object, exactly

DURATION: Object = {"type": "string", "pattern": r"^\d+(ms|s|m|h|d)$"}
LABELS: Object = {"type": "object", "additionalProperties": {"type": "string"}}
RELABELING = exactly(
    {"targetLabel": TEXT}, sourceLabels={"type": "array", "items": TEXT}, replacement=TEXT, regex=TEXT, action=TEXT
)
ENDPOINT = exactly(
    {"port": TEXT},
    interval=DURATION,
    path=TEXT,
    scheme={"enum": ["http", "https"]},
    honorLabels={"type": "boolean"},
    relabelings={"type": "array", "items": RELABELING},
)
RULE = exactly({"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS}, **{"for": DURATION})
GROUP = exactly({"name": TEXT, "rules": {"type": "array", "items": RULE}})
SPECS: dict[str, Object] = {
    "ServiceMonitor": exactly(
        {
            "selector": exactly({"matchLabels": LABELS}),
            "endpoints": {"type": "array", "items": ENDPOINT, "minItems": 1},
        }
    ),
    "PrometheusRule": exactly({"groups": {"type": "array", "items": GROUP, "minItems": 1}}),
}
