"""Mixtures of residual streams, by torch and by Triton's kernel, are those of float64; streams that are added to, too."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import choose, fused_mixing
from penstock.kernels.mixing import mix
from penstock.kernels.reference import Shares

from .test_paged_attention import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    choose.force("")


def exact(
    streams: Tensor, more: Tensor | None, given: Tensor | None, shares: Shares, epsilon: float
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
    chance = random.Random(size)
    torch.manual_seed(size)
    tokens, kinds = chance.randint(2, 5), 1 + gives

    def numbers(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * factor).to(DEVICE)

    shares = Shares(
        numbers(kinds * count, count * size, factor=size**-0.5), numbers(kinds * count), numbers(kinds * count), 1.7, 0.01
    )
    streams = numbers(tokens, count, size).to(dtype)
    more, given = (numbers(tokens, size).to(dtype), numbers(tokens, count)) if adds else (None, None)
    wide, seen, giving = (x.cpu() for x in exact(streams, more, given, shares, 1e-3))
    choose.force(route)
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


def test_of_no_tokens() -> None:
    choose.force("triton")
    empty = torch.zeros(0, 2, 8, device=DEVICE)
    shares = Shares(*(torch.zeros(*shape, device=DEVICE) for shape in ((4, 16), (4,), (4,))), 1.0, 0.0)
    mixed, given = mix(empty, None, None, shares, 1e-6)
    assert mixed.shape == (0, 8)
    assert given is not None
    assert given.shape == (0, 2)


def test_it_is_compiled_as_it_is_launched() -> None:
    """In the order of its arguments."""
    for one in fused_mixing.compilations():
        names = [name for name in fused_mixing.mixing_kernel.arg_names if name not in one.constants]
        assert list(one.signature) == names
