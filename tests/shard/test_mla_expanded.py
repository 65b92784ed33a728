"""MLA models whose long prompt chunks attend to latents that are expanded to keys and values of all heads, instead of absorbing the
projections into queries: logits and tokens against transformers, with chunks beside decodes and draft trees, preemption, and two
ranks. Here chunks of few tokens already count as long."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import expanded
from penstock.launcher import roofline
from penstock.shard import memory
from penstock.shard.engine import Engine
from penstock.shard.forward import expansion_of
from penstock.shard.models.families import shape
from penstock.shard.parallel import Ranks
from penstock.shard.step import Span
from penstock.tests.shard import test_against_transformers, test_mla, tiny
from penstock.tests.shard.driver import Traffic, drive
from penstock.tests.shard.test_against_transformers import (
    ANSWER_LENGTH,
    SpanRunner,
    assert_logits_close,
    greedy_requests,
    prompt,
    prompts,
)

FAMILIES = [
    *("ax-k1", "deepseek-v2", "deepseek-v2-sets", "deepseek-v3", "deepseek-v3-biases", "glm4-moe-lite", "kimi-linear", "longcat"),
    *("minicpm3", "mistral4", "youtu"),
]
MIN_QUERIES = 6


@pytest.fixture(autouse=True)
def expanded_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lowers the limit, and counts the query tokens of each call of expanded attention: one for each layer of a step."""
    monkeypatch.setattr(expanded, "MIN_QUERIES", MIN_QUERIES)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    counts: list[int] = []
    original = expanded.attention

    def attention(query: Tensor, *rest: Any) -> Tensor:
        counts.append(len(query))
        return original(query, *rest)

    monkeypatch.setattr(expanded, "attention", attention)
    return counts


# Not mistral4, whose logits differ by 1.1e-4, with absorbed attention as well.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mistral4"])
@pytest.mark.parametrize("cut", [0, 65])
def test_logits_of_a_long_prompt_in_one_or_two_chunks_equal_transformers(name: str, cut: int, expanded_counts: list[int]) -> None:
    """The second chunk has computed context before it. Blocks of 64 queries, and a shorter one."""
    runner = SpanRunner(name, 16)
    tokens = prompt(cut, 140)
    sequence = runner.start(tokens[:cut])
    found = runner.run([Span(sequence, cut, tokens[cut:], wanted=140 - cut)])
    assert_logits_close(found, tiny.expected_logits(name, tokens)[cut:])
    assert set(expanded_counts) == {140 - cut, *([cut] if cut else [])}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_randomly_chunked_prompts_equal_transformers(name: str, expanded_counts: list[int]) -> None:
    """Beside chunks that are too short to be expanded, and decodes."""
    test_against_transformers.test_logits_of_randomly_chunked_prompts_equal_transformers(name)
    assert len(set(expanded_counts)) > 5


@pytest.mark.parametrize("page_size", [1, 16])
def test_draft_trees_beside_expanded_chunks_equal_transformers(page_size: int, expanded_counts: list[int]) -> None:
    test_against_transformers.check_tree("deepseek-v3", page_size)
    assert 9 + 25 in expanded_counts  # query tokens of the two chains among the five spans


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4-moe-lite"])
def test_preempted_requests_get_transformers_tokens(name: str, expanded_counts: list[int]) -> None:
    test_against_transformers.check_preemption(name, 20)
    assert len(expanded_counts) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_two_ranks_equal_transformers(name: str, expanded_counts: list[int]) -> None:
    test_against_transformers.test_greedy_tokens_of_every_family_on_two_ranks_equal_transformers(name)
    assert expanded_counts


def test_expanded_and_absorbed_attention_agree_with_an_8_bit_kv_cache(
    expanded_counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the same quantized latents."""

    def prompt_logprobs() -> Tensor:
        engine = Engine(tiny.decoder("deepseek-v3"), tiny.DEVICE, 4, cache_dtype=torch.float8_e4m3fn)
        engine.resize(64)
        groups = [tiny.group(uid, prompt(uid, length), 3, prompt_logprobs=True) for uid, length in ((1, 70), (2, 4))]
        return torch.tensor(
            [score for _, logprobs, _ in engine.prefill(0, groups, [(1, 70), (2, 4)], 74, []).prompts for score in logprobs]
        )

    found = prompt_logprobs()
    assert set(expanded_counts) == {70}
    monkeypatch.setattr(expanded, "MIN_QUERIES", 1 << 30)
    torch.testing.assert_close(found, prompt_logprobs(), rtol=1e-4, atol=1e-4)
    assert len(expanded_counts) == 3


def test_nothing_is_expanded_with_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("deepseek-v3")
    assert expansion_of(decoder) is not None
    monkeypatch.setattr(decoder, "invariant", True)
    assert expansion_of(decoder) is None


@pytest.mark.parametrize(
    ("config", "expandable"),
    [(test_mla.V2, True), (test_mla.V3, True), (test_mla.K2, True)]
    + [(config, False) for config in (test_mla.V32, test_mla.GLM_5, test_mla.HY_4, test_mla.AX_K2)],
)
def test_only_mla_models_without_an_indexer_are_expandable(config: dict[str, Any], expandable: bool) -> None:
    """In others an indexer selects tokens."""
    assert (shape(config).expandable is not None) == expandable


def test_roofline_of_prefill_counts_expanded_attention() -> None:
    """In `penstock plan`: 320 multiplications per pair of tokens and head, instead of 1,152 with absorbed attention."""
    model = shape(test_mla.V3)
    group = roofline.Group(shape=model, ranks=8, nodes=1, item=2, token_bytes=1)
    accelerator = roofline.Accelerator(memory=1, bandwidth=1e30, flops=1e12, link=1e30, network=1e30, latency=0, network_latency=0)
    pairs = 8192 * 8193 // 2
    matmul_operations = 2 * ((group.parameters() - group.head) * 8192 + group.head)
    attention = 2 * 61 * 128 // 8 * pairs * (192 + 128)
    assert roofline.prefill(group, accelerator, 8192) == pytest.approx(
        (matmul_operations + attention) / accelerator.flops, rel=1e-6
    )
    absorbed = replace(group, shape=replace(model, sinks="sinks"))
    assert roofline.prefill(absorbed, accelerator, 8192) > 1.2 * roofline.prefill(group, accelerator, 8192)


def test_memory_for_expanded_keys_and_values_is_reserved() -> None:
    """For the longest sequence: keys and values of some heads, and a copy of its latents."""
    engine = tiny.engine("deepseek-v3")
    assert memory._expansion_bytes(engine, 64, 1000) == 4 * 1000 * (8 * 2 * 20 + 24 + 8)
    assert memory._expansion_bytes(engine, 64, 100_000) == (32 << 20) + 4 * 100_000 * (24 + 8)
    assert memory._expansion_bytes(tiny.engine("deepseek-v32"), 64, 1000) == 0


def test_logits_check_fails_if_chunks_do_not_attend_to_the_context_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: tokens attend to their own chunk only."""
    original = expanded._causal

    def without_context(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        context = keys.shape[2] - query.shape[2]
        return original(query, keys[:, :, context:], values[:, :, context:], scale)

    monkeypatch.setattr(expanded, "_causal", without_context)
    with pytest.raises(AssertionError):
        test_against_transformers.test_logits_of_randomly_chunked_prompts_equal_transformers("deepseek-v3")


def test_decodes_after_expanded_chunks_get_transformers_tokens(expanded_counts: list[int]) -> None:
    """In steps that mix chunks and decodes."""
    token_lists = prompts(10)
    result = drive(tiny.engine("deepseek-v2", 4), greedy_requests(token_lists), Traffic(chunk=25), 3)
    assert result.answers == tiny.expected_next_tokens("deepseek-v2", token_lists, result.answers, ANSWER_LENGTH)
    assert result.mixed > 0
    assert expanded_counts


def test_each_rank_expands_its_own_heads(expanded_counts: list[int]) -> None:
    def work(ranks: Ranks) -> int:
        found = expansion_of(tiny.rank_engine("deepseek-v3", ranks).decoder)
        assert found is not None
        return found.heads

    assert tiny.ThreadedRanks().run(work) == [4, 4]
