"""Schemas of custom resources, whose kinds Kubernetes itself lacks: only the fields that our manifests use, and no others
allowed, so that typing errors are found without the CRDs (which PENSTOCK_CRDS can provide). Pod templates are validated by
Kubernetes' own schema.
"""

from typing import Any


def closed_object(required: str = "", **fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def array_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def enum(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT, POD_TEMPLATE = {"type": "string", "minLength": 1}, {"type": "object"}
COUNT, PORT = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {"type": "object", "additionalProperties": TEXT}
REFERENCE = closed_object("name", group=TEXT, kind=TEXT, name=TEXT)

LEADER_WORKER_SET = closed_object(
    "leaderWorkerTemplate",
    replicas=COUNT,
    rolloutStrategy=closed_object(
        "type", type=enum("RollingUpdate"), rollingUpdateConfiguration=closed_object(maxUnavailable=COUNT, maxSurge=COUNT)
    ),
    leaderWorkerTemplate=closed_object(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy=enum("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        leaderTemplate=POD_TEMPLATE,
        workerTemplate=POD_TEMPLATE,
    ),
)
INFERENCE_POOL = closed_object(
    "selector targetPorts endpointPickerRef",
    selector=closed_object("matchLabels", matchLabels=LABELS),
    targetPorts=array_of(closed_object("number", number=PORT)),
    endpointPickerRef=closed_object(
        "name", name=TEXT, port=closed_object("number", number=PORT), failureMode=enum("FailOpen", "FailClose")
    ),
)
HTTP_ROUTE = closed_object(
    "parentRefs rules",
    parentRefs=array_of(REFERENCE),
    rules=array_of(
        closed_object(
            "backendRefs",
            matches=array_of(closed_object(path=closed_object("type value", type=enum("PathPrefix", "Exact"), value=TEXT))),
            backendRefs=array_of(REFERENCE),
            timeouts=closed_object(request={"type": "string", "pattern": r"^(\d+(h|m|s|ms)){1,4}$"}),
        )
    ),
)
SPECS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
}
