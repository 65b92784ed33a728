"""The shard on a simulated CUDA device (`fake_cuda`): devices of tensors, host waits, kernel compilation, graph capture, threads.

Outputs of kernels are made up, so no numbers are checked here.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from penstock.kernels import dependent_launch, dispatch, expanded, linear, noise, paged_attention, transfer
from penstock.proto import shard_pb2 as wire
from penstock.shard import __main__ as entry
from penstock.shard import memory, step
from penstock.shard.adapters import Adapter
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.hypotheses import Path as Beam
from penstock.shard.decoding.hypotheses import Search, Stop
from penstock.shard.engine import Engine, Outcome
from penstock.shard.forward import GraphExtent, expansion_of
from penstock.shard.graphs import Recorder
from penstock.shard.host_pages import HostPages
from penstock.shard.loading import _check_able, load
from penstock.shard.memory import size_pool
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import Unsupported, shape
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.service import Service
from penstock.shard.weights import Weights
from penstock.tests.shard import fake_cuda, lora, packing, stream_order, test_draft_head, tiny, vision_models
from penstock.tests.shard.fake_cuda import Activity
from penstock.tests.shard.test_weights import LoadingRank

triton = pytest.importorskip("triton")
expanded_attention = pytest.importorskip("penstock.kernels.expanded_attention")
skinny_gemm = pytest.importorskip("penstock.kernels.fused_skinny_gemm")

FOLDER = Path(__file__).parents[2] / "demo"
PROMPT = list(range(5, 65))  # long enough that answers take further pages
END = frozenset([2])
LETTERS = llguidance.LLMatcher.grammar_from_regex("[a-z ]{1,200}")
TOKENS, ROWS, TOTAL, PAGES, PAGE = 256, 16, 512, 256, 16
# The only wait of the host in a decode step of greedy or sampled sequences: for the previous step's tokens.
WAITS = {("kernels.transfer:wait", "event")}


def group(uid: int, sampling: Sampling | None = None, choices: int = 1, search: Search | None = None, **more: Any) -> Group:
    begun, waiting = sequences(PROMPT[: 30 + 30 * (uid % 2)], choices)
    if search is not None:
        begun[0].path = Beam()
    end_ids = more.pop("end_ids", frozenset())
    return Group(uid, begun, waiting, sampling or Sampling(), max_new_tokens=6, end_ids=end_ids, search=search, **more)


def beams(width: int, wanted: int = 1) -> Search:
    return Search(width, wanted, 1.0, Stop.FULL, 0, False, [])


def hot(**more: Any) -> Sampling:
    return Sampling(temperature=0.8, seed=3, **more)


PLAIN: dict[str, Callable[[], list[Group]]] = {
    "greedy": lambda: [group(1), group(2), group(3)],
    "sampled": lambda: [group(1, hot(top_p=0.9)), group(2, hot(top_p=0.95, top_k=7, min_p=0.1)), group(3)],
}
SCENARIOS: dict[str, Callable[[], list[Group]]] = PLAIN | {
    "penalties": lambda: [group(1, hot(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1)), group(2)],
    "bias": lambda: [group(1, Sampling(bias=((4, 2.0), (9, -1.0)))), group(2, end_ids=END, min_new_tokens=3)],
    "top_n": lambda: [group(1, top_n=5), group(2, hot(final_logprobs=True)), group(3, hot(final_logprobs=True), top_n=3)],
    "typical": lambda: [group(1, hot(typical_p=0.9)), group(2)],
    "choices": lambda: [group(1, hot(), choices=4), group(2)],
    "prompt_logprobs": lambda: [group(1, prompt_logprobs=True, prompt_top_n=3)],
    "beams": lambda: [group(1, search=beams(4, 2), end_ids=END), group(2), group(4, search=beams(2))],
    "beams alone": lambda: [group(1, search=beams(4, 2), end_ids=END, top_n=2), group(4, search=beams(2))],
    "beams with penalties": lambda: [
        group(1, Sampling(repetition_penalty=1.2, bias=((4, 2.0),)), search=beams(3), end_ids=END, min_new_tokens=4)
    ],
    "sampled beams": lambda: [group(1, hot(top_p=0.9, repetition_penalty=1.1), search=beams(3), end_ids=END, top_n=2)],
    "grammar": lambda: [group(1, grammar=LETTERS, end_ids=END), group(2, hot(frequency_penalty=0.5), grammar=LETTERS), group(3)],
    "beams with a grammar": lambda: [group(1, grammar=LETTERS, search=beams(3), end_ids=END), group(2)],
}

DRAFT_SCENARIOS = ("greedy", "sampled", "penalties", "grammar")  # scenarios whose steps differ with drafts


@pytest.fixture
def activity(monkeypatch: pytest.MonkeyPatch) -> Iterator[Activity]:
    """The simulated device's activity. The skinny GEMM's inputs are split into parts, as larger models' are."""
    monkeypatch.setattr(skinny_gemm, "SHORTEST", 16)
    with fake_cuda.device(monkeypatch) as recorded:
        yield recorded


def config(speculate: str = "", **more: Any) -> ShardConfig:
    resolved = speculate.replace("DRAFT", f"{FOLDER}/draft").replace("EAGLE", f"{FOLDER}/eagle")
    return ShardConfig(folder=str(FOLDER / "model"), model="demo", device="cuda", dtype="bfloat16", speculate=resolved, **more)


def engine_of(speculate: str = "", graphs: bool = True, **more: Any) -> Engine:
    """An engine that has warmed up, as the service does it."""
    engine = load(config(speculate, **more), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    if graphs:
        extent = GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, engine.speculator.most > 0, engine.speculator.trees)
        engine.record(Recorder(), extent, lambda stage: None)
    return engine


@pytest.fixture(scope="module")
def resting() -> Callable[[bool], Engine]:
    """An engine with or without graphs, shared by several tests: emptied of groups and cached prefixes for each."""
    made = cache(lambda graphs: engine_of(graphs=graphs))

    def cleared(graphs: bool) -> Engine:
        engine = made(graphs)
        engine.clear()
        return engine

    return cleared


def prefill(engine: Engine, groups: Sequence[Group], count: int, decode: Sequence[int]) -> Outcome:
    return checked(
        engine.prefill(0, groups, [(uid, count) for uid in engine.books.groups | {g.uid: g for g in groups}], 1000, decode)
    )


def checked(outcome: Outcome) -> Outcome:
    assert not outcome.failed
    return outcome


def run(engine: Engine, groups: Sequence[Group], step: Callable[[], object] = lambda: None) -> list[tuple[int, int, int]]:
    """All tokens, as (uid, choice, token). Prompts come in chunks, beside decodes. `step` is called before each decode step."""
    outcomes = []
    for one in groups:
        if not one.search:
            one.drafts = engine.speculator.most
        outcomes += [prefill(engine, [one], 24, [0]), prefill(engine, [], 1000, [0])]
    while engine.books.groups:
        step()
        outcomes.append(checked(engine.decode([0])))
    return [(uid, one.choice, one.pick.token) for outcome in outcomes for uid, one in outcome.emitted]


def overlapped(engine: Engine, groups: Sequence[Group], step: Callable[[], object] = lambda: None) -> list[tuple[int, int, int]]:
    """Like `run`, but every step is begun before the previous one has landed, where possible."""
    begun = []
    for one in groups:
        if not one.search:
            one.drafts = engine.speculator.most
        begun += [
            engine.begin_prefill(0, [one], [(one.uid, 24)], 1000, [0]),
            engine.begin_prefill(0, [], [(one.uid, 1000)], 1000, [0]),
        ]
    while engine.books.groups:
        step()
        begun.append(engine.begin_decode([0]))
    engine.land()
    return [(uid, one.choice, one.pick.token) for landed in begun for uid, one in checked(landed.result(0)).emitted]


@pytest.mark.parametrize(
    ("speculate", "more"),
    [
        ("", {"kv_cache_dtype": "fp8_e4m3fn"}),
        ("draft=DRAFT,tree=2x2,ngram=3", {}),
        ("draft=DRAFT,tokens=2,verify=rejection", {}),
        ("draft=EAGLE,tree=2x2", {}),
    ],
)
def test_all_tensors_of_a_step_are_on_the_device(activity: Activity, speculate: str, more: dict[str, Any]) -> None:
    """`fake_cuda` raises WrongDevice otherwise, and fails if the host waits while a graph is recorded."""
    engine = engine_of(speculate, **more)
    for make in [SCENARIOS[name] for name in DRAFT_SCENARIOS] if speculate else SCENARIOS.values():
        run(engine, make())
    assert engine.forward.replayed > 20
    engine.cache.move([[(40, 36), (41, 37)], [(70, 66)]])  # as when a tree's second branch was accepted
    names = {launched.kernel for launched in activity.launches}
    assert names >= {"attend", "merge", "rotary_kernel", "norm_kernel", "gated_kernel", "move_kernel", "top_kernel"}
    assert names >= {
        "product_kernel",
        "survey_kernel",
        "filter_kernel",
        "draw_kernel",
        "penalize_kernel",
    }
    assert speculate or "copy_kernel" in names
    assert {dict(one.constants)["PARTS"] for one in activity.launches if one.kernel in ("product_kernel", "norm_kernel")} >= {1, 4}


EARLY_KERNELS = {
    "rotary_kernel",
    "attend",
    "merge",
    "penalize_kernel",
    "survey_kernel",
    "filter_kernel",
    "draw_kernel",
    "settle_kernel",
}


@pytest.mark.parametrize("enabled", [False, True])
def test_kernels_are_launched_early_only_if_they_wait_for_their_inputs(
    activity: Activity, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    """A kernel that is launched early (launch_pdl) and does not wait itself would read inputs that are not written yet."""
    monkeypatch.setattr(dependent_launch, "enabled", enabled)
    engine = engine_of()
    run(engine, SCENARIOS["sampled"]())
    launches = {
        (one.kernel, dict(one.constants).get("launch_pdl", False), dict(one.constants).get("EARLY", False))
        for one in activity.launches
    }
    assert {kernel for kernel, launched, _ in launches if launched} == (EARLY_KERNELS if enabled else set())
    assert all(launched == waits for _, launched, waits in launches)


def test_tokens_are_the_same_with_and_without_cuda_graphs(activity: Activity) -> None:
    """No value of the recorded step is fixed in the graph: the made-up tokens are the same as without graphs."""
    eager, replaying = engine_of(graphs=False), engine_of()
    for make in PLAIN.values():
        assert run(replaying, make()) == run(eager, make())
    assert eager.forward.replayed == replaying.forward.eager == 0


def test_overlapped_steps_give_the_same_tokens(activity: Activity, resting: Callable[[bool], Engine]) -> None:
    """Reading a result on the host before its copy has finished raises WrongDevice."""
    engine = resting(True)
    for make in [*PLAIN.values(), SCENARIOS["top_n"], SCENARIOS["grammar"], SCENARIOS["beams"]]:
        assert sorted(overlapped(engine, make())) == sorted(run(engine, make()))


@torch.inference_mode()
def test_inputs_are_written_beside_kernels_only_after_a_graph_has_read_them(
    activity: Activity, resting: Callable[[bool], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step fails between its inputs and its graph, those of the next one wait for all that is queued."""
    engine = resting(True)
    engine.forward._inputs_read = None
    seen: list[object] = []
    for module in (paged_attention, step):
        monkeypatch.setattr(
            module, "copy_into", lambda tensor, into, after: seen.append(after) or transfer.copy_into(tensor, into, after)
        )
    [one] = SCENARIOS["sampled"]()[:1]
    overlapped(engine, [one])
    assert len(seen) % 2 == 0
    events = seen[::2]
    assert events == seen[1::2]  # the attention's plan, and the step's lists
    assert events[0] is None
    assert len({*events}) == len(events) > 3
    engine.clear()
    [sequence] = group(1).sequences
    engine.pool.extend(sequence.pages, 1)
    before = engine.forward._inputs_read
    seen.clear()
    for _ in range(2):
        engine.forward._padded([step.Span(sequence, 0, [5])], 1, None)
    assert seen == [before] * 2 + [None] * 2
    assert before not in (None, *events)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("speculate", "lacking"), [("", ""), ("", "wait_event"), ("", "wait_stream"), ("draft=EAGLE,tokens=2", "")]
)
def test_copies_beside_kernels_wait_for_these_and_these_for_them(
    activity: Activity, speculate: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what does not wait is found."""
    if lacking:
        monkeypatch.setattr(stream_order.Stream, lacking, lambda self, other: None)
    with stream_order.watched(monkeypatch) as order:
        engine = engine_of(speculate)
        for name in DRAFT_SCENARIOS if speculate or lacking else SCENARIOS:
            overlapped(engine, SCENARIOS[name]())
    assert order.done["copy_", False] > 20
    assert order.done["to", False] > 20
    assert bool(order.races) == bool(lacking), order.races


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", [*PLAIN, "beams alone", "beams with penalties"])
def test_host_waits_once_per_overlapped_decode_step(
    activity: Activity, resting: Callable[[bool], Engine], name: str, graphs: bool
) -> None:
    engine = resting(graphs)
    counts: list[list[fake_cuda.Wait]] = []

    def record_waits() -> None:
        counts.append(list(activity.waits))
        activity.waits.clear()

    overlapped(engine, SCENARIOS[name](), record_waits)
    assert {(one.place, one.why) for some in counts[1:] for one in some} == WAITS
    assert max(map(len, counts[1:])) == 1


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_host_waits_only_for_tokens_in_a_plain_decode_step(
    activity: Activity, resting: Callable[[bool], Engine], name: str, graphs: bool
) -> None:
    engine = resting(graphs)
    found = set()
    counts = []

    def record_waits() -> None:
        found.update((one.place, one.why) for one in activity.waits)
        counts.append(len(activity.waits))
        activity.waits.clear()

    run(engine, PLAIN[name](), lambda: record_waits() if counts else (activity.waits.clear(), counts.append(0)))
    record_waits()
    assert found == WAITS
    assert max(counts) == len(WAITS)


@torch.inference_mode()
def test_cleared_pages_are_zeroed_by_one_launch(activity: Activity) -> None:
    """Nearly every step takes pages, and the device may idle between the previous step's launches and those that zero them."""
    cache = engine_of(graphs=False).cache
    activity.launches.clear()
    before = activity.operations
    cache.clear([5, 7])
    cache.clear([])
    assert [one.kernel for one in activity.launches] == ["copy_kernel"]
    assert activity.operations - before == 1
    [pages] = cache.pages
    pages[:, 1:].fill_(1)
    dispatch.force("reference")  # this one computes numbers
    try:
        cache.clear([5, 7])
    finally:
        dispatch.force("")
    assert [page for page in range(PAGES + 1) if not pages[:, page].any().item()] == [0, 5, 7]


@torch.inference_mode()
def test_pages_are_offloaded_and_restored_without_host_waits(activity: Activity) -> None:
    host = HostPages(engine_of(graphs=False).cache.pages, 3)
    [pages] = host._parts
    pages.copy_(torch.randint(9, pages.shape))
    before = [pages[:, page].clone() for page in (5, 7)]
    activity.waits.clear()
    host.save([(5, 3), (7, 1)])
    pages.zero_()
    host.load([(1, 2), (3, 4)])
    assert not activity.waits
    assert [page for page in range(PAGES + 1) if pages[:, page].any().item()] == [2, 4]
    assert all((pages[:, page] == was).all().item() for page, was in zip((4, 2), before, strict=True))


@torch.inference_mode()
def test_gumbel_noise_takes_one_launch(activity: Activity) -> None:
    """With torch's operations it takes hundreds, and drafting for sampled rows needs it in every round."""
    for rows in (1, 8):
        keys = torch.arange(rows, device="cuda")
        activity.launches.clear()
        before = activity.operations
        noise.gumbel_all(keys, keys, keys, 1 << 17)
        noise.gumbel(keys, keys, keys, keys.unsqueeze(1))
        assert [one.kernel for one in activity.launches] == ["all_kernel", "some_kernel"]
        assert activity.operations - before < 10


@pytest.mark.parametrize(("speculate", "graphs"), [("", True), ("", False), ("draft=EAGLE,tokens=2", True)])
def test_all_kernels_are_compiled_during_warm_up(activity: Activity, speculate: str, graphs: bool) -> None:
    """For any number of rows. Kernels that copy and move keys and values are excluded: they compile in no time worth mentioning."""
    engine = engine_of(speculate, graphs)
    known = {fake_cuda.Launch(one.kernel, one.types, one.constants) for one in activity.launches}
    for make in [SCENARIOS[name] for name in DRAFT_SCENARIOS] if speculate else SCENARIOS.values():
        run(engine, make())
    for rows in range(1, 5):
        run(engine, [group(uid, hot(top_p=0.9)) for uid in range(rows)])
    for name in [] if speculate else ["sampled", "beams alone"]:
        overlapped(engine, SCENARIOS[name]())
    prefill(engine, [group(uid) for uid in range(linear.FEWER + 1)], 1000, [])  # more rows than any graph has
    run(engine, [])
    compiled_later = {one for one in activity.launches if one.kernel not in ("copy_kernel", "move_kernel")} - known
    assert not compiled_later


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        (
            {"medusa_num_heads": 1, "medusa_num_layers": 1},
            {"0.0.linear.weight": (256, 256), "0.0.linear.bias": (256,), "0.1.weight": (2048, 256)},
        ),
        (
            {"model_type": "mlp_speculator", "emb_dim": 256, "inner_dim": 96, "vocab_size": 2048, "n_predict": 1},
            {f"speculator.{name}.0.weight": size for name, size in {"emb": (2048, 96), "head": (2048, 96), "ln": (96,)}.items()}
            | {"speculator.proj.0.weight": (96, 256), "speculator.ln.0.bias": (96,)},
        ),
    ],
)
def test_kernels_of_medusa_and_mlp_speculator_heads_are_compiled_during_warm_up(
    activity: Activity, fields: dict[str, Any], sizes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({name: numpy.zeros(size, numpy.float32) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    engine = engine_of(f"draft={tmp_path},tree=2")
    products = [one for one in activity.launches if one.kernel == "product_kernel"]
    known = {(one.types, one.constants) for one in products}
    for name in DRAFT_SCENARIOS:
        run(engine, SCENARIOS[name]())
    assert engine.speculator.drafter is not None
    assert engine.speculator.drafter.rounds > 10
    products_later = [one for one in activity.launches if one.kernel == "product_kernel"][len(products) :]
    assert len(products_later) > 20
    assert not {(one.types, one.constants) for one in products_later} - known


@pytest.mark.parametrize("name", ["words-wide", "qwen3-moe", "bloom", "qwen3-next", "falcon-h1"])
def test_no_kernel_is_compiled_in_the_step_whose_time_is_measured(
    activity: Activity, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router derives the cost of tokens from this step's time, and compiling takes longer. A step of many tokens uses kernels
    that small steps don't."""
    counts: list[int] = []

    def run(engine: Engine, lengths: list[int], choices: int, sampling: Sampling) -> Outcome:
        counts.append(len(activity.launches))
        return original_run(engine, lengths, choices, sampling)

    original_run = memory._run
    monkeypatch.setattr(memory, "_run", run)
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    chunks = {"chunk_convolution_kernel", "chunk_systems_kernel", "chunk_state_kernel"} if engine.decoder.shape.recurrent else set()
    assert {one.kernel for one in activity.launches[counts[-1] :]} >= {"attend", "rotary_kernel"} | chunks
    assert not {*activity.launches[counts[-1] :]} - {*activity.launches[: counts[-1]]}


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h-moe", "falcon-h1"])
def test_chunked_linear_attention_prefill_makes_no_extra_host_wait_and_compiles_nothing(activity: Activity, name: str) -> None:
    """Alone and beside decodes. No kernel is compiled for them later, wherever chunks begin."""
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    engine.resize(PAGES)
    known, before = {*activity.launches}, len(activity.launches)
    activity.waits.clear()
    for lengths in ((70,), (3, 65, 64), (129, 1, 2)):
        assert len(run(engine, [tiny.group(uid, range(length), 4) for uid, length in enumerate(lengths)])) == 4 * len(lengths)
    kernels = {
        "chunk_convolution_kernel",
        "chunk_systems_kernel",
        "chunk_state_kernel",
        "recurrent_kernel",
        "convolution_window_kernel",
    }
    chunk_launches = {one for one in activity.launches[before:] if one.kernel in kernels}
    assert {one.kernel for one in chunk_launches} == kernels
    assert not chunk_launches - known
    assert {(one.place, one.why) for one in activity.waits} <= WAITS


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v32",
        "glm-5-borrowing",
        "hy-4",
        "mistral-large4",
        "ax-k2",
        "glm-5-next",
        "glm-5-pools",
        "minimax-m3",
        "deepseek-v4",
    ],
)
def test_kernels_of_sparse_attention_are_compiled_during_warm_up(activity: Activity, name: str) -> None:
    """For any number of rows, in contexts that are long enough for sparse selection."""
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    engine.resize(PAGES)
    known = {*activity.launches}
    most = engine.decoder.shape.sparse_beyond
    for rows in (1, 3, linear.FEWER + 1):
        assert len(run(engine, [tiny.group(uid, range(10, 10 + most + uid % 3), 4) for uid in range(1, rows + 1)])) == 4 * rows
    assert "scores_kernel" in {one.kernel for one in activity.launches}
    compiled_later = {one for one in activity.launches if one.kernel not in ("copy_kernel", "move_kernel")} - known
    assert not compiled_later


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite", "kimi-linear", "mistral4"])
def test_kernels_of_expanded_latent_attention_are_compiled_during_warm_up(
    activity: Activity, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In long contexts fewer heads are expanded at once. The host does not wait."""
    for module in (expanded, expanded_attention):
        monkeypatch.setattr(module, "MIN_QUERIES_TRITON", 32)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    own = expansion_of(engine.decoder)
    assert own is not None
    # Room for all heads of 128 keys, which is one page of scratch, and for half as many of 256.
    monkeypatch.setattr(expanded_attention, "SCRATCH", 128 * own.heads * 2 * expanded_attention.width_of(own))
    engine.compile(8)
    size_pool(engine, 0, 0.9, 64, ROWS, ROWS, TOTAL)
    engine.resize(PAGES)
    known, heads = {*activity.launches}, set[int]()
    original_attend = expanded_attention.attend

    def attend(query: Tensor, latents: Tensor, part: expanded.Part, *rest: Any) -> None:
        heads.add(part.heads)
        original_attend(query, latents, part, *rest)

    monkeypatch.setattr(expanded_attention, "attend", attend)
    activity.waits.clear()
    for uid, length in enumerate((40, 232, 296, 488)):
        begun, waiting = sequences([uid] * length, 1)
        groups = [Group(uid, begun, waiting, Sampling(), 2, frozenset())]
        for _ in range(0, length, 64):
            checked(engine.prefill(0, groups, [(uid, 64)], 64, []))
            groups = []
    assert len(heads) > 1
    compiled_later = {one for one in activity.launches if one.kernel in ("attend", "merge", "attend_many")} - known
    assert not compiled_later
    assert {(one.place, one.why) for one in activity.waits} <= WAITS


@pytest.mark.parametrize(("rows", "prompts"), [(2, 3), (16, 16)])
def test_measured_step_attends_to_unexpanded_latents(
    activity: Activity, rows: int, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This takes more memory than expanding the latents, as a step of few prompts would do. Scratch is counted separately."""
    lengths: list[int] = []
    original_run = memory._run

    def run(engine: Engine, own: list[int], *rest: Any) -> Outcome:
        lengths[:] = own
        return original_run(engine, own, *rest)

    monkeypatch.setattr(memory, "_run", run)
    folder = str(tiny.folder("deepseek-v3"))
    engine = load(ShardConfig(folder=folder, model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    size_pool(engine, 0, 0.9, 600, rows, ROWS, TOTAL)
    assert sum(lengths) == 600
    assert len(lengths) == prompts
    assert max(lengths) < expanded.MIN_QUERIES_TRITON


@pytest.mark.parametrize("name", ["llama", "hy-4", "glm-5-next", "deepseek-v4"])
def test_compile_covers_skinny_gemm_kernels_of_all_layers(activity: Activity, name: str) -> None:
    """Also with an output matrix in float32, as Hy 4's, which no skinny kernel multiplies."""
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    activity.launches.clear()
    engine.compile(8)
    assert "product_kernel" in {one.kernel for one in activity.launches}


@pytest.mark.parametrize(
    ("capability", "cache", "message"),
    [
        ((7, 5), "auto", "PENSTOCK_KERNELS=reference"),
        ((8, 0), "auto", ""),
        ((8, 6), "fp8_e4m3fn", "leave --kv-cache-dtype out"),
        ((8, 9), "fp8_e4m3fn", ""),
        ((12, 0), "fp8_e4m3fn", ""),
    ],
)
def test_gpu_with_unsupported_compute_capability_is_refused(
    activity: Activity, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cache: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    with pytest.raises(Unsupported, match=message) if message else nullcontext():
        load(config(kv_cache_dtype=cache), lambda stage: None)


@pytest.mark.parametrize(
    ("capability", "arch_list", "supported"),
    [
        ((8, 9), ["sm_75", "sm_80", "sm_90a"], True),
        ((9, 0), ["sm_75", "sm_80", "sm_90a"], True),
        ((12, 0), ["sm_75", "sm_80", "sm_90a"], False),
        ((12, 1), ["sm_90", "sm_120"], True),
        ((12, 1), ["sm_90", "compute_90"], True),
        ((8, 0), ["sm_86", "compute_90"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
    ],
)
def test_gpu_missing_from_torchs_arch_list_is_refused(
    activity: Activity, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch_list: list[str], supported: bool
) -> None:
    """Otherwise the first operation fails with no hint at the remedy. This also holds without Triton kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arch_list)
    with dispatch.forced("reference"):
        message = f"torch is for {', '.join(arch_list)}, and the GPU is sm_{capability[0]}{capability[1]}: install a build"
        with pytest.raises(Unsupported, match=message) if not supported else nullcontext():
            _check_able(fake_cuda.DEVICE, "auto")


def test_missing_cuda_device_is_reported_with_torchs_reason_and_exit_code(
    activity: Activity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU build of torch is the operator's to change: exit code 2. The driver's errors may pass, as when a GPU was lost: 1."""
    codes: list[int] = []

    def start(error: Exception) -> str:
        def init() -> None:
            raise error

        monkeypatch.setattr(torch.cuda, "init", init)
        caplog.clear()
        entry._work(config(), SimpleNamespace(stage=""), load, codes.append)  # type: ignore[arg-type]
        return caplog.messages[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    message = start(RuntimeError("The driver on your system is too old (found version 11040).\nPlease update it"))
    assert message.startswith(
        "torch sees no CUDA device: The driver on your system is too old (found version 11040). Please update it (or"
    )
    assert "install its build for CUDA" in start(AssertionError("Torch not compiled with CUDA enabled"))
    assert codes == [1, 2]


def test_available_memory_of_an_integrated_gpu_is_the_machines(activity: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the page cache as used, above all the cached files of the weights."""
    properties = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 40)
    assert memory._available(fake_cuda.DEVICE) == 1 << 27
    monkeypatch.setattr(properties, "is_integrated", 1)
    assert memory._available(fake_cuda.DEVICE) == 1 << 40
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    assert memory._available(fake_cuda.DEVICE) == 1 << 27


@pytest.mark.parametrize(
    ("architecture", "cache", "message"),
    [
        ("gfx942:sramecc+:xnack-", "auto", ""),
        ("gfx803", "auto", "this build of torch is for gfx90a, gfx942, and the GPU is gfx803: use --device cpu"),
        ("gfx942", "fp8_e4m3fn", "8 bits are not there for AMD's GPUs: leave --kv-cache-dtype out"),
    ],
)
def test_amd_gpu_is_accepted_only_if_torch_supports_it_and_without_fp8_kv_cache(
    activity: Activity, monkeypatch: pytest.MonkeyPatch, architecture: str, cache: str, message: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    properties = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=architecture, **vars(properties))
    )
    with pytest.raises(Unsupported, match=message) if message else nullcontext():
        load(config(kv_cache_dtype=cache), lambda stage: None)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
            "C compiler.* apt-get install gcc",
        ),
        (AssertionError("libcuda.so cannot found!\n"), "cannot found.*TRITON_LIBCUDA_PATH"),
        (PermissionError(13, "Permission denied", "/.triton"), "Permission denied: '/.triton'.*TRITON_CACHE_DIR"),
    ],
)
def test_failed_build_of_tritons_launcher_is_reported_with_a_remedy(
    problem: Exception, message: str, activity: Activity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton builds it when its driver is first requested."""

    def build() -> None:
        raise problem

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=build))
    with pytest.raises(Unsupported, match=f"(?s){message}"):
        load(config(), lambda stage: None)


def test_service_executes_commands_on_the_engines_device(activity: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several devices. Every thread starts on the first one, and Triton launches on the thread's current device."""
    monkeypatch.setattr(fake_cuda, "DEVICE", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = config(local_rank=1)
    codes: list[int] = []
    service = Service(settings, codes.append)
    measure = service._measure

    def measured(request: wire.WarmupRequest) -> wire.WarmupReply:
        assert threading.current_thread() is not threading.main_thread()
        with fake_cuda.Device():
            return measure(request)

    monkeypatch.setattr(service, "_measure", measured)
    service.start(load(settings, lambda stage: None), None)  # type: ignore[arg-type]  # there are no other ranks
    context: Any = None
    reply = service.Warmup(wire.WarmupRequest(max_step_tokens=64, max_step_rows=4, max_total_tokens=TOTAL), context)
    assert reply.pages
    assert not codes


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "mixtral", "qwen3-moe", "gemma2", "gemma3", "deepseek-v2-sets", "deepseek-v3", "deepseek-v32"),
        *("gemma4-e", "gemma4-experts", "qwen3-next", "lfm2-moe", "nemotron-h-moe", "falcon-h1"),
        *("glm-5-borrowing", "kimi-linear", "lfm3", "mimo", "minimax-m3", "hy-4", "mistral-large4", "ax-k2", "olmo-hybrid"),
        *("gemma3n", "longcat"),
        *("glm-5-next", "glm-5-pools", "qwen4-exp", "deepseek-v4"),
    ],
)
def test_no_model_family_makes_the_host_wait_within_a_step(activity: Activity, name: str) -> None:
    """Neither while a graph is recorded nor in a step: experts are routed on the device. Warm-up compiles what it needs before."""
    folder = str(tiny.folder(name))
    engine = load(ShardConfig(folder=folder, model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    groups = [tiny.group(uid, range(20 + uid), 6) for uid in range(1, 4)]
    activity.waits.clear()
    assert len(run(engine, groups)) == 18
    shape = engine.decoder.shape
    assert engine.forward.replayed > 5 or shape.sparse_beyond
    assert {(one.place, one.why) for one in activity.waits} <= WAITS
    names = {launched.kernel for launched in activity.launches}
    assert ("scores_kernel" in names) == (shape.sparse_beyond > 0)
    assert ("experts_kernel" in names) == any(shape.mixtures)
    assert ("latents_kernel" in names) == (shape.latent is not None and not shape.compressed)
    assert ("entries_kernel" in names) == (shape.compressed is not None)
    # These numbers differ from step to step and must not be specialized: otherwise some steps wait for a compilation.
    counts = {
        value for one in activity.launches for key, value in one.types if key in ("pairs", "first", "count", "length", "rows")
    }
    assert counts <= {"int"} | {value for value in counts if value.startswith("*")}


@pytest.fixture(scope="module")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[vision_models.ImagePrompt]]]:
    """By name, a model with image input and prompts with images. Created outside the simulated device."""
    found = {}
    for name in ("Gemma3", "Gemma4Both", "InternVL", "LlavaOnevision", "Mistral3", "Qwen3VL", "Qwen3_5"):
        folder = tmp_path_factory.mktemp(name)
        kind = vision_models.make_model(name, folder).config.model_type
        found[name] = folder, [vision_models.image_prompt(name, kind, random.Random(seed), [(2, 3), (1, 1)]) for seed in range(3)]
    return found


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4Both", "InternVL", "LlavaOnevision", "Mistral3", "Qwen3VL", "Qwen3_5"])
def test_images_are_encoded_on_the_device_with_no_host_wait_but_the_encoders(
    image_models: dict[str, tuple[Path, list[vision_models.ImagePrompt]]], activity: Activity, name: str
) -> None:
    """Only transformers' encoders make the host wait: they compute sizes on the host from what they have put on the device."""
    folder, prompts = image_models[name]
    settings = ShardConfig(folder=str(folder), model="m", device="cuda", dtype="bfloat16", image_pixels=1 << 14, images_asked=True)
    engine = load(settings, lambda stage: None)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    activity.waits.clear()
    groups = [tiny.group(uid, prompt.tokens, 6, images=prompt.pictures) for uid, prompt in enumerate(prompts)]
    assert len(overlapped(engine, groups)) == 18
    assert engine.forward.replayed > 5
    waiting = {one.place.partition(":")[0] for one in activity.waits if (one.place, one.why) not in WAITS}
    assert waiting == (set() if name in ("Gemma3", "InternVL") else {"shard.models.encoders"})


@pytest.mark.parametrize("loaded_later", [False, True])
@pytest.mark.parametrize("name", ["words-wide", "qwen3.5-wide", "kimi-linear", "deepseek-v3", "falcon-h1"])
def test_lora_adapters_make_no_extra_host_wait_and_compile_nothing_after_warm_up(
    activity: Activity, tmp_path: Path, name: str, loaded_later: bool
) -> None:
    """Graphs contain the adapters' products, whichever adapter is requested, also those loaded later; nothing is compiled after the
    warm-up."""
    adapters, _ = lora.adapters_for(name, tmp_path)
    room: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8} if loaded_later else {"adapters": adapters}
    folder = str(tiny.folder(name))
    engine = load(ShardConfig(folder=folder, model="m", device="cuda", dtype="bfloat16", **room), print)
    engine.compile(TOKENS)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    known = {one for one in activity.launches if one.kernel == "experts_kernel"}
    assert known
    assert not engine.decoder.adapters.later
    for name, place in adapters if loaded_later else ():
        adapter = Adapter(name, Path(place), torch.bfloat16, torch.device("cpu"))
        assert engine.adapt(name, engine.decoder.adapters.prepared(adapter)) == ""
    activity.waits.clear()
    groups = [tiny.group(uid, range(20 + uid), 6, adapter=adapter) for uid, adapter in enumerate(("", "0", "1", "1"), 1)]
    assert len(run(engine, groups)) == 24
    assert engine.forward.replayed > 5
    assert {(one.place, one.why) for one in activity.waits} <= WAITS
    assert {one for one in activity.launches if one.kernel == "experts_kernel"} == known


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantized_weights_make_no_extra_host_wait_and_are_captured_in_graphs(activity: Activity, kind: str) -> None:
    """Graphs contain their products, of few rows and of many."""
    engine = load(
        ShardConfig(folder=str(tiny.folder("words-wide")), model="m", device="cuda", dtype="bfloat16", quantize=kind), print
    )
    shape = engine.decoder.shape
    assert engine.decoder.weight_bytes == pytest.approx(shape.weight_bytes(1, 2, "cuda", "bfloat16", False), rel=0.01)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    activity.waits.clear()
    assert len(run(engine, [tiny.group(uid, range(20 + uid), 6) for uid in range(1, 4)])) == 18
    assert engine.forward.replayed > 5
    assert {(one.place, one.why) for one in activity.waits} <= WAITS
    assert "quantized_kernel" in {launched.kernel for launched in activity.launches}


@pytest.mark.parametrize("name", ["words-wide", "gemma4-e-wide", "llama4-wide", "mixtral-wide", "few-heads-mixtral"])
@pytest.mark.usefixtures("activity")
def test_planned_weight_bytes_of_a_rank_match_the_loaded_int4_decoder(name: str) -> None:
    """Of 192 inputs in groups of 64 each of two ranks has 96, in groups of 32. Of 88 inputs it has 44, so experts are dequantized:
    if some are, all of them."""
    path, device = tiny.folder(name), torch.device("cuda", 0)
    model = shape(json.loads((path / "config.json").read_text())).quantized("int4")
    decoder = Decoder(model, Weights(path, torch.bfloat16, device, lambda read: None), LoadingRank(1), device)
    assert model.weight_bytes(2, 2, "cuda", "bfloat16", False) == pytest.approx(decoder.weight_bytes, rel=0.003)


FP4_CHECKPOINTS = [("words-wide", "modelopt-nvfp4"), ("words-wide", "mxfp4"), ("mixtral-wide", "nvfp4"), ("mixtral-wide", "mxfp4")]


@pytest.fixture(scope="module")
def fp4_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Checkpoints of 4-bit floats, created outside the simulated device."""
    return {one: packing.checkpoints(*one, tmp_path_factory.mktemp("few"))[0] for one in FP4_CHECKPOINTS}


@pytest.mark.parametrize("one", FP4_CHECKPOINTS)
@pytest.mark.usefixtures("activity")
def test_4_bit_float_weights_take_the_planned_memory(one: tuple[str, str], fp4_folders: dict[tuple[str, str], Path]) -> None:
    """They take the planned memory: all weights, and those of one of two ranks, which has 96 of 192 inputs."""
    device = torch.device("cuda", 0)
    model = shape(json.loads((fp4_folders[one] / "config.json").read_text()))
    for ranks in (Ranks(0, 1, device), LoadingRank(1)):
        decoder = Decoder(model, Weights(fp4_folders[one], torch.bfloat16, device, lambda read: None), ranks, device)
        planned = model.weight_bytes(ranks.size, 2, "cuda", "bfloat16", False)
        assert planned == pytest.approx(decoder.weight_bytes, rel=0.001)
        assert model.saved(ranks.size, 2, "cuda", "bfloat16") > 0


@pytest.fixture(scope="module")
def draft_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By name, a model and a draft head that reads its hidden states. Created outside the simulated device."""
    made = {"llama": (tiny.folder("llama"), str(test_draft_head.write_head(tmp_path_factory.mktemp("eagle") / "head")))}
    for name in ("deepseek-v3", "qwen3.5"):
        folder = tmp_path_factory.mktemp(name)
        test_draft_head.write_mtp_model(name, folder, tables=False)
        made[name] = folder, "mtp"
    return made


@pytest.mark.parametrize(("name", "shape"), [("llama", "tree=2x2"), ("deepseek-v3", "tokens=2"), ("qwen3.5", "tokens=2")])
def test_draft_heads_read_hidden_states_on_the_device_from_graphs(
    draft_models: dict[str, tuple[Path, str]], activity: Activity, name: str, shape: str
) -> None:
    """From graphs, as many as are planned, and without any wait of the host."""
    folder, draft = draft_models[name]
    settings = ShardConfig(folder=str(folder), model=name, device="cuda", dtype="bfloat16", speculate=f"draft={draft},{shape}")
    service = Service(settings, lambda code: None)
    service._engine = engine = load(settings, lambda stage: None)
    size_arguments: list[Any] = []

    def size(engine: Engine, *rest: Any) -> tuple[int, int, memory.Measured]:
        size_arguments.extend(rest)
        return PAGES, ROWS, memory.Measured(TOKENS, 0, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.shard.service.size_pool", size)
        service._measure(wire.WarmupRequest(max_step_tokens=TOKENS, max_step_rows=ROWS, max_total_tokens=TOTAL - 2))
    *_, recorded, _ = size_arguments
    drafter = engine.speculator.drafter
    assert drafter is not None
    assert len(recorded) == sum(len(own._decodes) + len(own._mixed) for own in (engine.forward, drafter.forward))
    for scenario in ("greedy", "sampled"):
        run(engine, SCENARIOS[scenario]())
    assert drafter.forward.replayed > 10
    assert not drafter.forward.eager
