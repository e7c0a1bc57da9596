"""A strict schema of the parts of KEDA's ScaledObject that this project uses: any other name is an error. Pure.

Source of the names: KEDA's reference, keda.sh/v1alpha1, and its Prometheus scaler.
"""

from __future__ import annotations

from tools.deploy_checks.strict_schemas import TEXT, Object, exactly

COUNT: Object = {"type": "integer", "minimum": 0}
TARGET = exactly({"kind": TEXT, "name": TEXT}, apiVersion=TEXT)
# The API server has no schema of this metadata either: KEDA reads strings.
QUERY = exactly({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}, ignoreNullValues={"enum": ["true", "false"]})
TRIGGER = exactly(
    {"type": {"const": "prometheus"}, "metadata": QUERY}, metricType={"enum": ["AverageValue", "Value", "Utilization"]}
)
POLICY = exactly({"type": {"enum": ["Pods", "Percent"]}, "value": COUNT, "periodSeconds": COUNT})
DIRECTION = exactly({}, stabilizationWindowSeconds=COUNT, policies={"type": "array", "items": POLICY})
BEHAVIOR = exactly({}, scaleUp=DIRECTION, scaleDown=DIRECTION)
SPECS: dict[str, Object] = {
    "ScaledObject": exactly(
        {"scaleTargetRef": TARGET, "triggers": {"type": "array", "items": TRIGGER, "minItems": 1}},
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        advanced=exactly({}, horizontalPodAutoscalerConfig=exactly({}, behavior=BEHAVIOR)),
    )
}
