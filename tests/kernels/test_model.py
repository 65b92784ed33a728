"""A whole shard by Triton's kernels, in the interpreter or on a GPU, gives the tokens that the plain operations give, also with
steps that are padded and replayed, as graphs are.
"""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import (
    dispatch,
    expanded,
    expanded_attention,
    fused_batch_invariant,
    fused_chunked_delta,
    fused_sampling,
    fused_skinny_gemm,
    indexed_attention,
    linear,
    operations,
    work_list,
)
from penstock.proto.speculation import parse
from penstock.shard import graph_sizes, step
from penstock.shard.decoding.hypotheses import Search, Stop
from penstock.shard.drafter import Drafter
from penstock.shard.engine import Engine
from penstock.shard.forward import GraphExtent
from penstock.shard.guesses import Guesses
from penstock.shard.models import stream
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.tests.kernels import sanitizer
from penstock.tests.shard import configurations, packing, test_invariance, test_quantized, tiny
from penstock.tests.shard.driver import Driver, Flying, Habits, World, drive, message
from penstock.tests.shard.test_weights import load_decoder

# What padding computes is said nowhere, and nobody sees it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")

# Triton's interpreter takes milliseconds for every token of every operation, also for those that are padding: so steps are small.
PAGES = 32
LLAMA, BLOOM, QWEN3, WINDOW = "few-heads", "few-heads-bloom", "few-heads-qwen3", "few-heads-window"
GEMMA, GEMMA4, GEMMA4_MOE, GPT_OSS, LLAMA4, MIXTRAL, OLMO, MOE, DEEPSEEK, INDEXED = (
    f"few-heads-{name}"
    for name in (
        *("gemma2", "gemma4", "gemma4-experts", "gpt-oss", "llama4", "mixtral", "olmo3", "qwen2-moe"),
        *("deepseek", "glm-5"),
    )
)
(
    DELTA,
    FINE,
    SPACES,
    SHORT,
    PARTS,
    BESIDE,
    GEMMA4_E,
    LAGUNA,
    MIMO,
    BLOCKS,
    STREAMS,
    SHARPENED,
    NORM_GATES,
    APART,
    UPDATED,
    PAIRED,
    POOLS,
    GRAMS,
    ENTRIES,
) = (
    f"few-heads-{name}"
    for name in (
        *("qwen3.5", "kimi-linear", "granite-4-h", "lfm2-moe", "nemotron-h", "falcon-h1", "gemma4-e"),
        *("laguna", "mimo", "minimax-m3", "hy-4", "mistral-large4", "ax-k2", "olmo-hybrid", "gemma3n", "longcat"),
        *("glm-5-next", "qwen4-exp", "deepseek-v4"),
    )
)


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        monkeypatch.setattr(tiny, "DEVICE", torch.device("cuda", 0))
    yield
    dispatch.force("")


def groups(filters: bool = False) -> list[Group]:
    """Greedy and sampled ones, with penalties, log-probabilities, several choices and a prompt in common. filters: of tokens, which
    take the interpreter as long as the model, and are no part of a graph."""
    top_p, top_k = (0.9, 5) if filters else (1.0, 0)
    common = [5, 9, 2, 44, 7, 7, 3, 11]
    sampled = Sampling(temperature=0.9, top_p=top_p, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, bias=((4, 2.0),))
    last = Sampling(temperature=0.7, top_k=top_k, seed=9, final_logprobs=True)
    return [
        tiny.group(1, common, 3, top_n=3),
        tiny.group(2, [*common, 17, 18], 3, sampled, choices=2),
        tiny.group(3, [3], 2, Sampling(temperature=1.1, seed=8, typical_p=0.8)),
        tiny.group(4, list(range(1, 14)), 2, last, prompt_logprobs=True),
    ]


def run(engine: Engine, chunk: int = 5, filters: bool = False) -> World:
    return drive(engine, groups(filters), Habits(chunk), seed=4)


@functools.cache
def plain(name: str, filters: bool = False) -> World:
    """What the plain operations give."""
    dispatch.force("reference")
    return run(tiny.engine(name, 4, PAGES), filters=filters)


def replaying(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stands for a graph where there is no GPU. There is nothing to record: a step of padding alone is replayed below."""
    return run


@pytest.fixture(autouse=True)
def watched() -> None:
    """Not here, but where a test says so: each kernel has been watched in its own tests, and it takes a third of the time."""


USUAL = GraphExtent(tokens=16, rows=4, total=32, pages=PAGES)


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch, extent: GraphExtent = USUAL) -> Engine:
    monkeypatch.setattr(graph_sizes, "DECODES", (1, 2, 4))
    monkeypatch.setattr(graph_sizes, "MIXED", (8, 16))
    record: Any = replaying
    if torch.cuda.is_available():
        from penstock.shard.graphs import Recorder

        record = Recorder()
    engine.record(record, extent, lambda stage: None)
    return engine


@pytest.mark.parametrize(
    "name",
    [
        *(QWEN3, WINDOW, GEMMA, GEMMA4, GEMMA4_E, GEMMA4_MOE, GPT_OSS, LLAMA4, MIXTRAL, OLMO, MOE, DEEPSEEK, INDEXED),
        *(BLOOM, DELTA, FINE, SPACES, SHORT, PARTS, BESIDE, LAGUNA, MIMO, BLOCKS, STREAMS, SHARPENED, NORM_GATES, APART),
        *(UPDATED, PAIRED, POOLS, GRAMS, ENTRIES),
    ],
)
def test_a_shard_by_triton_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(name, filters=True)
    calls = []
    sample = fused_sampling.sample
    monkeypatch.setattr(fused_sampling, "sample", lambda *given: calls.append(1) or sample(*given))
    dispatch.force("triton")
    with sanitizer.watching():
        found = run(tiny.engine(name, 4, PAGES), filters=True)
    assert found.tokens == expected.tokens
    assert found.finishes == expected.finishes
    assert calls


@pytest.mark.parametrize("name", [DELTA, SPACES, BESIDE, APART])
def test_prompts_by_chunks_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two tokens were many: parts of prompts stand beside tokens that come one by one."""
    expected = plain(name)
    monkeypatch.setattr(fused_chunked_delta, "CHUNKED_FROM", 2)
    dispatch.force("triton")
    with sanitizer.watching() as kernels:
        found = run(tiny.engine(name, 4, PAGES))
    assert found.tokens == expected.tokens
    assert {"chunk_state_kernel", "recurrent_kernel"} <= set(kernels)


@pytest.mark.parametrize(
    ("name", "cut"), [(QWEN3, False), (QWEN3, True), (GEMMA4, True), (OLMO, True), (MOE, False), (DEEPSEEK, True), (SHORT, True)]
)
def test_products_of_few_rows_give_the_same_tokens(name: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for models in bfloat16: norms, SwiGLU and sums go with the products, sums of what is cut with the norms behind."""
    if cut:
        monkeypatch.setattr(fused_skinny_gemm, "SHORTEST", 8)
    expected = plain(name)
    dispatch.force("triton")
    monkeypatch.setattr(linear, "STREAMED", {torch.float32})
    monkeypatch.setattr(linear, "FEW", 5)  # of steps of up to a dozen
    calls = []
    product = fused_skinny_gemm.product
    monkeypatch.setattr(
        fused_skinny_gemm, "product", lambda *given, **how: calls.append((len(given[0]), *how)) or product(*given, **how)
    )
    norms = []
    norm = operations.add_rms_norm
    monkeypatch.setattr(stream, "add_rms_norm", lambda x, *given: norms.append(x.shape) or norm(x, *given))
    found = run(tiny.rank_engine(name, Ranks(0, 1, tiny.DEVICE), 4, PAGES))
    assert found.tokens == expected.tokens
    added = {"add"} if name not in (GEMMA4, OLMO) else set()  # which have a norm before it is added
    assert {how for _, *names in calls for how in names} == {"gains", "epsilon", "gated", "gelu"} | added
    assert max(rows for rows, *_ in calls) == 5
    assert max(rows for *_, rows, _ in norms) > 5  # larger steps go by the others
    assert any(len(shape) == 3 for shape in norms) == (cut and bool(added))


@pytest.mark.parametrize("name", [DEEPSEEK, PAIRED])
def test_expanded_latents_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks that are long from three tokens on; steps that a graph takes are not expanded."""
    expected = plain(name)
    monkeypatch.setattr(expanded, "MIN_QUERIES_TRITON", 3)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    calls = []
    attend = expanded_attention.attend
    monkeypatch.setattr(expanded_attention, "attend", lambda query, *given: calls.append(len(query)) or attend(query, *given))
    dispatch.force("triton")
    with sanitizer.watching():
        found = run(tiny.engine(name, 4, PAGES))
    assert found.tokens == expected.tokens
    assert max(calls) > 3
    calls.clear()
    assert run(with_graphs(tiny.engine(name, 4, PAGES), monkeypatch)).tokens == expected.tokens
    assert not calls


@pytest.mark.parametrize("name", [LLAMA, LLAMA4, GEMMA4])
def test_padded_steps_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(name)
    dispatch.force("triton")
    engine = with_graphs(tiny.engine(name, 4, PAGES), monkeypatch)
    for graph in (engine.forward._decodes[1], engine.forward._mixed[0]):
        graph.replay()  # which is all padding
    found = run(engine)
    assert found.tokens == expected.tokens
    assert engine.forward.replayed > 3 * engine.forward.eager
    assert not any(part[:, 0].any() for part in engine.cache.pages)  # padding is written nowhere


def test_graphs_are_for_tokens_that_attend_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which an index chooses are computed without."""
    expected = plain(INDEXED)
    dispatch.force("triton")
    engine = with_graphs(tiny.engine(INDEXED, 4, PAGES), monkeypatch)
    asked = []
    attention = indexed_attention.attention
    monkeypatch.setattr(indexed_attention, "attention", lambda *given: asked.append(1) or attention(*given))
    assert run(engine).tokens == expected.tokens
    assert engine.forward.replayed > 0
    assert len(asked) == engine.forward.eager * engine.decoder.shape.layers > 0


@pytest.mark.parametrize("name", [LLAMA, LLAMA4])
@pytest.mark.parametrize("said", ["tokens=3", "tree=2x2"])
def test_steps_with_drafts_fit_graphs(said: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model, which verify chains or trees, and those of its draft model."""
    expected = plain(name)
    dispatch.force("triton")
    engine = tiny.engine(name, 4, PAGES)
    speculation = parse(f"draft=x,{said}")
    drafter = Drafter(engine.decoder, configurations.VOCABULARY, tiny.DEVICE, speculation.most)
    engine.guesses = Guesses(engine.decoder.ranks, tiny.DEVICE, speculation, drafter)
    engine.resize(PAGES)
    asked = groups()
    for group in asked:
        group.drafts = engine.guesses.most
    extent = replace(USUAL, drafts=True, trees=engine.guesses.trees)
    found = drive(with_graphs(engine, monkeypatch, extent), asked, Habits(chunk=5), seed=4)
    assert found.tokens == expected.tokens
    assert found.accepted > 0
    assert engine.forward.replayed > 3 * engine.forward.eager
    drafter = engine.guesses.drafter
    assert drafter is not None
    assert drafter.forward.replayed > 3 * drafter.forward.eager


def searches() -> list[Group]:
    """Beams that read what they have in common together, and part behind it; and one beside them."""
    common = [5, 9, 2, 44, 7, 7, 3, 11, 17]
    kinds = [(Search(3, 3), (2,)), (Search(2, 2, 0.0, Stop.NEVER), ())]
    made = [tiny.group(uid, common[: 9 - uid], 13, search=search, end_ids=ends) for uid, (search, ends) in enumerate(kinds)]
    return [*made, tiny.group(2, common[:4], 9)]


@pytest.mark.parametrize(("name", "graphs"), [(LLAMA, False), (LLAMA4, True)])
def test_beams_part_on_the_device(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps overlap, only the device knows whose pages they go on with."""
    monkeypatch.setattr(work_list, "SHORTEST_RUN", 4)
    dispatch.force("reference")
    expected = drive(tiny.engine(name, 4, 2 * PAGES), searches(), Habits())
    dispatch.force("triton")
    engine = tiny.engine(name, 4, 2 * PAGES, ahead=True)
    if graphs:
        with_graphs(engine, monkeypatch, replace(USUAL, rows=8, pages=2 * PAGES))
    told: list[int] = []
    inherit = step._inherit

    def inheriting(own: step.Step, rows: Any, *rest: Any) -> None:
        before = own.attention.pages.clone()  # type: ignore[union-attr]
        inherit(own, rows, *rest)
        told.append(int((own.attention.pages != before).sum()))  # type: ignore[union-attr]

    monkeypatch.setattr(step, "_inherit", inheriting)
    flying = Flying(engine, random.Random(1))
    found = Driver(flying, [message(group) for group in searches()], Habits(), 4).run()
    assert found.tokens == expected.tokens
    assert found.scores == {uid: pytest.approx(scores, abs=1e-4) for uid, scores in expected.scores.items()}
    assert flying.ahead > 5
    assert sum(told) > 3, "nobody takes the pages of others"
    assert bool(engine.forward.replayed) == graphs


def test_a_step_that_no_graph_has_room_for_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.force("triton")
    engine = with_graphs(tiny.engine(LLAMA, 4, PAGES), monkeypatch, replace(USUAL, tokens=8, rows=2))
    engine.record(replaying, replace(USUAL, chosen=(1,)), lambda stage: None)
    found = run(engine, chunk=40)
    assert engine.forward.eager > 0
    assert engine.forward.replayed > 0
    assert found.tokens == plain(LLAMA).tokens


def test_a_cache_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as a full one whose keys and values were rounded when they were written. By the plain operations on a GPU, too: what
    writes there is a function by itself."""
    dispatch.force("reference")
    small = torch.float8_e4m3fn
    scale = 0.25
    write = operations.write

    def rounding(slots: Tensor, rows: Tensor, cache: Tensor, scales: Tensor | None) -> None:
        write(slots, (rows / scale).to(small).to(rows.dtype) * scale, cache)

    def scores(dtype: torch.dtype | None) -> Tensor:
        engine = Engine(tiny.decoder("llama"), tiny.DEVICE, 4, cache_dtype=dtype)
        engine.resize(PAGES)
        assert engine.token_bytes == tiny.decoder("llama").shape.kv_elements(1) * (1 if dtype else 4)
        for layer in engine.decoder.layers:
            monkeypatch.setattr(layer.attention, "scales", torch.full((2, layer.shape.kv_heads), scale, device=tiny.DEVICE))
        outcome = engine.prefill(0, [tiny.group(1, list(range(1, 30)), 3, prompt_logprobs=True)], [(1, 7)], 7, [])
        while not outcome.prompts:
            outcome = engine.prefill(0, [], [(1, 7)], 7, [])
        return torch.tensor(outcome.prompts[0][1])

    found, full = scores(small), scores(None)
    monkeypatch.setattr(operations, "write", rounding)
    torch.testing.assert_close(found, scores(None), rtol=1e-5, atol=1e-5)
    assert (found - full).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "dtype"), [(WINDOW, "float32"), (MOE, "float32"), (GEMMA, "bfloat16")])
def test_nothing_depends_on_the_batch(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `batch_invariant`, where all go by tiles that are always the same: each request alone, and all of them in chunks."""
    rows = set()
    product = fused_batch_invariant.product
    monkeypatch.setattr(fused_batch_invariant, "product", lambda x, *given: rows.add(len(x)) or product(x, *given))
    dispatch.force("triton")
    made = functools.partial(test_invariance.engine, name, dtype, page_size=4, pages=PAGES)
    expected = test_invariance.alone(lambda: made(prefix_caching=False), groups())
    assert test_invariance.differences(run(made()), expected) == []
    assert len(rows) > 5
    replayed = with_graphs(made(), monkeypatch)
    assert test_invariance.differences(run(replayed), expected) == []
    assert replayed.forward.replayed > replayed.forward.eager


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tensors are a CPU's")
@pytest.mark.parametrize("form", ["modelopt-nvfp4", "mxfp4"])
def test_floats_of_4_bits_are_what_the_checkpoint_says(form: str, tmp_path: Path) -> None:
    """From the file through the kernels; as near as bfloat16 is to the same numbers in float32."""
    few, plain = packing.checkpoints("words-wide", form, tmp_path)
    tokens = tuple(range(3, 15))
    expected = test_quantized.logits(load_decoder(plain), tokens)
    rounded = test_quantized.logits(load_decoder(plain, dtype="bfloat16"), tokens)
    dispatch.force("triton")
    model = load_decoder(few, dtype="bfloat16")
    assert len(test_quantized.quantized_weights(model)) == 4
    found = test_quantized.logits(model, tokens)
    assert (found - expected).norm() < 1.5 * (rounded - expected).norm()
