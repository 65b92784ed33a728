"""The shard on a CUDA device that isn't there: what is where, what makes the host wait, what is compiled, where threads are.

Numbers are made up where kernels would compute them; see `fake_cuda`.
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

from penstock.kernels import dependent_launch, dispatch, expanded, linear, noise
from penstock.proto import shard_pb2 as wire
from penstock.shard import __main__ as entry
from penstock.shard import memory
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
from penstock.tests.shard import fake_cuda, lora, packing, seeing, test_draft_head, tiny
from penstock.tests.shard.fake_cuda import Noted
from penstock.tests.shard.test_weights import Alone

triton = pytest.importorskip("triton")
expanded_attention = pytest.importorskip("penstock.kernels.expanded_attention")
fused_penalties = pytest.importorskip("penstock.kernels.fused_penalties")
skinny_gemm = pytest.importorskip("penstock.kernels.fused_skinny_gemm")

FOLDER = Path(__file__).parents[2] / "demo"
PROMPT = list(range(5, 65))  # so many that answers take pages
END = frozenset([2])
WORDS = llguidance.LLMatcher.grammar_from_regex("[a-z ]{1,200}")
TOKENS, ROWS, TOTAL, PAGES, PAGE = 256, 16, 512, 256, 16
# Where the host may wait in a decode step of greedy or sampled sequences: for the tokens of the step before.
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
    "tops": lambda: [group(1, top_n=5), group(2, hot(final_logprobs=True)), group(3, hot(final_logprobs=True), top_n=3)],
    "typical": lambda: [group(1, hot(typical_p=0.9)), group(2)],
    "choices": lambda: [group(1, hot(), choices=4), group(2)],
    "prompt": lambda: [group(1, prompt_logprobs=True, prompt_top_n=3)],
    "beams": lambda: [group(1, search=beams(4, 2), end_ids=END), group(2), group(4, search=beams(2))],
    "beams alone": lambda: [group(1, search=beams(4, 2), end_ids=END, top_n=2), group(4, search=beams(2))],
    "beams with penalties": lambda: [
        group(1, Sampling(repetition_penalty=1.2, bias=((4, 2.0),)), search=beams(3), end_ids=END, min_new_tokens=4)
    ],
    "drawn beams": lambda: [group(1, hot(top_p=0.9, repetition_penalty=1.1), search=beams(3), end_ids=END, top_n=2)],
    "grammar": lambda: [group(1, grammar=WORDS, end_ids=END), group(2, hot(frequency_penalty=0.5), grammar=WORDS), group(3)],
    "beams of a grammar": lambda: [group(1, grammar=WORDS, search=beams(3), end_ids=END), group(2)],
}

DRAFTED = ("greedy", "sampled", "penalties", "grammar")  # what drafts make another step of


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """Inputs of products are cut, as those of larger models are."""
    monkeypatch.setattr(skinny_gemm, "SHORTEST", 16)
    with fake_cuda.device(monkeypatch) as found:
        yield found


def config(speculate: str = "", **more: Any) -> ShardConfig:
    said = speculate.replace("DRAFT", f"{FOLDER}/draft").replace("EAGLE", f"{FOLDER}/eagle")
    return ShardConfig(folder=str(FOLDER / "model"), model="demo", device="cuda", dtype="bfloat16", speculate=said, **more)


def engine_of(speculate: str = "", graphs: bool = True, **more: Any) -> Engine:
    """One that has warmed up, as the service has it do."""
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
    """An engine with graphs or without that several tests run, one after the other: it has no groups and knows no prefixes."""
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
    """All tokens, as (uid, choice, token). Prompts come in chunks, beside decodes. step: is called before each decode step."""
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
    """`run`, but every step is begun before the one before it has landed, where it can be."""
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
def test_nothing_is_on_the_wrong_device(noted: Noted, speculate: str, more: dict[str, Any]) -> None:
    """`fake_cuda` raises WrongDevice where it is, and says so where the host waits while a graph is recorded."""
    engine = engine_of(speculate, **more)
    for make in [SCENARIOS[name] for name in DRAFTED] if speculate else SCENARIOS.values():
        run(engine, make())
    assert engine.forward.replayed > 20
    engine.cache.move([[(40, 36), (41, 37)], [(70, 66)]])  # as where a tree's second branch was right
    names = {launched.kernel for launched in noted.launches}
    assert names >= {"attend", "merge", "rotary_kernel", "norm_kernel", "gated_kernel", "move_kernel", "top_kernel"}
    assert names >= {
        "product_kernel",
        "survey_kernel",
        "filter_kernel",
        "draw_kernel",
        "penalize_kernel",
        "renew_kernel",
        "restore_kernel",
    }
    assert speculate or "copy_kernel" in names
    assert {dict(one.constants)["PARTS"] for one in noted.launches if one.kernel in ("product_kernel", "norm_kernel")} >= {1, 4}


EARLY = {"rotary_kernel", "attend", "merge"}


@pytest.mark.parametrize("begins", [False, True])
def test_kernels_begin_early_where_they_wait_themselves(noted: Noted, monkeypatch: pytest.MonkeyPatch, begins: bool) -> None:
    """Both or neither: one that is launched early and does not wait reads what is not there yet."""
    monkeypatch.setattr(dependent_launch, "enabled", begins)
    engine = engine_of()
    run(engine, SCENARIOS["sampled"]())
    told = {
        (one.kernel, dict(one.constants).get("launch_pdl", False), dict(one.constants).get("EARLY", False))
        for one in noted.launches
    }
    assert {kernel for kernel, launched, _ in told if launched} == (EARLY if begins else set())
    assert all(launched == waits for _, launched, waits in told)


def test_graphs_replay_what_was_planned(noted: Noted) -> None:
    """Nothing of a step is baked into a graph: the made-up tokens are those that come without one."""
    eager, replaying = engine_of(graphs=False), engine_of()
    for make in PLAIN.values():
        assert run(replaying, make()) == run(eager, make())
    assert eager.forward.replayed == replaying.forward.eager == 0


def test_steps_overlap(noted: Noted, resting: Callable[[bool], Engine]) -> None:
    """With the tokens that they have without. What is read on the host before it is there is a WrongDevice."""
    engine = resting(True)
    for make in [*PLAIN.values(), SCENARIOS["tops"], SCENARIOS["grammar"], SCENARIOS["beams"]]:
        assert sorted(overlapped(engine, make())) == sorted(run(engine, make()))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", [*PLAIN, "beams alone", "beams with penalties"])
def test_an_overlapped_decode_step_waits_once(noted: Noted, resting: Callable[[bool], Engine], name: str, graphs: bool) -> None:
    engine = resting(graphs)
    counts: list[list[fake_cuda.Wait]] = []

    def note() -> None:
        counts.append(list(noted.waits))
        noted.waits.clear()

    overlapped(engine, SCENARIOS[name](), note)
    assert {(one.place, one.why) for some in counts[1:] for one in some} == WAITS
    assert max(map(len, counts[1:])) == 1


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_decode_step_waits_for_its_tokens_only(
    noted: Noted, resting: Callable[[bool], Engine], name: str, graphs: bool
) -> None:
    engine = resting(graphs)
    found = set()
    counts = []

    def note() -> None:
        found.update((one.place, one.why) for one in noted.waits)
        counts.append(len(noted.waits))
        noted.waits.clear()

    run(engine, PLAIN[name](), lambda: note() if counts else (noted.waits.clear(), counts.append(0)))
    note()
    assert found == WAITS
    assert max(counts) == len(WAITS)


@torch.inference_mode()
def test_pages_are_zeroed_by_one_launch(noted: Noted) -> None:
    """In nearly every step some are taken, between whose launches and those of the one before the device may stand still."""
    cache = engine_of(graphs=False).cache
    noted.launches.clear()
    before = noted.operations
    cache.clear([5, 7])
    cache.clear([])
    assert [one.kernel for one in noted.launches] == ["copy_kernel"]
    assert noted.operations - before == 1
    [pages] = cache.pages
    pages[:, 1:].fill_(1)
    dispatch.force("reference")  # which computes numbers
    try:
        cache.clear([5, 7])
    finally:
        dispatch.force("")
    assert [page for page in range(PAGES + 1) if not pages[:, page].any().item()] == [0, 5, 7]


@torch.inference_mode()
def test_pages_go_to_the_host_and_come_back_without_a_wait(noted: Noted) -> None:
    host = HostPages(engine_of(graphs=False).cache.pages, 3)
    [pages] = host._parts
    pages.copy_(torch.randint(9, pages.shape))
    before = [pages[:, page].clone() for page in (5, 7)]
    noted.waits.clear()
    host.save([(5, 3), (7, 1)])
    pages.zero_()
    host.load([(1, 2), (3, 4)])
    assert not noted.waits
    assert [page for page in range(PAGES + 1) if pages[:, page].any().item()] == [2, 4]
    assert all((pages[:, page] == was).all().item() for page, was in zip((4, 2), before, strict=True))


@torch.inference_mode()
def test_noise_takes_one_launch(noted: Noted) -> None:
    """By torch's operations it takes hundreds, and drafts of rows that are drawn want it in each of their rounds."""
    for rows in (1, 8):
        keys = torch.arange(rows, device="cuda")
        noted.launches.clear()
        before = noted.operations
        noise.gumbel_all(keys, keys, keys, 1 << 17)
        noise.gumbel(keys, keys, keys, keys.unsqueeze(1))
        assert [one.kernel for one in noted.launches] == ["all_kernel", "some_kernel"]
        assert noted.operations - before < 10


@pytest.mark.parametrize(("speculate", "graphs"), [("", True), ("", False), ("draft=EAGLE,tokens=2", True)])
def test_kernels_are_compiled_before_the_first_request(noted: Noted, speculate: str, graphs: bool) -> None:
    """Whatever the number of rows. Those that copy and move keys and values take no time worth mentioning."""
    engine = engine_of(speculate, graphs)
    known = {fake_cuda.Launch(one.kernel, one.types, one.constants) for one in noted.launches}
    for make in [SCENARIOS[name] for name in DRAFTED] if speculate else SCENARIOS.values():
        run(engine, make())
    for rows in range(1, 5):
        run(engine, [group(uid, hot(top_p=0.9)) for uid in range(rows)])
    prefill(engine, [group(uid) for uid in range(linear.FEWER + 1)], 1000, [])  # more than graphs are for
    run(engine, [])
    later = {one for one in noted.launches if one.kernel not in ("copy_kernel", "move_kernel")} - known
    assert not later


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
def test_heads_without_keys_are_compiled_before_the_first_request(
    noted: Noted, fields: dict[str, Any], sizes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({name: numpy.zeros(size, numpy.float32) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    engine = engine_of(f"draft={tmp_path},tree=2")
    products = [one for one in noted.launches if one.kernel == "product_kernel"]
    known = {(one.types, one.constants) for one in products}
    for name in DRAFTED:
        run(engine, SCENARIOS[name]())
    assert engine.speculator.drafter is not None
    assert engine.speculator.drafter.rounds > 10
    later = [one for one in noted.launches if one.kernel == "product_kernel"][len(products) :]
    assert len(later) > 20
    assert not {(one.types, one.constants) for one in later} - known


@pytest.mark.parametrize("name", ["words-wide", "qwen3-moe", "bloom", "qwen3-next", "falcon-h1"])
def test_nothing_is_compiled_in_the_step_that_is_measured(noted: Noted, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router takes its time for what tokens cost, and compiling takes longer. A step of many tokens has kernels of its own."""
    counts: list[int] = []

    def run(engine: Engine, lengths: list[int], choices: int, sampling: Sampling) -> Outcome:
        counts.append(len(noted.launches))
        return honest(engine, lengths, choices, sampling)

    honest = memory._run
    monkeypatch.setattr(memory, "_run", run)
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    chunks = {"chunk_convolution_kernel", "chunk_systems_kernel", "chunk_state_kernel"} if engine.decoder.shape.recurrent else set()
    assert {one.kernel for one in noted.launches[counts[-1] :]} >= {"attend", "rotary_kernel"} | chunks
    assert not {*noted.launches[counts[-1] :]} - {*noted.launches[: counts[-1]]}


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h-moe", "falcon-h1"])
def test_prompts_that_go_by_chunks_ask_nothing(noted: Noted, name: str) -> None:
    """Alone and beside others that decode; nor is a kernel compiled for them, wherever they begin."""
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    engine.resize(PAGES)
    known, before = {*noted.launches}, len(noted.launches)
    noted.waits.clear()
    for lengths in ((70,), (3, 65, 64), (129, 1, 2)):
        assert len(run(engine, [tiny.group(uid, range(length), 4) for uid, length in enumerate(lengths)])) == 4 * len(lengths)
    kernels = {
        "chunk_convolution_kernel",
        "chunk_systems_kernel",
        "chunk_state_kernel",
        "recurrent_kernel",
        "convolution_window_kernel",
    }
    later = {one for one in noted.launches[before:] if one.kernel in kernels}
    assert {one.kernel for one in later} == kernels
    assert not later - known
    assert {(one.place, one.why) for one in noted.waits} <= WAITS


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
def test_kernels_of_what_is_chosen_are_compiled_before_the_first_request(noted: Noted, name: str) -> None:
    """By any number of rows, in texts that are long enough for it."""
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    engine.compile(8)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    engine.resize(PAGES)
    known = {*noted.launches}
    most = engine.decoder.shape.sparse_beyond
    for rows in (1, 3, linear.FEWER + 1):
        assert len(run(engine, [tiny.group(uid, range(10, 10 + most + uid % 3), 4) for uid in range(1, rows + 1)])) == 4 * rows
    assert "scores_kernel" in {one.kernel for one in noted.launches}
    later = {one for one in noted.launches if one.kernel not in ("copy_kernel", "move_kernel")} - known
    assert not later


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite", "kimi-linear", "mistral4"])
def test_what_attends_to_expanded_latents_is_compiled_before_the_first_request(
    noted: Noted, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In long contexts fewer heads are expanded at once. The host waits for nothing."""
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
    known, heads = {*noted.launches}, set[int]()
    right = expanded_attention.attend

    def attend(query: Tensor, latents: Tensor, part: expanded.Part, *rest: Any) -> None:
        heads.add(part.heads)
        right(query, latents, part, *rest)

    monkeypatch.setattr(expanded_attention, "attend", attend)
    noted.waits.clear()
    for uid, length in enumerate((40, 232, 296, 488)):
        begun, waiting = sequences([uid] * length, 1)
        asked = [Group(uid, begun, waiting, Sampling(), 2, frozenset())]
        for _ in range(0, length, 64):
            checked(engine.prefill(0, asked, [(uid, 64)], 64, []))
            asked = []
    assert len(heads) > 1
    later = {one for one in noted.launches if one.kernel in ("attend", "merge", "attend_many")} - known
    assert not later
    assert {(one.place, one.why) for one in noted.waits} <= WAITS


@pytest.mark.parametrize(("rows", "prompts"), [(2, 3), (16, 16)])
def test_the_step_that_is_measured_attends_to_latents(
    noted: Noted, rows: int, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes more memory than what a step of few prompts would do: expand them all. Scratch is counted beside it."""
    lengths: list[int] = []
    honest = memory._run

    def run(engine: Engine, own: list[int], *rest: Any) -> Outcome:
        lengths[:] = own
        return honest(engine, own, *rest)

    monkeypatch.setattr(memory, "_run", run)
    folder = str(tiny.folder("deepseek-v3"))
    engine = load(ShardConfig(folder=folder, model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    size_pool(engine, 0, 0.9, 600, rows, ROWS, TOTAL)
    assert sum(lengths) == 600
    assert len(lengths) == prompts
    assert max(lengths) < expanded.MIN_QUERIES_TRITON


@pytest.mark.parametrize("name", ["llama", "hy-4", "glm-5-next", "deepseek-v4"])
def test_layers_of_few_rows_are_compiled_by_themselves(noted: Noted, name: str) -> None:
    """Also beside an output matrix of float32, as Hy 4's, which no kernel of few rows multiplies."""
    engine = load(ShardConfig(folder=str(tiny.folder(name)), model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    noted.launches.clear()
    engine.compile(8)
    assert "product_kernel" in {one.kernel for one in noted.launches}


def test_what_is_kept_for_penalties_is_there_before_memory_is_measured(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as a step may have: else the pool would have that memory, too."""
    kept = list[int]()

    def peak(device: torch.device, reset: bool = False) -> int:
        kept.append(sum(map(len, fused_penalties._tallies.values())))
        return 0

    engine = load(config(), lambda stage: None)
    monkeypatch.setattr(fused_penalties, "_tallies", {})
    monkeypatch.setattr(memory, "_peak", peak)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL)
    assert kept[0] == ROWS * engine.decoder.shape.vocabulary


@pytest.mark.parametrize(
    ("capability", "cache", "word"),
    [
        ((7, 5), "auto", "PENSTOCK_KERNELS=reference"),
        ((8, 0), "auto", ""),
        ((8, 6), "fp8_e4m3fn", "leave --kv-cache-dtype out"),
        ((8, 9), "fp8_e4m3fn", ""),
        ((12, 0), "fp8_e4m3fn", ""),
    ],
)
def test_an_accelerator_that_the_kernels_can_not_be_compiled_for(
    noted: Noted, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cache: str, word: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    with pytest.raises(Unsupported, match=word) if word else nullcontext():
        load(config(kv_cache_dtype=cache), lambda stage: None)


@pytest.mark.parametrize(
    ("capability", "able", "runs"),
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
def test_a_gpu_that_torch_was_not_built_for(
    noted: Noted, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: list[str], runs: bool
) -> None:
    """Else the first operation fails, without a word on what to do. Without kernels of our own, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: able)
    with dispatch.forced("reference"):
        told = f"torch is for {', '.join(able)}, and the GPU is sm_{capability[0]}{capability[1]}: install a build"
        with pytest.raises(Unsupported, match=told) if not runs else nullcontext():
            _check_able(fake_cuda.DEVICE, "auto")


def test_why_torch_sees_no_gpu(noted: Noted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A build for CPUs is the operator's to change. What the driver says may pass, as when it has lost a GPU that it had."""
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
    said = start(RuntimeError("The driver on your system is too old (found version 11040).\nPlease update it"))
    assert said.startswith(
        "torch sees no CUDA device: The driver on your system is too old (found version 11040). Please update it (or"
    )
    assert "install its build for CUDA" in start(AssertionError("Torch not compiled with CUDA enabled"))
    assert codes == [1, 2]


def test_memory_that_a_gpu_shares_with_the_machine(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which CUDA counts cached files as used: those of the weights, above all."""
    properties = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 40)
    assert memory._available(fake_cuda.DEVICE) == 1 << 27
    monkeypatch.setattr(properties, "is_integrated", 1)
    assert memory._available(fake_cuda.DEVICE) == 1 << 40
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    assert memory._available(fake_cuda.DEVICE) == 1 << 27


@pytest.mark.parametrize(
    ("kind", "cache", "word"),
    [
        ("gfx942:sramecc+:xnack-", "auto", ""),
        ("gfx803", "auto", "this build of torch is for gfx90a, gfx942, and the GPU is gfx803: use --device cpu"),
        ("gfx942", "fp8_e4m3fn", "8 bits are not there for AMD's GPUs: leave --kv-cache-dtype out"),
    ],
)
def test_a_gpu_of_amds(noted: Noted, monkeypatch: pytest.MonkeyPatch, kind: str, cache: str, word: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    properties = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=kind, **vars(properties)))
    with pytest.raises(Unsupported, match=word) if word else nullcontext():
        load(config(kv_cache_dtype=cache), lambda stage: None)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
            "C compiler.* apt-get install gcc",
        ),
        (AssertionError("libcuda.so cannot found!\n"), "cannot found.*TRITON_LIBCUDA_PATH"),
        (PermissionError(13, "Permission denied", "/.triton"), "Permission denied: '/.triton'.*TRITON_CACHE_DIR"),
    ],
)
def test_a_machine_where_triton_can_not_build_what_launches_kernels(
    problem: Exception, words: str, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries when it is first asked for its driver."""

    def build() -> None:
        raise problem

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=build))
    with pytest.raises(Unsupported, match=f"(?s){words}"):
        load(config(), lambda stage: None)


def test_commands_are_executed_on_the_engines_device(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several. Every thread begins with the first one, and Triton launches where the thread is."""
    monkeypatch.setattr(fake_cuda, "DEVICE", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = config(local_rank=1)
    codes: list[int] = []
    service = Service(own, codes.append)
    measure = service._measure

    def measured(request: wire.WarmupRequest) -> wire.WarmupReply:
        assert threading.current_thread() is not threading.main_thread()
        with fake_cuda.Device():
            return measure(request)

    monkeypatch.setattr(service, "_measure", measured)
    service.start(load(own, lambda stage: None), None)  # type: ignore[arg-type]  # it has no other ranks
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
def test_no_family_asks_the_host(noted: Noted, name: str) -> None:
    """While a graph is recorded, nor in a step: experts are chosen on the device."""
    folder = str(tiny.folder(name))
    engine = load(ShardConfig(folder=folder, model="m", device="cuda", dtype="bfloat16"), lambda stage: None)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    groups = [tiny.group(uid, range(20 + uid), 6) for uid in range(1, 4)]
    noted.waits.clear()
    assert len(run(engine, groups)) == 18
    shape = engine.decoder.shape
    assert engine.forward.replayed > 5 or shape.sparse_beyond
    assert {(one.place, one.why) for one in noted.waits} <= WAITS
    names = {launched.kernel for launched in noted.launches}
    assert ("scores_kernel" in names) == (shape.sparse_beyond > 0)
    assert ("experts_kernel" in names) == any(shape.mixtures)
    assert ("latents_kernel" in names) == (shape.latent is not None and not shape.compressed)
    assert ("entries_kernel" in names) == (shape.compressed is not None)
    # Numbers that differ from step to step: else some steps wait for a kernel that is compiled for theirs.
    counts = {value for one in noted.launches for key, value in one.types if key in ("pairs", "first", "count", "length", "rows")}
    assert counts <= {"int"} | {value for value in counts if value.startswith("*")}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[seeing.Seen]]]:
    """By name a model that sees images, and prompts with some. Made where there is no device."""
    found = {}
    for name in ("Gemma3", "Gemma4Both", "InternVL", "LlavaOnevision", "Mistral3", "Qwen3VL", "Qwen3_5"):
        folder = tmp_path_factory.mktemp(name)
        kind = seeing.made(name, folder).config.model_type
        found[name] = folder, [seeing.seen(name, kind, random.Random(seed), [(2, 3), (1, 1)]) for seed in range(3)]
    return found


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4Both", "InternVL", "LlavaOnevision", "Mistral3", "Qwen3VL", "Qwen3_5"])
def test_images_are_encoded_on_the_device(seen: dict[str, tuple[Path, list[seeing.Seen]]], noted: Noted, name: str) -> None:
    """Nobody but transformers looks at it for that, which has the host count what it has itself given to the device."""
    folder, prompts = seen[name]
    said = ShardConfig(folder=str(folder), model="m", device="cuda", dtype="bfloat16", image_pixels=1 << 14, images_asked=True)
    engine = load(said, lambda stage: None)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    noted.waits.clear()
    groups = [tiny.group(uid, prompt.tokens, 6, images=prompt.pictures) for uid, prompt in enumerate(prompts)]
    assert len(overlapped(engine, groups)) == 18
    assert engine.forward.replayed > 5
    waiting = {one.place.partition(":")[0] for one in noted.waits if (one.place, one.why) not in WAITS}
    assert waiting == (set() if name in ("Gemma3", "InternVL") else {"shard.models.encoders"})


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ["words-wide", "qwen3.5-wide", "kimi-linear", "deepseek-v3", "falcon-h1"])
def test_adapters_ask_nothing(noted: Noted, tmp_path: Path, name: str, later: bool) -> None:
    """Graphs hold what they add, whichever of them is asked for, those that come later, too; nothing of it is compiled after the
    warm-up."""
    changes, _ = lora.of(name, tmp_path)
    room: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8} if later else {"adapters": changes}
    folder = str(tiny.folder(name))
    engine = load(ShardConfig(folder=folder, model="m", device="cuda", dtype="bfloat16", **room), print)
    engine.compile(TOKENS)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    known = {one for one in noted.launches if one.kernel == "experts_kernel"}
    assert known
    assert not engine.decoder.adapters.later
    for name, place in changes if later else ():
        adapter = Adapter(name, Path(place), torch.bfloat16, torch.device("cpu"))
        assert engine.adapt(name, engine.decoder.adapters.prepared(adapter)) == ""
    noted.waits.clear()
    groups = [tiny.group(uid, range(20 + uid), 6, adapter=adapter) for uid, adapter in enumerate(("", "0", "1", "1"), 1)]
    assert len(run(engine, groups)) == 24
    assert engine.forward.replayed > 5
    assert {(one.place, one.why) for one in noted.waits} <= WAITS
    assert {one for one in noted.launches if one.kernel == "experts_kernel"} == known


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_weights_of_few_bits_ask_nothing(noted: Noted, kind: str) -> None:
    """Graphs hold their products, of few rows and of many."""
    engine = load(
        ShardConfig(folder=str(tiny.folder("words-wide")), model="m", device="cuda", dtype="bfloat16", quantize=kind), print
    )
    shape = engine.decoder.shape
    assert engine.decoder.weight_bytes == pytest.approx(shape.weight_bytes(1, 2, "cuda", "bfloat16", False), rel=0.01)
    size_pool(engine, 0, 0.9, TOKENS, ROWS, ROWS, TOTAL, [1, 2, 4])
    engine.resize(PAGES)
    engine.record(Recorder(), GraphExtent(TOKENS, ROWS, TOTAL, PAGES, None, False, False), lambda stage: None)
    noted.waits.clear()
    assert len(run(engine, [tiny.group(uid, range(20 + uid), 6) for uid in range(1, 4)])) == 18
    assert engine.forward.replayed > 5
    assert {(one.place, one.why) for one in noted.waits} <= WAITS
    assert "quantized_kernel" in {launched.kernel for launched in noted.launches}


@pytest.mark.parametrize("name", ["words-wide", "gemma4-e-wide", "llama4-wide", "mixtral-wide", "few-heads-mixtral"])
@pytest.mark.usefixtures("noted")
def test_the_plan_knows_what_a_rank_holds(name: str) -> None:
    """Of 192 inputs in groups of 64 each of two has 96, in groups of 32; of 88 it has 44, so that experts are unpacked, and all of
    them if some."""
    path, device = tiny.folder(name), torch.device("cuda", 0)
    model = shape(json.loads((path / "config.json").read_text())).quantized("int4")
    decoder = Decoder(model, Weights(path, torch.bfloat16, device, lambda read: None), Alone(1), device)
    assert model.weight_bytes(2, 2, "cuda", "bfloat16", False) == pytest.approx(decoder.weight_bytes, rel=0.003)


FEW = [("words-wide", "modelopt-nvfp4"), ("words-wide", "mxfp4"), ("mixtral-wide", "nvfp4"), ("mixtral-wide", "mxfp4")]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Checkpoints of floats of 4 bits, made where there is no device."""
    return {one: packing.checkpoints(*one, tmp_path_factory.mktemp("few"))[0] for one in FEW}


@pytest.mark.parametrize("one", FEW)
@pytest.mark.usefixtures("noted")
def test_floats_of_4_bits_stay_small(one: tuple[str, str], few: dict[tuple[str, str], Path]) -> None:
    """As planned, all of them and what one of two ranks has, 96 of 192 inputs."""
    device = torch.device("cuda", 0)
    model = shape(json.loads((few[one] / "config.json").read_text()))
    for ranks in (Ranks(0, 1, device), Alone(1)):
        decoder = Decoder(model, Weights(few[one], torch.bfloat16, device, lambda read: None), ranks, device)
        planned = model.weight_bytes(ranks.size, 2, "cuda", "bfloat16", False)
        assert planned == pytest.approx(decoder.weight_bytes, rel=0.001)
        assert model.saved(ranks.size, 2, "cuda", "bfloat16") > 0


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By name a model, and the draft model that goes by what it makes of tokens. Made where there is no device."""
    made = {"llama": (tiny.folder("llama"), str(test_draft_head.written(tmp_path_factory.mktemp("eagle") / "head")))}
    for name in ("deepseek-v3", "qwen3.5"):
        folder = tmp_path_factory.mktemp(name)
        test_draft_head.predicting(name, folder, tables=False)
        made[name] = folder, "mtp"
    return made


@pytest.mark.parametrize(("name", "shape"), [("llama", "tree=2x2"), ("deepseek-v3", "tokens=2"), ("qwen3.5", "tokens=2")])
def test_heads_read_what_the_model_has_put_on_the_device(
    heads: dict[str, tuple[Path, str]], noted: Noted, name: str, shape: str
) -> None:
    """From graphs, of which there are as many as are planned, and without a look at it."""
    folder, draft = heads[name]
    said = ShardConfig(folder=str(folder), model=name, device="cuda", dtype="bfloat16", speculate=f"draft={draft},{shape}")
    service = Service(said, lambda code: None)
    service._engine = engine = load(said, lambda stage: None)
    told: list[Any] = []

    def size(engine: Engine, *rest: Any) -> tuple[int, int, memory.Measured]:
        told.extend(rest)
        return PAGES, ROWS, memory.Measured(TOKENS, 0, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.shard.service.size_pool", size)
        service._measure(wire.WarmupRequest(max_step_tokens=TOKENS, max_step_rows=ROWS, max_total_tokens=TOTAL - 2))
    *_, recorded, _ = told
    drafter = engine.speculator.drafter
    assert drafter is not None
    assert len(recorded) == sum(len(own._decodes) + len(own._mixed) for own in (engine.forward, drafter.forward))
    for scenario in ("greedy", "sampled"):
        run(engine, SCENARIOS[scenario]())
    assert drafter.forward.replayed > 10
    assert not drafter.forward.eager
