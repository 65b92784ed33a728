"""Loads a layer's experts in all layouts that checkpoints have: one by one, or stacked in one tensor. Each layout is handled here
and nowhere else."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.codes import FP4_BLOCKS, QuantizedWeight, joined, quantize
from ...kernels.experts import Biases, Weights
from ..weights import Source
from .codes import fp4, powers, stack
from .fields import AGAIN
from .loader import Loader
from .quantization import REMEDY
from .shape import Unsupported
from .traits import Mixture, Quantization

# Module of stacked experts as transformers 5 saves them, unless the mixture's own module or the layer itself has them.
TOGETHER = "mlp"
SCALES = ("_scale_inv", "_scale", "_blocks", "_weight_scale")


def as_stored(load: Loader, mixture: Mixture) -> Mixture:
    """The mixture with the names of its tensors in this checkpoint: with `save_original_format=False` transformers 5 saves its
    own."""
    if mixture.stacked:
        block = mixture.stacked[0].partition(".")[0]
        own = f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"
        there = load.source.has(load.prefix + own[0])
        return replace(mixture, stacked=own, router=f"{block}.router") if there else mixture
    home = _home(load, mixture)
    if mixture.interleaved or not home:
        return mixture
    correction = mixture.correction
    if correction and not load.source.has(f"{load.prefix}{home}.{correction}"):
        correction = f"{mixture.router}.{correction}"
    router = "router" if load.source.has(f"{load.prefix}{home}.router.weight") else mixture.router
    return replace(mixture, name=home, correction=correction, router=router)


def experts(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """This rank's part of each expert: gate and up projections [2 * size, hidden], gates first, and down projections [hidden,
    size]; with biases of all, if there are any."""
    if mixture.interleaved:
        return _interleaved(load, mixture)
    if mixture.by_kind:
        return _by_kind(load, mixture)
    if mixture.stacked or _home(load, mixture) is not None:
        return _together(load, mixture)
    gate, up, down = ([mixture.named(f"experts.{i}.{name}") for i in range(mixture.experts)] for name in mixture.names)
    if load.source.has(f"{load.prefix}{mixture.named('experts')}.{mixture.names[0]}.weight"):
        return _by_part(load, mixture)
    apart = [[name] for name in up] if load.shape.ungated else zip(gate, up, strict=True)
    outwards = [load.outwards(names, [mixture.size] * len(names), inputs=mixture.latent) for names in apart]
    inwards = [load.inwards(name, mixture.size, mixture.latent) for name in down]
    ordered = any(isinstance(weight, QuantizedWeight) and weight.order is not None for weight in (*outwards, *inwards))
    if ordered and load.source.device.type != "cpu":  # unpacked they would take four times the memory that is planned for them
        raise Unsupported(
            f"{load.prefix}{down[0]}: experts with inputs in the order of their activations (desc_act, actorder) are not supported "
            f"on an accelerator: {REMEDY}"
        )
    return outwards, inwards, None


def _home(load: Loader, mixture: Mixture) -> str | None:
    """The module that has stacked experts; None: they are not stacked."""
    homes = dict.fromkeys((TOGETHER, mixture.name) if mixture.name else ("",))
    own = _first(load)
    return next((home for home in homes if load.source.has(load.prefix + replace(mixture, name=home).named(own))), None)


def _first(load: Loader) -> str:
    """The name of the stacked experts' first matrices, which lead out of the residual stream."""
    return "experts.up_proj" if load.shape.ungated else "experts.gate_up_proj"


def _together(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """Loads stacked experts: one tensor each for the gate and up projections (gates first, if there are any), and for the down
    projections."""
    count, size, hidden = mixture.experts, mixture.size, mixture.latent or load.shape.hidden
    names = mixture.stacked or (mixture.named(_first(load)), mixture.named("experts.down_proj"))
    first_name, second_name = (load.prefix + name for name in names)
    part, how = size // load.ranks.size, load.shape.quantization
    start = load.ranks.rank * part
    firsts = (start,) if load.shape.ungated else (start, size + start)
    outputs = len(firsts) * size
    scales = next((end for end in SCALES if load.source.has(f"{first_name}{end}")), None)
    if scales == ("_scale" if mixture.inputs_first else "_scale_inv") and how and how.method == "fp8":
        both = stack(load.source, first_name, (count, outputs, hidden), how, mixture.inputs_first)
        gate_ups = [joined([one.part(0, first, first + part) for first in firsts]) for one in both]
        downs = stack(load.source, second_name, (count, hidden, size), how, mixture.inputs_first)
        return gate_ups, [load.residual(one.part(1, start, start + part)) for one in downs], None
    _check_bits(load.source, first_name)

    def read(name: str, shape: tuple[int, ...], dimension: int, first: int) -> Tensor:
        transposed = (shape[0], shape[2], shape[1])
        if mixture.inputs_first or (shape != transposed and load.source.has(name, transposed)):  # as Qwen 3 VL's are on the hub
            return load.source.tensor(name, transposed, (3 - dimension, first, first + part)).transpose(1, 2).contiguous()
        return load.source.tensor(name, shape, (dimension, first, first + part))

    # transformers makes and stores weights for identity experts, too.
    stored = mixture.routed if mixture.idle and load.source.has(first_name, (mixture.routed, outputs, hidden)) else count
    apart = [read(first_name, (stored, outputs, hidden), 1, first)[:count] for first in firsts]
    return _quantized(load, apart, read(second_name, (count, hidden, size), 2, start))


def _quantized(load: Loader, apart: Sequence[Iterable[Tensor]], downs: Iterable[Tensor]) -> tuple[Weights, Weights, Biases]:
    """Experts of unquantized matrices, of which those that lead out of the stream are `apart`; quantized if that is to happen at
    load."""
    how = load.shape.quantization

    def kept(weight: Tensor) -> Tensor | QuantizedWeight:
        return quantize(weight, how.kind) if how and how.at_load else weight

    joint = [kept(torch.cat(parts)) for parts in zip(*apart, strict=True)]
    return joint, [load.residual(kept(down)) for down in downs], None


def _by_kind(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """Loads DBRX's experts: one tensor for each projection, experts one below the other."""
    rows = mixture.experts * mixture.size
    start, stop = load.own(mixture.size)

    def read(name: str) -> list[Tensor]:
        place = f"{load.prefix}{mixture.named('experts')}.{name}", (rows, load.shape.hidden)
        return [load.source.tensor(*place, (0, first + start, first + stop)) for first in range(0, rows, mixture.size)]

    gates, ups, downs = map(read, mixture.names)
    return _quantized(load, (gates, ups), (down.t().contiguous() for down in downs))


def _by_part(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """Loads Step 3's experts: one stacked tensor for each projection, gate, up and down."""
    count, hidden = mixture.experts, load.shape.hidden
    gate, up, down = (f"{load.prefix}{mixture.named('experts')}.{name}.weight" for name in mixture.names)
    own = load.own(mixture.size)
    _check_bits(load.source, gate)
    gates, ups = (load.source.tensor(name, (count, mixture.size, hidden), (1, *own)) for name in (gate, up))
    return _quantized(load, (gates, ups), load.source.tensor(down, (count, hidden, mixture.size), (2, *own)))


def _check_bits(source: Source, name: str) -> None:
    """Raises Unsupported for quantized experts in one tensor."""
    if scales := next((end for end in SCALES if source.has(f"{name}{end}")), None):
        raise Unsupported(
            f"{name}{scales} says that experts that are all in one tensor have few bits, which is not supported: save "
            "the model with save_original_format=True, or use its unquantized weights"
        )


def _interleaved(load: Loader, mixture: Mixture) -> tuple[Weights, Weights, Biases]:
    """Loads gpt-oss's experts, with alternating gate and up rows."""
    name, source, hidden, count = f"{load.prefix}{mixture.name}.experts", load.source, load.shape.hidden, mixture.experts
    size = mixture.part(load.ranks.size)
    start = load.ranks.rank * size
    rows, columns = (2 * start, 2 * (start + size)), (start, start + size)
    how = mixture.quantization or load.shape.quantization
    gate_ups = _stacked(source, f"{name}.gate_up_proj", (count, 2 * mixture.size, hidden), (0, *rows), how)
    downs = _stacked(source, f"{name}.down_proj", (count, hidden, mixture.size), (1, *columns), how)
    first = source.tensor(f"{name}.gate_up_proj_bias", (count, 2 * mixture.size), (1, *rows))
    second = source.tensor(f"{name}.down_proj_bias", (count, hidden))
    if load.ranks.rank:  # the all-reduced sum must have it once
        second = torch.zeros_like(second)
    gates_first = torch.arange(2 * size, device=source.device).view(-1, 2).t().flatten()
    return [weight[gates_first] for weight in gate_ups], downs, (first[:, gates_first], second)


def _stacked(
    source: Source, name: str, shape: tuple[int, int, int], cut: tuple[int, int, int], how: Quantization | None
) -> Weights:
    """The part `cut` of each expert's [outputs, inputs], which are stored transposed, or in MXFP4."""
    dimension, start, stop = cut
    experts, outputs, inputs = shape
    if source.has(f"{name}_blocks"):
        return [one.part(*cut) for one in _codes(source, name, shape)]
    found = source.tensor(name, (experts, inputs, outputs), (2 - dimension, start, stop)).transpose(1, 2).contiguous()
    made_up = not source.has(name)  # random weights, without a checkpoint
    return [quantize(one, how.kind) for one in found] if how and (how.at_load or made_up) else [*found]


def _codes(source: Source, name: str, shape: tuple[int, int, int]) -> Iterator[QuantizedWeight]:
    """Each expert of MXFP4: two codes in a byte, the lower 4 bits first, and each block's scale as an exponent."""
    codes, scales = source.stored(f"{name}_blocks", ("U8",)), source.stored(f"{name}_scales", ("U8",))
    size = FP4_BLOCKS["fp4"]
    if codes.shape != (*shape[:2], shape[2] // size, size // 2) or scales.shape != codes.shape[:3] or shape[2] % size:
        raise Unsupported(
            f"{name} has blocks {list(codes.shape)} and scales {list(scales.shape)}, config.json says {list(shape)}: {AGAIN}"
        )
    for held, exponents in zip(codes.flatten(2), scales, strict=True):
        source.progress(2 * held.numel())
        yield QuantizedWeight("fp4", fp4(held), powers(exponents))
