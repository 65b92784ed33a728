"""Long spans of linear attention, which Triton's kernels compute in chunks, compared with transformers and with the reference,
beside short spans and padding. In Triton's interpreter."""

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

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
RULES = [test_gated_delta, test_state_space]
DTYPES = [torch.float32, torch.float16]
OutputsAndStates = tuple[Tensor, RecurrentStates]


def random_layer(rule: ModuleType, rng: random.Random, dtype: torch.dtype = torch.float32) -> Any:
    dispatch.force("triton")
    return rule.random_layer(rng, dtype, 40, 2)


def long_span_length(rng: random.Random) -> int:
    """Tokens of a long span: whole chunks, one token less, or one more."""
    return rng.choice([CHUNKED_FROM, 95, 96, 97, rng.randint(CHUNKED_FROM, 130)])


def short_span_lengths(rng: random.Random) -> list[int]:
    """Tokens of spans that are too short for chunks."""
    return [rng.choice([1, 1, rng.randint(2, 5)]) for _ in range(rng.randint(0, 2))]


def run_both(
    layer: recurrent.Rule, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates
) -> tuple[OutputsAndStates, OutputsAndStates]:
    """Outputs and states by Triton's kernels, and by the reference."""
    found = []
    for route in ("triton", "reference"):
        final_states = recurrent.copy_states(states)
        with dispatch.forced(route):
            found.append((layer.run(inputs, spans, final_states), final_states))
    return found[0], found[1]


def assert_close(found: OutputsAndStates, expected: OutputsAndStates, tolerance: float) -> None:
    """Except for slot 0, which the reference writes to."""
    scale = max(1.0, *(part.abs().max().item() for part in (expected[0], expected[1].memories[1:])))
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance * scale)
    torch.testing.assert_close(found[1].memories[1:], expected[1].memories[1:], rtol=tolerance, atol=tolerance * scale)
    assert found[1].windows[1:].equal(expected[1].windows[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_chunks_match_transformers(rule: ModuleType, dtype: torch.dtype, rng: random.Random) -> None:
    """Long spans, with short ones before, between and after them, and padding."""
    lengths = [
        *short_span_lengths(rng),
        long_span_length(rng),
        *short_span_lengths(rng),
        long_span_length(rng),
        *short_span_lengths(rng),
    ]
    recurrent.check_against_oracle(random_layer(rule, rng, dtype), lengths, rng, rng.randint(0, 3))


@pytest.mark.parametrize("rule", RULES)
def test_rounding_operands_to_tf32_stays_within_half_the_bfloat16_tolerance(
    rule: ModuleType, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernels do for bfloat16. The numbers here are float16, since the interpreter would truncate bfloat16."""
    tile = fused_chunked_delta.tile_of(torch.bfloat16, False)
    assert tile.precision == "tf32"
    monkeypatch.setattr(fused_chunked_delta, "tile_of", lambda dtype, amd: tile)
    layer, lengths = random_layer(rule, rng, torch.float16), [long_span_length(rng), long_span_length(rng)]
    found, expected = run_both(layer, layer.inputs(sum(lengths)), recurrent.make_spans(lengths, [1, 2], [0, 1]), layer.states(3))
    assert_close(found, expected, TOLERANCES[torch.bfloat16] / 2)
    assert not found[1].memories[1].equal(expected[1].memories[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_states_include_accepted_draft_tokens_only(rule: ModuleType, dtype: torch.dtype, rng: random.Random) -> None:
    """Long spans may have any number of draft tokens, which begin a chunk of their own."""
    layer, lengths = random_layer(rule, rng, dtype), [long_span_length(rng), 3, long_span_length(rng)]
    recurrent.check_drafts(layer, lengths, 1, rng, 10 * TOLERANCES[dtype])


@pytest.mark.filterwarnings("ignore:overflow")  # with a bound, exponentials overflow to infinity as intended
@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize("rule", RULES)
def test_tokens_after_one_that_decays_a_state_to_zero_stay_accurate(rule: ModuleType, bound: float, rng: random.Random) -> None:
    """They decay by little, which a sum of decays over the whole chunk would lose. Also with keys of more features than are loaded
    at once, in heads that are wider than a program."""
    layer = random_layer(rule, rng)
    if rule is test_gated_delta:
        layer = dataclasses.replace(test_gated_delta.random_layer(rng, torch.float32, 70, 1), bound=bound)
    inputs = layer.inputs(2 * CHUNKED_FROM)
    inputs[-1][::9] = 2000.0 if rule is test_gated_delta else 200.0
    found, expected = run_both(layer, inputs, recurrent.make_spans([CHUNKED_FROM, CHUNKED_FROM], [1, 2], [1, 0]), layer.states(3))
    assert_close(found, expected, 1e-5)


def test_equal_keys_with_hardly_any_decay_stay_accurate(rng: random.Random) -> None:
    """Inverting the matrix between such tokens in fewer steps, by its powers, would overflow: they would reach 1e17."""
    layer = random_layer(test_gated_delta, rng)
    layer = dataclasses.replace(layer, rates=torch.full_like(layer.rates, -1e-4), strongest=1.0)
    mixed, strengths, fades = layer.inputs(100)
    mixed[:], strengths[:] = mixed[:1].clone(), 20.0
    found, expected = run_both(layer, (mixed, strengths, fades), recurrent.make_spans([100], [1], [1]), layer.states(2))
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_chunked_and_whole_sequences_have_equal_outputs_and_states(rule: ModuleType, rng: random.Random) -> None:
    """Also where a part is too short for chunks."""
    layer, length = random_layer(rule, rng), 2 * CHUNKED_FROM + 40
    inputs, cuts = layer.inputs(length), [0, CHUNKED_FROM + 3, CHUNKED_FROM + 7, length - CHUNKED_FROM, length]
    states, whole = layer.states(3), layer.states(3)
    expected = layer.run(inputs, recurrent.make_spans([length], [1], [1]), whole)
    found = [
        layer.run(tuple(part[begin:end] for part in inputs), recurrent.make_spans([end - begin], [1], [int(not begin)]), states)
        for begin, end in itertools.pairwise(cuts)
    ]
    whole.memories[2], whole.windows[2] = states.memories[2], states.windows[2]  # a slot that no sequence uses
    assert_close((torch.cat(found), states), (expected, whole), 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_padding_reads_and_writes_no_state(rule: ModuleType, rng: random.Random) -> None:
    """Also long spans of padding."""
    layer = random_layer(rule, rng)
    states = layer.states(2)
    states.memories[0] = states.windows[0] = torch.nan
    found = layer.run(layer.inputs(2 * CHUNKED_FROM), recurrent.make_spans([CHUNKED_FROM, CHUNKED_FROM], [0, 1], [0, 0]), states)
    assert found.isfinite().all()
    assert states.memories[0].isnan().all()
    assert states.windows[0].isnan().all()
    assert states.memories[1].isfinite().all()


def test_spans_from_the_first_long_to_the_last_long_are_computed_in_chunks(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless each feature of a key decays separately: then all go token by token."""
    calls = list[tuple[str, tuple[int, ...]]]()
    monkeypatch.setattr(fused_chunked_delta, "_by_chunks", lambda inputs, spans, *rest: calls.append(("chunks", spans.lengths)))
    monkeypatch.setattr(
        fused_chunked_delta.fused_gated_delta, "walk", lambda inputs, spans, *rest: calls.append(("tokens", spans.lengths))
    )
    dispatch.force("triton")
    for decay_per_feature in (False, True):
        layer = test_gated_delta.random_layer(rng, torch.float32, 20, 2, decay_per_feature)
        for lengths in ([1, CHUNKED_FROM - 1], [CHUNKED_FROM], [1, CHUNKED_FROM, 2, CHUNKED_FROM, 3], [CHUNKED_FROM, 1]):
            count = len(lengths)
            spans = recurrent.make_spans(lengths, list(range(1, count + 1)), [1] * count)
            layer.run(layer.inputs(sum(lengths)), spans, layer.states(count + 1))
    tokens = [("tokens", (1, CHUNKED_FROM - 1))]
    expected = [
        *tokens,
        ("chunks", (CHUNKED_FROM,)),
        ("tokens", (1,)),
        ("tokens", (3,)),
        ("chunks", (CHUNKED_FROM, 2, CHUNKED_FROM)),
    ]
    expected_per_feature = [
        *tokens,
        ("tokens", (CHUNKED_FROM,)),
        ("tokens", (1, CHUNKED_FROM, 2, CHUNKED_FROM, 3)),
        ("tokens", (CHUNKED_FROM, 1)),
    ]
    assert calls == [*expected, ("tokens", (1,)), ("chunks", (CHUNKED_FROM,)), *expected_per_feature]
