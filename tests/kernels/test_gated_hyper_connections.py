"""Gated hyper-connections (Qwen 4 Exp), by the reference and by Triton's kernels, compared with transformers in float64."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_gated_hyper_connections
from penstock.kernels.gated_hyper_connections import gathered, spread

from .test_hyper_connections import TOLERANCE
from .test_paged_attention import DEVICE


@pytest.fixture(autouse=True)
def automatic_dispatch(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "size", "with_write_shares", "with_update"),
    [(4, 40, True, True), (3, 17, True, False), (2, 600, False, True), (1, 9, True, True)],
)
def test_gated_mixing_of_streams_matches_transformers(
    count: int, size: int, with_write_shares: bool, with_update: bool, dtype: torch.dtype, route: str
) -> None:
    torch.manual_seed(size)
    config = SimpleNamespace(hc_count=count, hidden_size=size, hc_lowrank=5, rms_norm_eps=1e-2)
    module = Qwen4ExpTextGatedResidual(config, use_combine=with_write_shares).double()
    for values in module.parameters():
        values.data.normal_(std=0.3).copy_(values.data.to(dtype))
    streams, more = (torch.randn(3, *shape).to(DEVICE, dtype) for shape in ((count, size), (size,)))
    given = torch.rand(3, count).to(DEVICE)
    updated = streams.double()
    if with_update:
        updated = (updated + given.double().unsqueeze(2) * more.double().unsqueeze(1)).to(dtype).double()
    with torch.inference_mode():
        found = module(updated.flatten(1).cpu())
    expected, expected_shares = (found[0], found[2]) if with_write_shares else (found, None)
    dispatch.force(route)
    gains = module.hc_norm.weight.detach().float().view(count, size).to(DEVICE) + 1
    down, up = (getattr(module, f"input_mix_weight_{name}").weight.detach().to(DEVICE, dtype) for name in ("down", "up"))
    inject = module.block_inject_weight.weight.detach().to(DEVICE, dtype) / count if with_write_shares else None
    normalized = spread(streams, *((more, given) if with_update else (None, None)), gains, 1e-2)
    torch.testing.assert_close(streams.double(), updated, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gates = functional.linear(functional.silu(functional.linear(normalized, down / count)), up)
    joint = torch.full((3, count + 2), torch.nan).to(DEVICE, dtype)
    if inject is not None:
        joint[:, 1 : count + 1] = functional.linear(normalized, inject)
    mixed, write_shares = gathered(normalized, gates, joint[:, 1 : count + 1] if with_write_shares else None, count)
    tolerance = 2 * TOLERANCE[dtype]
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    assert (write_shares is None) == (expected_shares is None)
    if write_shares is not None and expected_shares is not None:
        torch.testing.assert_close(write_shares.double().cpu(), expected_shares, rtol=tolerance, atol=tolerance)


def test_gated_mixing_of_no_tokens_returns_empty_tensors() -> None:
    dispatch.force("triton")
    normal = spread(torch.zeros(0, 2, 8, device=DEVICE), None, None, torch.ones(2, 8, device=DEVICE), 1e-6)
    mixed, given = gathered(normal, normal, normal[:, :2], 2)
    assert mixed.shape == (0, 8)
    assert given is not None
    assert given.shape == (0, 2)


def test_ahead_of_time_signatures_match_the_kernels_parameters() -> None:
    for compilation in fused_gated_hyper_connections.compilations():
        assert list(compilation.signature) == [name for name in compilation.kernel.arg_names if name not in compilation.constants]
