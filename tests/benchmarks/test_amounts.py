"""Benchmarks refuse amounts with which there would be nothing to measure, before they begin."""

import importlib
import sys

import pytest

FLAGS = {
    "beams": "new rounds",
    "cpu": "new batches prefill rounds",
    "grammar": "tokens seconds",
    "host": "steps",
    "invariance": "requests rounds",
    "latency": "target streams seconds",
    "latents": "rounds",
    "load": "batch prompt new seconds",
    "overload": "connections tokens",
    "placement": "replicas requests",
    "policies": "requests",
    "prefix": "rounds",
    "replicas": "most streams seconds",
    "router": "new rounds",
    "scheduler": "running steps",
    "speculation": "new",
    "wire": "ranks steps",
}


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name, flags in FLAGS.items() for flag in flags.split()])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "many"])
def test_amount_that_is_not_above_0_is_refused(
    name: str, flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module(f"penstock.benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", ["script", f"--{flag}={value}"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert f"argument --{flag}: " in capsys.readouterr().err


@pytest.mark.parametrize(("name", "flag", "least"), [("placement", "requests", 2), ("scheduler", "steps", 2), ("wire", "steps", 3)])
def test_too_few_values_for_quantiles_are_refused(
    name: str, flag: str, least: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module(f"penstock.benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", ["script", f"--{flag}={least - 1}"])
    with pytest.raises(SystemExit):
        script.main()
    assert f"{least - 1}: a whole number from {least} on is needed" in capsys.readouterr().err
