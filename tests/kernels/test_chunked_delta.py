"""Long spans of linear attention, which Triton's kernels take chunk by chunk, come to what transformers and the reference make of
them, whatever stands beside them; by the interpreter."""

import dataclasses
import itertools
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import dispatch
from penstock.kernels.spans import CHUNKED_FROM, RecurrentStates, Spans
from penstock.tests.kernels import recurrent, test_gated_delta, test_state_space
from penstock.tests.kernels.recurrent import TOLERANCES

pytest.importorskip("triton")

from penstock.kernels import fused_chunked_delta

pytestmark = pytest.mark.usefixtures("poisoned")
RULES = [test_gated_delta, test_state_space]
TYPES = [torch.float32, torch.float16]
Run = tuple[Tensor, RecurrentStates]


def layer_of(rule: ModuleType, chance: random.Random, dtype: torch.dtype = torch.float32) -> Any:
    dispatch.force("triton")
    return rule.layer_of(chance, dtype, 40, 2)


def long(chance: random.Random) -> int:
    """Tokens of a span: of whole chunks, one less, and one more."""
    return chance.choice([CHUNKED_FROM, 95, 96, 97, chance.randint(CHUNKED_FROM, 130)])


def beside(chance: random.Random) -> list[int]:
    """Tokens of spans that are not long."""
    return [chance.choice([1, 1, chance.randint(2, 5)]) for _ in range(chance.randint(0, 2))]


def both(layer: recurrent.Rule, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> tuple[Run, Run]:
    """What Triton's kernels find, and the reference; and their states."""
    found = []
    for way in ("triton", "reference"):
        own = recurrent.copied(states)
        with dispatch.forced(way):
            found.append((layer.run(inputs, spans, own), own))
    return found[0], found[1]


def assert_alike(found: Run, expected: Run, tolerance: float) -> None:
    """But for slot 0, which the reference writes to."""
    size = max(1.0, *(part.abs().max().item() for part in (expected[0], expected[1].memories[1:])))
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(found[1].memories[1:], expected[1].memories[1:], rtol=tolerance, atol=tolerance * size)
    assert found[1].windows[1:].equal(expected[1].windows[1:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule", RULES)
def test_it_is_transformers(rule: ModuleType, dtype: torch.dtype, chance: random.Random) -> None:
    """Of long spans and others before, between and behind them, and padding."""
    lengths = [*beside(chance), long(chance), *beside(chance), long(chance), *beside(chance)]
    recurrent.check(layer_of(rule, chance, dtype), lengths, chance, chance.randint(0, 3))


@pytest.mark.parametrize("rule", RULES)
def test_operands_of_bfloat16_may_be_rounded(rule: ModuleType, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are by its kernels; numbers are of float16, since the interpreter would cut bfloat16 off. It is within half of what
    bfloat16 is allowed."""
    tile = fused_chunked_delta.tile_of(torch.bfloat16, False)
    assert tile.precision == "tf32"
    monkeypatch.setattr(fused_chunked_delta, "tile_of", lambda dtype, amd: tile)
    layer, lengths = layer_of(rule, chance, torch.float16), [long(chance), long(chance)]
    found, expected = both(layer, layer.inputs(sum(lengths)), recurrent.spans_of(lengths, [1, 2], [0, 1]), layer.states(3))
    assert_alike(found, expected, TOLERANCES[torch.bfloat16] / 2)
    assert not found[1].memories[1].equal(expected[1].memories[1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule", RULES)
def test_states_forget_drafts(rule: ModuleType, dtype: torch.dtype, chance: random.Random) -> None:
    """Of which a long span may have any number; they begin a chunk of their own."""
    layer, lengths = layer_of(rule, chance, dtype), [long(chance), 3, long(chance)]
    recurrent.check_speculation(layer, lengths, 1, chance, 10 * TOLERANCES[dtype])


@pytest.mark.filterwarnings("ignore:overflow")  # an exponential that is infinite is meant, where a bound is near
@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize("rule", RULES)
def test_what_lets_all_fade_hides_nothing(rule: ModuleType, bound: float, chance: random.Random) -> None:
    """Tokens behind it fade by little, which a sum over the chunk would not tell. And keys of more features than are loaded at
    once, in heads that are wider than a program."""
    layer = layer_of(rule, chance)
    if rule is test_gated_delta:
        layer = dataclasses.replace(test_gated_delta.layer_of(chance, torch.float32, 70, 1), bound=bound)
    inputs = layer.inputs(2 * CHUNKED_FROM)
    inputs[-1][::9] = 2000.0 if rule is test_gated_delta else 200.0
    found, expected = both(layer, inputs, recurrent.spans_of([CHUNKED_FROM, CHUNKED_FROM], [1, 2], [1, 0]), layer.states(3))
    assert_alike(found, expected, 1e-5)


def test_tokens_that_are_all_alike(chance: random.Random) -> None:
    """Powers of the matrix between them, with which it could be inverted in fewer steps, would reach 1e17. What they put into the
    memory hardly fades."""
    layer = layer_of(test_gated_delta, chance)
    layer = dataclasses.replace(layer, rates=torch.full_like(layer.rates, -1e-4), strongest=1.0)
    mixed, strengths, fades = layer.inputs(100)
    mixed[:], strengths[:] = mixed[:1].clone(), 20.0
    found, expected = both(layer, (mixed, strengths, fades), recurrent.spans_of([100], [1], [1]), layer.states(2))
    assert_alike(found, expected, 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_cutting_a_sequence_changes_nothing(rule: ModuleType, chance: random.Random) -> None:
    """Where a part is too short for chunks, either."""
    layer, length = layer_of(rule, chance), 2 * CHUNKED_FROM + 40
    inputs, cuts = layer.inputs(length), [0, CHUNKED_FROM + 3, CHUNKED_FROM + 7, length - CHUNKED_FROM, length]
    states, whole = layer.states(3), layer.states(3)
    expected = layer.run(inputs, recurrent.spans_of([length], [1], [1]), whole)
    found = [
        layer.run(tuple(part[begin:end] for part in inputs), recurrent.spans_of([end - begin], [1], [int(not begin)]), states)
        for begin, end in itertools.pairwise(cuts)
    ]
    whole.memories[2], whole.windows[2] = states.memories[2], states.windows[2]  # nobody's
    assert_alike((torch.cat(found), states), (expected, whole), 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_padding_has_a_slot_of_its_own(rule: ModuleType, chance: random.Random) -> None:
    """A long span of it, too; nothing is read or written there."""
    layer = layer_of(rule, chance)
    states = layer.states(2)
    states.memories[0] = states.windows[0] = torch.nan
    found = layer.run(layer.inputs(2 * CHUNKED_FROM), recurrent.spans_of([CHUNKED_FROM, CHUNKED_FROM], [0, 1], [0, 0]), states)
    assert found.isfinite().all()
    assert states.memories[0].isnan().all()
    assert states.windows[0].isnan().all()
    assert states.memories[1].isfinite().all()


def test_which_spans_go_by_chunks(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """All from the first long one to the last, unless each feature of a key fades by itself."""
    ways = list[tuple[str, tuple[int, ...]]]()
    monkeypatch.setattr(fused_chunked_delta, "_by_chunks", lambda inputs, spans, *rest: ways.append(("chunks", spans.lengths)))
    monkeypatch.setattr(
        fused_chunked_delta.fused_gated_delta, "walk", lambda inputs, spans, *rest: ways.append(("tokens", spans.lengths))
    )
    dispatch.force("triton")
    for each in (False, True):
        layer = test_gated_delta.layer_of(chance, torch.float32, 20, 2, each)
        for lengths in ([1, CHUNKED_FROM - 1], [CHUNKED_FROM], [1, CHUNKED_FROM, 2, CHUNKED_FROM, 3], [CHUNKED_FROM, 1]):
            count = len(lengths)
            spans = recurrent.spans_of(lengths, list(range(1, count + 1)), [1] * count)
            layer.run(layer.inputs(sum(lengths)), spans, layer.states(count + 1))
    tokens = [("tokens", (1, CHUNKED_FROM - 1))]
    first = [*tokens, ("chunks", (CHUNKED_FROM,)), ("tokens", (1,)), ("tokens", (3,)), ("chunks", (CHUNKED_FROM, 2, CHUNKED_FROM))]
    other = [*tokens, ("tokens", (CHUNKED_FROM,)), ("tokens", (1, CHUNKED_FROM, 2, CHUNKED_FROM, 3)), ("tokens", (CHUNKED_FROM, 1))]
    assert ways == [*first, ("tokens", (1,)), ("chunks", (CHUNKED_FROM,)), *other]
