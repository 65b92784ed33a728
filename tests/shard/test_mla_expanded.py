"""Models of latents of which long chunks see heads' own keys and values compute what transformers computes, however work is cut,
beside decodes and trees, on several ranks. Here chunks are long from few tokens on."""

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
from penstock.tests.shard.driver import Habits, drive
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
FEWEST = 6


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens were expanded in each layer of each step."""
    monkeypatch.setattr(expanded, "MIN_QUERIES", FEWEST)
    monkeypatch.setattr(expanded, "MARGIN", -1e9)
    found: list[int] = []
    right = expanded.attention

    def attention(query: Tensor, *given: Any) -> Tensor:
        found.append(len(query))
        return right(query, *given)

    monkeypatch.setattr(expanded, "attention", attention)
    return found


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mistral4"])  # 1.1e-4 from it by latents, too
@pytest.mark.parametrize("cut", [0, 65])
def test_logits_of_a_long_prompt_equal_transformers(name: str, cut: int, counted: list[int]) -> None:
    """In one piece, or behind what is computed; 64 queries at once, and less."""
    bench = SpanRunner(name, 16)
    tokens = prompt(cut, 140)
    sequence = bench.start(tokens[:cut])
    found = bench.run([Span(sequence, cut, tokens[cut:], wanted=140 - cut)])
    assert_logits_close(found, tiny.expected_logits(name, tokens)[cut:])
    assert set(counted) == {140 - cut, *([cut] if cut else [])}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_chunks_equal_transformers(name: str, counted: list[int]) -> None:
    """Beside chunks that are too short, and decodes."""
    test_against_transformers.test_logits_of_randomly_chunked_prompts_equal_transformers(name)
    assert len(set(counted)) > 5


@pytest.mark.parametrize("page_size", [1, 16])
def test_trees_beside_long_chunks(page_size: int, counted: list[int]) -> None:
    test_against_transformers.check_tree("deepseek-v3", page_size)
    assert 9 + 25 in counted  # two chains of five spans


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4-moe-lite"])
def test_pauses_and_prefixes(name: str, counted: list[int]) -> None:
    test_against_transformers.check_preemption(name, 20)
    assert len(counted) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks(name: str, counted: list[int]) -> None:
    test_against_transformers.test_greedy_tokens_of_every_family_on_two_ranks_equal_transformers(name)
    assert counted


def test_a_cache_of_8_bits(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of it is the same, whoever reads."""

    def scores() -> Tensor:
        engine = Engine(tiny.decoder("deepseek-v3"), tiny.DEVICE, 4, cache_dtype=torch.float8_e4m3fn)
        engine.resize(64)
        asked = [tiny.group(uid, prompt(uid, length), 3, prompt_logprobs=True) for uid, length in ((1, 70), (2, 4))]
        return torch.tensor([score for _, own in engine.prefill(0, asked, [(1, 70), (2, 4)], 74, []).prompts for score in own])

    found = scores()
    assert set(counted) == {70}
    monkeypatch.setattr(expanded, "MIN_QUERIES", 1 << 30)
    torch.testing.assert_close(found, scores(), rtol=1e-4, atol=1e-4)
    assert len(counted) == 3


def test_where_bits_may_not_depend_on_a_chunk_nothing_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny.decoder("deepseek-v3")
    assert expansion_of(decoder) is not None
    monkeypatch.setattr(decoder, "invariant", True)
    assert expansion_of(decoder) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [(test_mla.V2, True), (test_mla.V3, True), (test_mla.K2, True)]
    + [(config, False) for config in (test_mla.V32, test_mla.GLM_5, test_mla.HY_4, test_mla.AX_K2)],
)
def test_which_models_are_expanded(config: dict[str, Any], said: bool) -> None:
    """Not those of which an index chooses."""
    assert (shape(config).expandable is not None) == said


def test_a_prompt_costs_fewer_operations() -> None:
    """By `penstock plan`: per pair of tokens and head 320 multiplications instead of 1,152."""
    model = shape(test_mla.V3)
    group = roofline.Group(shape=model, ranks=8, nodes=1, item=2, token_bytes=1)
    on = roofline.Accelerator(memory=1, bandwidth=1e30, flops=1e12, link=1e30, network=1e30, latency=0, network_latency=0)
    pairs = 8192 * 8193 // 2
    products = 2 * ((group.parameters() - group.head) * 8192 + group.head)
    attention = 2 * 61 * 128 // 8 * pairs * (192 + 128)
    assert roofline.prefill(group, on, 8192) == pytest.approx((products + attention) / on.flops, rel=1e-6)
    absorbed = replace(group, shape=replace(model, sinks=True))
    assert roofline.prefill(absorbed, on, 8192) > 1.2 * roofline.prefill(group, on, 8192)


def test_memory_for_what_is_expanded() -> None:
    """Keys and values of some heads, with a copy of latents, of the longest sequence."""
    engine = tiny.engine("deepseek-v3")
    assert memory._expanded(engine, 64, 1000) == 4 * 1000 * (8 * 2 * 20 + 24 + 8)
    assert memory._expanded(engine, 64, 100_000) == (32 << 20) + 4 * 100_000 * (24 + 8)
    assert memory._expanded(tiny.engine("deepseek-v32"), 64, 1000) == 0


def test_the_check_finds_what_sees_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: of a chunk's tokens each sees those of the chunk."""
    right = expanded._causal

    def blind(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        context = keys.shape[2] - query.shape[2]
        return right(query, keys[:, :, context:], values[:, :, context:], scale)

    monkeypatch.setattr(expanded, "_causal", blind)
    with pytest.raises(AssertionError):
        test_against_transformers.test_logits_of_randomly_chunked_prompts_equal_transformers("deepseek-v3")


def test_decodes_go_on_from_what_was_expanded(counted: list[int]) -> None:
    """Steps of chunks and decodes: tokens are transformers'."""
    asked = prompts(10)
    world = drive(tiny.engine("deepseek-v2", 4), greedy_requests(asked), Habits(chunk=25), 3)
    assert world.answers == tiny.expected_next_tokens("deepseek-v2", asked, world.answers, ANSWER_LENGTH)
    assert world.mixed > 0
    assert counted


def test_ranks_have_their_own_heads(counted: list[int]) -> None:
    def work(ranks: Ranks) -> int:
        found = expansion_of(tiny.rank_engine("deepseek-v3", ranks).decoder)
        assert found is not None
        return found.heads

    assert tiny.ThreadedRanks().run(work) == [4, 4]
