"""Strict schemas of the parts of the Gateway API and of its Inference Extension that this project uses: any other name is an
error. Pure.

Source of the names and limits: the custom resource definitions of InferencePool (inference.networking.k8s.io/v1) and HTTPRoute
(gateway.networking.k8s.io/v1).
"""

from __future__ import annotations

from tools.deploy_checks.strict_schemas import Object, exactly


def _some(items: Object, most: int) -> Object:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


NAME: Object = {"type": "string", "minLength": 1, "maxLength": 253}
KIND: Object = {"type": "string", "pattern": r"^[a-zA-Z]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$"}
GROUP: Object = {"type": "string", "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
NAMESPACE: Object = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT = exactly({"number": {"type": "integer", "minimum": 1, "maximum": 65_535}})
LABEL: Object = {"type": "string", "maxLength": 63, "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
DURATION: Object = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
POOL = exactly(
    {
        "selector": exactly(
            {"matchLabels": {"type": "object", "minProperties": 1, "maxProperties": 64, "additionalProperties": LABEL}}
        ),
        "targetPorts": _some(PORT, 8),
        # The definition lets a pool be without a picker; then it is no use here.
        "endpointPickerRef": exactly(
            {"name": NAME, "port": PORT}, group=GROUP, kind=KIND, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    },
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
)
PATH = exactly({"type": {"enum": ["Exact", "PathPrefix"]}, "value": {"type": "string", "pattern": "^/"}})
ROUTE = exactly(
    {
        "parentRefs": _some(exactly({"name": NAME}, group=GROUP, kind=KIND, namespace=NAMESPACE), 32),
        "rules": _some(
            exactly(
                {
                    "matches": _some(exactly({"path": PATH}), 64),
                    "backendRefs": _some(exactly({"name": NAME}, group=GROUP, kind=KIND), 16),
                },
                timeouts=exactly({}, request=DURATION, backendRequest=DURATION),
            ),
            16,
        ),
    }
)
SPECS = {"InferencePool": POOL, "HTTPRoute": ROUTE}
