"""The GPU benchmark with its real shapes on a fake GPU (`fake_cuda`), which checks on which device tensors are, what can't be
captured in a CUDA graph, and how much memory is used. Speeds and results are fake.
"""

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
OTHER_IMPLEMENTATIONS = ("FlashInfer", "vLLM's Triton", "SGLang's Triton", "SDPA flash", "SDPA cuDNN", "FlexAttention")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Activity]:
    """The fake device, with every measurement done only once."""
    for name, value in {"MOST_CALLS": 2, "MOST": 1, "LEAST": 1}.items():
        monkeypatch.setattr(gpu_measure, name, value)
    for name, value in {"STEPS": 3, "WARM": 1, "CASES": ((1, 1024), (256, 1024), (256, 8192))}.items():
        monkeypatch.setattr(gpu_model, name, value)
    monkeypatch.setattr(gpu_checks_products, "MIXTURES", ((16, 8),))
    watched = (Engine, "_decodes"), (Decoder, "__call__"), (Decoder, "logits"), (logits, "begin"), (graphs.Recorder, "__call__")
    for where, name in watched:
        monkeypatch.setattr(
            where, name, getattr(where, name)
        )  # `gpu_busy` wraps them for the rest of the process; here they are restored
    with fake_cuda.device(monkeypatch, shapes=1 << 14) as found:
        yield found


def lines_of(section: Callable[[Bench], object]) -> list[Line]:
    """The lines of a section; it must not fail."""
    lines: list[Line] = []
    bench = Bench(torch.device("cuda"), False, lines.append)
    bench.copy_rate, bench.read_rate, bench.product_rate = RATES
    with torch.inference_mode():
        section(bench)
    return lines


def unmeasured_lines(lines: list[Line]) -> list[Line]:
    """Lines without ratio and timing, except those of other implementations."""
    return [line for line in lines if line.ratio is None and line.timing is None and not line.what.endswith(OTHER_IMPLEMENTATIONS)]


@pytest.mark.parametrize("section", [gpu_ceilings.measure, gpu_attention.measure, gpu_operations.measure, gpu_tuning.measure])
def test_section_with_real_shapes_measures_every_line_within_20_gb(fake_gpu: Activity, section: Callable[[Bench], object]) -> None:
    lines = lines_of(section)
    assert not unmeasured_lines(lines)
    assert len(lines) >= 20
    assert fake_gpu.most < 20e9
    eager = [line.what for line in lines if line.timing is not None and line.timing.way == "eager"]
    assert all("plain torch" in what or "best 8" in what or "the host" in what for what in eager)


def test_model_steps_measure_every_case_that_fits_in_memory(fake_gpu: Activity) -> None:
    lines = lines_of(gpu_model.steps)
    assert [line.what for line in unmeasured_lines(lines)] == ["256 x 8192"]  # its keys and values do not fit
    assert {line.what for line in lines if line.goal is not None} >= {"1 x 1024, graph: step", "256 x 1024, graph: step"}
    assert 40e9 < fake_gpu.most < 100e9


def test_all_checks_run_on_the_fake_device(fake_gpu: Activity) -> None:
    """Their results are wrong, since they are fake, but none fails to run."""
    bench = Bench(torch.device("cuda"), False, print)
    with torch.inference_mode():
        lines = [gpu_checks.checked(bench, 1, name) for name in gpu_checks.checks(bench)]
    assert not [line for line in lines if line.verdict == UNMEASURED]


def test_failing_measurement_does_not_stop_the_others(fake_gpu: Activity) -> None:
    def broken(bench: Bench) -> Any:
        raise ValueError("no")

    def works(bench: Bench, what: str) -> Any:
        bench.add(Line(section="s", what=what, ratio=1.0))

    lines = lines_of(lambda bench: bench.each("s", (partial(works, what="first"), broken, partial(works, what="second"))))
    assert [line.what for line in lines] == ["first", "broken", "second"]
    assert lines[1].verdict == UNMEASURED


def test_failed_graph_capture_falls_back_to_eager_calls_and_restores_torch(
    fake_gpu: Activity, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovered: list[object] = []
    monkeypatch.setattr(gpu_measure, "_recover", lambda graph, stream: recovered.append(graph))

    def call() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        torch.zeros(1, device="cuda")

    with torch.inference_mode():
        assert Bench(torch.device("cuda"), False, print).time([call]).way == "eager"
    assert len(recovered) == 1
