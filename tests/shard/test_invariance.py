"""With `batch_invariant` no bit of a request's results depends on the other requests in the batch, prompt chunks, preemption,
cached prefixes or drafts: tokens and log-probabilities are equal, not close, to those of the request alone."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.kernels import batch_invariant, dispatch
from penstock.kernels.layout import AttentionLayout, LayerKind
from penstock.kernels.linear import Invariance
from penstock.shard import invariance, loading
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.latents import PerHeadWeight
from penstock.shard.models.shape import Unsupported
from penstock.shard.sequence import Group, Sampling
from penstock.tests.shard import test_speculation, tiny
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free
from penstock.tests.shard.test_sharing import pages_of_largest_group, prompts_with_common_prefixes

COUNT = 12
# Families with all kinds of attention, ALiBi, experts, latents, both kinds of norms, several residual streams, zero-compute
# experts.
FAMILIES = [
    *("llama", "qwen3", "gemma2", "gpt-oss", "qwen2-moe", "deepseek-v3", "bloom", "cohere2", "gemma4-experts", "llama4"),
    *("gemma3n", "longcat"),
]


def engine(
    name: str, dtype: str = "bfloat16", page_size: int = 16, pages: int = 1000, invariant: bool = True, **more: Any
) -> Engine:
    config = ShardConfig(
        folder=str(tiny.folder(name)),
        model=name,
        dtype=dtype,
        page_size=page_size,
        batch_invariant=invariant,
        device=tiny.DEVICE.type,
        **more,
    )
    result = load(config, lambda stage: None)
    result.resize(pages)
    return result


def mixed_groups(drafts: int = 0) -> list[Group]:
    """Greedy groups, seeded ones with filters and penalties, some with several choices, beams."""
    result = []
    for uid, tokens in enumerate(prompts_with_common_prefixes(14)):
        fields: dict[str, Any] = {"top_n": uid % 3, "drafts": drafts}
        sampling = Sampling()
        if uid % 4 == 1:
            fields["choices"], sampling = 3, Sampling(temperature=1.3, top_p=0.9, seed=uid)
        elif uid % 4 == 2:
            sampling = Sampling(temperature=0.8, top_k=20, typical_p=0.95, repetition_penalty=1.2, seed=uid, final_logprobs=True)
        elif uid % 4 == 3:
            fields["search"], fields["drafts"] = Search(3, 2), 0
            sampling = Sampling(temperature=0.9, seed=uid) if uid == 7 else Sampling()  # one search samples its beams
        result.append(tiny.group(uid, tokens, COUNT + uid % 5, sampling, **fields))
    return result


def alone(make: Callable[[], Engine], groups: Sequence[Group]) -> Results:
    """The results of each group alone, in an engine of its own."""
    merged = Results()
    for group in groups:
        one = drive(make(), [group], Traffic())
        for name in ("tokens", "logprobs", "finishes", "scores"):
            getattr(merged, name).update(getattr(one, name))
        assert not one.failed
    return merged


def differences(found: Results, expected: Results) -> list[object]:
    """The keys whose tokens or numbers are not equal to the last bit."""
    names = ("tokens", "logprobs", "finishes", "scores")
    pairs = [(getattr(found, name), getattr(expected, name)) for name in names]
    return [key for ours, theirs in pairs for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]


@functools.cache
def results_alone(name: str, dtype: str) -> Results:
    return alone(lambda: engine(name, dtype, prefix_caching=False), mixed_groups())


def test_results_alone_contain_enough_numbers_to_compare() -> None:
    expected = results_alone("llama", "bfloat16")
    assert all(len(found) == len(expected.tokens[key]) for key, found in expected.logprobs.items())
    assert sum(map(len, expected.logprobs.values())) > 200
    assert sum(map(len, expected.scores.values())) > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 7), (16, UNLIMITED)])
def test_mixed_batch_in_a_tiny_pool_equals_each_request_alone(page_size: int, chunk: int, dtype: str) -> None:
    """All groups are paused, prompts come in chunks, prefixes are found in the cache."""
    groups = mixed_groups()
    tested = engine(
        "llama",
        dtype,
        page_size,
        pages_of_largest_group([group for group in groups if not group.search], page_size) + 60 // page_size,
    )
    results = drive(tested, groups, Traffic(chunk, pause=0.05, pauses=1), seed=page_size)
    assert differences(results, results_alone("llama", dtype)) == []
    assert results.pauses.total() > 5
    assert results.cached > 50
    assert results.mixed > 5
    assert all_pages_free(tested)


@pytest.mark.parametrize(("name", "dtype"), [*zip(FAMILIES[1:], itertools.cycle(("bfloat16", "float32")), strict=False)])
def test_mixed_batch_of_each_family_equals_each_request_alone(name: str, dtype: str) -> None:
    results = drive(engine(name, dtype, page_size=4), mixed_groups(), Traffic(9, pause=0.03), seed=3)
    assert differences(results, results_alone(name, dtype)) == []
    assert results.mixed > 3


def test_check_catches_differences_without_batch_invariance() -> None:
    """Without `batch_invariant` the comparison finds differences."""
    make = functools.partial(engine, "llama", "bfloat16", invariant=False)
    results = drive(make(page_size=4), mixed_groups(), Traffic(7, pause=0.05), seed=4)
    assert len(differences(results, alone(lambda: make(prefix_caching=False), mixed_groups()))) > 10


def test_results_with_drafts_equal_those_without() -> None:
    plain, groups = results_alone("llama", "bfloat16"), mixed_groups(drafts=4)
    tested = engine("llama", page_size=4)
    test_speculation.set_proposer(tested, "chains", plain)
    results = drive(tested, groups, Traffic(7, pause=0.02), seed=5)
    assert differences(results, plain) == []
    assert results.accepted > 30
    assert results.drafted > results.accepted + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 3, 2), (3, 31, 5), (6, 3, 40), (2, 24, 16), (2, 64, 128)])
def test_per_head_products_of_latents_do_not_depend_on_other_rows(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also with few features, for which torch uses another algorithm."""
    heads, features, _ = sizes
    torch.manual_seed(0)
    x, weights = torch.randn(200, heads, features).to(dtype), torch.randn(sizes).to(dtype)
    product = PerHeadWeight(weights, Invariance.INVARIANT)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    assert all(product(x[:count]).equal(alone[:count]) for count in range(1, 201))
    torch.testing.assert_close(alone, torch.einsum("thi,hio->tho", x, weights), atol=0.05, rtol=0.02)


def test_plan_refuses_rows_of_draft_trees() -> None:
    row = batch_invariant.Row(3, 20, range(30), parents=[-1, 0, 0])
    layout = AttentionLayout(1, (LayerKind(0, 1, 2, 4),), torch.float32, tiny.CPU)
    with pytest.raises(ValueError, match="not computed as a chain's"):
        batch_invariant.plan([row], layout)
    assert batch_invariant.plan([replace(row, parents=[-1, 0, 1])], layout)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "short", "four"])
def test_startup_check_passes(name: str) -> None:
    tested = engine(name)
    invariance.check(tested)
    invariance.check(engine(name, page_size=1))


def test_startup_check_catches_dependence_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"--batch-invariant: here a token's logits depend .*\(by 0.*leave it out"):
        invariance.check(engine("llama", invariant=False))
    tested = engine("llama")
    monkeypatch.setattr(batch_invariant, "KEYS", 1)
    with pytest.raises(Unsupported):
        invariance.check(tested)
    monkeypatch.undo()
    product = tested.decoder.layers[0].mlp.down.product
    tested.decoder.layers[0].mlp.down.product = lambda x: product(x) * (1 + len(x) * 2**-10)
    with pytest.raises(Unsupported):
        invariance.check(tested)


@pytest.mark.parametrize(
    ("name", "triton", "feature"),
    [
        ("deepseek-v32", False, "sparse attention"),
        ("deepseek-v3", True, "latents on an accelerator"),
        ("gpt-oss", True, "attention with sinks on an accelerator"),
        ("gemma3n", True, "streams that are predicted on an accelerator"),
    ],
)
def test_unsupported_models_are_refused(name: str, triton: bool, feature: str) -> None:
    dispatch.force("triton" if triton else "")
    try:
        with pytest.raises(Unsupported, match=f"--batch-invariant is not there for {feature}.*leave it out"):
            engine(name)
    finally:
        dispatch.force("")


def test_accelerator_without_triton_kernels_is_refused() -> None:
    """The accelerator's libraries choose algorithms by the number of rows."""
    with dispatch.forced("reference"), pytest.raises(Unsupported, match="by our own kernels alone"):
        loading._check_invariant(tiny.decoder("llama").shape, torch.device("cuda"))
