"""What the manifests may say of kinds that Kubernetes itself does not know: those of their fields that we use, closed, so that a
slip of the pen is found without their definitions (PENSTOCK_CRDS has those). A pod's template is Kubernetes' own, tested as one.
"""

from typing import Any


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object of just these fields."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT, POD = {"type": "string", "minLength": 1}, {"type": "object"}
COUNT, PORT = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {"type": "object", "additionalProperties": TEXT}
REFERENCE = record("name", group=TEXT, kind=TEXT, name=TEXT)

LEADER_WORKER_SET = record(
    "leaderWorkerTemplate",
    replicas=COUNT,
    rolloutStrategy=record(
        "type", type=one_of("RollingUpdate"), rollingUpdateConfiguration=record(maxUnavailable=COUNT, maxSurge=COUNT)
    ),
    leaderWorkerTemplate=record(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        leaderTemplate=POD,
        workerTemplate=POD,
    ),
)
INFERENCE_POOL = record(
    "selector targetPorts endpointPickerRef",
    selector=record("matchLabels", matchLabels=LABELS),
    targetPorts=several(record("number", number=PORT)),
    endpointPickerRef=record("name", name=TEXT, port=record("number", number=PORT), failureMode=one_of("FailOpen", "FailClose")),
)
HTTP_ROUTE = record(
    "parentRefs rules",
    parentRefs=several(REFERENCE),
    rules=several(
        record(
            "backendRefs",
            matches=several(record(path=record("type value", type=one_of("PathPrefix", "Exact"), value=TEXT))),
            backendRefs=several(REFERENCE),
            timeouts=record(request={"type": "string", "pattern": r"^(\d+(h|m|s|ms)){1,4}$"}),
        )
    ),
)
SPECS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
}
