"""NCCL calls of several ranks on simulated GPUs. Whether NCCL executes them correctly, only real GPUs can show.

NCCL checks nothing across ranks: if two ranks make different calls, they hang or get wrong numbers.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.proto import shard_pb2 as wire
from penstock.shard import parallel
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.forward import GraphExtent
from penstock.shard.graphs import Recorder
from penstock.shard.loading import load
from penstock.shard.memory import size_pool
from penstock.shard.sequence import Group
from penstock.shard.service import Service
from penstock.tests.shard import fake_cuda, tiny
from penstock.tests.shard.fake_cuda import Activity, OnDevice
from penstock.tests.shard.test_fake_device import (  # noqa: F401
    DRAFT_SCENARIOS,
    PAGES,
    ROWS,
    SCENARIOS,
    TOKENS,
    TOTAL,
    activity,
    engine_of,
    overlapped,
    run,
)

# The dtypes that torch's NCCL backend can send.
TYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


class FakeNccl:
    """A stand-in for torch.distributed in the processes of two ranks, which run one after the other: what rank 0 broadcasts is kept
    for rank 1."""

    ReduceOp = SimpleNamespace(MIN="min")

    def __init__(self) -> None:
        self.rank = 0
        self.calls: list[tuple[object, ...]] = []
        self._broadcasts: list[Tensor] = []

    def init_process_group(self, backend: str, **options: Any) -> None:
        self.calls.append(("begin", backend))

    def all_reduce(self, x: Tensor, op: object = None) -> None:
        self._record("all_reduce", x, op)

    def gather(self, x: Tensor, parts: list[Tensor] | None, dst: int) -> None:
        self._record("gather", x, dst)
        for part in parts or ():
            part.copy_(x)

    def broadcast(self, x: Tensor, src: int) -> None:
        self._record("broadcast", x, src)
        assert isinstance(x, OnDevice)
        if self.rank:
            x.inner.copy_(self._broadcasts.pop(0))
        else:
            self._broadcasts.append(x.inner.clone())

    def _record(self, name: str, x: Tensor, *options: object) -> None:
        assert isinstance(x, OnDevice), f"{name} of a tensor on the host"
        assert x.is_contiguous(), f"{name} of {x.shape} with strides {x.stride()}"
        assert x.dtype in TYPES
        self.calls.append((name, *options, tuple(x.shape), x.dtype, fake_cuda._tape is not None))


@pytest.fixture
def nccl(activity: Activity, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:  # noqa: F811
    found = FakeNccl()
    store = SimpleNamespace(set=lambda key, value: found.calls.append(("here",)), wait=lambda keys, timeout: None)
    monkeypatch.setattr(parallel, "distributed", found)
    monkeypatch.setattr(parallel, "_store", lambda *given: store)
    return found


def calls_of_both_ranks(
    nccl: FakeNccl, make: Callable[[int], Engine], groups: Sequence[Callable[[], list[Group]]]
) -> list[tuple[object, ...]]:
    """Runs both ranks; the NCCL calls of either. Fails if the calls or the tokens differ between them."""
    tokens, calls = [], []
    for nccl.rank in range(2):
        nccl.calls = []
        engine = make(nccl.rank)
        tokens.append([sorted(way(engine, each())) for each in groups for way in (run, overlapped)])
        calls.append(nccl.calls)
    assert calls[0] == calls[1]
    assert tokens[0] == tokens[1]
    return calls[0]


@pytest.mark.parametrize("speculate", ["", "draft=DRAFT,tree=2x2,ngram=3"])
def test_both_ranks_make_the_same_nccl_calls(nccl: FakeNccl, speculate: str) -> None:
    """In the same order, with the same sizes, and recorded into a graph on both ranks or on neither."""
    calls = calls_of_both_ranks(
        nccl,
        lambda rank: engine_of(speculate, rank=rank, ranks=2, local_rank=0),
        [SCENARIOS[name] for name in (DRAFT_SCENARIOS if speculate else SCENARIOS)],
    )
    assert {one[0] for one in calls} == {"begin", "here", "all_reduce", "gather", "broadcast"}
    assert {one[0] for one in calls if one[-1] is True} == {"all_reduce"}  # a gather's memory is not the graph's


@pytest.mark.parametrize("name", ["gemma3n", "minimax-m3", "nemotron-h-moe"])
def test_both_ranks_make_the_same_nccl_calls_for_families_with_further_reductions(nccl: FakeNccl, name: str) -> None:
    """These families reduce more than the outputs of their layers."""

    def make(rank: int) -> Engine:
        config = ShardConfig(
            folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16", rank=rank, ranks=2, local_rank=0
        )
        engine = load(config, lambda stage: None)
        size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
        engine.resize(PAGES)
        engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
        return engine

    calls_of_both_ranks(nccl, make, [lambda: [tiny.group(uid, range(20 + uid), 6) for uid in range(1, 4)]])


def test_both_ranks_make_the_same_nccl_calls_during_warmup(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory each has: the smallest decides."""
    calls = []
    for nccl.rank in range(2):
        nccl.calls = []
        config = ShardConfig(
            folder=str(tiny.DEMO), model="m", device="cuda", dtype="bfloat16", rank=nccl.rank, ranks=2, local_rank=0, overlap="on"
        )
        service = Service(config, lambda code: None)
        service._engine = load(config, lambda stage: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 27 - nccl.rank, 1 << 28))
        service._measure(wire.WarmupRequest(max_step_tokens=64, max_step_rows=4, max_total_tokens=TOTAL))
        calls.append(nccl.calls)
    assert calls[0] == calls[1]
    assert calls[0].count(("all_reduce", "min", (1,), torch.int64, False)) == 4


def test_nccl_connects_the_ranks_before_weights_are_read(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise torch would look up the other ranks' address in the first step, for no longer than they may be late, and a machine
    on which NCCL fails would read all weights before it fails."""
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: nccl.calls.append(("wait",)))
    parallel.Ranks(0, 2, fake_cuda.DEVICE, Path("meeting"))
    assert nccl.calls == [("begin", "nccl"), ("here",), ("all_reduce", None, (1,), torch.int64, False), ("wait",)]
    assert "NCCL connected 2 ranks in 0.0 s" in caplog.text


def test_slow_nccl_connection_is_warned_of(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog only watches operations that it has begun, and it has begun none."""
    warned = threading.Event()
    monkeypatch.setattr(parallel, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(parallel.log, "warning", lambda text: warned.set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: warned.wait(9))
    parallel.Ranks(0, 2, fake_cuda.DEVICE, Path("meeting"))
    assert warned.is_set()
    warned.clear()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(parallel, "SLOW_SECONDS", 0.2)
    parallel.Ranks(0, 2, fake_cuda.DEVICE, Path("meeting"))
    assert not warned.wait(0.4)
