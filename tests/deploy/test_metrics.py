"""Every metric, label and kind of error that the dashboard, the alerts and the autoscaler name is one that a server exports."""

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.router.api.app import TURNED_AWAY
from penstock.router.metrics import COUNTERS, HISTOGRAMS, REPLICA_GAUGES, Metrics
from penstock.tests.deploy import promql

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "monitoring/grafana/penstock.json").read_text())
RULES = yaml.safe_load((DEPLOY / "monitoring/alerts.yml").read_text())["groups"][0]["rules"]
TARGET = {"job", "instance", "namespace", "pod"}  # labels that Prometheus adds
OWN = {"up"}  # metrics that Prometheus makes
EXPORTED = promql.exported(Metrics("model").render().decode())


def dashboard() -> dict[str, str]:
    """Each expression of the dashboard, by its panel's title and place."""
    return {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }


def alerts() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in RULES}


def autoscaling() -> dict[str, str]:
    """What the autoscaler asks for, and how the adapter finds it."""
    folder = DEPLOY / "kubernetes/overlays/replicas"
    metrics = yaml.safe_load((folder / "autoscaler.yaml").read_text())["spec"]["metrics"]
    rules = yaml.safe_load((folder / "adapter.yaml").read_text())["rules"]["custom"]
    asked = {f"autoscaler {number}": metric["pods"]["metric"]["name"] for number, metric in enumerate(metrics)}
    series = {f"series {number}": rule["seriesQuery"] for number, rule in enumerate(rules)}
    return asked | series | {f"query {number}": rule["metricsQuery"] for number, rule in enumerate(rules)}


EXPRESSIONS = {**dashboard(), **alerts(), **autoscaling()}


def faults(expression: str) -> list[str]:
    """What it names that no server exports."""
    found = [f"no metric {name}" for name in sorted(promql.names(expression) - EXPORTED - OWN)]
    labels = set(TARGET)
    for name in promql.names(expression):
        labels |= labels_of(name)
    found += [f"no label {label}" for label in sorted(promql.grouped(expression) - labels)]
    for metric, label, value in promql.matchers(expression):
        if label not in TARGET | labels_of(metric):
            found.append(f"no label {label}")
        if label == "err":
            found += [f"no error {kind}" for kind in value.split("|") if kind not in kinds_of_errors()]
    return found


def labels_of(name: str) -> set[str]:
    base = re.sub(r"_(total|bucket|sum|count)$", "", name)
    labels: tuple[str, ...] = ()
    for found in (name, base):
        labels += COUNTERS[found][1] if found in COUNTERS else HISTOGRAMS[found][1] if found in HISTOGRAMS else ()
    return {*labels, *(("le",) if name.endswith("_bucket") else ()), *(("replica",) if name in REPLICA_GAUGES else ())}


def kinds_of_errors() -> set[str]:
    """What the router calls the failures that it counts."""
    text = "".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    return set(re.findall(r'(?:fail(?:ed)?|ended)\(.*"(\w+)"\)', text)) | set(TURNED_AWAY)


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_what_it_names_exists(place: str) -> None:
    assert faults(EXPRESSIONS[place]) == []
    assert promql.names(EXPRESSIONS[place])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("penstok_waiting > 0", ["no metric penstok_waiting"]),
        ("rate(penstock_prompt_tokens[5m])", ["no metric penstock_prompt_tokens"]),  # counters end in _total
        ("rate(tgi_request_count_total[5m])", ["no metric tgi_request_count_total"]),  # but for TGI's
        ("sum(penstock_step_seconds)", ["no metric penstock_step_seconds"]),  # histograms have parts
        ("histogram_quantile(0.9, sum by (le, node) (rate(penstock_step_seconds_bucket[1m])))", ["no label node"]),
        ('vllm:num_requests_waiting{job="a"} / vllm:num_requests_queued', ["no metric vllm:num_requests_queued"]),
        ('rate(penstock_step_seconds_sum{phase="decode"}[1m])', ["no label phase"]),
        ('rate(tgi_request_failure{err=~"generation|broken"}[1m])', ["no error broken"]),
    ],
)
def test_a_planted_fault_is_found(expression: str, expected: list[str]) -> None:
    assert faults(expression) == expected


def test_the_autoscaler_asks_for_what_the_adapter_has() -> None:
    named = {next(iter(promql.names(expression))) for expression in autoscaling().values()}
    assert len(named) == 1


def test_every_alert_is_tried() -> None:
    """With an example where it fires and one where it doesn't."""
    cases = yaml.safe_load((DEPLOY / "monitoring/alerts_test.yml").read_text())["tests"]
    tried = [(one["alertname"], "exp_alerts" in one) for case in cases for one in case["alert_rule_test"]]
    assert set(tried) == {(name, fires) for name in alerts() for fires in (True, False)}


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used - {"__rate_interval"} == variables
