"""The fused elementwise kernels mean what the plain operations mean: odd shapes, views, in place; rows know no neighbours."""

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
# float16 rounds where the reference rounds; the interpreter cuts bfloat16 off instead of rounding, each time by up to a unit.
# bfloat16: the interpreter cuts off what the reference rounds, three times where what is normalized is turned.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (3e-3, 3e-3), torch.bfloat16: (4e-2, 9e-2)}


@pytest.fixture(autouse=True)
def by_triton() -> Iterator[None]:
    dispatch.force("triton")
    yield
    dispatch.force("")


def close(found: Tensor, expected: Tensor) -> None:
    relative, absolute = TOLERANCES[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) * 2).to(dtype).to(DEVICE)


def wide(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view [rows, size] of something wider that is NaN elsewhere, and the whole."""
    whole = torch.full((rows, size + 7), torch.nan, dtype=dtype, device=DEVICE)
    whole[:, 3 : size + 3] = randn(rows, size, dtype=dtype)
    return whole[:, 3 : size + 3], whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype, rng: random.Random) -> None:
    from penstock.kernels import fused_norm

    for size in (1, 7, rng.randint(30, 80), rng.randint(900, 1100)):
        rows = rng.randint(1, 5)
        x, _ = wide(rows, size, dtype)
        weight = randn(size, dtype=dtype)
        out = torch.full((rows, size), torch.nan, dtype=dtype, device=DEVICE)
        close(fused_norm.rms_norm(x, weight, 1e-3, out), reference.rms_norm(x, weight, 1e-3))
        close(operations.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_place(dtype: torch.dtype, rng: random.Random) -> None:
    """A part of the heads of joint rows, as queries and keys are; the others stay."""
    from penstock.kernels import fused_norm

    tokens, heads, size = rng.randint(1, 4), rng.randint(1, 9), rng.choice([6, 64, 80])
    joint = randn(tokens, (heads + 3) * size, dtype=dtype)
    before, weight = joint.clone(), randn(size, dtype=dtype)
    part = joint.view(tokens, -1, size)[:, 2 : heads + 2]
    expected = reference.rms_norm(part, weight, 1e-6)
    fused_norm.rms_norm(part, weight, 1e-6, part)
    close(part, expected)
    assert joint[:, : 2 * size].equal(before[:, : 2 * size])
    assert joint[:, -size:].equal(before[:, -size:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_residual(dtype: torch.dtype, rng: random.Random) -> None:
    rows, size = rng.randint(1, 5), rng.randint(1, 300)
    x, residual, weight = randn(rows, size, dtype=dtype), wide(rows, size, dtype)[0], randn(size, dtype=dtype)
    total = residual + x
    found = operations.add_rms_norm(x, residual, weight, 1e-5)
    close(residual, total)
    close(found, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_parts_of_a_product(dtype: torch.dtype, rng: random.Random, poisoned_float_outputs: None) -> None:
    """They are added up in their order, and rounded once, together with the residual."""
    rows, size, parts = rng.randint(1, 5), rng.randint(1, 300), rng.choice([1, 2, 3, 4])
    x, residual, weight = randn(parts, rows, size, dtype=torch.float32), wide(rows, size, dtype)[0], randn(size, dtype=dtype)
    begun, total = residual.clone(), x[0]
    for part in x[1:]:
        total = total + part
    total = (total + begun.float()).to(dtype)
    found = operations.add_rms_norm(x, residual, weight, 1e-5)
    close(residual, total)
    close(found, reference.rms_norm(total, weight, 1e-5))
    dispatch.force("reference")
    close(operations.add_rms_norm(x, begun, weight, 1e-5), found)
    close(begun, total)


def test_the_plain_branches(rng: random.Random) -> None:
    """What is defined in `operations` is put together from what is tested elsewhere."""
    dispatch.force("reference")
    x, residual, weight = (randn(*shape, dtype=torch.float32) for shape in ((3, 8), (3, 8), (8,)))
    total = residual + x
    assert operations.add_rms_norm(x, residual, weight, 1e-5).equal(reference.rms_norm(total, weight, 1e-5))
    assert residual.equal(total)
    assert operations.rms_norm(x, weight, 1e-5).equal(reference.rms_norm(x, weight, 1e-5))
    assert operations.gated(x, Activation(True)).equal(reference.gated(x, Activation(True)))


@pytest.mark.filterwarnings("ignore:overflow")  # an exponential that is infinite is meant
@pytest.mark.parametrize(
    "how", [PLAIN, Activation(True), *(Activation(limit=0.7, form=form) for form in ("steep", "before", "behind"))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype, how: Activation, rng: random.Random) -> None:
    from penstock.kernels import fused_activation

    for size in (1, 7, rng.randint(1000, 1100)):
        tokens = rng.randint(1, 4)
        gate_up, _ = wide(tokens, 2 * size, dtype)
        out, whole = wide(tokens, size, dtype)
        out.fill_(torch.nan)
        close(fused_activation.gated(gate_up, out, how), reference.gated(gate_up, how))
        assert whole[:, :3].isnan().all()
        assert whole[:, size + 3 :].isnan().all()
        close(operations.gated(gate_up, how), reference.gated(gate_up, how))


@pytest.mark.filterwarnings("ignore:overflow")  # an exponential that is infinite is meant
@pytest.mark.parametrize("gelu", [False, True])
def test_gates_of_large_numbers(gelu: bool) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, -1e15, 1e15, 1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    close(operations.gated(gate_up, Activation(gelu)), reference.gated(gate_up, Activation(gelu)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_and_write(dtype: torch.dtype, norm: bool, rng: random.Random) -> None:
    for _ in range(3):
        kv_heads = rng.choice([1, 2, 5])
        heads, size, tokens = kv_heads * rng.choice([1, 3, 4]), rng.choice([2, 10, 64, 80]), rng.randint(1, 5)
        joint = randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
        table = reference.rotary_table(torch.rand(size // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        slots = torch.randperm(20)[:tokens]
        slots[torch.rand(tokens) < 0.2] = -1
        weights = [randn(size, dtype=dtype) if norm else None for _ in "qk"]
        found = []
        for which in ("reference", "triton"):
            dispatch.force(which)
            cache = torch.full((20, 2, kv_heads, size), torch.nan, dtype=dtype, device=DEVICE)
            own = joint.clone()
            query = operations.rotate_and_write(own, table, slots.to(DEVICE), cache, *weights, 1e-5)
            assert query.data_ptr() == own.data_ptr()
            values = cache[slots[slots >= 0].to(DEVICE), 1].flatten(1)
            assert values.equal(joint[slots.to(DEVICE) >= 0, (heads + kv_heads) * size :])
            found.append((query, cache))
        close(found[1][0], found[0][0])
        assert found[1][1].isnan().equal(found[0][1].isnan())  # nothing but the slots is written
        close(found[1][1].nan_to_num(), found[0][1].nan_to_num())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_alone_are_turned(dtype: torch.dtype, norm: bool, rng: random.Random) -> None:
    """Where they stand."""
    for _ in range(3):
        heads, size, tokens = rng.randint(1, 9), rng.choice([2, 10, 80, 512]), rng.randint(1, 5)
        queries, weight = randn(tokens, heads * size, dtype=dtype), randn(size, dtype=dtype) if norm else None
        table = reference.rotary_table(torch.rand(size // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        expected = queries.clone().view(tokens, heads, size)
        if weight is not None:
            expected = reference.rms_norm(expected, weight, 1e-5)
        expected = reference.rotate(expected, table)
        for which in ("reference", "triton"):
            dispatch.force(which)
            own = queries.clone()
            found = operations.rotate(own, table, weight, 1e-5)
            assert found.data_ptr() == own.data_ptr()
            close(found, expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_be_normalized_and_be_keys(dtype: torch.dtype, shared: bool, rng: random.Random) -> None:
    """Those that keys are before they are normalized and turned."""
    for _ in range(3):
        kv_heads = rng.choice([1, 2, 5])
        heads, size, tokens = kv_heads * rng.choice([1, 3, 4]), rng.choice([2, 10, 80, 512]), rng.randint(1, 5)
        joint = randn(tokens, (heads + (1 if shared else 2) * kv_heads) * size, dtype=dtype)
        table = reference.rotary_table(torch.rand(size // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        # Small gains: of large ones the halves of a pair are rounded by more than is left of their difference.
        slots, weights = torch.randperm(20)[:tokens].to(DEVICE), [randn(size, dtype=dtype).clamp(-1, 1) for _ in "qk"]
        found = []
        for which in ("reference", "triton"):
            dispatch.force(which)
            cache, own = torch.full((20, 2, kv_heads, size), torch.nan, dtype=dtype, device=DEVICE), joint.clone()
            query = operations.rotate_and_write(own, table, slots, cache, *weights, 1e-5, None, True, shared)
            assert query.data_ptr() == own.data_ptr() or (shared and which == "reference")
            found.append((query, cache))
        values = joint[:, -kv_heads * size :].view(tokens, kv_heads, size)
        close(found[0][1][slots, 1], reference.rms_norm(values, values.new_ones(size), 1e-5))
        close(found[1][0], found[0][0])
        close(found[1][1].nan_to_num(), found[0][1].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_turned_and_written(dtype: torch.dtype, rng: random.Random) -> None:
    for heads, size, turned in ((1, 8, 2), (rng.randint(2, 40), 24, 6), (17, rng.randint(30, 100), 16)):
        tokens = rng.randint(1, 5)
        query, latents, gains = (
            randn(tokens, heads, size + turned, dtype=dtype),
            wide(tokens, size + turned, dtype)[0],
            randn(size, dtype=dtype),
        )
        table = reference.rotary_table(torch.rand(turned // 2), torch.randint(0, 5000, (tokens,)), dtype).to(DEVICE)
        slots = torch.randperm(20)[:tokens]
        slots[torch.rand(tokens) < 0.2] = -1
        found = []
        for which in ("reference", "triton"):
            dispatch.force(which)
            cache = torch.full((20, 1, 1, size + turned), torch.nan, dtype=dtype, device=DEVICE)
            own = query.clone()
            operations.rotate_and_write_latents(own, latents.clone(), gains, table, slots.to(DEVICE), cache, 1e-5)
            assert own[..., :size].equal(query[..., :size])
            found.append((own, cache))
        close(found[1][0], found[0][0])
        assert found[1][1].isnan().equal(found[0][1].isnan())  # nothing but the slots is written
        close(found[1][1].nan_to_num(), found[0][1].nan_to_num())


def test_latents_of_8_bits() -> None:
    """As below; what is too large becomes the largest number that there is."""
    latents = torch.tensor([[1.0, -1.0, 1.0, 1.0, 1e9, 3.25]], device=DEVICE)
    table = reference.rotary_table(torch.zeros(1), torch.arange(1), torch.float32).to(DEVICE)
    for which in ("reference", "triton"):
        dispatch.force(which)
        cache = torch.zeros(3, 1, 1, 6, device=DEVICE).to(torch.float8_e4m3fn)
        gains, query = torch.tensor([2.0, 0.5, 900.0, 0.0], device=DEVICE), torch.zeros(1, 2, 6, device=DEVICE)
        operations.rotate_and_write_latents(query, latents.clone(), gains, table, torch.tensor([1], device=DEVICE), cache, 0.0)
        expected = [[0] * 6, [2, -0.5, 448, 0, 448, 3.25], [0] * 6]
        torch.testing.assert_close(cache.float().flatten(1).cpu(), torch.tensor(expected))


def test_write_of_8_bits() -> None:
    """Numbers that 8 bits can hold, so that rounding, which the interpreter gets wrong, has nothing to do; and larger ones."""
    joint = torch.tensor([[0.0, 0, 1.5, -0.875, 448 * 4, 8], [0, 0, 1e9, 3.25, -1e9, 0.5]], device=DEVICE)
    table = reference.rotary_table(torch.zeros(1), torch.arange(2), torch.float32).to(DEVICE)
    scales = torch.tensor([[0.5], [4.0]], device=DEVICE)
    for which in ("reference", "triton"):
        dispatch.force(which)
        cache = torch.zeros(3, 2, 1, 2, device=DEVICE).to(torch.float8_e4m3fn)
        operations.rotate_and_write(joint.clone(), table, torch.tensor([2, 0], device=DEVICE), cache, None, None, 1e-5, scales)
        expected = [[448, 6.5, -448, 0.125], [0, 0, 0, 0], [3, -1.75, 448, 2]]
        torch.testing.assert_close(cache.float().flatten(1).cpu(), torch.tensor(expected))


def test_rows_do_not_know_their_neighbours(rng: random.Random) -> None:
    """To the last bit: alone as among others, some of which are NaN."""
    size, heads = 10, 4
    joint, weight = randn(5, heads * size, dtype=torch.float32), randn(size, dtype=torch.float32)
    joint[[0, 3]] = torch.nan
    table = reference.rotary_table(torch.rand(size // 2), torch.arange(5), torch.float32).to(DEVICE)
    caches = torch.zeros(2, 5, 2, 1, size, device=DEVICE)
    slots = torch.arange(5, device=DEVICE)
    alone = operations.rotate_and_write(joint[2:3].clone(), table[2:3], slots[2:3], caches[0], weight, weight, 1e-5)
    among = operations.rotate_and_write(joint.clone(), table, slots, caches[1], weight, weight, 1e-5)
    assert alone[0].equal(among[2])
    assert caches[0, 2].equal(caches[1, 2])
    states, gains = joint, randn(heads * size, dtype=torch.float32)
    assert operations.rms_norm(states[2:3], gains, 1e-5)[0].equal(operations.rms_norm(states, gains, 1e-5)[2])
    assert operations.gated(states[2:3])[0].equal(operations.gated(states)[2])


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    assert operations.rms_norm(empty, torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)
    assert operations.gated(empty).shape == (0, 4)


def test_the_choice() -> None:
    dispatch.force("")
    assert dispatch.triton_for(torch.empty(1)) is False
    dispatch.force("reference")
    assert dispatch.triton_for(torch.empty(1, device=DEVICE)) is False
    with pytest.raises(ValueError, match="no such kernels: 'cuda'"):
        dispatch.force("cuda")
