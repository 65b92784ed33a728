"""Prometheus itself checks the alert rules and the dashboard's expressions, and scrapes a running server. Debian's package
`prometheus` has both programs that are needed; without them these tests are skipped.
"""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.launcher.machine import free_port
from penstock.tests.deploy import deploy_page, promql
from penstock.tests.deploy.test_metrics import alerts, dashboard

MONITORING = deploy_page.ROOT / "deploy" / "monitoring"
SCRAPE_TIMEOUT = 20.0  # seconds until Prometheus has scraped the server
NOT_INSTALLED = "is not installed: apt-get install prometheus"
needs_promtool = pytest.mark.skipif(deploy_page.find("promtool") is None, reason=f"promtool {NOT_INSTALLED}")


def promtool(*arguments: str) -> str:
    answer = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=30)
    return "" if answer.returncode == 0 else answer.stdout + answer.stderr


@needs_promtool
def test_alert_rules_pass_their_promtool_tests() -> None:
    assert promtool("check", "rules", "alerts.yml") == ""
    assert promtool("test", "rules", "alerts_test.yml") == ""


@needs_promtool
def test_wrong_threshold_fails_the_promtool_tests(tmp_path: Path) -> None:
    rules = (MONITORING / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(rules.replace("> 0.01", "> 0.1"))
    (tmp_path / "alerts_test.yml").write_text((MONITORING / "alerts_test.yml").read_text())
    assert "PenstockFails" in promtool("test", "rules", str(tmp_path / "alerts_test.yml"))


def without_variables(expression: str) -> str:
    """A dashboard expression with Grafana's variables filled in."""
    return expression.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*")


@needs_promtool
def test_dashboard_expressions_are_valid_promql(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": without_variables(each)} for number, each in enumerate(dashboard().values())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert promtool("check", "rules", str(tmp_path / "rules.yml")) == ""


@pytest.fixture(scope="module")
def prometheus(server: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with our settings, which scrapes a server once a second."""
    if deploy_page.find("prometheus") is None:
        pytest.skip(f"prometheus {NOT_INSTALLED}")
    folder = tmp_path_factory.mktemp("prometheus")
    settings = (MONITORING / "prometheus.yml").read_text()
    assert "penstock:3000" in settings
    (folder / "prometheus.yml").write_text(settings.replace("penstock:3000", f"127.0.0.1:{server}").replace(" 5s", " 1s"))
    (folder / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
            assert process.poll() is None, (folder / "log").read_text()
        finally:
            process.terminate()
            process.wait(10)


def query(url: str, **values: str) -> Any:
    """The data of Prometheus' response; None while it is starting."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(values)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is starting
            return None
        raise AssertionError(error.read()) from None
    except OSError:
        return None


def generate(server: int) -> None:
    body = json.dumps({"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def test_prometheus_scrapes_a_server_and_evaluates_all_expressions(prometheus: str, server: int) -> None:
    generate(server)
    deadline = time.monotonic() + SCRAPE_TIMEOUT
    targets: list[Any] = []
    while not targets or targets[0]["health"] != "up":
        assert time.monotonic() < deadline, targets
        time.sleep(0.05)
        targets = (query(f"{prometheus}/targets") or {"activeTargets": []})["activeTargets"]
    assert targets[0]["labels"]["job"] == "penstock"
    scraped = set(query(f"{prometheus}/label/__name__/values"))
    optional = {"tgi_request_failure"}  # has no sample before the first failure
    optional |= {f"penstock_{name}_total" for name in ("placements", "placement_hit_tokens")}  # with one replica
    optional |= {f"penstock_{name}_total" for name in ("drafted_positions", "accepted_positions", "speculation_steps")}
    for expression_name, expression in {**dashboard(), **alerts()}.items():
        assert promql.names(expression) - optional <= scraped, expression_name
        query(f"{prometheus}/query", query=without_variables(expression))
    [group] = query(f"{prometheus}/rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == set(alerts())
    [up] = query(f"{prometheus}/query", query='up{job="penstock"}')["result"]
    assert up["value"][1] == "1"
    [generated_tokens] = query(f"{prometheus}/query", query="penstock_generated_tokens_total")["result"]
    assert float(generated_tokens["value"][1]) >= 8
