"""Attention of many rows on Hopper: when it is chosen, how it is launched, and what it comes to.

Its kernel is in Gluon, which Triton's interpreter does not know: here `gluon` runs it. On a GPU numbers are checked by
`benchmarks/gpu_checks_attention.py`.
"""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from penstock.benchmarks import gpu_checks_attention
from penstock.benchmarks.gpu_measure import Bench
from penstock.kernels import hopper_attention, paged_attention
from penstock.kernels.attention import AttentionOptions
from penstock.kernels.layout import LayerKind
from penstock.kernels.paged_attention import Capacity
from penstock.kernels.work_list import CAUSAL, WHOLE, Item, Tile
from penstock.tests.kernels.gluon import Kernel
from penstock.tests.kernels.test_paged_attention import AttentionCase, random_paged_rows
from penstock.tests.shard import fake_cuda
from penstock.tests.shard.fake_cuda import Noted

KIND = LayerKind(0, 8, 4, 128)
TILE = Tile(128, 128, 8, 4)
HOW = AttentionOptions(0, 0.1)


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
        gpu_checks_attention.many_rows(bench, random.Random(page_size), page_size, torch.bfloat16)
    launches = [one for one in hopper.launches if one.kernel == "attend_many"]
    assert len(launches) == 6
    assert "attend" not in {one.kernel for one in hopper.launches}
    [like] = [one for one in hopper_attention.compilations() if one.name == f"hopper attend many 128 bf16 ratio 4 page {page_size}"]
    names = [name for name in like.kernel.arg_names if name not in like.constants]
    assert list(like.signature) == names
    for one in launches:
        assert [name for name, _ in one.types] == names
        constants = dict(one.constants)
        assert (constants.pop("num_warps"), constants.pop("enable_fp_fusion")) == (like.warps, like.fuse)
        shape = {"KV_HEADS", "RATIO", "APART", "TREES"}
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


def test_the_first_query_of_an_item_is_the_nearest(rng: random.Random) -> None:
    """Of which the kernel takes it that all see what that one sees."""
    seen = set[int]()
    for _ in range(60):
        page_size = rng.choice([8, 16, 64])
        shapes = [(rng.choice([1, 17, 40, 300]), rng.choice([0, 130, 500])) for _ in range(5)]
        rows = random_paged_rows(shapes, page_size, rng, sharing=0.7, whole=0.3)
        case = AttentionCase(rows, page_size, ratio=4, size=128, dtype=torch.bfloat16, joined=(0,))
        step = case.plan()
        launch = step.launches[0]
        for tile, items in zip(launch.tiles, launch.items, strict=True):
            for numbers in items.tolist() if tile == TILE else []:
                item = Item(*numbers)
                positions = step.positions[step.listed[item.first : item.first + item.queries].long()]
                assert item.tree in (CAUSAL, WHOLE)
                assert item.begin % page_size == 0
                assert item.begin < item.end
                assert min(item.end, int(positions[0]) + 1) == min(item.end, int(positions.min()) + 1)
                seen.add(item.tree)
    assert CAUSAL in seen


# The kernel itself, on a CPU.

FILE = Path(hopper_attention.__file__).parent / "hopper_kernels.py"
Check = Callable[..., None]


@pytest.fixture
def compare(poisoned_float_outputs: None, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Check:
    """Compares attention with a softmax in float64, its items of many rows by the kernel, whose source may be changed; on a GPU it
    is what that compiles."""

    def check(case: AttentionCase, change: Callable[[str], str] | None = None, **options: Any) -> None:
        if case.query.is_cuda:
            if change is not None:
                pytest.skip("a GPU has nothing that would notice")
            case.check(**options)
            return
        launched: list[tuple[int]] = []
        kernel = Kernel(FILE, "attend_many", rng, change or (lambda source: source))

        class Noting:
            def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
                launched.append(grid)
                return kernel[grid]

        monkeypatch.setattr(hopper_attention, "_there", lambda device: True)
        monkeypatch.setattr(hopper_attention, "attend_many", Noting())
        case.check(**options)
        assert launched

    return check


@pytest.mark.parametrize("dtype", hopper_attention.TYPES)
@pytest.mark.parametrize("page_size", hopper_attention.PAGES)
def test_a_mixture_is_right(page_size: int, dtype: torch.dtype, compare: Check, rng: random.Random) -> None:
    """Long prompts and short ones, decode rows, rows that begin alike, and some whose queries see each other."""
    shapes = [(200, 0), (70, 300), (1, 400), (40, 129), (3, 20), (33, 1)]
    rng.shuffle(shapes)
    rows = random_paged_rows(shapes, page_size, rng, sharing=0.5, whole=0.3)
    case = AttentionCase(rows, page_size, kv_heads=2, ratio=4, size=128, dtype=dtype, joined=(0,))
    compare(case, processors=rng.choice([1, 3, 100]))


@pytest.mark.parametrize("ratio", [1, 2, 5, 7, 8, 16])
def test_heads_are_right(ratio: int, compare: Check, rng: random.Random) -> None:
    rows = random_paged_rows([(150, 70), (129, 0), (20, 400)], 16, rng)
    compare(AttentionCase(rows, 16, kv_heads=3 if ratio < 4 else 1, ratio=ratio, size=128, dtype=torch.float16))


@pytest.mark.parametrize("nodes", [33, 64, 100, 128])
def test_trees_are_right(nodes: int, compare: Check, rng: random.Random) -> None:
    """Beside prompts, at every place within a tile, and cut into pieces."""
    for context in (0, rng.randint(1, 127), rng.randint(128, 900)):
        rows = random_paged_rows([(nodes, context)], 16, rng, trees=1.0)
        rows.append(replace(rows[0], context=context // 16 * 16))
        if rng.random() < 0.5:
            rows.append(replace(rows[0], parents=None, whole=True))
        case = AttentionCase(rows, 16, kv_heads=2, ratio=4, size=128, dtype=torch.float16, joined=(0,))
        compare(case, processors=rng.choice([1, 3, 100]))


def test_trees_that_begin_alike_are_right(compare: Check, rng: random.Random) -> None:
    """What they have in common is read together, their own keys begin within a tile, and some are of chains."""
    shapes = [(rng.randint(17, 31), rng.randint(130, 500)) for _ in range(4)]
    rows = random_paged_rows(shapes, 16, rng, trees=0.7, sharing=1.0)
    compare(AttentionCase(rows, 16, ratio=4, size=128, dtype=torch.float16), processors=rng.choice([1, 3, 100]))


def test_a_graph_has_room_for_more(compare: Check, rng: random.Random) -> None:
    """Items behind the last one are none; there may be no others."""
    tiles = paged_attention.tiles_of(KIND, torch.float16)
    room = Capacity(400, 800, 200, {0: tiles}, {0: (30, 30, 30)}, 400, 3000, True)
    for shapes in ([(200, 100), (64, 300), (1, 40)], [(1, 300), (1, 20)]):
        case = AttentionCase(random_paged_rows(shapes, 16, rng, trees=0.5), 16, kv_heads=2, ratio=4, size=128, dtype=torch.float16)
        compare(case, capacity=room)


FAULTS = {
    "a stage is free when one consumer has read it": (
        "mbarrier.init(empty.index(i), count=2)",
        "mbarrier.init(empty.index(i), count=1)",
    ),
    "values are free before they are multiplied": (
        "    sums, packed = warpgroup_mma_wait(0, deps=[sums, packed])\n    mbarrier.arrive(values.empty.index(before))\n",
        "    mbarrier.arrive(values.empty.index(before))\n    sums, packed = warpgroup_mma_wait(0, deps=[sums, packed])\n",
    ),
    "nobody waits for keys": (
        "    mbarrier.wait(keys.full.index(stage), phase)\n    mbarrier.wait(turns",
        "    mbarrier.wait(turns",
    ),
    "nobody waits for the last values": ("    mbarrier.wait(values.full.index(stage), (last // SHAPE.stages) & 1)\n", ""),
    "queries without a fence": ("other=0.0))\n    fence_async_shared()", "other=0.0))"),
    "values behind the last one are kept": ("        _clear(values, stage, item.end - begin, SHAPE)\n", "        pass\n"),
    "keys before a tree are hidden": ("gl.where(which < 0, -1, found)", "found"),
    "an item ends all": ("gl.where(item.tiles == 0, step.rounds, turn)", "step.rounds"),
    "nobody begins": ("    mbarrier.arrive(turns.index(0))\n", ""),
    "no first query is the nearest": ("gl.minimum(item.end, nearest + 1)", "item.end"),
    "trees have no masks": ("gl.where(item.tree < 0, -1, (high", "gl.where(True, -1, (high"),
    "nobody waits for values": ("    mbarrier.wait(values.full.index(before), before_phase)\n", ""),
    "queries without a barrier": ("other=0.0))\n    fence_async_shared()\n    barrier()", "other=0.0))\n    fence_async_shared()"),
    "masks of a tensor before": ("masks + rows.token * 4 + which", "masks + -4 + rows.token * 4 + which"),
    "sums don't fade": ("    sums = sums * gl.expand_dims(fade, 1)\n", ""),
    "every item is the program's": ("return turn * gl.num_programs(0) + own", "return turn"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, compare: Check, rng: random.Random) -> None:
    right, wrong = FAULTS[name]
    assert FILE.read_text(encoding="utf-8").count(right) == 1

    rows = random_paged_rows([(70, 700), (300, 40), (128, 300), (100, 0)], 16, rng, trees=0.5)
    rows[0] = replace(rows[0], parents=[-1, *range(35), *range(34)])
    case = AttentionCase(rows, 16, ratio=1, size=128, dtype=torch.float16)

    def check() -> None:
        for processors in (3, 100) * 20:  # who is next is drawn
            compare(case, lambda source: source.replace(right, wrong), processors=processors)

    with pytest.raises((AssertionError, InterpreterError)):  # the latter of merged garbage
        check()
