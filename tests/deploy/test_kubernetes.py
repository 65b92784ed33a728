"""The manifests, as Kustomize renders them: valid by Kubernetes' own schemas, and in accord with what penstock does.

`kubectl` (or `kustomize`) renders; without one nothing here can be tested. `pip install 'penstock[deploy]'` brings Kubernetes'
schemas. Those of Gateway API, its inference extension and LeaderWorkerSet come with their releases: PENSTOCK_CRDS names a folder
with their CRDs.
"""

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.launcher import command_line, nodes, options, parts
from penstock.router.api import probes
from penstock.router.config import RouterConfig
from penstock.tests.deploy import foreign, walk

FOLDER = walk.ROOT / "deploy" / "kubernetes"
OVERLAYS = ["base", *(f"overlays/{path.name}" for path in sorted((FOLDER / "overlays").iterdir()))]
RENDERER = walk.find("kubectl") or walk.find("kustomize")
VERSION = "1.34"  # of Kubernetes, whose schemas are asked
SPARE = 10  # seconds between the end of the last stream and the end of the pod
SECRETS = {"API_KEY", "ADMIN_KEY", "HF_TOKEN"}
LIBRARIES = re.compile(r"NCCL_|HF_|OMP_|CUDA_|OTEL_")  # variables that are no flags of ours
CHOOSING: dict[str, Callable[[Any], Any]] = {  # where each kind says which pods it is for
    "Deployment": lambda spec: spec["selector"]["matchLabels"],
    "InferencePool": lambda spec: spec["selector"]["matchLabels"],
    "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
    "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
    "Service": lambda spec: spec["selector"],
}
FOREIGN = {  # whose schemas Kubernetes does not have
    "InferencePool": "overlays/gateway",
    "HTTPRoute": "overlays/gateway",
    "LeaderWorkerSet": "overlays/nodes",
}
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
SEVERAL_NODES = ("overlays/nodes",)

pytestmark = pytest.mark.skipif(
    RENDERER is None, reason="kubectl (1.27 or newer) or kustomize is needed: https://kubernetes.io/docs/tasks/tools/"
)
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@functools.cache
def rendered(folder: Path) -> list[Any]:
    assert RENDERER is not None
    verb = "kustomize" if RENDERER.endswith("kubectl") else "build"
    answer = subprocess.run([RENDERER, verb, str(folder)], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""  # warnings of what is out of use
    return list(yaml.safe_load_all(answer.stdout))


def one(overlay: str, kind: str) -> Any:
    [found] = [item for item in rendered(FOLDER / overlay) if item["kind"] == kind]
    return found


def pods(overlay: str) -> dict[str, Any]:
    """Every template of pods, by its role."""
    if overlay not in SEVERAL_NODES:
        return {"one": one(overlay, "Deployment")["spec"]["template"]}
    group = one(overlay, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}


def pod(overlay: str) -> Any:
    """The one that serves HTTP."""
    return next(iter(pods(overlay).values()))


def only(template: Any) -> Any:
    """Its container."""
    [found] = template["spec"]["containers"]
    return found


def container(overlay: str) -> Any:
    return only(pod(overlay))


def variables(overlay: str) -> dict[str, str]:
    """What the container's environment is, but for secrets."""
    found = one(overlay, "ConfigMap")
    for template in pods(overlay).values():
        assert [source["configMapRef"]["name"] for source in only(template)["envFrom"]] == [found["metadata"]["name"]]
    return dict(found["data"])


def asked(overlay: str) -> options.Options:
    """What penstock makes of it. Certificates are files that only a pod has."""
    arguments = container(overlay)["command"]
    assert arguments[:2] == ["penstock", "serve"]
    parser = command_line.Parser()
    command_line.add(parser)
    here = {name: str(walk.PAGE) if name.startswith("TLS_") else value for name, value in variables(overlay).items()}
    return command_line.parse(parser, arguments[2:], here)


def test_every_overlay_has_what_it_is_for() -> None:
    always = {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service"}
    more = {
        "base": {"Deployment"},
        "overlays/gpu": {"Deployment", "PersistentVolumeClaim"},
        "overlays/tensor-parallel": {"Deployment", "PersistentVolumeClaim"},
        "overlays/replicas-of-a-node": {"Deployment", "PersistentVolumeClaim"},
        "overlays/nodes": {"LeaderWorkerSet", "PersistentVolumeClaim"},
        "overlays/replicas": {"Deployment", "PersistentVolumeClaim", "HorizontalPodAutoscaler"},
        "overlays/gateway": {"Deployment", "PersistentVolumeClaim", "HorizontalPodAutoscaler", "InferencePool", "HTTPRoute"},
    }
    kinds = {overlay: {item["kind"] for item in rendered(FOLDER / overlay)} for overlay in OVERLAYS}
    assert kinds == {overlay: always | more.get(overlay, set()) for overlay in OVERLAYS}


@each_overlay
def test_it_is_valid(overlay: str) -> None:
    for item in rendered(FOLDER / overlay):
        if item["kind"] not in FOREIGN:
            assert complaint(item) == "", item["kind"]
    for template in pods(overlay).values():  # of a kind that Kubernetes does not know
        assert complaint({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template}) == ""


def complaint(item: Any) -> str:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'penstock[deploy]' brings Kubernetes' schemas")
    try:
        validate.validate(item, VERSION, strict=True)
    except validate.ValidationError as error:
        return str(error)
    return ""


def test_a_slip_of_the_pen_is_invalid() -> None:
    item = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "a"}, "spec": {"maxUnavailabel": 1}}
    assert "maxUnavailabel" in complaint(item)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_others_define_says_nothing_that_they_do_not_know(kind: str) -> None:
    item = one(FOREIGN[kind], kind)
    validator = jsonschema.Draft202012Validator(foreign.SPECS[item["apiVersion"], kind])
    validator.validate(item["spec"])
    with pytest.raises(jsonschema.ValidationError, match="sice"):
        validator.validate({**item["spec"], "sice": 2})


def test_what_others_define_is_valid() -> None:
    if "PENSTOCK_CRDS" not in os.environ:
        pytest.skip("PENSTOCK_CRDS names no folder with the CRDs of Gateway API, its inference extension and LeaderWorkerSet")
    schemas = {}
    for path in Path(os.environ["PENSTOCK_CRDS"]).rglob("*.yaml"):
        for crd in yaml.safe_load_all(path.read_text()):
            for version in crd["spec"]["versions"] if crd and crd["kind"] == "CustomResourceDefinition" else ():
                schemas[crd["spec"]["names"]["kind"], f"{crd['spec']['group']}/{version['name']}"] = version["schema"]
    for item in (one(overlay, kind) for kind, overlay in FOREIGN.items()):
        schema = closed(schemas[item["kind"], item["apiVersion"]]["openAPIV3Schema"])
        jsonschema.Draft202012Validator(schema).validate({**item, "metadata": {}})


def closed(schema: Any) -> Any:
    """The same, in which a field that it does not name is a fault."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    extra = {"additionalProperties": False} if "properties" in schema and "additionalProperties" not in schema else {}
    return {**{key: closed(value) for key, value in schema.items()}, **extra}


@each_overlay
def test_every_variable_is_a_flag(overlay: str) -> None:
    flags = {spelling.upper() for field in options.FIELDS.values() for spelling in (field.name, field.metadata["also"]) if spelling}
    own = {name for name in (*variables(overlay), *SECRETS) if not LIBRARIES.match(name)}
    assert own <= flags
    asked(overlay)


@each_overlay
def test_secrets_come_from_a_secret(overlay: str) -> None:
    for role, template in pods(overlay).items():
        entries = only(template)["env"]
        # Only who serves HTTP needs to know the keys.
        assert {entry["name"] for entry in entries} == ({"HF_TOKEN"} if role == "worker" else SECRETS)
        assert all(entry["valueFrom"]["secretKeyRef"]["optional"] for entry in entries)
    assert not SECRETS & set(variables(overlay))
    assert "Secret" not in {item["kind"] for item in rendered(FOLDER / overlay)}


@each_overlay
def test_every_selector_finds_the_pods(overlay: str) -> None:
    labels = pod(overlay)["metadata"]["labels"] | {WORKER_INDEX: "0"}  # which LeaderWorkerSet adds
    for item in rendered(FOLDER / overlay):
        if item["kind"] in CHOOSING:
            wanted = CHOOSING[item["kind"]](item["spec"])
            assert wanted
            assert wanted.items() <= labels.items(), item["kind"]


@each_overlay
def test_the_port_is_one(overlay: str) -> None:
    [port] = container(overlay)["ports"]
    assert port["containerPort"] == asked(overlay).port == RouterConfig(folder="", model="").port
    assert pod(overlay)["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    assert one(overlay, "Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    rule, *between = one(overlay, "NetworkPolicy")["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port["name"]]
    assert len(between) == (overlay in SEVERAL_NODES)


@each_overlay
def test_each_probe_asks_its_question(overlay: str) -> None:
    routes = {"startupProbe": probes.HEALTH, "readinessProbe": probes.READY, "livenessProbe": probes.LIVE}
    for name, route in routes.items():
        assert container(overlay)[name]["httpGet"] == {"path": route, "port": container(overlay)["ports"][0]["name"]}


@each_overlay
def test_a_pod_has_the_time_to_end(overlay: str) -> None:
    for template in pods(overlay).values():
        [command, seconds] = only(template)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        given = template["spec"]["terminationGracePeriodSeconds"]
        assert given >= int(seconds) + asked(overlay).graceful_termination_timeout + SPARE
    assert SPARE >= 2 * parts.GRACE  # the router's, then the shards'


@each_overlay
def test_it_may_do_nothing_that_it_need_not(overlay: str) -> None:
    for template in pods(overlay).values():
        spec, rights = template["spec"], only(template)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert rights == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        mounted = {mount["name"]: mount["mountPath"] for mount in only(template)["volumeMounts"]}
        assert {"/tmp", "/data"} <= set(mounted.values())
        assert set(mounted) == {volume["name"] for volume in spec["volumes"]}


@each_overlay
def test_there_is_a_gpu_for_each_rank(overlay: str) -> None:
    ranks = (asked(overlay).num_shard or 1) * (asked(overlay).replicas or 1)
    gpus = 0
    for role, template in pods(overlay).items():
        own = only(template)["resources"]["limits"].get("nvidia.com/gpu", 0)
        gpus += own * (one(overlay, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"] - 1 if role == "worker" else 1)
        assert only(template)["image"] == ("penstock:cuda" if own else "penstock:cpu")
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        shared = [mount for mount in only(template)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        assert bool(shared) == (own > 1)
        assert all(volumes[mount["name"]]["emptyDir"]["medium"] == "Memory" for mount in shared)
    assert gpus == (ranks if asked(overlay).device == "cuda" else 0)


def test_pods_of_a_group_differ_in_what_http_needs() -> None:
    leader, worker = (only(template) for template in pods("overlays/nodes").values())
    of_http = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert of_http <= set(leader)
    rest = {name: value for name, value in leader.items() if name not in of_http}
    assert rest | {"env": [entry for entry in leader["env"] if entry["name"] == "HF_TOKEN"]} == worker
    assert worker["command"] == ["penstock", "serve"]


def test_a_group_knows_its_nodes_by_what_its_placer_sets() -> None:
    """With these variables, and the settings, a pod of the group needs no flag."""
    parser = command_line.Parser()
    command_line.add(parser)
    size = one("overlays/nodes", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    given = {"LWS_LEADER_ADDRESS": "penstock-nodes-0.penstock-nodes.llm", "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "1"}
    found, _ = nodes.settle(asked("overlays/nodes"), given)
    assert (found.nnodes, found.node_rank, found.master_addr) == (size, 1, given["LWS_LEADER_ADDRESS"])
    assert found.num_shard % size == 0


def test_nodes_show_each_other_certificates() -> None:
    settings = variables("overlays/nodes")
    for template in pods("overlays/nodes").values():
        [volume] = [volume for volume in template["spec"]["volumes"] if "secret" in volume]
        [mount] = [mount for mount in only(template)["volumeMounts"] if mount["name"] == volume["name"]]
        assert volume["secret"]["secretName"] == "penstock-nodes"
        assert mount["readOnly"]
        files = {settings[name] for name in ("TLS_CERT", "TLS_KEY", "TLS_CA")}
        assert files == {f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    assert not asked("overlays/nodes").insecure_nodes


def test_between_nodes_all_ports_are_open_and_nobody_else_may_come() -> None:
    policy = one("overlays/nodes", "NetworkPolicy")["spec"]
    mine = {"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}
    assert policy["ingress"][1:] == [{"from": [mine]}]
    assert policy["egress"][2:] == [{"to": [mine]}]


def test_the_autoscaler_has_the_last_word_on_replicas() -> None:
    for overlay in ("overlays/replicas", "overlays/gateway"):
        deployment, target = one(overlay, "Deployment"), one(overlay, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
        assert "replicas" not in deployment["spec"]
        assert target == {key: deployment[key] for key in ("apiVersion", "kind")} | {"name": deployment["metadata"]["name"]}
        assert one(overlay, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_route_leads_through_the_pool_to_the_pods() -> None:
    pool, route = one("overlays/gateway", "InferencePool"), one("overlays/gateway", "HTTPRoute")
    [rule] = route["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    assert rule["backendRefs"] == [{"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}]
    assert pool["spec"]["targetPorts"] == [{"number": container("overlays/gateway")["ports"][0]["containerPort"]}]


def test_the_page_shows_an_overlay_that_works(tmp_path: Path) -> None:
    [block] = walk.blocks("yaml")
    place = os.path.relpath(FOLDER, tmp_path.resolve())
    assert "../penstock/deploy/kubernetes" in block.text
    (tmp_path / "kustomization.yaml").write_text(block.text.replace("../penstock/deploy/kubernetes", place))
    found = {item["kind"]: item for item in rendered(tmp_path)}
    assert found["ConfigMap"]["data"]["DEVICE"] == "cuda"
    assert found["ConfigMap"]["data"]["MODEL_ID"] == "Qwen/Qwen3-4B"
    assert found["Deployment"]["metadata"]["namespace"] == "llm"
    assert found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"].startswith("images.example.org/penstock:")
