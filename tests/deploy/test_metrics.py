"""Every metric, label and error kind in the dashboard, the alerts and the autoscaler is one that a server exports."""

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.router.metrics import COUNTERS, HISTOGRAMS, REPLICA_GAUGES, Metrics
from penstock.router.request import Failure
from penstock.router.tracing import DROPPED
from penstock.tests.deploy import promql

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "monitoring/grafana/penstock.json").read_text())
RULES = yaml.safe_load((DEPLOY / "monitoring/alerts.yml").read_text())["groups"][0]["rules"]
PROMETHEUS_LABELS = {"job", "instance", "namespace", "pod"}  # labels that Prometheus adds
PROMETHEUS_METRICS = {"up"}  # metrics that Prometheus creates
EXPORTED = promql.exported(Metrics("model").render().decode())


def dashboard() -> dict[str, str]:
    """Each expression of the dashboard, by its panel's title and reference id."""
    return {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    }


def alerts() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in RULES}


def autoscaler() -> dict[str, str]:
    """The metrics that the autoscaler requests, and the adapter's queries for them."""
    folder = DEPLOY / "kubernetes/overlays/replicas"
    metrics = yaml.safe_load((folder / "autoscaler.yaml").read_text())["spec"]["metrics"]
    rules = yaml.safe_load((folder / "adapter.yaml").read_text())["rules"]["custom"]
    requested = {f"autoscaler {number}": metric["pods"]["metric"]["name"] for number, metric in enumerate(metrics)}
    series = {f"series {number}": rule["seriesQuery"] for number, rule in enumerate(rules)}
    return requested | series | {f"query {number}": rule["metricsQuery"] for number, rule in enumerate(rules)}


EXPRESSIONS = {**dashboard(), **alerts(), **autoscaler()}


def unknown_names(expression: str) -> list[str]:
    """The metrics, labels and error kinds in an expression that no server exports."""
    found = [f"no metric {name}" for name in sorted(promql.names(expression) - EXPORTED - PROMETHEUS_METRICS)]
    labels = set(PROMETHEUS_LABELS)
    for name in promql.names(expression):
        labels |= labels_of_metric(name)
    found += [f"no label {label}" for label in sorted(promql.grouped(expression) - labels)]
    for metric, label, value in promql.matchers(expression):
        if label not in PROMETHEUS_LABELS | labels_of_metric(metric):
            found.append(f"no label {label}")
        if label == "err":
            found += [f"no error {kind}" for kind in value.split("|") if kind not in error_kinds()]
    return found


def labels_of_metric(name: str) -> set[str]:
    base = re.sub(r"_(total|bucket|sum|count)$", "", name)
    labels: tuple[str, ...] = ()
    for found in (name, base):
        labels += COUNTERS[found][1] if found in COUNTERS else HISTOGRAMS[found][1] if found in HISTOGRAMS else ()
    return {*labels, *(("le",) if name.endswith("_bucket") else ()), *(("replica",) if name in REPLICA_GAUGES else ())}


def error_kinds() -> set[str]:
    """The kinds of errors that the router counts."""
    return {Failure.kind, DROPPED, *(each.kind for each in Failure.__subclasses__())}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_names_in_dashboard_alerts_and_autoscaler_are_exported(name: str) -> None:
    assert unknown_names(EXPRESSIONS[name]) == []
    assert promql.names(EXPRESSIONS[name])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("penstok_waiting > 0", ["no metric penstok_waiting"]),
        ("rate(penstock_prompt_tokens[5m])", ["no metric penstock_prompt_tokens"]),  # counters end in _total
        ("rate(tgi_request_count_total[5m])", ["no metric tgi_request_count_total"]),  # except TGI's
        ("sum(penstock_step_seconds)", ["no metric penstock_step_seconds"]),  # histograms have parts
        ("histogram_quantile(0.9, sum by (le, node) (rate(penstock_step_seconds_bucket[1m])))", ["no label node"]),
        ('vllm:num_requests_waiting{job="a"} / vllm:num_requests_queued', ["no metric vllm:num_requests_queued"]),
        ('rate(penstock_step_seconds_sum{phase="decode"}[1m])', ["no label phase"]),
        ('rate(tgi_request_failure{err=~"generation|broken"}[1m])', ["no error broken"]),
    ],
)
def test_unknown_name_is_reported(expression: str, expected: list[str]) -> None:
    assert unknown_names(expression) == expected


def test_autoscaler_and_adapter_use_the_same_metric() -> None:
    metrics = {next(iter(promql.names(expression))) for expression in autoscaler().values()}
    assert len(metrics) == 1


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """In alerts_test.yml, which promtool runs."""
    cases = yaml.safe_load((DEPLOY / "monitoring/alerts_test.yml").read_text())["tests"]
    cases_of_alerts = [(each["alertname"], "exp_alerts" in each) for case in cases for each in case["alert_rule_test"]]
    assert set(cases_of_alerts) == {(name, fires) for name in alerts() for fires in (True, False)}


def test_dashboard_panels_do_not_overlap_and_all_variables_are_used() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not cells & occupied, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        occupied |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used - {"__rate_interval"} == variables
