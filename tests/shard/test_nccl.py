"""Several ranks on simulated GPUs: what NCCL is asked for. That it does it, only GPUs can tell.

NCCL checks nothing across ranks: where two of them ask for different things they hang, or get wrong numbers.
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
from penstock.tests.shard.fake_cuda import Noted, OnDevice
from penstock.tests.shard.test_fake_device import (  # noqa: F401
    DRAFTED,
    PAGES,
    ROWS,
    SCENARIOS,
    TOKENS,
    TOTAL,
    engine_of,
    noted,
    overlapped,
    run,
)

# What torch's backend for NCCL sends.
TYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


class Nccl:
    """Stands for torch.distributed in the processes of two ranks, which run one after the other: what rank 0 broadcasts is kept for
    rank 1."""

    ReduceOp = SimpleNamespace(MIN="min")

    def __init__(self) -> None:
        self.rank = 0
        self.asked: list[tuple[object, ...]] = []
        self._told: list[Tensor] = []

    def init_process_group(self, backend: str, **how: Any) -> None:
        self.asked.append(("begin", backend))

    def all_reduce(self, x: Tensor, op: object = None) -> None:
        self._ask("all_reduce", x, op)

    def gather(self, x: Tensor, parts: list[Tensor] | None, dst: int) -> None:
        self._ask("gather", x, dst)
        for part in parts or ():
            part.copy_(x)

    def broadcast(self, x: Tensor, src: int) -> None:
        self._ask("broadcast", x, src)
        assert isinstance(x, OnDevice)
        if self.rank:
            x.inner.copy_(self._told.pop(0))
        else:
            self._told.append(x.inner.clone())

    def _ask(self, what: str, x: Tensor, *how: object) -> None:
        assert isinstance(x, OnDevice), f"{what} of what is on the host"
        assert x.is_contiguous(), f"{what} of {x.shape} with strides {x.stride()}"
        assert x.dtype in TYPES
        self.asked.append((what, *how, tuple(x.shape), x.dtype, fake_cuda._tape is not None))


@pytest.fixture
def nccl(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> Nccl:  # noqa: F811
    found = Nccl()
    store = SimpleNamespace(set=lambda key, value: found.asked.append(("here",)), wait=lambda keys, timeout: None)
    monkeypatch.setattr(parallel, "distributed", found)
    monkeypatch.setattr(parallel, "_store", lambda *given: store)
    return found


def both(nccl: Nccl, make: Callable[[int], Engine], groups: Sequence[Callable[[], list[Group]]]) -> list[tuple[object, ...]]:
    """What either rank asks NCCL for. Fails where that, or the tokens, differ."""
    tokens, asked = [], []
    for nccl.rank in range(2):
        nccl.asked = []
        engine = make(nccl.rank)
        tokens.append([sorted(way(engine, each())) for each in groups for way in (run, overlapped)])
        asked.append(nccl.asked)
    assert asked[0] == asked[1]
    assert tokens[0] == tokens[1]
    return asked[0]


@pytest.mark.parametrize("speculate", ["", "draft=DRAFT,tree=2x2,ngram=3"])
def test_both_ranks_ask_for_the_same(nccl: Nccl, speculate: str) -> None:
    """In the same order, of the same sizes, and where one records a graph of it, the other does, too."""
    asked = both(
        nccl,
        lambda rank: engine_of(speculate, rank=rank, ranks=2, local_rank=0),
        [SCENARIOS[name] for name in (DRAFTED if speculate else SCENARIOS)],
    )
    assert {one[0] for one in asked} == {"begin", "here", "all_reduce", "gather", "broadcast"}
    assert {one[0] for one in asked if one[-1] is True} == {"all_reduce"}  # a gather's memory is not the graph's


@pytest.mark.parametrize("name", ["gemma3n", "minimax-m3", "nemotron-h-moe"])
def test_both_ranks_of_a_family_ask_for_the_same(nccl: Nccl, name: str) -> None:
    """Of those that reduce more than the sums of their layers."""

    def make(rank: int) -> Engine:
        own = ShardConfig(
            folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16", rank=rank, ranks=2, local_rank=0
        )
        engine = load(own, lambda stage: None)
        size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
        engine.resize(PAGES)
        engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
        return engine

    both(nccl, make, [lambda: [tiny.group(uid, range(20 + uid), 6) for uid in range(1, 4)]])


def test_both_ranks_warm_up_alike(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever room each has: the smallest counts."""
    asked = []
    for nccl.rank in range(2):
        nccl.asked = []
        own = ShardConfig(
            folder=str(tiny.DEMO), model="m", device="cuda", dtype="bfloat16", rank=nccl.rank, ranks=2, local_rank=0, overlap="on"
        )
        service = Service(own, lambda code: None)
        service._engine = load(own, lambda stage: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 27 - nccl.rank, 1 << 28))
        service._measure(wire.WarmupRequest(max_step_tokens=64, max_step_rows=4, max_total_tokens=TOTAL))
        asked.append(nccl.asked)
    assert asked[0] == asked[1]
    assert asked[0].count(("all_reduce", "min", (1,), torch.int64, False)) == 4


def test_nccl_connects_the_ranks_before_weights_are_read(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else torch looks for the address of the others in the first step, for no longer than they may be late, and a machine on which
    NCCL fails reads all weights before that."""
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: nccl.asked.append(("wait",)))
    parallel.Ranks(0, 2, fake_cuda.DEVICE, Path("meeting"))
    assert nccl.asked == [("begin", "nccl"), ("here",), ("all_reduce", None, (1,), torch.int64, False), ("wait",)]
    assert "NCCL connected 2 ranks in 0.0 s" in caplog.text


def test_ranks_that_nccl_does_not_connect_are_told_of(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog looks after what it has begun, and it has begun nothing."""
    said = threading.Event()
    monkeypatch.setattr(parallel, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(parallel.log, "warning", lambda text: said.set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.wait(9))
    parallel.Ranks(0, 2, fake_cuda.DEVICE, Path("meeting"))
    assert said.is_set()
    said.clear()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(parallel, "SLOW_SECONDS", 0.2)
    parallel.Ranks(0, 2, fake_cuda.DEVICE, Path("meeting"))
    assert not said.wait(0.4)
