"""Hopper's warp-specialized attention of many query rows: when it is chosen, how it is launched, and what it computes.

Its kernel is in Gluon, which Triton's interpreter does not support: here `gluon` executes it. On a GPU,
`benchmarks/gpu_checks_attention.py` checks its results.
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
from penstock.tests.shard.fake_cuda import Activity

KIND = LayerKind(0, 8, 4, 128)
TILE = Tile(128, 128, 8, 4)
OPTIONS = AttentionOptions(0, 0.1)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Activity]:
    """A simulated Hopper GPU, for which kernels would be compiled."""
    monkeypatch.setattr(hopper_attention, "INTERPRET", False)
    hopper_attention._there.cache_clear()
    with fake_cuda.device(monkeypatch) as recorded:
        yield recorded
    hopper_attention._there.cache_clear()


def test_hopper_tile_is_the_general_kernels_tile_for_many_rows() -> None:
    for dtype in hopper_attention.TYPES:
        for ratio in (1, 4, 7, 16):
            assert paged_attention.tiles_of(replace(KIND, ratio=ratio), dtype)[-1] == hopper_attention.TILE
    for windowed in (False, True):
        assert (paged_attention.narrowed(TILE, 128, windowed) == hopper_attention.TILE) is not windowed


ONES = torch.ones(8)
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "supported": (True, {}),
    "float16": (True, {"dtype": torch.float16}),
    "pages of 8": (True, {"page_size": 8}),
    "pages of 128": (True, {"page_size": 128}),
    "part of a slot's heads": (True, {"heads": 3}),
    "bidirectional attention": (True, {"kind": replace(KIND, joined=True)}),
    "float32": (False, {"dtype": torch.float32}),
    "fp8 cache": (False, {"cached": torch.float8_e4m3fn}),
    "scales": (False, {"how": replace(OPTIONS, scales=ONES)}),
    "sinks": (False, {"how": replace(OPTIONS, sinks=ONES)}),
    "softcap": (False, {"how": replace(OPTIONS, softcap=30.0)}),
    "sliding window": (False, {"how": replace(OPTIONS, window=512), "kind": replace(KIND, window=512)}),
    "chunked attention": (False, {"how": replace(OPTIONS, window=512), "kind": replace(KIND, window=512, chunked=True)}),
    "MLA latents": (False, {"how": replace(OPTIONS, latent=64), "kind": replace(KIND, latent=True)}),
    "pages of 4": (False, {"page_size": 4}),
    "pages of 48": (False, {"page_size": 48}),
    "pages of 256": (False, {"page_size": 256}),
    "heads of 64 features": (False, {"kind": replace(KIND, size=64), "size": 64}),
    "tile of few rows": (False, {"tile": Tile(64, 64, 4, 5)}),
    "tile of windowed layers": (False, {"tile": Tile(128, 64, 8, 5)}),
    "tile with 4 warps": (False, {"tile": Tile(128, 128, 4, 4)}),
    "slot stride that TMA does not support": (False, {"padding": 4}),
    "CPU": (False, {"device": "cpu"}),
    "A100": (False, {"capability": (8, 0)}),
    "B200": (False, {"capability": (10, 0)}),
    "AMD": (False, {"hip": "6.4"}),
    "Triton's interpreter": (False, {"interpret": True}),
    "Gluon missing": (False, {"missing": "no module named gluon"}),
    "unknown Triton version": (False, {"version": (4, 0)}),
}


@pytest.mark.parametrize("name", CASES)
def test_hopper_kernel_is_chosen_only_where_it_is_supported(name: str, hopper: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, settings = CASES[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: settings.get("capability", (9, 0)))
    monkeypatch.setattr(torch.version, "hip", settings.get("hip"))
    monkeypatch.setattr(hopper_attention, "INTERPRET", settings.get("interpret", False))
    monkeypatch.setattr(hopper_attention, "MISSING", settings.get("missing", ""))
    monkeypatch.setattr(hopper_attention, "VERSION", settings.get("version", (3, 6)))
    dtype, size, device = settings.get("dtype", torch.bfloat16), settings.get("size", 128), settings.get("device", "cuda")
    query = torch.zeros(4, 32, size, dtype=dtype, device=device)
    width = 2 * 8 * size + settings.get("padding", 0)
    slots = torch.zeros(256, width, dtype=settings.get("cached", dtype), device=device)
    cache = slots[:, : 2 * 8 * size].view(256, 2, 8, size)[:, :, : settings.get("heads", 8)]
    found = hopper_attention.able(
        query,
        cache,
        settings.get("kind", KIND),
        settings.get("tile", TILE),
        settings.get("page_size", 16),
        settings.get("how", OPTIONS),
    )
    assert found is expected


def test_missing_gluon_is_logged_once(hopper: Activity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hopper_attention, "MISSING", "no thread_barrier")
    caplog.set_level(logging.INFO, hopper_attention.__name__)
    assert not any(hopper_attention._there(torch.device("cuda", 0)) for _ in range(3))
    [record] = caplog.records
    assert hopper_attention.triton.__version__ in record.getMessage()
    assert "no thread_barrier" in record.getMessage()


@pytest.mark.parametrize("page_size", hopper_attention.PAGES)
def test_launches_match_the_ahead_of_time_compilation(page_size: int, hopper: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefill attention, for the largest tile only; and TMA descriptors stay within the cache's memory."""
    descriptors: list[Any] = []
    describe = hopper_attention.descriptor
    monkeypatch.setattr(hopper_attention, "descriptor", lambda *given: descriptors.append(describe(*given)) or descriptors[-1])
    bench = Bench(torch.device("cuda"), False, print)
    with torch.inference_mode():
        gpu_checks_attention.many_rows(bench, random.Random(page_size), page_size, torch.bfloat16)
    launches = [launch for launch in hopper.launches if launch.kernel == "attend_many"]
    assert len(launches) == 6
    assert "attend" not in {launch.kernel for launch in hopper.launches}
    [compilation] = [
        launch
        for launch in hopper_attention.compilations()
        if launch.name == f"hopper attend many 128 bf16 ratio 4 page {page_size}"
    ]
    names = [name for name in compilation.kernel.arg_names if name not in compilation.constants]
    assert list(compilation.signature) == names
    for launch in launches:
        assert [name for name, _ in launch.types] == names
        constants = dict(launch.constants)
        assert (constants.pop("num_warps"), constants.pop("enable_fp_fusion")) == (compilation.warps, compilation.fuse)
        shape = {"KV_HEADS", "RATIO", "APART", "TREES"}
        assert {**constants, **dict.fromkeys(shape)} == {**compilation.constants, **dict.fromkeys(shape)}
        types = dict(launch.types)
        for name, kind in compilation.signature.items():
            if kind.startswith("*"):
                assert types[name].startswith({"*bf16": "*bfloat16", "*fp32": "*float32", "*i32": "*int32"}[kind])
        assert types["scale"] == "float"
        assert types["places"] == types["rounds"] == "int"
    for launch in descriptors:
        assert launch.block_shape == [page_size, 128]
        assert launch.strides[0] >= launch.shape[1]  # part of a slot's heads
        place = (launch.shape[0] - 1) * launch.strides[0] + launch.shape[1]
        assert launch.base.storage_offset() + place == launch.base.untyped_storage().nbytes() // launch.base.element_size()


def test_first_query_of_an_item_has_the_lowest_position(rng: random.Random) -> None:
    """The kernel relies on it: keys that the first query sees are visible to all queries of the item."""
    kinds = set[int]()
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
                kinds.add(item.tree)
    assert CAUSAL in kinds


# The kernel itself, executed on a CPU.

FILE = Path(hopper_attention.__file__).parent / "hopper_kernels.py"
Check = Callable[..., None]


@pytest.fixture
def check_against_exact(poisoned_float_outputs: None, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Check:
    """Compares attention with a softmax in float64, with items of many rows computed by the kernel, whose source may be changed. On
    a GPU the compiled kernel computes them."""

    def check(case: AttentionCase, change: Callable[[str], str] | None = None, **options: Any) -> None:
        if case.query.is_cuda:
            if change is not None:
                pytest.skip("only the CPU's emulation detects planted faults")
            case.check(**options)
            return
        launched: list[tuple[int]] = []
        kernel = Kernel(FILE, "attend_many", rng, change or (lambda source: source))

        class RecordingKernel:
            def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
                launched.append(grid)
                return kernel[grid]

        monkeypatch.setattr(hopper_attention, "_there", lambda device: True)
        monkeypatch.setattr(hopper_attention, "attend_many", RecordingKernel())
        case.check(**options)
        assert launched

    return check


@pytest.mark.parametrize("dtype", hopper_attention.TYPES)
@pytest.mark.parametrize("page_size", hopper_attention.PAGES)
def test_mixed_rows_match_exact_attention(
    page_size: int, dtype: torch.dtype, check_against_exact: Check, rng: random.Random
) -> None:
    """Long and short prompt chunks, decode rows, rows with shared prefixes, and rows with bidirectional attention."""
    shapes = [(200, 0), (70, 300), (1, 400), (40, 129), (3, 20), (33, 1)]
    rng.shuffle(shapes)
    rows = random_paged_rows(shapes, page_size, rng, sharing=0.5, whole=0.3)
    case = AttentionCase(rows, page_size, kv_heads=2, ratio=4, size=128, dtype=dtype, joined=(0,))
    check_against_exact(case, processors=rng.choice([1, 3, 100]))


@pytest.mark.parametrize("ratio", [1, 2, 5, 7, 8, 16])
def test_numbers_of_query_heads_per_key_head_match_exact_attention(
    ratio: int, check_against_exact: Check, rng: random.Random
) -> None:
    rows = random_paged_rows([(150, 70), (129, 0), (20, 400)], 16, rng)
    check_against_exact(AttentionCase(rows, 16, kv_heads=3 if ratio < 4 else 1, ratio=ratio, size=128, dtype=torch.float16))


@pytest.mark.parametrize("nodes", [33, 64, 100, 128])
def test_draft_trees_match_exact_attention(nodes: int, check_against_exact: Check, rng: random.Random) -> None:
    """Beside prompt chunks, at any offset within a tile, and cut into items."""
    for context in (0, rng.randint(1, 127), rng.randint(128, 900)):
        rows = random_paged_rows([(nodes, context)], 16, rng, trees=1.0)
        rows.append(replace(rows[0], context=context // 16 * 16))
        if rng.random() < 0.5:
            rows.append(replace(rows[0], parents=None, whole=True))
        case = AttentionCase(rows, 16, kv_heads=2, ratio=4, size=128, dtype=torch.float16, joined=(0,))
        check_against_exact(case, processors=rng.choice([1, 3, 100]))


def test_draft_trees_with_shared_prefixes_match_exact_attention(check_against_exact: Check, rng: random.Random) -> None:
    """The shared prefix is read together, the rows' own keys begin within a tile, and some rows are chains."""
    shapes = [(rng.randint(17, 31), rng.randint(130, 500)) for _ in range(4)]
    rows = random_paged_rows(shapes, 16, rng, trees=0.7, sharing=1.0)
    check_against_exact(AttentionCase(rows, 16, ratio=4, size=128, dtype=torch.float16), processors=rng.choice([1, 3, 100]))


def test_empty_items_of_a_graphs_capacity_are_skipped(check_against_exact: Check, rng: random.Random) -> None:
    """Also where there are no others."""
    tiles = paged_attention.tiles_of(KIND, torch.float16)
    room = Capacity(400, 800, 200, {0: tiles}, {0: (30, 30, 30)}, 400, 3000, True)
    for shapes in ([(200, 100), (64, 300), (1, 40)], [(1, 300), (1, 20)]):
        case = AttentionCase(random_paged_rows(shapes, 16, rng, trees=0.5), 16, kv_heads=2, ratio=4, size=128, dtype=torch.float16)
        check_against_exact(case, capacity=room)


FAULTS = {
    "stage freed after one of two consumers": (
        "mbarrier.init(empty.index(i), count=2)",
        "mbarrier.init(empty.index(i), count=1)",
    ),
    "values freed before their product": (
        "    sums, packed = warpgroup_mma_wait(0, deps=[sums, packed])\n    mbarrier.arrive(values.empty.index(before))\n",
        "    mbarrier.arrive(values.empty.index(before))\n    sums, packed = warpgroup_mma_wait(0, deps=[sums, packed])\n",
    ),
    "no wait for keys": (
        "    mbarrier.wait(keys.full.index(stage), phase)\n    mbarrier.wait(turns",
        "    mbarrier.wait(turns",
    ),
    "no wait for the last values": ("    mbarrier.wait(values.full.index(stage), (last // SHAPE.stages) & 1)\n", ""),
    "no fence after writing queries": ("other=0.0))\n    fence_async_shared()", "other=0.0))"),
    "values after the last key not cleared": ("        _clear(values, stage, item.end - begin, SHAPE)\n", "        pass\n"),
    "keys before a tree masked": ("gl.where(which < 0, -1, found)", "found"),
    "program ends after one item": ("gl.where(item.tiles == 0, step.rounds, turn)", "step.rounds"),
    "no consumer takes the first turn": ("    mbarrier.arrive(turns.index(0))\n", ""),
    "unmasked keys not limited by the first query": ("gl.minimum(item.end, nearest + 1)", "item.end"),
    "tree masks ignored": ("gl.where(item.tree < 0, -1, (high", "gl.where(True, -1, (high"),
    "no wait for values": ("    mbarrier.wait(values.full.index(before), before_phase)\n", ""),
    "no barrier after writing queries": (
        "other=0.0))\n    fence_async_shared()\n    barrier()",
        "other=0.0))\n    fence_async_shared()",
    ),
    "tree masks at a negative offset": ("masks + rows.token * 4 + which", "masks + -4 + rows.token * 4 + which"),
    "accumulator not rescaled": ("    sums = sums * gl.expand_dims(fade, 1)\n", ""),
    "every program takes every item": ("return turn * gl.num_programs(0) + own", "return turn"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_kernel_faults_are_detected(name: str, check_against_exact: Check, rng: random.Random) -> None:
    right, wrong = FAULTS[name]
    assert FILE.read_text(encoding="utf-8").count(right) == 1

    rows = random_paged_rows([(70, 700), (300, 40), (128, 300), (100, 0)], 16, rng, trees=0.5)
    rows[0] = replace(rows[0], parents=[-1, *range(35), *range(34)])
    case = AttentionCase(rows, 16, ratio=1, size=128, dtype=torch.float16)

    def check() -> None:
        for processors in (3, 100) * 20:  # threads are scheduled at random
            check_against_exact(case, lambda source: source.replace(right, wrong), processors=processors)

    with pytest.raises((AssertionError, InterpreterError)):  # the latter from merging garbage
        check()
