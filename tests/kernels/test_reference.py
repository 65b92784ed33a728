"""The elementwise operations and the packed matrix product mean what their papers and transformers say."""

from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.models.llama import modeling_llama

from penstock.kernels import linear
from penstock.kernels.linear import (
    PIECE,
    SHORT,
    SMALL,
    Invariance,
    Weight,
    by_mkl_columns,
    compile_products,
    packed,
    plain,
    transposed,
    usual,
    with_short_route,
)
from penstock.kernels.reference import Activation, gated, rms_norm, rotary_table, rotate, squared

SIZES = [1, 7, 1000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_transformers(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, size) * 4).to(dtype)
    module = modeling_llama.LlamaRMSNorm(size, eps=1e-3)
    module.weight.data = torch.randn(size).to(dtype)
    found = rms_norm(x, module.weight.data, 1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(found, module(x).detach())


@pytest.mark.parametrize("size", [2, 6, 64])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rotation_is_transformers(tokens: int, size: int) -> None:
    config = transformers.LlamaConfig(hidden_size=size * 2, num_attention_heads=2, head_dim=size)
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.randint(0, 5000, (tokens,))
    query, key = torch.randn(tokens, 2, size), torch.randn(tokens, 3, size)
    cosine, sine = embedding(query, positions.unsqueeze(0))
    expected = modeling_llama.apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cosine, sine)
    table = rotary_table(embedding.inv_freq, positions, torch.float32)
    for x, wanted in zip((query, key), expected, strict=True):
        # Two multiplications in another order, of angles up to 5000.
        torch.testing.assert_close(rotate(x.clone(), table), wanted[0].transpose(0, 1))


def test_relu_squared_is_transformers() -> None:
    x = torch.randn(3, 77)
    torch.testing.assert_close(squared(x.clone()), transformers.activations.ACT2FN["relu2"](x), rtol=0, atol=0)


def test_rotation_is_in_place_and_leaves_position_0_alone() -> None:
    table = rotary_table(torch.rand(4), torch.tensor([0, 3]), torch.float32)
    x = torch.randn(2, 5, 8)
    before = x.clone()
    assert rotate(x, table) is x
    assert x[0].equal(before[0])
    torch.testing.assert_close(x.norm(dim=-1), before.norm(dim=-1))
    assert not x[1].equal(before[1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gates_are_transformers(size: int, name: str) -> None:
    gate, up = torch.randn(4, size), torch.randn(4, size)
    torch.testing.assert_close(
        gated(torch.cat((gate, up), -1), Activation(name != "silu")), transformers.activations.ACT2FN[name](gate) * up
    )


@pytest.mark.parametrize("limit", [0.0, 0.7])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("form", ["steep", "before", "behind"])
def test_gated_rows_know_no_neighbours(form: str, gelu: bool, limit: float) -> None:
    """Nor which of them is the last: not by a bit."""
    how = Activation(gelu, limit, form)
    x = torch.randn(200, 2 * 37)
    whole = gated(x.clone(), how)
    for rows in (1, 2, 3, 60, 199):
        assert gated(x[:rows].clone(), how).equal(whole[:rows])


@pytest.mark.parametrize("route", [plain, packed, transposed, by_mkl_columns])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(("wide", "high"), [(1, 1), (1, 7), (7, 1000), (1000, 1), (1000, 7), (2 * PIECE, 3)])
def test_every_route_is_the_same_product(wide: int, high: int, rows: int, bias: bool, route: Any) -> None:
    matrix, x = torch.randn(high, wide), torch.randn(rows, wide)
    vector = torch.randn(high) if bias else None
    torch.testing.assert_close(route(matrix, vector)(x), functional.linear(x, matrix, vector), rtol=1.3e-6, atol=3e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_a_small_weight_may_take_the_short_way(bias: bool) -> None:
    weight, vector = torch.randn(512, 128), torch.randn(512) if bias else None
    most, taken = SHORT // weight.numel(), []

    def usual_way(x: Any) -> Any:
        taken.append(len(x))
        return functional.linear(x, weight, vector)

    product = with_short_route(weight, vector, usual_way)
    for rows in (1, most, most + 1, 40):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(product(x), functional.linear(x, weight, vector), rtol=1.3e-6, atol=3e-4)
    assert taken == [most + 1, 40]


def test_only_drafts_take_it() -> None:
    small, large = torch.randn(4, 8), torch.randn(SHORT // 8 + 1, 8)
    ways = [
        Weight(small),
        Weight(small, exact=Invariance.GUESS),
        Weight(large, exact=Invariance.GUESS),
        Weight(small.bfloat16(), exact=Invariance.GUESS),
    ]
    assert ["shortest" in weight.product.__qualname__ for weight in ways] == [False, True, False, False]
    assert [weight.bytes for weight in ways[:2]] == [small.nbytes, 2 * small.nbytes]


@pytest.mark.parametrize("inputs", [200, 1500])
@pytest.mark.parametrize("route", [packed, *([by_mkl_columns] if linear.by_mkl() else [])])
def test_rows_are_independent_to_the_last_bit(route: Any, inputs: int) -> None:
    product, x = route(torch.randn(300, inputs), torch.randn(300)), torch.randn(700, inputs)
    whole = product(x)
    for rows in (1, 2, 5, 31, 64, 129, 300):
        assert product(x[:rows].clone()).equal(whole[:rows])


@pytest.mark.parametrize("inputs", [200, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_invariant_weights_are_independent(dtype: torch.dtype, inputs: int) -> None:
    """In 16 bits, too, in which each processor has another way."""
    x, matrix, bias = (torch.randn(size).to(dtype) for size in ((200, inputs), (300, inputs), (300,)))
    product = Weight(matrix, bias, Invariance.INVARIANT)
    whole = product(x)
    torch.testing.assert_close(whole, functional.linear(x, matrix, bias), rtol=1e-2, atol=1e-1)
    assert all(product(x[:rows].clone()).equal(whole[:rows]) for rows in range(1, 200))


@pytest.mark.skipif(not linear.by_mkl(), reason="nobody chooses between MKL and oneDNN here")
@pytest.mark.parametrize("inputs", [3, 64, 1500])
@pytest.mark.parametrize("outputs", [1, 2, 7])
def test_rows_of_few_outputs_are_independent_as_well(outputs: int, inputs: int) -> None:
    product, x = Weight(torch.randn(outputs, inputs)), torch.randn(300, inputs)
    whole = product(x)
    assert all(product(x[:rows].clone()).equal(whole[:rows]) for rows in range(1, 300))


def test_small_weights_go_by_mkl_where_that_is_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways() -> list[str]:
        sizes = [(SMALL // 4, 4), (SMALL // 4 + 1, 4), (1, SMALL)]
        weights = [*(torch.zeros(size) for size in sizes), torch.zeros(4, 4, dtype=torch.float16)]
        return [Weight(weight).product.__qualname__.partition(".")[0] for weight in weights]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(linear, "by_mkl", lambda: True)
    assert ways() == ["by_mkl_columns", "packed", "packed", "plain"]
    monkeypatch.setattr(linear, "by_mkl", lambda: False)
    assert ways() == ["packed", "packed", "packed", "plain"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(linear, "by_mkl", lambda: True)
    assert ways() == ["packed", "packed", "packed", "plain"]


def test_few_numbers_of_rows_are_computed_and_they_are_little_more() -> None:
    assert [usual(rows) for rows in (1, 2, 15, 16, 17, 31, 33, 4095, 4096)] == [2, 2, 15, 16, 18, 32, 36, 4096, 4096]
    assert all(rows <= usual(rows) < 1.125 * rows for rows in range(2, 5000))
    assert len({usual(rows) for rows in range(1, 4097)}) == 15 + 8 * 8


def test_products_are_compiled_once_for_each_shape_of_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[torch.Size, int]] = []
    monkeypatch.setattr("penstock.kernels.linear._route", lambda *given: packed)
    weights = [Weight(torch.randn(high, 6), bias) for high, bias in ((4, None), (5, None), (4, None), (4, torch.randn(4)))]
    for weight in weights:
        weight.product = lambda x, weight=weight: compiled.append((weight.shape, len(x))) or x  # type: ignore[misc,func-returns-value]
    compile_products(weights, 20)
    assert sorted(compiled) == sorted((torch.Size((high, 6)), rows) for high in (4, 4, 5) for rows in [*range(2, 17), 18, 20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(("wide", "high"), [(1, 1), (1, 7), (7, 1000), (1000, 1), (1000, 7)])
def test_a_weight_multiplies_as_linear_does(wide: int, high: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    matrix, x = torch.randn(high, wide, dtype=dtype), torch.randn(rows, wide, dtype=dtype)
    vector = torch.randn(high, dtype=dtype) if bias else None
    weight = Weight(matrix, vector)
    assert weight.bytes == (high * wide + high * bias) * dtype.itemsize
    # Sums of a thousand products in another order: their error grows with the root of their number.
    torch.testing.assert_close(
        weight(x), functional.linear(x, matrix, vector), rtol=1.3e-6 if dtype.itemsize == 4 else 1.6e-2, atol=3e-4
    )


def test_a_weight_takes_rows_that_are_a_view() -> None:
    """Slices of columns, as attention's output may be."""
    matrix, x = torch.randn(5, 8), torch.randn(6, 16)
    torch.testing.assert_close(Weight(matrix)(x[:, 8:]), x[:, 8:] @ matrix.T)
