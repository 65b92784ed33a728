"""Triton's fused elementwise kernels (norms, gated activations, rotary embedding with cache writes) compared with the reference:
odd shapes, views, in place, and independence of rows."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, operations, reference
from penstock.kernels.reference import PLAIN, Activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# float16 is rounded where the reference rounds. bfloat16: the interpreter truncates where the reference rounds, each time by up to
# a unit in the last place, and three times where normalized numbers are rotated.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (3e-3, 3e-3), torch.bfloat16: (4e-2, 9e-2)}


@pytest.fixture(autouse=True)
def triton_kernels() -> Iterator[None]:
    dispatch.force("triton")
    yield
    dispatch.force("")


def assert_close(found: Tensor, expected: Tensor) -> None:
    relative, absolute = TOLERANCES[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) * 2).to(dtype).to(DEVICE)


def poisoned_view(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view [rows, size] of a wider tensor that is NaN elsewhere, and the wider tensor."""
    parent = torch.full((rows, size + 7), torch.nan, dtype=dtype, device=DEVICE)
    parent[:, 3 : size + 3] = randn(rows, size, dtype=dtype)
    return parent[:, 3 : size + 3], parent


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_matches_the_reference(dtype: torch.dtype, rng: random.Random) -> None:
    from penstock.kernels import fused_norm

    for size in (1, 7, rng.randint(30, 80), rng.randint(900, 1100)):
        rows = rng.randint(1, 5)
        x, _ = poisoned_view(rows, size, dtype)
        weight = randn(size, dtype=dtype)
        out = torch.full((rows, size), torch.nan, dtype=dtype, device=DEVICE)
        assert_close(fused_norm.rms_norm(x, weight, 1e-3, out), reference.rms_norm(x, weight, 1e-3))
        assert_close(operations.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_some_heads_in_place_leaves_the_others_unchanged(dtype: torch.dtype, rng: random.Random) -> None:
    """Of some heads of joint rows, as for queries and keys."""
    from penstock.kernels import fused_norm

    tokens, heads, size = rng.randint(1, 4), rng.randint(1, 9), rng.choice([6, 64, 80])
    joint = randn(tokens, (heads + 3) * size, dtype=dtype)
    before, weight = joint.clone(), randn(size, dtype=dtype)
    part = joint.view(tokens, -1, size)[:, 2 : heads + 2]
    expected = reference.rms_norm(part, weight, 1e-6)
    fused_norm.rms_norm(part, weight, 1e-6, part)
    assert_close(part, expected)
    assert joint[:, : 2 * size].equal(before[:, : 2 * size])
    assert joint[:, -size:].equal(before[:, -size:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_residual_sum_matches_the_reference(dtype: torch.dtype, rng: random.Random) -> None:
    rows, size = rng.randint(1, 5), rng.randint(1, 300)
    x, residual, weight = randn(rows, size, dtype=dtype), poisoned_view(rows, size, dtype)[0], randn(size, dtype=dtype)
    total = residual + x
    found = operations.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total)
    assert_close(found, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_split_k_parts_in_order_and_rounds_once(
    dtype: torch.dtype, rng: random.Random, poisoned_float_outputs: None
) -> None:
    """Together with the residual."""
    rows, size, parts = rng.randint(1, 5), rng.randint(1, 300), rng.choice([1, 2, 3, 4])
    x, residual, weight = (
        randn(parts, rows, size, dtype=torch.float32),
        poisoned_view(rows, size, dtype)[0],
        randn(size, dtype=dtype),
    )
    initial, total = residual.clone(), x[0]
    for part in x[1:]:
        total = total + part
    total = (total + initial.float()).to(dtype)
    found = operations.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total)
    assert_close(found, reference.rms_norm(total, weight, 1e-5))
    dispatch.force("reference")
    assert_close(operations.add_rms_norm(x, initial, weight, 1e-5), found)
    assert_close(initial, total)


def test_operations_dispatch_to_the_reference(rng: random.Random) -> None:
    """Operations that `operations` composes itself; their parts are tested elsewhere."""
    dispatch.force("reference")
    x, residual, weight = (randn(*shape, dtype=torch.float32) for shape in ((3, 8), (3, 8), (8,)))
    total = residual + x
    assert operations.add_rms_norm(x, residual, weight, 1e-5).equal(reference.rms_norm(total, weight, 1e-5))
    assert residual.equal(total)
    assert operations.rms_norm(x, weight, 1e-5).equal(reference.rms_norm(x, weight, 1e-5))
    assert operations.gated(x, Activation(True)).equal(reference.gated(x, Activation(True)))


@pytest.mark.filterwarnings("ignore:overflow")  # exponentials overflow to infinity as intended
@pytest.mark.parametrize(
    "activation", [PLAIN, Activation(True), *(Activation(limit=0.7, form=form) for form in ("steep", "before", "behind"))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_match_the_reference(dtype: torch.dtype, activation: Activation, rng: random.Random) -> None:
    from penstock.kernels import fused_activation

    for size in (1, 7, rng.randint(1000, 1100)):
        tokens = rng.randint(1, 4)
        gate_up, _ = poisoned_view(tokens, 2 * size, dtype)
        out, parent = poisoned_view(tokens, size, dtype)
        out.fill_(torch.nan)
        assert_close(fused_activation.gated(gate_up, out, activation), reference.gated(gate_up, activation))
        assert parent[:, :3].isnan().all()
        assert parent[:, size + 3 :].isnan().all()
        assert_close(operations.gated(gate_up, activation), reference.gated(gate_up, activation))


@pytest.mark.filterwarnings("ignore:overflow")  # exponentials overflow to infinity as intended
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_activations_of_large_numbers_match_the_reference(gelu: bool) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, -1e15, 1e15, 1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert_close(operations.gated(gate_up, Activation(gelu)), reference.gated(gate_up, Activation(gelu)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotary_and_cache_write_match_the_reference(dtype: torch.dtype, norm: bool, rng: random.Random) -> None:
    for _ in range(3):
        kv_heads = rng.choice([1, 2, 5])
        heads, size, tokens = kv_heads * rng.choice([1, 3, 4]), rng.choice([2, 10, 64, 80]), rng.randint(1, 5)
        joint = randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
        table = reference.rotary_table(torch.rand(size // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        slots = torch.randperm(20)[:tokens]
        slots[torch.rand(tokens) < 0.2] = -1
        weights = [randn(size, dtype=dtype) if norm else None for _ in "qk"]
        found = []
        for route in ("reference", "triton"):
            dispatch.force(route)
            cache = torch.full((20, 2, kv_heads, size), torch.nan, dtype=dtype, device=DEVICE)
            rows = joint.clone()
            query = operations.rotate_and_write(rows, table, slots.to(DEVICE), cache, *weights, 1e-5)
            assert query.data_ptr() == rows.data_ptr()
            values = cache[slots[slots >= 0].to(DEVICE), 1].flatten(1)
            assert values.equal(joint[slots.to(DEVICE) >= 0, (heads + kv_heads) * size :])
            found.append((query, cache))
        assert_close(found[1][0], found[0][0])
        assert found[1][1].isnan().equal(found[0][1].isnan())  # only the given slots are written
        assert_close(found[1][1].nan_to_num(), found[0][1].nan_to_num())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_of_queries_alone_is_in_place(dtype: torch.dtype, norm: bool, rng: random.Random) -> None:
    for _ in range(3):
        heads, size, tokens = rng.randint(1, 9), rng.choice([2, 10, 80, 512]), rng.randint(1, 5)
        queries, weight = randn(tokens, heads * size, dtype=dtype), randn(size, dtype=dtype) if norm else None
        table = reference.rotary_table(torch.rand(size // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        expected = queries.clone().view(tokens, heads, size)
        if weight is not None:
            expected = reference.rms_norm(expected, weight, 1e-5)
        expected = reference.rotate(expected, table)
        for route in ("reference", "triton"):
            dispatch.force(route)
            rows = queries.clone()
            found = operations.rotate(rows, table, weight, 1e-5)
            assert found.data_ptr() == rows.data_ptr()
            assert_close(found, expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalized_values_and_values_shared_with_keys_match_the_reference(
    dtype: torch.dtype, shared: bool, rng: random.Random
) -> None:
    """Shared values are the keys before norm and rotary embedding."""
    for _ in range(3):
        kv_heads = rng.choice([1, 2, 5])
        heads, size, tokens = kv_heads * rng.choice([1, 3, 4]), rng.choice([2, 10, 80, 512]), rng.randint(1, 5)
        joint = randn(tokens, (heads + (1 if shared else 2) * kv_heads) * size, dtype=dtype)
        table = reference.rotary_table(torch.rand(size // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        # Small gains: with large ones, the halves of a rotated pair are rounded by more than their difference.
        slots, weights = torch.randperm(20)[:tokens].to(DEVICE), [randn(size, dtype=dtype).clamp(-1, 1) for _ in "qk"]
        found = []
        for route in ("reference", "triton"):
            dispatch.force(route)
            cache, rows = torch.full((20, 2, kv_heads, size), torch.nan, dtype=dtype, device=DEVICE), joint.clone()
            query = operations.rotate_and_write(rows, table, slots, cache, *weights, 1e-5, None, True, shared)
            assert query.data_ptr() == rows.data_ptr() or (shared and route == "reference")
            found.append((query, cache))
        values = joint[:, -kv_heads * size :].view(tokens, kv_heads, size)
        assert_close(found[0][1][slots, 1], reference.rms_norm(values, values.new_ones(size), 1e-5))
        assert_close(found[1][0], found[0][0])
        assert_close(found[1][1].nan_to_num(), found[0][1].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_latents_norm_rotary_and_cache_write_match_the_reference(dtype: torch.dtype, rng: random.Random) -> None:
    for heads, size, rotary in ((1, 8, 2), (rng.randint(2, 40), 24, 6), (17, rng.randint(30, 100), 16)):
        tokens = rng.randint(1, 5)
        query, latents, gains = (
            randn(tokens, heads, size + rotary, dtype=dtype),
            poisoned_view(tokens, size + rotary, dtype)[0],
            randn(size, dtype=dtype),
        )
        table = reference.rotary_table(torch.rand(rotary // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        slots = torch.randperm(20)[:tokens]
        slots[torch.rand(tokens) < 0.2] = -1
        found = []
        for route in ("reference", "triton"):
            dispatch.force(route)
            cache = torch.full((20, 1, 1, size + rotary), torch.nan, dtype=dtype, device=DEVICE)
            rotated = query.clone()
            operations.rotate_and_write_latents(rotated, latents.clone(), gains, table, slots.to(DEVICE), cache, 1e-5)
            assert rotated[..., :size].equal(query[..., :size])
            found.append((rotated, cache))
        assert_close(found[1][0], found[0][0])
        assert found[1][1].isnan().equal(found[0][1].isnan())  # only the given slots are written
        assert_close(found[1][1].nan_to_num(), found[0][1].nan_to_num())


def test_fp8_cache_write_of_mla_latents_saturates() -> None:
    """Numbers that are too large become the largest one of the format. The inputs are as in the next test."""
    latents = torch.tensor([[1.0, -1.0, 1.0, 1.0, 1e9, 3.25]], device=DEVICE)
    table = reference.rotary_table(torch.zeros(1), torch.arange(1), torch.float32).to(DEVICE)
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(3, 1, 1, 6, device=DEVICE).to(torch.float8_e4m3fn)
        gains, query = torch.tensor([2.0, 0.5, 900.0, 0.0], device=DEVICE), torch.zeros(1, 2, 6, device=DEVICE)
        operations.rotate_and_write_latents(query, latents.clone(), gains, table, torch.tensor([1], device=DEVICE), cache, 0.0)
        expected = [[0] * 6, [2, -0.5, 448, 0, 448, 3.25], [0] * 6]
        torch.testing.assert_close(cache.float().flatten(1).cpu(), torch.tensor(expected))


def test_fp8_cache_write_divides_by_scales_and_saturates() -> None:
    """Numbers that fp8 can hold, so that nothing is rounded (the interpreter rounds wrongly), and numbers that are too large."""
    joint = torch.tensor([[0.0, 0, 1.5, -0.875, 448 * 4, 8], [0, 0, 1e9, 3.25, -1e9, 0.5]], device=DEVICE)
    table = reference.rotary_table(torch.zeros(1), torch.arange(2), torch.float32).to(DEVICE)
    scales = torch.tensor([[0.5], [4.0]], device=DEVICE)
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(3, 2, 1, 2, device=DEVICE).to(torch.float8_e4m3fn)
        operations.rotate_and_write(joint.clone(), table, torch.tensor([2, 0], device=DEVICE), cache, None, None, 1e-5, scales)
        expected = [[448, 6.5, -448, 0.125], [0, 0, 0, 0], [3, -1.75, 448, 2]]
        torch.testing.assert_close(cache.float().flatten(1).cpu(), torch.tensor(expected))


def test_rows_are_bit_identical_whatever_the_other_rows_are(rng: random.Random) -> None:
    """Alone and beside others, some of which are NaN."""
    size, heads = 10, 4
    joint, weight = randn(5, heads * size, dtype=torch.float32), randn(size, dtype=torch.float32)
    joint[[0, 3]] = torch.nan
    table = reference.rotary_table(torch.rand(size // 2), torch.arange(5), torch.float32).to(DEVICE)
    caches = torch.zeros(2, 5, 2, 1, size, device=DEVICE)
    slots = torch.arange(5, device=DEVICE)
    alone = operations.rotate_and_write(joint[2:3].clone(), table[2:3], slots[2:3], caches[0], weight, weight, 1e-5)
    together = operations.rotate_and_write(joint.clone(), table, slots, caches[1], weight, weight, 1e-5)
    assert alone[0].equal(together[2])
    assert caches[0, 2].equal(caches[1, 2])
    states, gains = joint, randn(heads * size, dtype=torch.float32)
    assert operations.rms_norm(states[2:3], gains, 1e-5)[0].equal(operations.rms_norm(states, gains, 1e-5)[2])
    assert operations.gated(states[2:3])[0].equal(operations.gated(states)[2])


def test_empty_inputs_give_empty_outputs() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    assert operations.rms_norm(empty, torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)
    assert operations.gated(empty).shape == (0, 4)


def test_dispatch_chooses_the_reference_on_cpu_and_refuses_unknown_names() -> None:
    dispatch.force("")
    assert dispatch.triton_for(torch.empty(1)) is False
    dispatch.force("reference")
    assert dispatch.triton_for(torch.empty(1, device=DEVICE)) is False
    with pytest.raises(ValueError, match="no such kernels: 'cuda'"):
        dispatch.force("cuda")
