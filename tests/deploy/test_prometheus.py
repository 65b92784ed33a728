"""Prometheus itself reads the rules, the dashboard's expressions and a server that runs. Debian's package `prometheus` has both
programs that are needed here; without them these tests are skipped.
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
from penstock.tests.deploy import promql, walk
from penstock.tests.deploy.test_metrics import alerts, dashboard

MONITORING = walk.ROOT / "deploy" / "monitoring"
SOON = 20.0  # seconds until Prometheus has looked at the server
HOW = "is not installed: apt-get install prometheus"
needs_promtool = pytest.mark.skipif(walk.find("promtool") is None, reason=f"promtool {HOW}")


def promtool(*arguments: str) -> str:
    answer = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=30)
    return "" if answer.returncode == 0 else answer.stdout + answer.stderr


@needs_promtool
def test_the_rules_fire_when_they_should() -> None:
    assert promtool("check", "rules", "alerts.yml") == ""
    assert promtool("test", "rules", "alerts_test.yml") == ""


@needs_promtool
def test_a_wrong_threshold_is_found(tmp_path: Path) -> None:
    rules = (MONITORING / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(rules.replace("> 0.01", "> 0.1"))
    (tmp_path / "alerts_test.yml").write_text((MONITORING / "alerts_test.yml").read_text())
    assert "PenstockFails" in promtool("test", "rules", str(tmp_path / "alerts_test.yml"))


def plain(expression: str) -> str:
    """Of the dashboard, with Grafana's variables filled in."""
    return expression.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*")


@needs_promtool
def test_the_expressions_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": plain(each)} for number, each in enumerate(dashboard().values())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert promtool("check", "rules", str(tmp_path / "rules.yml")) == ""


@pytest.fixture(scope="module")
def prometheus(server: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with our settings, which looks at a server of ours once a second."""
    if walk.find("prometheus") is None:
        pytest.skip(f"prometheus {HOW}")
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


def ask(url: str, **values: str) -> Any:
    """What Prometheus has to say; None while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(values)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it starts
            return None
        raise AssertionError(error.read()) from None
    except OSError:
        return None


def generate(server: int) -> None:
    body = json.dumps({"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def test_prometheus_scrapes_a_server(prometheus: str, server: int) -> None:
    generate(server)
    deadline = time.monotonic() + SOON
    targets: list[Any] = []
    while not targets or targets[0]["health"] != "up":
        assert time.monotonic() < deadline, targets
        time.sleep(0.05)
        targets = (ask(f"{prometheus}/targets") or {"activeTargets": []})["activeTargets"]
    assert targets[0]["labels"]["job"] == "penstock"
    seen = set(ask(f"{prometheus}/label/__name__/values"))
    optional = {"tgi_request_failure"}  # has no sample before the first failure
    optional |= {f"penstock_{name}_total" for name in ("placements", "placement_hit_tokens")}  # with one replica
    optional |= {f"penstock_{name}_total" for name in ("drafted_positions", "accepted_positions", "speculation_steps")}
    for place, expression in {**dashboard(), **alerts()}.items():
        assert promql.names(expression) - optional <= seen, place
        ask(f"{prometheus}/query", query=plain(expression))
    [group] = ask(f"{prometheus}/rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == set(alerts())
    [alive] = ask(f"{prometheus}/query", query='up{job="penstock"}')["result"]
    assert alive["value"][1] == "1"
    [made] = ask(f"{prometheus}/query", query="penstock_generated_tokens_total")["result"]
    assert float(made["value"][1]) >= 8
