"""A strict schema of the parts of KEDA's ScaledObject that this project uses: any other name is an error. Pure.

Source of the names: KEDA's reference, keda.sh/v1alpha1, and its Prometheus scaler.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Object = dict[str, Any]

TEXT: Object = {"type": "string", "minLength": 1}
COUNT: Object = {"type": "integer", "minimum": 0}


def _fields(required: Object, **optional: Object) -> Object:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


TARGET = _fields({"kind": TEXT, "name": TEXT}, apiVersion=TEXT)
# The API server has no schema of this metadata either: KEDA reads strings.
QUERY = _fields({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}, ignoreNullValues={"enum": ["true", "false"]})
TRIGGER = _fields(
    {"type": {"const": "prometheus"}, "metadata": QUERY}, metricType={"enum": ["AverageValue", "Value", "Utilization"]}
)
POLICY = _fields({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT})
DIRECTION = _fields({}, stabilizationWindowSeconds=COUNT, policies={"type": "array", "items": POLICY})
BEHAVIOR = _fields({}, scaleUp=DIRECTION, scaleDown=DIRECTION)
SPEC = _fields(
    {"scaleTargetRef": TARGET, "triggers": {"type": "array", "items": TRIGGER, "minItems": 1}},
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    advanced=_fields({}, horizontalPodAutoscalerConfig=_fields({}, behavior=BEHAVIOR)),
)


def schema_problems(item: Object) -> list[str]:
    """Return the schema violations of one object of KEDA's kinds."""
    if item["kind"] != "ScaledObject":
        return [f"no schema for {item['kind']}"]
    errors = jsonschema.Draft202012Validator(SPEC).iter_errors(item.get("spec"))
    return [f"spec.{'.'.join(map(str, error.path))}: {error.message}" for error in errors]
