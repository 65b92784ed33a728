"""The manifests, as Kustomize renders them: valid by Kubernetes' own schemas, and in accord with what penstock does.

`kubectl` (or `kustomize`) renders; without one nothing here can be tested. `pip install 'penstock[deploy]'` brings Kubernetes'
schemas. Those of Gateway API and its inference extension come with their releases: PENSTOCK_CRDS names a folder with their CRDs.
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

from penstock.launcher import options, serve
from penstock.router.api import probes
from penstock.router.config import RouterConfig
from penstock.tests.deploy import walk

FOLDER = walk.ROOT / "deploy" / "kubernetes"
OVERLAYS = ["base", *(f"overlays/{path.name}" for path in sorted((FOLDER / "overlays").iterdir()))]
RENDERER = walk.find("kubectl") or walk.find("kustomize")
VERSION = "1.34"  # of Kubernetes, whose schemas are asked
SPARE = 10  # seconds between the end of the last stream and the end of the pod
LIBRARIES = re.compile(r"NCCL_|HF_|OMP_|CUDA_|OTEL_")  # variables that are no flags of ours
CHOOSING: dict[str, Callable[[Any], Any]] = {  # where each kind says which pods it is for
    "Deployment": lambda spec: spec["selector"]["matchLabels"],
    "InferencePool": lambda spec: spec["selector"]["matchLabels"],
    "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
    "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
    "Service": lambda spec: spec["selector"],
}
FOREIGN = ("InferencePool", "HTTPRoute")  # whose schemas Kubernetes does not have

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


def pod(overlay: str) -> Any:
    return one(overlay, "Deployment")["spec"]["template"]


def container(overlay: str) -> Any:
    [found] = pod(overlay)["spec"]["containers"]
    return found


def variables(overlay: str) -> dict[str, str]:
    """What the container's environment is, but for secrets."""
    found = one(overlay, "ConfigMap")
    assert [source["configMapRef"]["name"] for source in container(overlay)["envFrom"]] == [found["metadata"]["name"]]
    return dict(found["data"])


def asked(overlay: str) -> options.Options:
    """What penstock makes of it."""
    arguments = container(overlay)["command"]
    assert arguments[:2] == ["penstock", "serve"]
    parser = options.Parser()
    options.add(parser)
    return options.parse(parser, arguments[2:], variables(overlay))


def test_every_overlay_has_what_it_is_for() -> None:
    always = {"ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"}
    more = {
        "overlays/gpu": {"PersistentVolumeClaim"},
        "overlays/tensor-parallel": {"PersistentVolumeClaim"},
        "overlays/replicas": {"PersistentVolumeClaim", "HorizontalPodAutoscaler"},
        "overlays/gateway": {"PersistentVolumeClaim", "HorizontalPodAutoscaler", "InferencePool", "HTTPRoute"},
    }
    kinds = {overlay: {item["kind"] for item in rendered(FOLDER / overlay)} for overlay in OVERLAYS}
    assert kinds == {overlay: always | more.get(overlay, set()) for overlay in OVERLAYS}


@each_overlay
def test_it_is_valid(overlay: str) -> None:
    for item in rendered(FOLDER / overlay):
        if item["kind"] not in FOREIGN:
            assert complaint(item) == "", item["kind"]


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


def test_what_the_gateway_brings_is_valid() -> None:
    if "PENSTOCK_CRDS" not in os.environ:
        pytest.skip("PENSTOCK_CRDS names no folder with the CRDs of Gateway API and its inference extension (from their releases)")
    schemas = {}
    for path in Path(os.environ["PENSTOCK_CRDS"]).rglob("*.yaml"):
        for crd in yaml.safe_load_all(path.read_text()):
            for version in crd["spec"]["versions"] if crd and crd["kind"] == "CustomResourceDefinition" else ():
                schemas[crd["spec"]["names"]["kind"], f"{crd['spec']['group']}/{version['name']}"] = version["schema"]
    for item in (one("overlays/gateway", kind) for kind in FOREIGN):
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
    own = {name for name in (*variables(overlay), "API_KEY") if not LIBRARIES.match(name)}
    assert own <= flags
    asked(overlay)


@each_overlay
def test_secrets_come_from_a_secret(overlay: str) -> None:
    names = {entry["name"] for entry in container(overlay)["env"]}
    assert names == {"API_KEY", "HF_TOKEN"}
    assert all(entry["valueFrom"]["secretKeyRef"]["optional"] for entry in container(overlay)["env"])
    assert not names & set(variables(overlay))
    assert "Secret" not in {item["kind"] for item in rendered(FOLDER / overlay)}


@each_overlay
def test_every_selector_finds_the_pods(overlay: str) -> None:
    labels = pod(overlay)["metadata"]["labels"]
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
    [rule] = one(overlay, "NetworkPolicy")["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port["name"]]


@each_overlay
def test_each_probe_asks_its_question(overlay: str) -> None:
    routes = {"startupProbe": probes.HEALTH, "readinessProbe": probes.READY, "livenessProbe": probes.LIVE}
    for name, route in routes.items():
        assert container(overlay)[name]["httpGet"] == {"path": route, "port": container(overlay)["ports"][0]["name"]}


@each_overlay
def test_a_pod_has_the_time_to_end(overlay: str) -> None:
    [command, seconds] = container(overlay)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    given = pod(overlay)["spec"]["terminationGracePeriodSeconds"]
    assert given >= int(seconds) + asked(overlay).graceful_termination_timeout + SPARE
    assert SPARE >= 2 * serve.GRACE  # the router's, then the shards'


@each_overlay
def test_it_may_do_nothing_that_it_need_not(overlay: str) -> None:
    spec, rights = pod(overlay)["spec"], container(overlay)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert rights == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    mounted = {mount["name"]: mount["mountPath"] for mount in container(overlay)["volumeMounts"]}
    assert {"/tmp", "/data"} <= set(mounted.values())
    assert set(mounted) == {volume["name"] for volume in spec["volumes"]}


@each_overlay
def test_there_is_a_gpu_for_each_rank(overlay: str) -> None:
    limits = container(overlay)["resources"]["limits"]
    ranks = asked(overlay).num_shard or 1
    gpus = limits.get("nvidia.com/gpu", 0)
    assert gpus == (ranks if asked(overlay).device == "cuda" else 0)
    assert container(overlay)["image"] == ("penstock:cuda" if gpus else "penstock:cpu")
    volumes = {volume["name"]: volume for volume in pod(overlay)["spec"]["volumes"]}
    shared = [mount for mount in container(overlay)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert bool(shared) == (ranks > 1)
    assert all(volumes[mount["name"]]["emptyDir"]["medium"] == "Memory" for mount in shared)


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
