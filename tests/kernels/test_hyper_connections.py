"""Mixtures of residual streams, by torch and by Triton's kernel, are those of float64; streams that are added to, too."""

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
def _clean() -> Iterator[None]:
    yield
    dispatch.force("")


def exact(
    streams: Tensor, more: Tensor | None, given: Tensor | None, shares: HyperConnectionWeights, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams afterwards, what is seen, and what is given."""
    wide, count = streams.double(), streams.shape[1]
    if more is not None and given is not None:
        wide = (wide + given.double().unsqueeze(2) * more.double().unsqueeze(1)).to(streams.dtype).double()
    flat = wide.flatten(1)
    normal = flat / (flat.square().mean(1, keepdim=True) + epsilon).sqrt()
    found = (normal @ shares.matrix.double().t() * shares.scale.double() + shares.base.double()).sigmoid()
    seen, gives = found[:, :count] + shares.epsilon, found[:, count:] * shares.magnitude + shares.epsilon
    return wide, torch.einsum("tc,tch->th", seen, wide), gives


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "size", "gives", "adds"), [(4, 40, True, True), (3, 17, True, False), (2, 700, False, True), (1, 9, True, True)]
)
def test_mixtures(count: int, size: int, gives: bool, adds: bool, dtype: torch.dtype, route: str) -> None:
    rng = random.Random(size)
    torch.manual_seed(size)
    tokens, kinds = rng.randint(2, 5), 1 + gives

    def numbers(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * factor).to(DEVICE)

    shares = HyperConnectionWeights(
        numbers(kinds * count, count * size, factor=size**-0.5), numbers(kinds * count), numbers(kinds * count), 1.7, 0.01
    )
    streams = numbers(tokens, count, size).to(dtype)
    more, given = (numbers(tokens, size).to(dtype), numbers(tokens, count)) if adds else (None, None)
    wide, seen, giving = (x.cpu() for x in exact(streams, more, given, shares, 1e-3))
    dispatch.force(route)
    mixed, found = mix(streams, more, given, shares, 1e-3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(streams.double().cpu(), wide, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mixed.double().cpu(), seen, rtol=tolerance, atol=tolerance)
    assert mixed.dtype == dtype
    if gives:
        assert found is not None
        torch.testing.assert_close(found.double().cpu(), giving, rtol=tolerance, atol=tolerance)
    else:
        assert found is None


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "size", "rounds", "adds"),
    [(4, 40, 20, True), (3, 17, 2, True), (2, 300, 1, False), (1, 9, 3, True), (4, 33, 0, True)],
)
def test_mixtures_of_each_other(count: int, size: int, rounds: int, adds: bool, dtype: torch.dtype, route: str) -> None:
    """As DeepSeek V4's own code has them; without rounds the mean is seen."""
    torch.manual_seed(size)
    config = SimpleNamespace(hc_mult=count, hc_sinkhorn_iters=rounds, hc_eps=1e-3, rms_norm_eps=1e-3, hidden_size=size)
    theirs = DeepseekV4HyperConnection(config).double()
    for values in theirs.parameters():
        values.data.normal_(std=size**-0.5 if values.dim() == 2 else 1.0)
    parts = (values.detach().float().to(DEVICE) for values in (theirs.fn, theirs.scale, theirs.base))
    matrix, scale, base = parts
    scale = scale.repeat_interleave(torch.tensor([count, count, count**2], device=DEVICE))
    shares = HyperConnectionWeights(matrix, scale, base, 2.0, 1e-3, rounds) if rounds else None
    tokens = 3
    streams, more = (torch.randn(tokens, *shape).to(DEVICE, dtype) for shape in ((count, size), (size,)))
    gives = torch.rand(tokens, count + count**2, device=DEVICE)
    wide = streams.double().cpu()
    if adds:
        own, cross = gives.double().cpu().split_with_sizes((count, count**2), 1)
        wide = own.unsqueeze(2) * more.double().cpu().unsqueeze(1) + cross.view(-1, count, count).transpose(1, 2) @ wide
        wide = wide.to(dtype).double()
    post, comb, seen = (x[:, 0] for x in theirs(wide.unsqueeze(1)))
    dispatch.force(route)
    mixed, found = mix(streams, more if adds else None, gives if adds else None, shares, 1e-3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(streams.double().cpu(), wide, rtol=tolerance, atol=tolerance)
    seen = seen if rounds else wide.mean(1)
    torch.testing.assert_close(mixed.double().cpu(), seen.double(), rtol=tolerance, atol=tolerance)
    if not rounds:
        assert found is None
        return
    assert found is not None
    torch.testing.assert_close(found.double().cpu(), torch.cat((post, comb.flatten(1)), 1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_the_last_mixture_gives_nothing(route: str) -> None:
    """Of streams that become mixtures of each other before it (DeepSeek V4)."""
    torch.manual_seed(3)
    streams, more, given = (torch.randn(*shape) for shape in ((2, 3, 10), (2, 10), (2, 12)))
    matrix, scale, base = (torch.randn(*shape) for shape in ((3, 30), (3,), (3,)))
    added = given[:, :3].unsqueeze(2) * more.unsqueeze(1)
    wide = (added + given[:, 3:].view(-1, 3, 3).transpose(1, 2) @ streams).double()
    flat = wide.flatten(1)
    normal = flat * (flat.square().mean(1, keepdim=True) + 1e-3).rsqrt()
    seen = torch.sigmoid(normal @ matrix.double().t() * scale + base) + 1e-3
    shares = HyperConnectionWeights(*(x.to(DEVICE) for x in (matrix, scale, base)), 2.0, 1e-3)
    dispatch.force(route)
    mixed, found = mix(*(x.to(DEVICE) for x in (streams, more, given)), shares, 1e-3)
    torch.testing.assert_close(mixed.double().cpu(), (seen.unsqueeze(2) * wide).sum(1), rtol=1e-5, atol=1e-5)
    assert found is None


def test_of_no_tokens() -> None:
    dispatch.force("triton")
    empty = torch.zeros(0, 2, 8, device=DEVICE)
    shares = HyperConnectionWeights(*(torch.zeros(*shape, device=DEVICE) for shape in ((4, 16), (4,), (4,))), 1.0, 0.0)
    mixed, given = mix(empty, None, None, shares, 1e-6)
    assert mixed.shape == (0, 8)
    assert given is not None
    assert given.shape == (0, 2)


def test_it_is_compiled_as_it_is_launched() -> None:
    """In the order of its arguments."""
    for one in (*fused_hyper_connections.compilations(), *fused_manifold_connections.compilations()):
        names = [name for name in one.kernel.arg_names if name not in one.constants]
        assert list(one.signature) == names
