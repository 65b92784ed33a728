"""The reference's elementwise operations compared with transformers, and the CPU's routes of matrix products (`linear`) with
torch's: results, batch invariance, and which route is chosen."""

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
def test_rms_norm_matches_transformers(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, size) * 4).to(dtype)
    module = modeling_llama.LlamaRMSNorm(size, eps=1e-3)
    module.weight.data = torch.randn(size).to(dtype)
    found = rms_norm(x, module.weight.data, 1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(found, module(x).detach())


@pytest.mark.parametrize("size", [2, 6, 64])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rotary_embedding_matches_transformers(tokens: int, size: int) -> None:
    config = transformers.LlamaConfig(hidden_size=size * 2, num_attention_heads=2, head_dim=size)
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.randint(0, 5000, (tokens,))
    query, key = torch.randn(tokens, 2, size), torch.randn(tokens, 3, size)
    cosine, sine = embedding(query, positions.unsqueeze(0))
    expected = modeling_llama.apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cosine, sine)
    table = rotary_table(embedding.inv_freq, positions, torch.float32)
    for x, expected_x in zip((query, key), expected, strict=True):
        # Two multiplications in another order, of angles up to 5000.
        torch.testing.assert_close(rotate(x.clone(), table), expected_x[0].transpose(0, 1))


def test_squared_relu_matches_transformers() -> None:
    x = torch.randn(3, 77)
    torch.testing.assert_close(squared(x.clone()), transformers.activations.ACT2FN["relu2"](x), rtol=0, atol=0)


def test_rotary_embedding_is_in_place_and_leaves_position_0_unchanged() -> None:
    table = rotary_table(torch.rand(4), torch.tensor([0, 3]), torch.float32)
    x = torch.randn(2, 5, 8)
    before = x.clone()
    assert rotate(x, table) is x
    assert x[0].equal(before[0])
    torch.testing.assert_close(x.norm(dim=-1), before.norm(dim=-1))
    assert not x[1].equal(before[1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_swiglu_and_geglu_match_transformers(size: int, name: str) -> None:
    gate, up = torch.randn(4, size), torch.randn(4, size)
    torch.testing.assert_close(
        gated(torch.cat((gate, up), -1), Activation(name != "silu")), transformers.activations.ACT2FN[name](gate) * up
    )


@pytest.mark.parametrize("limit", [0.0, 0.7])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("form", ["steep", "before", "behind"])
def test_gated_activation_of_a_row_is_bit_identical_for_any_number_of_rows(form: str, gelu: bool, limit: float) -> None:
    activation = Activation(gelu, limit, form)
    x = torch.randn(200, 2 * 37)
    whole = gated(x.clone(), activation)
    for rows in (1, 2, 3, 60, 199):
        assert gated(x[:rows].clone(), activation).equal(whole[:rows])


@pytest.mark.parametrize("route", [plain, packed, transposed, by_mkl_columns])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 7), (7, 1000), (1000, 1), (1000, 7), (2 * PIECE, 3)])
def test_every_product_route_matches_torch(inputs: int, outputs: int, rows: int, bias: bool, route: Any) -> None:
    matrix, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    vector = torch.randn(outputs) if bias else None
    torch.testing.assert_close(route(matrix, vector)(x), functional.linear(x, matrix, vector), rtol=1.3e-6, atol=3e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_small_weights_use_the_short_route_for_few_rows_only(bias: bool) -> None:
    weight, vector = torch.randn(512, 128), torch.randn(512) if bias else None
    max_rows, usual_calls = SHORT // weight.numel(), []

    def usual_route(x: Any) -> Any:
        usual_calls.append(len(x))
        return functional.linear(x, weight, vector)

    product = with_short_route(weight, vector, usual_route)
    for rows in (1, max_rows, max_rows + 1, 40):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(product(x), functional.linear(x, weight, vector), rtol=1.3e-6, atol=3e-4)
    assert usual_calls == [max_rows + 1, 40]


def test_only_small_float32_weights_of_draft_models_use_the_short_route() -> None:
    small, large = torch.randn(4, 8), torch.randn(SHORT // 8 + 1, 8)
    weights = [
        Weight(small),
        Weight(small, exact=Invariance.GUESS),
        Weight(large, exact=Invariance.GUESS),
        Weight(small.bfloat16(), exact=Invariance.GUESS),
    ]
    assert ["shortest" in weight.product.__qualname__ for weight in weights] == [False, True, False, False]
    assert [weight.bytes for weight in weights[:2]] == [small.nbytes, 2 * small.nbytes]


@pytest.mark.parametrize("inputs", [200, 1500])
@pytest.mark.parametrize("route", [packed, *([by_mkl_columns] if linear.by_mkl() else [])])
def test_product_rows_are_bit_identical_for_any_number_of_rows(route: Any, inputs: int) -> None:
    product, x = route(torch.randn(300, inputs), torch.randn(300)), torch.randn(700, inputs)
    whole = product(x)
    for rows in (1, 2, 5, 31, 64, 129, 300):
        assert product(x[:rows].clone()).equal(whole[:rows])


@pytest.mark.parametrize("inputs", [200, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_batch_invariant_weights_are_bit_identical_for_any_number_of_rows(dtype: torch.dtype, inputs: int) -> None:
    """Also in 16 bits, where each CPU has another route."""
    x, matrix, bias = (torch.randn(size).to(dtype) for size in ((200, inputs), (300, inputs), (300,)))
    product = Weight(matrix, bias, Invariance.INVARIANT)
    whole = product(x)
    torch.testing.assert_close(whole, functional.linear(x, matrix, bias), rtol=1e-2, atol=1e-1)
    assert all(product(x[:rows].clone()).equal(whole[:rows]) for rows in range(1, 200))


@pytest.mark.skipif(not linear.by_mkl(), reason="this machine has no choice between MKL and oneDNN")
@pytest.mark.parametrize("inputs", [3, 64, 1500])
@pytest.mark.parametrize("outputs", [1, 2, 7])
def test_rows_of_few_outputs_are_bit_identical_for_any_number_of_rows(outputs: int, inputs: int) -> None:
    product, x = Weight(torch.randn(outputs, inputs)), torch.randn(300, inputs)
    whole = product(x)
    assert all(product(x[:rows].clone()).equal(whole[:rows]) for rows in range(1, 300))


def test_small_weights_use_mkl_with_one_thread_on_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    def routes() -> list[str]:
        sizes = [(SMALL // 4, 4), (SMALL // 4 + 1, 4), (1, SMALL)]
        weights = [*(torch.zeros(size) for size in sizes), torch.zeros(4, 4, dtype=torch.float16)]
        return [Weight(weight).product.__qualname__.partition(".")[0] for weight in weights]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(linear, "by_mkl", lambda: True)
    assert routes() == ["by_mkl_columns", "packed", "packed", "plain"]
    monkeypatch.setattr(linear, "by_mkl", lambda: False)
    assert routes() == ["packed", "packed", "packed", "plain"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(linear, "by_mkl", lambda: True)
    assert routes() == ["packed", "packed", "packed", "plain"]


def test_padded_row_counts_are_few_and_at_most_an_eighth_larger() -> None:
    assert [usual(rows) for rows in (1, 2, 15, 16, 17, 31, 33, 4095, 4096)] == [2, 2, 15, 16, 18, 32, 36, 4096, 4096]
    assert all(rows <= usual(rows) < 1.125 * rows for rows in range(2, 5000))
    assert len({usual(rows) for rows in range(1, 4097)}) == 15 + 8 * 8


def test_products_are_compiled_once_for_each_weight_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[torch.Size, int]] = []
    monkeypatch.setattr("penstock.kernels.linear._route", lambda *given: packed)
    weights = [Weight(torch.randn(outputs, 6), bias) for outputs, bias in ((4, None), (5, None), (4, None), (4, torch.randn(4)))]
    for weight in weights:
        weight.product = lambda x, weight=weight: compiled.append((weight.shape, len(x))) or x  # type: ignore[misc,func-returns-value]
    compile_products(weights, 20)
    assert sorted(compiled) == sorted((torch.Size((outputs, 6)), rows) for outputs in (4, 4, 5) for rows in [*range(2, 17), 18, 20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 7), (7, 1000), (1000, 1), (1000, 7)])
def test_weight_product_matches_functional_linear(inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    matrix, x = torch.randn(outputs, inputs, dtype=dtype), torch.randn(rows, inputs, dtype=dtype)
    vector = torch.randn(outputs, dtype=dtype) if bias else None
    weight = Weight(matrix, vector)
    assert weight.bytes == (outputs * inputs + outputs * bias) * dtype.itemsize
    # A thousand products are summed in another order: the error grows with the square root of their number.
    torch.testing.assert_close(
        weight(x), functional.linear(x, matrix, vector), rtol=1.3e-6 if dtype.itemsize == 4 else 1.6e-2, atol=3e-4
    )


def test_weight_product_accepts_views_of_rows() -> None:
    """Slices of columns, as attention's output may be."""
    matrix, x = torch.randn(5, 8), torch.randn(6, 16)
    torch.testing.assert_close(Weight(matrix)(x[:, 8:]), x[:, 8:] @ matrix.T)
