"""Hyper-connections (several residual streams per token), by the reference and by Triton's kernels, compared with float64, and with
transformers' DeepSeek V4."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_hyper_connections, fused_manifold_connections
from penstock.kernels.hyper_connections import mix
from penstock.kernels.reference import HyperConnectionWeights

from .test_paged_attention import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def automatic_dispatch() -> Iterator[None]:
    yield
    dispatch.force("")


def mix_in_float64(
    streams: Tensor, more: Tensor | None, given: Tensor | None, shares: HyperConnectionWeights, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The streams after the update, the next part's input, and the write shares of its output."""
    updated, count = streams.double(), streams.shape[1]
    if more is not None and given is not None:
        updated = (updated + given.double().unsqueeze(2) * more.double().unsqueeze(1)).to(streams.dtype).double()
    flat = updated.flatten(1)
    normalized = flat / (flat.square().mean(1, keepdim=True) + epsilon).sqrt()
    found = (normalized @ shares.matrix.double().t() * shares.scale.double() + shares.base.double()).sigmoid()
    read_shares, write_shares = found[:, :count] + shares.epsilon, found[:, count:] * shares.magnitude + shares.epsilon
    return updated, torch.einsum("tc,tch->th", read_shares, updated), write_shares


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "size", "with_write_shares", "with_update"),
    [(4, 40, True, True), (3, 17, True, False), (2, 700, False, True), (1, 9, True, True)],
)
def test_mixing_of_streams_matches_float64(
    count: int, size: int, with_write_shares: bool, with_update: bool, dtype: torch.dtype, route: str
) -> None:
    rng = random.Random(size)
    torch.manual_seed(size)
    tokens, share_kinds = rng.randint(2, 5), 1 + with_write_shares

    def numbers(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * factor).to(DEVICE)

    shares = HyperConnectionWeights(
        numbers(share_kinds * count, count * size, factor=size**-0.5),
        numbers(share_kinds * count),
        numbers(share_kinds * count),
        1.7,
        0.01,
    )
    streams = numbers(tokens, count, size).to(dtype)
    more, given = (numbers(tokens, size).to(dtype), numbers(tokens, count)) if with_update else (None, None)
    updated, expected, write_shares = (x.cpu() for x in mix_in_float64(streams, more, given, shares, 1e-3))
    dispatch.force(route)
    mixed, found = mix(streams, more, given, shares, 1e-3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(streams.double().cpu(), updated, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mixed.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    assert mixed.dtype == dtype
    if with_write_shares:
        assert found is not None
        torch.testing.assert_close(found.double().cpu(), write_shares, rtol=tolerance, atol=tolerance)
    else:
        assert found is None


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "size", "rounds", "with_update"),
    [(4, 40, 20, True), (3, 17, 2, True), (2, 300, 1, False), (1, 9, 3, True), (4, 33, 0, True)],
)
def test_manifold_constrained_mixing_matches_transformers(
    count: int, size: int, rounds: int, with_update: bool, dtype: torch.dtype, route: str
) -> None:
    """DeepSeek V4; with 0 Sinkhorn rounds the input of the next part is the mean of the streams."""
    torch.manual_seed(size)
    config = SimpleNamespace(hc_mult=count, hc_sinkhorn_iters=rounds, hc_eps=1e-3, rms_norm_eps=1e-3, hidden_size=size)
    module = DeepseekV4HyperConnection(config).double()
    for values in module.parameters():
        values.data.normal_(std=size**-0.5 if values.dim() == 2 else 1.0)
    parts = (values.detach().float().to(DEVICE) for values in (module.fn, module.scale, module.base))
    matrix, scale, base = parts
    scale = scale.repeat_interleave(torch.tensor([count, count, count**2], device=DEVICE))
    shares = HyperConnectionWeights(matrix, scale, base, 2.0, 1e-3, rounds) if rounds else None
    tokens = 3
    streams, more = (torch.randn(tokens, *shape).to(DEVICE, dtype) for shape in ((count, size), (size,)))
    given_shares = torch.rand(tokens, count + count**2, device=DEVICE)
    updated = streams.double().cpu()
    if with_update:
        own, cross = given_shares.double().cpu().split_with_sizes((count, count**2), 1)
        updated = own.unsqueeze(2) * more.double().cpu().unsqueeze(1) + cross.view(-1, count, count).transpose(1, 2) @ updated
        updated = updated.to(dtype).double()
    post, mixing, expected = (x[:, 0] for x in module(updated.unsqueeze(1)))
    dispatch.force(route)
    mixed, found = mix(streams, more if with_update else None, given_shares if with_update else None, shares, 1e-3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(streams.double().cpu(), updated, rtol=tolerance, atol=tolerance)
    expected = expected if rounds else updated.mean(1)
    torch.testing.assert_close(mixed.double().cpu(), expected.double(), rtol=tolerance, atol=tolerance)
    if not rounds:
        assert found is None
        return
    assert found is not None
    torch.testing.assert_close(found.double().cpu(), torch.cat((post, mixing.flatten(1)), 1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_last_mixing_returns_no_write_shares(route: str) -> None:
    """Although the streams were mixed with each other before it (DeepSeek V4)."""
    torch.manual_seed(3)
    streams, more, given = (torch.randn(*shape) for shape in ((2, 3, 10), (2, 10), (2, 12)))
    matrix, scale, base = (torch.randn(*shape) for shape in ((3, 30), (3,), (3,)))
    added = given[:, :3].unsqueeze(2) * more.unsqueeze(1)
    updated = (added + given[:, 3:].view(-1, 3, 3).transpose(1, 2) @ streams).double()
    flat = updated.flatten(1)
    normalized = flat * (flat.square().mean(1, keepdim=True) + 1e-3).rsqrt()
    read_shares = torch.sigmoid(normalized @ matrix.double().t() * scale + base) + 1e-3
    shares = HyperConnectionWeights(*(x.to(DEVICE) for x in (matrix, scale, base)), 2.0, 1e-3)
    dispatch.force(route)
    mixed, found = mix(*(x.to(DEVICE) for x in (streams, more, given)), shares, 1e-3)
    torch.testing.assert_close(mixed.double().cpu(), (read_shares.unsqueeze(2) * updated).sum(1), rtol=1e-5, atol=1e-5)
    assert found is None


def test_mixing_of_no_tokens_returns_empty_tensors() -> None:
    dispatch.force("triton")
    empty = torch.zeros(0, 2, 8, device=DEVICE)
    shares = HyperConnectionWeights(*(torch.zeros(*shape, device=DEVICE) for shape in ((4, 16), (4,), (4,))), 1.0, 0.0)
    mixed, given = mix(empty, None, None, shares, 1e-6)
    assert mixed.shape == (0, 8)
    assert given is not None
    assert given.shape == (0, 2)


def test_ahead_of_time_signatures_match_the_kernels_parameters() -> None:
    """And are in the same order."""
    for compilation in (*fused_hyper_connections.compilations(), *fused_manifold_connections.compilations()):
        names = [name for name in compilation.kernel.arg_names if name not in compilation.constants]
        assert list(compilation.signature) == names
