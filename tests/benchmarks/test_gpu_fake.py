"""The GPU's benchmark as it runs on a GPU, at its real shapes, on one that isn't there (`fake_cuda`): what is where, what a graph
can't hold, how much memory it takes. Speeds and results are made up."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from penstock.benchmarks import (
    gpu_attention,
    gpu_ceilings,
    gpu_checks,
    gpu_checks_products,
    gpu_measure,
    gpu_model,
    gpu_operations,
    gpu_tuning,
)
from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_report import UNMEASURED, Line
from penstock.shard import graphs, logits
from penstock.shard.engine import Engine
from penstock.shard.models.decoder import Decoder
from penstock.tests.shard import fake_cuda
from penstock.tests.shard.fake_cuda import Activity

RATES = (4.3e12, 4.5e12, 7.8e14)
PEERS = ("FlashInfer", "vLLM's Triton", "SGLang's Triton", "SDPA flash", "SDPA cuDNN", "FlexAttention")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Activity]:
    """Every measurement once."""
    for name, value in {"MOST_CALLS": 2, "MOST": 1, "LEAST": 1}.items():
        monkeypatch.setattr(gpu_measure, name, value)
    for name, value in {"STEPS": 3, "WARM": 1, "CASES": ((1, 1024), (256, 1024), (256, 8192))}.items():
        monkeypatch.setattr(gpu_model, name, value)
    monkeypatch.setattr(gpu_checks_products, "MIXTURES", ((16, 8),))
    watched = (Engine, "_decodes"), (Decoder, "__call__"), (Decoder, "logits"), (logits, "begin"), (graphs.Recorder, "__call__")
    for where, name in watched:
        monkeypatch.setattr(where, name, getattr(where, name))  # `gpu_busy` watches them for the rest of a process: not of this one
    with fake_cuda.device(monkeypatch, shapes=1 << 14) as found:
        yield found


def told(section: Callable[[Bench], object]) -> list[Line]:
    """By a section, none of which may fail."""
    lines: list[Line] = []
    bench = Bench(torch.device("cuda"), False, lines.append)
    bench.copy_rate, bench.read_rate, bench.product_rate = RATES
    with torch.inference_mode():
        section(bench)
    return lines


def unmeasured(lines: list[Line]) -> list[Line]:
    """But for other implementations."""
    return [line for line in lines if line.ratio is None and line.timing is None and not line.what.endswith(PEERS)]


@pytest.mark.parametrize("section", [gpu_ceilings.measure, gpu_attention.measure, gpu_operations.measure, gpu_tuning.measure])
def test_a_section_at_its_real_shapes(noted: Activity, section: Callable[[Bench], object]) -> None:
    lines = told(section)
    assert not unmeasured(lines)
    assert len(lines) >= 20
    assert noted.most < 20e9
    eager = [line.what for line in lines if line.timing is not None and line.timing.way == "eager"]
    assert all("plain torch" in what or "best 8" in what or "the host" in what for what in eager)


def test_steps_of_a_model(noted: Activity) -> None:
    lines = told(gpu_model.steps)
    assert [line.what for line in unmeasured(lines)] == ["256 x 8192"]  # its keys and values do not fit
    assert {line.what for line in lines if line.goal is not None} >= {"1 x 1024, graph: step", "256 x 1024, graph: step"}
    assert 40e9 < noted.most < 100e9


def test_checks_look_at_something(noted: Activity) -> None:
    """Nothing but made-up results is wrong with them."""
    bench = Bench(torch.device("cuda"), False, print)
    with torch.inference_mode():
        lines = [gpu_checks.checked(bench, 1, name) for name in gpu_checks.checks(bench)]
    assert not [line for line in lines if line.verdict == UNMEASURED]


def test_what_fails_takes_nothing_with_it(noted: Activity) -> None:
    def broken(bench: Bench) -> Any:
        raise ValueError("no")

    def works(bench: Bench, what: str) -> Any:
        bench.add(Line(section="s", what=what, ratio=1.0))

    lines = told(lambda bench: bench.each("s", (partial(works, what="first"), broken, partial(works, what="second"))))
    assert [line.what for line in lines] == ["first", "broken", "second"]
    assert lines[1].verdict == UNMEASURED


def test_a_capture_that_fails_leaves_no_trace(noted: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be captured is called one by one; torch is brought back to where it was."""
    recovered: list[object] = []
    monkeypatch.setattr(gpu_measure, "_recover", lambda graph, stream: recovered.append(graph))

    def call() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        torch.zeros(1, device="cuda")

    with torch.inference_mode():
        assert Bench(torch.device("cuda"), False, print).time([call]).way == "eager"
    assert len(recovered) == 1
