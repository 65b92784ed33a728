"""Attention of many rows on Hopper: when it is chosen, how it is launched, and that its warps never wait for each other for ever.

Its kernel is in Gluon, which nothing here interprets: numbers are checked on a GPU (`benchmarks/gpu_checks.py`).
"""

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from penstock.benchmarks import gpu_checks
from penstock.benchmarks.gpu_measure import Bench
from penstock.kernels import hopper_attention, paged_attention
from penstock.kernels.attention import How
from penstock.kernels.layout import Kind
from penstock.kernels.work import ORDERED, WHOLE, Item, Tile
from penstock.tests.kernels.test_paged_attention import World, rows_of
from penstock.tests.shard import fake_cuda
from penstock.tests.shard.fake_cuda import Noted

KIND = Kind(0, 8, 4, 128)
TILE = Tile(128, 128, 8, 4)
HOW = How(0, 0.1)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """One that isn't there, where kernels are compiled."""
    monkeypatch.setattr(hopper_attention, "INTERPRET", False)
    hopper_attention._there.cache_clear()
    with fake_cuda.device(monkeypatch) as noted:
        yield noted
    hopper_attention._there.cache_clear()


def test_the_tile_that_it_takes_is_that_of_many_rows() -> None:
    for dtype in hopper_attention.TYPES:
        for ratio in (1, 4, 7, 16):
            assert paged_attention.tiles_of(replace(KIND, ratio=ratio), dtype)[-1] == hopper_attention.TILE
    for windowed in (False, True):
        assert (paged_attention.narrowed(TILE, 128, windowed) == hopper_attention.TILE) is not windowed


NUMBERS = torch.ones(8)
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "as measured": (True, {}),
    "float16": (True, {"dtype": torch.float16}),
    "pages of 8": (True, {"page_size": 8}),
    "pages of 128": (True, {"page_size": 128}),
    "some of a slot's heads": (True, {"heads": 3}),
    "queries that see each other": (True, {"kind": replace(KIND, joined=True)}),
    "float32": (False, {"dtype": torch.float32}),
    "cache of 8 bits": (False, {"cached": torch.float8_e4m3fn}),
    "scales": (False, {"how": replace(HOW, scales=NUMBERS)}),
    "sinks": (False, {"how": replace(HOW, sinks=NUMBERS)}),
    "softcap": (False, {"how": replace(HOW, softcap=30.0)}),
    "a window": (False, {"how": replace(HOW, window=512), "kind": replace(KIND, window=512)}),
    "chunks": (False, {"how": replace(HOW, window=512), "kind": replace(KIND, window=512, chunked=True)}),
    "latents": (False, {"how": replace(HOW, latent=64), "kind": replace(KIND, latent=True)}),
    "trees": (False, {"trees": True}),
    "pages of 4": (False, {"page_size": 4}),
    "pages of 48": (False, {"page_size": 48}),
    "pages of 256": (False, {"page_size": 256}),
    "64 features": (False, {"kind": replace(KIND, size=64), "size": 64}),
    "a tile of few rows": (False, {"tile": Tile(64, 64, 4, 5)}),
    "a tile of a window": (False, {"tile": Tile(128, 64, 8, 5)}),
    "4 warps, where 128 query heads share a key": (False, {"tile": Tile(128, 128, 4, 4)}),
    "slots that TMA can't tell apart": (False, {"padding": 4}),
    "a CPU": (False, {"device": "cpu"}),
    "an A100": (False, {"capability": (8, 0)}),
    "a B200": (False, {"capability": (10, 0)}),
    "AMD's": (False, {"hip": "6.4"}),
    "Triton's interpreter": (False, {"interpret": True}),
    "no Gluon": (False, {"missing": "no module named gluon"}),
    "a Triton that is not known": (False, {"version": (4, 0)}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_used_where_it_may_be_and_nowhere_else(name: str, hopper: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, more = CASES[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: more.get("capability", (9, 0)))
    monkeypatch.setattr(torch.version, "hip", more.get("hip"))
    monkeypatch.setattr(hopper_attention, "INTERPRET", more.get("interpret", False))
    monkeypatch.setattr(hopper_attention, "MISSING", more.get("missing", ""))
    monkeypatch.setattr(hopper_attention, "VERSION", more.get("version", (3, 6)))
    dtype, size, device = more.get("dtype", torch.bfloat16), more.get("size", 128), more.get("device", "cuda")
    query = torch.zeros(4, 32, size, dtype=dtype, device=device)
    width = 2 * 8 * size + more.get("padding", 0)
    slots = torch.zeros(256, width, dtype=more.get("cached", dtype), device=device)
    cache = slots[:, : 2 * 8 * size].view(256, 2, 8, size)[:, :, : more.get("heads", 8)]
    found = hopper_attention.able(
        query,
        cache,
        more.get("kind", KIND),
        more.get("tile", TILE),
        more.get("page_size", 16),
        more.get("how", HOW),
        more.get("trees", False),
    )
    assert found is expected


def test_that_it_is_not_there_is_told_once(
    hopper: Noted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hopper_attention, "MISSING", "no thread_barrier")
    caplog.set_level(logging.INFO, hopper_attention.__name__)
    assert not any(hopper_attention._there(torch.device("cuda", 0)) for _ in range(3))
    [record] = caplog.records
    assert hopper_attention.triton.__version__ in record.getMessage()
    assert "no thread_barrier" in record.getMessage()


@pytest.mark.parametrize("page_size", hopper_attention.PAGES)
def test_it_is_compiled_as_it_is_launched(page_size: int, hopper: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """By attention of prompts, for the largest tile and no other; and what TMA is told is inside the cache's memory."""
    made: list[Any] = []
    describe = hopper_attention.descriptor
    monkeypatch.setattr(hopper_attention, "descriptor", lambda *given: made.append(describe(*given)) or made[-1])
    bench = Bench(torch.device("cuda"), False, print)
    with torch.inference_mode():
        gpu_checks.many_rows(bench, random.Random(page_size), page_size, torch.bfloat16)
    launches = [one for one in hopper.launches if one.kernel == "attend_many"]
    assert len(launches) == 3
    assert "attend" not in {one.kernel for one in hopper.launches}
    [like] = [one for one in hopper_attention.compilations() if f"bf16 ratio 4 page {page_size}" in one.name and one.constants]
    names = [name for name in like.kernel.arg_names if name not in like.constants]
    assert list(like.signature) == names
    for one in launches:
        assert [name for name, _ in one.types] == names
        constants = dict(one.constants)
        assert (constants.pop("num_warps"), constants.pop("enable_fp_fusion")) == (like.warps, like.fuse)
        shape = {"KV_HEADS", "RATIO", "APART"}
        assert {**constants, **dict.fromkeys(shape)} == {**like.constants, **dict.fromkeys(shape)}
        types = dict(one.types)
        for name, kind in like.signature.items():
            if kind.startswith("*"):
                assert types[name].startswith({"*bf16": "*bfloat16", "*fp32": "*float32", "*i32": "*int32"}[kind])
        assert types["scale"] == "float"
        assert types["places"] == types["rounds"] == "int"
    for one in made:
        assert one.block_shape == [page_size, 128]
        assert one.strides[0] >= one.shape[1]  # some of a slot's heads
        place = (one.shape[0] - 1) * one.strides[0] + one.shape[1]
        assert one.base.storage_offset() + place == one.base.untyped_storage().nbytes() // one.base.element_size()


def test_the_first_query_of_an_item_is_the_nearest(chance: random.Random) -> None:
    """Of which the kernel takes it that all see what that one sees."""
    seen = set[int]()
    for _ in range(60):
        page_size = chance.choice([8, 16, 64])
        shapes = [(chance.choice([1, 17, 40, 300]), chance.choice([0, 130, 500])) for _ in range(5)]
        rows = rows_of(shapes, page_size, chance, sharing=0.7, whole=0.3)
        world = World(rows, page_size, ratio=4, size=128, dtype=torch.bfloat16, joined=(0,))
        step = world.plan()
        launch = step.launches[0]
        for tile, items in zip(launch.tiles, launch.items, strict=True):
            for numbers in items.tolist() if tile == TILE else []:
                item = Item(*numbers)
                positions = step.positions[step.listed[item.first : item.first + item.queries].long()]
                assert item.tree in (ORDERED, WHOLE)
                assert item.begin % page_size == 0
                assert item.begin < item.end
                assert min(item.end, int(positions[0]) + 1) == min(item.end, int(positions.min()) + 1)
                seen.add(item.tree)
    assert ORDERED in seen


# What the three partitions do with barriers, in Python.


class Barrier:
    """As PTX's: a phase is over when there were so many arrivals."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = 0

    def arrive(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.phase, self.pending = self.phase + 1, self.count

    def over(self, parity: int) -> bool:
        """Whether who waits for that parity goes on."""
        return self.phase % 2 != parity


class Program:
    """Of the kernel: stages hold the numbers of tiles, and whether anything is read that isn't there is looked at."""

    def __init__(self, stages: int, tiles: list[int], chance: random.Random) -> None:
        self.stages, self.tiles, self.chance = stages, tiles, chance
        self.full, self.empty = ([[Barrier(count) for _ in range(stages)] for _ in range(2)] for count in (1, 2))
        self.turns = [Barrier(1), Barrier(1)]
        self.turns[0].arrive()
        self.held: list[list[int | None]] = [[None] * stages for _ in range(2)]  # of keys and of values
        self.began: list[tuple[int, int]] = []  # who, which tile

    def produce(self) -> Iterator[tuple[Barrier, int]]:
        base = 0
        for tiles in self.tiles:
            for count in range(base, base + tiles):
                stage, phase = count % self.stages, count // self.stages & 1 ^ 1
                for kind in range(2):
                    yield self.empty[kind][stage], phase
                    self.held[kind][stage] = count
                    self.full[kind][stage].arrive()
            base += tiles

    def consume(self, which: int) -> Iterator[tuple[Barrier, int]]:
        base = 0
        for tiles in self.tiles:
            for count in range(base, base + tiles):
                yield self.full[0][count % self.stages], count // self.stages & 1
                if count == base and self.chance.random() < 0.5:  # a partial tile
                    yield self.full[1][count % self.stages], count // self.stages & 1
                yield self.turns[which], count & 1
                self.began.append((which, count))
                assert self.held[0][count % self.stages] == count
                if count > base:
                    yield from self._values(count - 1)
                self.turns[1 - which].arrive()
                self.empty[0][count % self.stages].arrive()
                if count > base:
                    self.empty[1][(count - 1) % self.stages].arrive()
            base += tiles
            if tiles:
                yield from self._values(base - 1)
                self.empty[1][(base - 1) % self.stages].arrive()

    def _values(self, count: int) -> Iterator[tuple[Barrier, int]]:
        yield self.full[1][count % self.stages], count // self.stages & 1
        assert self.held[1][count % self.stages] == count

    def run(self) -> None:
        """In any order."""
        waiting = {partition: next(partition, None) for partition in (self.produce(), self.consume(0), self.consume(1))}
        while any(waiting.values()):
            able = [partition for partition, wait in waiting.items() if wait and wait[0].over(wait[1])]
            assert able, "all wait for each other"
            partition = self.chance.choice(able)
            waiting[partition] = next(partition, None)


def test_nobody_waits_for_ever_and_nothing_is_read_that_is_not_there(chance: random.Random) -> None:
    """Items without tiles among them; the two consumers always take turns."""
    for _ in range(600):
        tiles = [chance.choice([0, 1, 1, 2, 3, 7]) for _ in range(chance.randint(0, 9))]
        program = Program(chance.choice([2, hopper_attention.STAGES]), tiles, chance)
        program.run()
        assert program.began == [(which, count) for count in range(sum(tiles)) for which in range(2)]


@pytest.mark.parametrize("broken", ["turns", "empty"])
def test_the_program_in_python_would_notice(broken: str, chance: random.Random) -> None:
    def run() -> None:
        for _ in range(200):
            program = Program(3, [5, 0, 4], chance)
            if broken == "turns":
                program.turns[0] = Barrier(1)  # nobody begins
            else:
                program.empty[0] = [Barrier(1) for _ in range(3)]  # a stage is free when one consumer has read it
            program.run()

    with pytest.raises(AssertionError):
        run()
