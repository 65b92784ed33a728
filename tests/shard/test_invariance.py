"""With `batch_invariant` nothing that is computed for a request depends by a single bit on who else is in the batch, how its prompt
is cut, whether it pauses, what is cached, or what is guessed: tokens and log-probabilities are equal, not close."""

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
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive
from penstock.tests.shard.test_oracle import at_rest
from penstock.tests.shard.test_sharing import family, room

COUNT = 12
# What the tests of every family compare: attention in all its kinds, ALiBi, experts, latents, norms of both kinds, several streams,
# experts that do nothing.
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
    made = load(config, lambda stage: None)
    made.resize(pages)
    return made


def crowd(drafts: int = 0) -> list[Group]:
    """Greedy ones, seeded ones with filters and penalties, some of several choices, beams."""
    made = []
    for uid, tokens in enumerate(family(14)):
        how: dict[str, Any] = {"top_n": uid % 3, "drafts": drafts}
        sampling = Sampling()
        if uid % 4 == 1:
            how["choices"], sampling = 3, Sampling(temperature=1.3, top_p=0.9, seed=uid)
        elif uid % 4 == 2:
            sampling = Sampling(temperature=0.8, top_k=20, typical_p=0.95, repetition_penalty=1.2, seed=uid, final_logprobs=True)
        elif uid % 4 == 3:
            how["search"], how["drafts"] = Search(3, 2), 0
            sampling = Sampling(temperature=0.9, seed=uid) if uid == 7 else Sampling()  # whose beams are drawn beside the others
        made.append(tiny.group(uid, tokens, COUNT + uid % 5, sampling, **how))
    return made


def alone(make: Callable[[], Engine], groups: Sequence[Group]) -> World:
    """Each by itself, in an engine that knows nothing of the others."""
    whole = World()
    for group in groups:
        one = drive(make(), [group], Habits())
        for name in ("tokens", "logprobs", "finishes", "scores"):
            getattr(whole, name).update(getattr(one, name))
        assert not one.failed
    return whole


def differences(found: World, expected: World) -> list[object]:
    """Whose tokens or numbers are not equal, to the last bit."""
    names = ("tokens", "logprobs", "finishes", "scores")
    pairs = [(getattr(found, name), getattr(expected, name)) for name in names]
    return [key for ours, theirs in pairs for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]


@functools.cache
def calm(name: str, dtype: str) -> World:
    return alone(lambda: engine(name, dtype, prefix_caching=False), crowd())


def test_what_is_compared() -> None:
    expected = calm("llama", "bfloat16")
    assert all(len(found) == len(expected.tokens[key]) for key, found in expected.logprobs.items())
    assert sum(map(len, expected.logprobs.values())) > 200
    assert sum(map(len, expected.scores.values())) > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 7), (16, UNLIMITED)])
def test_a_crowd_in_a_tiny_pool(page_size: int, chunk: int, dtype: str) -> None:
    """Everybody is paused, prompts come in chunks, prefixes are found."""
    groups = crowd()
    own = engine("llama", dtype, page_size, room([group for group in groups if not group.search], page_size) + 60 // page_size)
    world = drive(own, groups, Habits(chunk, pause=0.05, pauses=1), seed=page_size)
    assert differences(world, calm("llama", dtype)) == []
    assert world.pauses.total() > 5
    assert world.cached > 50
    assert world.mixed > 5
    assert at_rest(own)


@pytest.mark.parametrize(("name", "dtype"), [*zip(FAMILIES[1:], itertools.cycle(("bfloat16", "float32")), strict=False)])
def test_families(name: str, dtype: str) -> None:
    world = drive(engine(name, dtype, page_size=4), crowd(), Habits(9, pause=0.03), seed=3)
    assert differences(world, calm(name, dtype)) == []
    assert world.mixed > 3


def test_without_it_numbers_differ() -> None:
    """And this would be seen."""
    make = functools.partial(engine, "llama", "bfloat16", invariant=False)
    world = drive(make(page_size=4), crowd(), Habits(7, pause=0.05), seed=4)
    assert len(differences(world, alone(lambda: make(prefix_caching=False), crowd()))) > 10


def test_drafts_are_judged_by_the_same_numbers() -> None:
    plain, asked = calm("llama", "bfloat16"), crowd(drafts=4)
    own = engine("llama", page_size=4)
    test_speculation.choose(own, "chains", plain)
    world = drive(own, asked, Habits(7, pause=0.02), seed=5)
    assert differences(world, plain) == []
    assert world.accepted > 30
    assert world.drafted > world.accepted + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 3, 2), (3, 31, 5), (6, 3, 40), (2, 24, 16), (2, 64, 128)])
def test_what_leads_from_latents_to_heads_depends_on_no_other_row(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of few features, too, which torch multiplies in another way."""
    heads, features, _ = sizes
    torch.manual_seed(0)
    x, weights = torch.randn(200, heads, features).to(dtype), torch.randn(sizes).to(dtype)
    product = PerHeadWeight(weights, Invariance.INVARIANT)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    assert all(product(x[:count]).equal(alone[:count]) for count in range(1, 201))
    torch.testing.assert_close(alone, torch.einsum("thi,hio->tho", x, weights), atol=0.05, rtol=0.02)


def test_nodes_of_trees_are_refused() -> None:
    row = batch_invariant.Row(3, 20, range(30), parents=[-1, 0, 0])
    layout = AttentionLayout(1, (LayerKind(0, 1, 2, 4),), torch.float32, tiny.CPU)
    with pytest.raises(ValueError, match="not computed as a chain's"):
        batch_invariant.plan([row], layout)
    assert batch_invariant.plan([replace(row, parents=[-1, 0, 1])], layout)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "short", "four"])
def test_the_check_at_the_start_passes(name: str) -> None:
    own = engine(name)
    invariance.check(own)
    invariance.check(engine(name, page_size=1))


def test_the_check_at_the_start_finds_what_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"--batch-invariant: here a token's logits depend .*\(by 0.*leave it out"):
        invariance.check(engine("llama", invariant=False))
    own = engine("llama")
    monkeypatch.setattr(batch_invariant, "KEYS", 1)
    with pytest.raises(Unsupported):
        invariance.check(own)
    monkeypatch.undo()
    product = own.decoder.layers[0].mlp.down.product
    own.decoder.layers[0].mlp.down.product = lambda x: product(x) * (1 + len(x) * 2**-10)
    with pytest.raises(Unsupported):
        invariance.check(own)


@pytest.mark.parametrize(
    ("name", "triton", "what"),
    [
        ("deepseek-v32", False, "sparse attention"),
        ("deepseek-v3", True, "latents on an accelerator"),
        ("gpt-oss", True, "attention with sinks on an accelerator"),
        ("gemma3n", True, "streams that are predicted on an accelerator"),
    ],
)
def test_what_is_not_there(name: str, triton: bool, what: str) -> None:
    dispatch.force("triton" if triton else "")
    try:
        with pytest.raises(Unsupported, match=f"--batch-invariant is not there for {what}.*leave it out"):
            engine(name)
    finally:
        dispatch.force("")


def test_an_accelerator_without_kernels() -> None:
    """Its libraries go by the number of rows."""
    with dispatch.forced("reference"), pytest.raises(Unsupported, match="by our own kernels alone"):
        loading._check_invariant(tiny.decoder("llama").shape, torch.device("cuda"))
