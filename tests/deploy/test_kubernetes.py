"""The Kubernetes manifests as rendered by Kustomize: valid by Kubernetes' own schemas, and consistent with penstock's flags and
routes.

`kubectl` or `kustomize` renders them; without either, all tests here are skipped. `pip install 'penstock[deploy]'` installs
Kubernetes' schemas. Those of Gateway API, its inference extension and LeaderWorkerSet come with their releases: PENSTOCK_CRDS
names a folder with their CRDs.
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
from penstock.tests.deploy import custom_resource_schemas, deploy_page

FOLDER = deploy_page.ROOT / "deploy" / "kubernetes"
OVERLAYS = ["base", *(f"overlays/{path.name}" for path in sorted((FOLDER / "overlays").iterdir()))]
RENDERER = deploy_page.find("kubectl") or deploy_page.find("kustomize")
KUBERNETES_VERSION = "1.34"  # of the schemas
SPARE_SECONDS = 10  # seconds between the end of the last stream and the end of the pod
SECRETS = {"API_KEY", "ADMIN_KEY", "HF_TOKEN"}
LIBRARIES = re.compile(r"NCCL_|HF_|OMP_|CUDA_|OTEL_")  # variables that are not penstock's flags
POD_SELECTORS: dict[str, Callable[[Any], Any]] = {  # the pod selector of each kind
    "Deployment": lambda spec: spec["selector"]["matchLabels"],
    "InferencePool": lambda spec: spec["selector"]["matchLabels"],
    "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
    "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
    "Service": lambda spec: spec["selector"],
}
CUSTOM_RESOURCES = {  # kinds that Kubernetes has no schema of, and an overlay with each
    "InferencePool": "overlays/gateway",
    "HTTPRoute": "overlays/gateway",
    "LeaderWorkerSet": "overlays/nodes",
}
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
MULTI_NODE_OVERLAYS = ("overlays/nodes",)

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
    assert answer.stderr == ""  # no warnings of deprecated fields
    return list(yaml.safe_load_all(answer.stdout))


def item_of_kind(overlay: str, kind: str) -> Any:
    [found] = [item for item in rendered(FOLDER / overlay) if item["kind"] == kind]
    return found


def pods(overlay: str) -> dict[str, Any]:
    """Every pod template, by role."""
    if overlay not in MULTI_NODE_OVERLAYS:
        return {"one": item_of_kind(overlay, "Deployment")["spec"]["template"]}
    group = item_of_kind(overlay, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}


def pod(overlay: str) -> Any:
    """The template of the pod that serves HTTP."""
    return next(iter(pods(overlay).values()))


def only_container(template: Any) -> Any:
    """A pod template's only container."""
    [found] = template["spec"]["containers"]
    return found


def container(overlay: str) -> Any:
    return only_container(pod(overlay))


def variables(overlay: str) -> dict[str, str]:
    """The container's environment variables, without secrets."""
    found = item_of_kind(overlay, "ConfigMap")
    for template in pods(overlay).values():
        assert [source["configMapRef"]["name"] for source in only_container(template)["envFrom"]] == [found["metadata"]["name"]]
    return dict(found["data"])


def parsed_options(overlay: str) -> options.Options:
    """The options that penstock parses from command and environment. Certificates are replaced by an existing file: only a pod
    has them."""
    arguments = container(overlay)["command"]
    assert arguments[:2] == ["penstock", "serve"]
    parser = command_line.Parser()
    command_line.add(parser)
    environment = {name: str(deploy_page.PAGE) if name.startswith("TLS_") else value for name, value in variables(overlay).items()}
    return command_line.parse(parser, arguments[2:], environment)


def test_each_overlay_renders_the_expected_kinds() -> None:
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
def test_overlay_is_valid_by_kubernetes_schemas(overlay: str) -> None:
    for item in rendered(FOLDER / overlay):
        if item["kind"] not in CUSTOM_RESOURCES:
            assert validation_error(item) == "", item["kind"]
    for template in pods(overlay).values():  # also those within custom resources
        assert validation_error({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template}) == ""


def validation_error(item: Any) -> str:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'penstock[deploy]' brings Kubernetes' schemas")
    try:
        validate.validate(item, KUBERNETES_VERSION, strict=True)
    except validate.ValidationError as error:
        return str(error)
    return ""


def test_misspelled_field_is_invalid() -> None:
    item = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "a"}, "spec": {"maxUnavailabel": 1}}
    assert "maxUnavailabel" in validation_error(item)


@pytest.mark.parametrize("kind", CUSTOM_RESOURCES)
def test_custom_resources_have_only_known_fields(kind: str) -> None:
    item = item_of_kind(CUSTOM_RESOURCES[kind], kind)
    validator = jsonschema.Draft202012Validator(custom_resource_schemas.SPECS[item["apiVersion"], kind])
    validator.validate(item["spec"])
    with pytest.raises(jsonschema.ValidationError, match="sice"):
        validator.validate({**item["spec"], "sice": 2})


def test_custom_resources_are_valid_by_their_crds() -> None:
    if "PENSTOCK_CRDS" not in os.environ:
        pytest.skip("PENSTOCK_CRDS names no folder with the CRDs of Gateway API, its inference extension and LeaderWorkerSet")
    schemas = {}
    for path in Path(os.environ["PENSTOCK_CRDS"]).rglob("*.yaml"):
        for crd in yaml.safe_load_all(path.read_text()):
            for version in crd["spec"]["versions"] if crd and crd["kind"] == "CustomResourceDefinition" else ():
                schemas[crd["spec"]["names"]["kind"], f"{crd['spec']['group']}/{version['name']}"] = version["schema"]
    for item in (item_of_kind(overlay, kind) for kind, overlay in CUSTOM_RESOURCES.items()):
        schema = without_additional_properties(schemas[item["kind"], item["apiVersion"]]["openAPIV3Schema"])
        jsonschema.Draft202012Validator(schema).validate({**item, "metadata": {}})


def without_additional_properties(schema: Any) -> Any:
    """The same schema, in which fields that it does not name are invalid."""
    if isinstance(schema, list):
        return [without_additional_properties(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    extra = {"additionalProperties": False} if "properties" in schema and "additionalProperties" not in schema else {}
    return {**{key: without_additional_properties(value) for key, value in schema.items()}, **extra}


@each_overlay
def test_every_variable_is_a_flag_of_penstock_serve(overlay: str) -> None:
    flags = {spelling.upper() for field in options.FIELDS.values() for spelling in (field.name, field.metadata["also"]) if spelling}
    variable_names = {name for name in (*variables(overlay), *SECRETS) if not LIBRARIES.match(name)}
    assert variable_names <= flags
    parsed_options(overlay)


@each_overlay
def test_secrets_come_from_a_kubernetes_secret(overlay: str) -> None:
    for role, template in pods(overlay).items():
        entries = only_container(template)["env"]
        # Only the pod that serves HTTP needs the keys.
        assert {entry["name"] for entry in entries} == ({"HF_TOKEN"} if role == "worker" else SECRETS)
        assert all(entry["valueFrom"]["secretKeyRef"]["optional"] for entry in entries)
    assert not SECRETS & set(variables(overlay))
    assert "Secret" not in {item["kind"] for item in rendered(FOLDER / overlay)}


@each_overlay
def test_every_selector_matches_the_pods(overlay: str) -> None:
    labels = pod(overlay)["metadata"]["labels"] | {WORKER_INDEX: "0"}  # LeaderWorkerSet adds this label
    for item in rendered(FOLDER / overlay):
        if item["kind"] in POD_SELECTORS:
            selector = POD_SELECTORS[item["kind"]](item["spec"])
            assert selector
            assert selector.items() <= labels.items(), item["kind"]


@each_overlay
def test_all_manifests_use_the_same_port(overlay: str) -> None:
    [port] = container(overlay)["ports"]
    assert port["containerPort"] == parsed_options(overlay).port == RouterConfig(folder="", model="").port
    assert pod(overlay)["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    assert item_of_kind(overlay, "Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    rule, *between = item_of_kind(overlay, "NetworkPolicy")["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port["name"]]
    assert len(between) == (overlay in MULTI_NODE_OVERLAYS)


@each_overlay
def test_each_probe_uses_its_route(overlay: str) -> None:
    routes = {"startupProbe": probes.HEALTH, "readinessProbe": probes.READY, "livenessProbe": probes.LIVE}
    for name, route in routes.items():
        assert container(overlay)[name]["httpGet"] == {"path": route, "port": container(overlay)["ports"][0]["name"]}


@each_overlay
def test_grace_period_covers_prestop_and_drain_timeout(overlay: str) -> None:
    for template in pods(overlay).values():
        [command, seconds] = only_container(template)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace >= int(seconds) + parsed_options(overlay).graceful_termination_timeout + SPARE_SECONDS
    assert SPARE_SECONDS >= 2 * parts.GRACE  # the router's grace period, then the shards'


@each_overlay
def test_pods_have_no_more_rights_than_needed(overlay: str) -> None:
    for template in pods(overlay).values():
        spec, security_context = template["spec"], only_container(template)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security_context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        mounted = {mount["name"]: mount["mountPath"] for mount in only_container(template)["volumeMounts"]}
        assert {"/tmp", "/data"} <= set(mounted.values())
        assert set(mounted) == {volume["name"] for volume in spec["volumes"]}


@each_overlay
def test_number_of_gpus_equals_the_number_of_ranks(overlay: str) -> None:
    ranks = (parsed_options(overlay).num_shard or 1) * (parsed_options(overlay).replicas or 1)
    gpus = 0
    for role, template in pods(overlay).items():
        gpus_of_pod = only_container(template)["resources"]["limits"].get("nvidia.com/gpu", 0)
        gpus += gpus_of_pod * (
            item_of_kind(overlay, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"] - 1 if role == "worker" else 1
        )
        assert only_container(template)["image"] == ("penstock:cuda" if gpus_of_pod else "penstock:cpu")
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        shared = [mount for mount in only_container(template)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        assert bool(shared) == (gpus_of_pod > 1)
        assert all(volumes[mount["name"]]["emptyDir"]["medium"] == "Memory" for mount in shared)
    assert gpus == (ranks if parsed_options(overlay).device == "cuda" else 0)


def test_leader_and_worker_pods_differ_only_in_ports_probes_and_keys() -> None:
    leader, worker = (only_container(template) for template in pods("overlays/nodes").values())
    http_fields = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert http_fields <= set(leader)
    rest = {name: value for name, value in leader.items() if name not in http_fields}
    assert rest | {"env": [entry for entry in leader["env"] if entry["name"] == "HF_TOKEN"]} == worker
    assert worker["command"] == ["penstock", "serve"]


def test_nodes_are_configured_by_leader_worker_sets_variables() -> None:
    """With these variables and the ConfigMap, a pod of the group needs no flags."""
    parser = command_line.Parser()
    command_line.add(parser)
    size = item_of_kind("overlays/nodes", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    given = {"LWS_LEADER_ADDRESS": "penstock-nodes-0.penstock-nodes.llm", "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "1"}
    found, _ = nodes.settle(parsed_options("overlays/nodes"), given)
    assert (found.nnodes, found.node_rank, found.master_addr) == (size, 1, given["LWS_LEADER_ADDRESS"])
    assert found.num_shard % size == 0


def test_node_certificates_are_mounted_from_a_secret() -> None:
    settings = variables("overlays/nodes")
    for template in pods("overlays/nodes").values():
        [volume] = [volume for volume in template["spec"]["volumes"] if "secret" in volume]
        [mount] = [mount for mount in only_container(template)["volumeMounts"] if mount["name"] == volume["name"]]
        assert volume["secret"]["secretName"] == "penstock-nodes"
        assert mount["readOnly"]
        files = {settings[name] for name in ("TLS_CERT", "TLS_KEY", "TLS_CA")}
        assert files == {f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    assert not parsed_options("overlays/nodes").insecure_nodes


def test_network_policy_allows_all_ports_between_nodes_and_no_other_peers() -> None:
    policy = item_of_kind("overlays/nodes", "NetworkPolicy")["spec"]
    own_pods = {"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}
    assert policy["ingress"][1:] == [{"from": [own_pods]}]
    assert policy["egress"][2:] == [{"to": [own_pods]}]


def test_autoscaled_deployments_set_no_replica_count() -> None:
    for overlay in ("overlays/replicas", "overlays/gateway"):
        deployment, target = (
            item_of_kind(overlay, "Deployment"),
            item_of_kind(overlay, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"],
        )
        assert "replicas" not in deployment["spec"]
        assert target == {key: deployment[key] for key in ("apiVersion", "kind")} | {"name": deployment["metadata"]["name"]}
        assert item_of_kind(overlay, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_http_route_points_to_the_inference_pool_and_its_port() -> None:
    pool, route = item_of_kind("overlays/gateway", "InferencePool"), item_of_kind("overlays/gateway", "HTTPRoute")
    [rule] = route["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    assert rule["backendRefs"] == [{"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}]
    assert pool["spec"]["targetPorts"] == [{"number": container("overlays/gateway")["ports"][0]["containerPort"]}]


def test_example_overlay_of_the_deploy_page_renders(tmp_path: Path) -> None:
    [block] = deploy_page.blocks("yaml")
    relative_path = os.path.relpath(FOLDER, tmp_path.resolve())
    assert "../penstock/deploy/kubernetes" in block.text
    (tmp_path / "kustomization.yaml").write_text(block.text.replace("../penstock/deploy/kubernetes", relative_path))
    found = {item["kind"]: item for item in rendered(tmp_path)}
    assert found["ConfigMap"]["data"]["DEVICE"] == "cuda"
    assert found["ConfigMap"]["data"]["MODEL_ID"] == "Qwen/Qwen3-4B"
    assert found["Deployment"]["metadata"]["namespace"] == "llm"
    assert found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"].startswith("images.example.org/penstock:")
