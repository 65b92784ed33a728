"""Whole shards with Triton's kernels, in the interpreter or on a GPU, generate the tokens that they generate with the reference,
also with steps that are padded and replayed as CUDA graphs."""

import functools
import random
from collections import Counter
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
    lookahead,
    operations,
    paged_attention,
    work_list,
)
from penstock.proto.speculation import parse
from penstock.shard import forward, graph_sizes
from penstock.shard.decoding.hypotheses import Search, Stop
from penstock.shard.drafter import Drafter
from penstock.shard.engine import Engine
from penstock.shard.forward import Forward, Graph, GraphExtent
from penstock.shard.models import stream
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.speculator import Speculator
from penstock.tests.kernels import sanitizer
from penstock.tests.shard import configurations, packing, test_invariance, test_quantized, tiny
from penstock.tests.shard.driver import Driver, OverlappingEngine, Results, Traffic, drive, message
from penstock.tests.shard.test_weights import load_decoder

# The results of padding are undefined, and not used.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")

# Steps are small: Triton's interpreter takes milliseconds for every token of every operation, padding included.
PAGES = 32
LLAMA, BLOOM, QWEN3, SLIDING_WINDOW = "few-heads", "few-heads-bloom", "few-heads-qwen3", "few-heads-window"
GEMMA2, GEMMA4, GEMMA4_MOE, GPT_OSS, LLAMA4, MIXTRAL, OLMO3, QWEN2_MOE, DEEPSEEK, GLM5 = (
    f"few-heads-{name}"
    for name in (
        *("gemma2", "gemma4", "gemma4-experts", "gpt-oss", "llama4", "mixtral", "olmo3", "qwen2-moe"),
        *("deepseek", "glm-5"),
    )
)
(
    QWEN35,
    KIMI_LINEAR,
    GRANITE4_H,
    LFM2_MOE,
    NEMOTRON_H,
    FALCON_H1,
    GEMMA4_E,
    LAGUNA,
    MIMO,
    MINIMAX_M3,
    HY4,
    MISTRAL_LARGE4,
    AX_K2,
    OLMO_HYBRID,
    GEMMA3N,
    LONGCAT,
    GLM5_NEXT,
    QWEN4_EXP,
    DEEPSEEK_V4,
) = (
    f"few-heads-{name}"
    for name in (
        *("qwen3.5", "kimi-linear", "granite-4-h", "lfm2-moe", "nemotron-h", "falcon-h1", "gemma4-e"),
        *("laguna", "mimo", "minimax-m3", "hy-4", "mistral-large4", "ax-k2", "olmo-hybrid", "gemma3n", "longcat"),
        *("glm-5-next", "qwen4-exp", "deepseek-v4"),
    )
)


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        monkeypatch.setattr(tiny, "DEVICE", torch.device("cuda", 0))
    yield
    dispatch.force("")


def groups(filters: bool = False) -> list[Group]:
    """Greedy and sampled requests, with penalties, log-probabilities, several choices and a shared prompt. filters: with top-p and
    top-k, which take the interpreter as long as the model and are no part of a graph."""
    top_p, top_k = (0.9, 5) if filters else (1.0, 0)
    shared_prompt = [5, 9, 2, 44, 7, 7, 3, 11]
    sampled = Sampling(temperature=0.9, top_p=top_p, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, bias=((4, 2.0),))
    last = Sampling(temperature=0.7, top_k=top_k, seed=9, final_logprobs=True)
    return [
        tiny.group(1, shared_prompt, 3, top_n=3),
        tiny.group(2, [*shared_prompt, 17, 18], 3, sampled, choices=2),
        tiny.group(3, [3], 2, Sampling(temperature=1.1, seed=8, typical_p=0.8)),
        tiny.group(4, list(range(1, 14)), 2, last, prompt_logprobs=True),
    ]


def run_groups(engine: Engine, chunk: int = 5, filters: bool = False) -> Results:
    return drive(engine, groups(filters), Traffic(chunk), seed=4)


@functools.cache
def reference_run(name: str, filters: bool = False) -> Results:
    """The result with the reference implementations."""
    dispatch.force("reference")
    return run_groups(tiny.engine(name, 4, PAGES), filters=filters)


def replay_eagerly(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Replaces the recorder of CUDA graphs where there is no GPU: a replay runs the step. A step of padding alone is replayed
    below."""
    return run


@pytest.fixture(autouse=True)
def sanitized() -> None:
    """Turns the sanitizer off, except where a test turns it on: it takes a third of the time, and each kernel's own tests have
    checked it."""


USUAL = GraphExtent(tokens=16, rows=4, total=32, pages=PAGES)


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch, extent: GraphExtent = USUAL) -> Engine:
    monkeypatch.setattr(graph_sizes, "DECODES", (1, 2, 4))
    monkeypatch.setattr(graph_sizes, "MIXED", (8, 16))
    record: Any = replay_eagerly
    if torch.cuda.is_available():
        from penstock.shard.graphs import Recorder

        record = Recorder()
    engine.record(record, extent, lambda stage: None)
    return engine


@pytest.mark.parametrize(
    "name",
    [
        *(QWEN3, SLIDING_WINDOW, GEMMA2, GEMMA4, GEMMA4_E, GEMMA4_MOE, GPT_OSS, LLAMA4, MIXTRAL, OLMO3, QWEN2_MOE, DEEPSEEK, GLM5),
        *(
            BLOOM,
            QWEN35,
            KIMI_LINEAR,
            GRANITE4_H,
            LFM2_MOE,
            NEMOTRON_H,
            FALCON_H1,
            LAGUNA,
            MIMO,
            MINIMAX_M3,
            HY4,
            MISTRAL_LARGE4,
            AX_K2,
            OLMO_HYBRID,
        ),
        *(GEMMA3N, LONGCAT, GLM5_NEXT, QWEN4_EXP, DEEPSEEK_V4),
    ],
)
def test_shard_with_triton_kernels_generates_the_reference_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_run(name, filters=True)
    calls = []
    sample = fused_sampling.sample
    monkeypatch.setattr(fused_sampling, "sample", lambda *given: calls.append(1) or sample(*given))
    dispatch.force("triton")
    with sanitizer.checking():
        found = run_groups(tiny.engine(name, 4, PAGES), filters=True)
    assert found.tokens == expected.tokens
    assert found.finishes == expected.finishes
    assert calls


@pytest.mark.parametrize("name", [QWEN35, GRANITE4_H, FALCON_H1, OLMO_HYBRID])
def test_linear_attention_in_chunks_generates_the_reference_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of two tokens count as long, so that prompt chunks are computed in chunks beside decodes, which go token by token."""
    expected = reference_run(name)
    monkeypatch.setattr(fused_chunked_delta, "CHUNKED_FROM", 2)
    dispatch.force("triton")
    with sanitizer.checking() as kernels:
        found = run_groups(tiny.engine(name, 4, PAGES))
    assert found.tokens == expected.tokens
    assert {"chunk_state_kernel", "recurrent_kernel"} <= set(kernels)


@pytest.mark.parametrize(
    ("name", "split"),
    [(QWEN3, False), (QWEN3, True), (GEMMA4, True), (OLMO3, True), (QWEN2_MOE, False), (DEEPSEEK, True), (LFM2_MOE, True)],
)
def test_fused_products_of_few_rows_generate_the_reference_tokens(name: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for models in bfloat16: norms, SwiGLU and residual sums are fused with the products, and split-K parts are added by the
    next norm."""
    if split:
        monkeypatch.setattr(fused_skinny_gemm, "SHORTEST", 8)
    expected = reference_run(name)
    dispatch.force("triton")
    monkeypatch.setattr(linear, "STREAMED", {torch.float32})
    monkeypatch.setattr(linear, "FEW", 5)  # steps have up to a dozen rows
    calls = []
    product = fused_skinny_gemm.product
    monkeypatch.setattr(
        fused_skinny_gemm,
        "product",
        lambda *given, **options: calls.append((len(given[0]), *options)) or product(*given, **options),
    )
    norms = []
    norm = operations.add_rms_norm
    monkeypatch.setattr(stream, "add_rms_norm", lambda x, *given: norms.append(x.shape) or norm(x, *given))
    found = run_groups(tiny.rank_engine(name, Ranks(0, 1, tiny.DEVICE), 4, PAGES))
    assert found.tokens == expected.tokens
    added = {"add"} if name not in (GEMMA4, OLMO3) else set()  # which have a norm before the residual sum
    assert {option for _, *names in calls for option in names} == {"gains", "epsilon", "gated", "gelu"} | added
    assert max(rows for rows, *_ in calls) == 5
    assert max(rows for *_, rows, _ in norms) > 5  # larger steps use the other products
    assert any(len(shape) == 3 for shape in norms) == (split and bool(added))


@pytest.mark.parametrize("name", [DEEPSEEK, LONGCAT])
def test_expanded_mla_latents_generate_the_reference_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three tokens and more are expanded, but not in steps that run as graphs."""
    expected = reference_run(name)
    monkeypatch.setattr(expanded, "MIN_QUERIES_TRITON", 3)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    calls = []
    attend = expanded_attention.attend
    monkeypatch.setattr(expanded_attention, "attend", lambda query, *given: calls.append(len(query)) or attend(query, *given))
    dispatch.force("triton")
    with sanitizer.checking():
        found = run_groups(tiny.engine(name, 4, PAGES))
    assert found.tokens == expected.tokens
    assert max(calls) > 3
    calls.clear()
    assert run_groups(with_graphs(tiny.engine(name, 4, PAGES), monkeypatch)).tokens == expected.tokens
    assert not calls


@pytest.mark.parametrize("name", [LLAMA, LLAMA4, GEMMA4])
def test_padded_graph_steps_generate_the_reference_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_run(name)
    dispatch.force("triton")
    engine = with_graphs(tiny.engine(name, 4, PAGES), monkeypatch)
    for graph in (engine.forward._decodes[1], engine.forward._mixed[0]):
        graph.replay()  # with padding only
    found = run_groups(engine)
    assert found.tokens == expected.tokens
    assert engine.forward.replayed > 3 * engine.forward.eager
    assert not any(part[:, 0].any() for part in engine.cache.pages)  # padding is not written, not even to page 0


@pytest.mark.parametrize("name", [LLAMA, GEMMA4])
def test_lean_graphs_hold_steps_whose_rows_are_one_item_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the usual graphs: with more processors than programs rows are cut."""
    monkeypatch.setattr(graph_sizes, "LEAN", 1)
    monkeypatch.setattr(forward, "FULL", 2)
    monkeypatch.setattr(work_list, "SHORTEST_ITEM", 4)
    monkeypatch.setattr(work_list, "ALIGNMENT", 4)
    expected = greedy(tiny.engine(name, 4, PAGES))
    dispatch.force("triton")
    for processors in (1, 1000):
        monkeypatch.setattr(paged_attention, "processors_of", lambda device, processors=processors: processors)
        engine = with_graphs(tiny.engine(name, 4, PAGES), monkeypatch)
        replays = count_replays(engine.forward)
        assert greedy(engine) == expected
        assert replays == ({"lean": GREEDY} if processors == 1 else {"usual": GREEDY})


def test_lean_graphs_are_no_larger_than_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of fewer rows than any lean graph has would compute many times as many."""
    dispatch.force("triton")
    monkeypatch.setattr(graph_sizes, "LEAN", 4)
    engine = with_graphs(tiny.engine(LLAMA, 4, PAGES), monkeypatch)
    replays = count_replays(engine.forward)
    greedy(engine, 2)
    assert replays == {"usual": GREEDY}
    greedy(engine, 4)
    assert replays == {"usual": GREEDY, "lean": GREEDY}


def test_rows_that_share_a_prefix_are_not_for_lean_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the tile of a lean graph would hold only one of them."""
    dispatch.force("triton")
    monkeypatch.setattr(graph_sizes, "LEAN", 1)
    monkeypatch.setattr(work_list, "SHORTEST_RUN", 4)
    monkeypatch.setattr(paged_attention, "processors_of", lambda device: 1)
    small = paged_attention.Tile(tiny.engine(LLAMA, 4, 0).decoder.shape.query_heads(0), 16, 4, 2)
    monkeypatch.setattr(paged_attention, "lean_tile", lambda kind, *rest: paged_attention.replace(small, rows=kind.ratio))
    engine = with_graphs(tiny.engine(LLAMA, 4, PAGES), monkeypatch)
    replays = count_replays(engine.forward)
    begun, waiting = sequences([5] * 12, 3)
    engine.prefill(0, [Group(0, begun, waiting, Sampling(temperature=1.0), 3, frozenset())], [(0, 99)], 99, [])
    engine.decode([0])
    assert replays == {"usual": 1}


GREEDY = 6  # decode steps


def greedy(engine: Engine, count: int = 3) -> list[list[int]]:
    """Tokens that so many sequences are continued with."""
    groups = []
    for uid in range(count):
        begun, waiting = sequences([7 + 3 * uid + k for k in range(9 + 4 * uid)], 1)
        groups.append(Group(uid, begun, waiting, Sampling(), GREEDY + 1, frozenset()))
    outcomes = [engine.prefill(0, groups, [(uid, 99) for uid in range(count)], 99, [])]
    outcomes += [engine.decode([0]) for _ in range(GREEDY)]
    return [[emitted.pick.token for _, emitted in outcome.emitted] for outcome in outcomes]


def count_replays(own: Forward) -> Counter[str]:
    """Counts the replays of decode graphs from now on."""
    replays = Counter[str]()

    def counted(kind: str, graph: Graph) -> Graph:
        def replay_and_count() -> Tensor:
            replays[kind] += 1
            return graph.replay()

        return replace(graph, replay=replay_and_count)

    own._lean = [counted("lean", graph) for graph in own._lean]
    own._decodes = [counted("usual", graph) for graph in own._decodes]
    return replays


def test_steps_in_which_an_indexer_selects_tokens_run_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_run(GLM5)
    dispatch.force("triton")
    engine = with_graphs(tiny.engine(GLM5, 4, PAGES), monkeypatch)
    calls = []
    attention = indexed_attention.attention
    monkeypatch.setattr(indexed_attention, "attention", lambda *given: calls.append(1) or attention(*given))
    assert run_groups(engine).tokens == expected.tokens
    assert engine.forward.replayed > 0
    assert len(calls) == engine.forward.eager * engine.decoder.shape.layers > 0


@pytest.mark.parametrize("name", [LLAMA, LLAMA4])
@pytest.mark.parametrize("draft_shape", ["tokens=3", "tree=2x2"])
def test_speculative_decoding_steps_run_as_graphs_and_generate_the_reference_tokens(
    draft_shape: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the model's steps, which verify chains or trees, and the draft model's."""
    expected = reference_run(name)
    dispatch.force("triton")
    engine = tiny.engine(name, 4, PAGES)
    speculation = parse(f"draft=x,{draft_shape}")
    drafter = Drafter(engine.decoder, configurations.VOCABULARY, tiny.DEVICE, speculation.most)
    engine.speculator = Speculator(engine.decoder.ranks, tiny.DEVICE, speculation, drafter)
    engine.resize(PAGES)
    requests = groups()
    for group in requests:
        group.drafts = engine.speculator.most
    extent = replace(USUAL, drafts=True, trees=engine.speculator.trees)
    found = drive(with_graphs(engine, monkeypatch, extent), requests, Traffic(chunk=5), seed=4)
    assert found.tokens == expected.tokens
    assert found.accepted > 0
    assert engine.forward.replayed > 3 * engine.forward.eager
    drafter = engine.speculator.drafter
    assert drafter is not None
    assert drafter.forward.replayed > 3 * drafter.forward.eager


def searches() -> list[Group]:
    """Beam searches whose beams share a prefix, which they read together, and part after it; and one request without beams."""
    shared_prompt = [5, 9, 2, 44, 7, 7, 3, 11, 17]
    kinds = [(Search(3, 3), (2,)), (Search(2, 2, 0.0, Stop.NEVER), ())]
    made = [tiny.group(uid, shared_prompt[: 9 - uid], 13, search=search, end_ids=ends) for uid, (search, ends) in enumerate(kinds)]
    return [*made, tiny.group(2, shared_prompt[:4], 9)]


@pytest.mark.parametrize(("name", "graphs"), [(LLAMA, False), (LLAMA4, True)])
def test_beams_in_overlapped_steps_take_over_pages_on_the_device(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps overlap, only the device knows which beam each beam continues, and so its pages."""
    monkeypatch.setattr(work_list, "SHORTEST_RUN", 4)
    dispatch.force("reference")
    expected = drive(tiny.engine(name, 4, 2 * PAGES), searches(), Traffic())
    dispatch.force("triton")
    engine = tiny.engine(name, 4, 2 * PAGES, ahead=True)
    if graphs:
        with_graphs(engine, monkeypatch, replace(USUAL, rows=8, pages=2 * PAGES))
    changed_pages: list[int] = []
    fill = lookahead.fill

    def filling(tokens: torch.Tensor, pages: torch.Tensor | None, *rest: Any) -> None:
        before = pages.clone() if pages is not None else None
        fill(tokens, pages, *rest)
        changed_pages.append(int((pages != before).sum()) if pages is not None else 0)

    monkeypatch.setattr(lookahead, "fill", filling)
    overlapping = OverlappingEngine(engine, random.Random(1))
    found = Driver(overlapping, [message(group) for group in searches()], Traffic(), 4).run()
    assert found.tokens == expected.tokens
    assert found.scores == {uid: pytest.approx(scores, abs=1e-4) for uid, scores in expected.scores.items()}
    assert overlapping.ahead > 5
    assert sum(changed_pages) > 3, "no beam continues another one's pages"
    assert bool(engine.forward.replayed) == graphs


def test_steps_too_large_for_any_graph_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.force("triton")
    engine = with_graphs(tiny.engine(LLAMA, 4, PAGES), monkeypatch, replace(USUAL, tokens=8, rows=2))
    engine.record(replay_eagerly, replace(USUAL, chosen=(1,)), lambda stage: None)
    found = run_groups(engine, chunk=40)
    assert engine.forward.eager > 0
    assert engine.forward.replayed > 0
    assert found.tokens == reference_run(LLAMA).tokens


def test_fp8_cache_matches_a_full_precision_cache_of_rounded_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reference implementations, on a GPU, too, where the cache write can be replaced."""
    dispatch.force("reference")
    fp8 = torch.float8_e4m3fn
    scale = 0.25
    write = operations.write

    def rounding(slots: Tensor, rows: Tensor, cache: Tensor, scales: Tensor | None) -> None:
        write(slots, (rows / scale).to(fp8).to(rows.dtype) * scale, cache)

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

    found, full = scores(fp8), scores(None)
    monkeypatch.setattr(operations, "write", rounding)
    torch.testing.assert_close(found, scores(None), rtol=1e-5, atol=1e-5)
    assert (found - full).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "dtype"), [(SLIDING_WINDOW, "float32"), (QWEN2_MOE, "float32"), (GEMMA2, "bfloat16")])
def test_batch_invariant_shard_generates_identical_results_in_any_batch(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `batch_invariant`: each request alone compared with all requests together in chunks, with and without graphs."""
    rows = set()
    product = fused_batch_invariant.product
    monkeypatch.setattr(fused_batch_invariant, "product", lambda x, *given: rows.add(len(x)) or product(x, *given))
    dispatch.force("triton")
    make_engine = functools.partial(test_invariance.engine, name, dtype, page_size=4, pages=PAGES)
    expected = test_invariance.alone(lambda: make_engine(prefix_caching=False), groups())
    assert test_invariance.differences(run_groups(make_engine()), expected) == []
    assert len(rows) > 5
    replayed = with_graphs(make_engine(), monkeypatch)
    assert test_invariance.differences(run_groups(replayed), expected) == []
    assert replayed.forward.replayed > replayed.forward.eager


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter needs CPU tensors")
@pytest.mark.parametrize("form", ["modelopt-nvfp4", "mxfp4"])
def test_fp4_checkpoints_compute_logits_as_close_as_bfloat16_ones(form: str, tmp_path: Path) -> None:
    """From the checkpoint through the kernels. The error against the dequantized checkpoint in float32 is within 1.5 times that of
    the dequantized checkpoint in bfloat16."""
    quantized, dequantized = packing.checkpoints("words-wide", form, tmp_path)
    tokens = tuple(range(3, 15))
    expected = test_quantized.logits(load_decoder(dequantized), tokens)
    rounded = test_quantized.logits(load_decoder(dequantized, dtype="bfloat16"), tokens)
    dispatch.force("triton")
    model = load_decoder(quantized, dtype="bfloat16")
    assert len(test_quantized.quantized_weights(model)) == 4
    found = test_quantized.logits(model, tokens)
    assert (found - expected).norm() < 1.5 * (rounded - expected).norm()
