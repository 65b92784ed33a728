"""What parts of layers see of streams whose features have gates, and give, by torch and by Triton's kernels, is transformers' in
float64; streams that are added to, too."""

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
def _clean(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "size", "gives", "adds"), [(4, 40, True, True), (3, 17, True, False), (2, 600, False, True), (1, 9, True, True)]
)
def test_mixtures(count: int, size: int, gives: bool, adds: bool, dtype: torch.dtype, route: str) -> None:
    torch.manual_seed(size)
    config = SimpleNamespace(hc_count=count, hidden_size=size, hc_lowrank=5, rms_norm_eps=1e-2)
    theirs = Qwen4ExpTextGatedResidual(config, use_combine=gives).double()
    for values in theirs.parameters():
        values.data.normal_(std=0.3).copy_(values.data.to(dtype))
    streams, more = (torch.randn(3, *shape).to(DEVICE, dtype) for shape in ((count, size), (size,)))
    given = torch.rand(3, count).to(DEVICE)
    wide = streams.double()
    if adds:
        wide = (wide + given.double().unsqueeze(2) * more.double().unsqueeze(1)).to(dtype).double()
    with torch.inference_mode():
        found = theirs(wide.flatten(1).cpu())
    seen, shares = (found[0], found[2]) if gives else (found, None)
    dispatch.force(route)
    gains = theirs.hc_norm.weight.detach().float().view(count, size).to(DEVICE) + 1
    down, up = (getattr(theirs, f"input_mix_weight_{name}").weight.detach().to(DEVICE, dtype) for name in ("down", "up"))
    inject = theirs.block_inject_weight.weight.detach().to(DEVICE, dtype) / count if gives else None
    normal = spread(streams, *((more, given) if adds else (None, None)), gains, 1e-2)
    torch.testing.assert_close(streams.double(), wide, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gates = functional.linear(functional.silu(functional.linear(normal, down / count)), up)
    joint = torch.full((3, count + 2), torch.nan).to(DEVICE, dtype)
    if inject is not None:
        joint[:, 1 : count + 1] = functional.linear(normal, inject)
    mixed, gave = gathered(normal, gates, joint[:, 1 : count + 1] if gives else None, count)
    tolerance = 2 * TOLERANCE[dtype]
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.double().cpu(), seen, rtol=tolerance, atol=tolerance)
    assert (gave is None) == (shares is None)
    if gave is not None and shares is not None:
        torch.testing.assert_close(gave.double().cpu(), shares, rtol=tolerance, atol=tolerance)


def test_of_no_tokens() -> None:
    dispatch.force("triton")
    normal = spread(torch.zeros(0, 2, 8, device=DEVICE), None, None, torch.ones(2, 8, device=DEVICE), 1e-6)
    mixed, given = gathered(normal, normal, normal[:, :2], 2)
    assert mixed.shape == (0, 8)
    assert given is not None
    assert given.shape == (0, 2)


def test_it_is_compiled_as_it_is_launched() -> None:
    for one in fused_gated_hyper_connections.compilations():
        assert list(one.signature) == [name for name in one.kernel.arg_names if name not in one.constants]
