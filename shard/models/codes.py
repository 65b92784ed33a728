"""Reads quantized matrices in the checkpoints' formats (GPTQ, AWQ, compressed-tensors, FP8, ModelOpt, MXFP4). Each format's layout
is handled here and nowhere else."""

from collections.abc import Callable, Iterator
from math import gcd

import torch
from torch import Tensor

from ...kernels.codes import BITS, FP4_BLOCKS, MIDDLES, QuantizedWeight, quantize
from ..weights import Source
from .fields import AGAIN
from .quantization import REMEDY
from .shape import Unsupported
from .traits import Quantization

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # index within a word of each of eight outputs
SIGN = 128  # the sign bit of a byte
USUAL_BLOCK = 128  # DeepSeek's and Qwen's
ONES = {4: 0x11111111, 8: 0x01010101}  # a 1 in each of the codes packed in a word
FLOATS = ("F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")  # of scales that are powers of two
Read = Callable[[Source, str, tuple[int, int], Quantization], QuantizedWeight]
FP4_MIDDLE = 127  # bias of the exponents


def matrix(
    source: Source, name: str, shape: tuple[int, int], how: Quantization | None, cut: tuple[int, int, int] | None
) -> Tensor | QuantizedWeight:
    """Reads the matrix `name`, [outputs, inputs], or its part along a dimension: cut is (dimension, start, stop)."""
    read = next(
        (read for (method, mark), read in READERS.items() if how and method == how.method and source.has(f"{name}.{mark}")), None
    )
    if how is None or read is None:
        found = source.tensor(f"{name}.weight", shape, cut)
        made_up = not source.has(f"{name}.weight")  # weights are random, without a checkpoint
        return quantize(found, how.kind) if how and (how.at_load or made_up) else found
    codes = _stored_as(read, source, name, shape, (how, *how.others))
    own = codes.part(*cut) if cut else codes
    source.progress(own.codes.numel())
    return own


def _stored_as(read: Read, source: Source, name: str, shape: tuple[int, int], ways: tuple[Quantization, ...]) -> QuantizedWeight:
    """A matrix stored in one of these formats: in the others its type or shape would differ."""
    problem: Unsupported | None = None
    for how in ways:
        try:
            codes = read(source, name, shape, how)
            _check(codes, name, shape)
            if len(ways) > 1 and how.group and codes.block not in (how.group, gcd(how.group, shape[1])):
                raise Unsupported(f"{name} has groups of {codes.block}, config.json says {how.group}: {AGAIN}")
            return codes
        except Unsupported as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _gptq(source: Source, name: str, shape: tuple[int, int], how: Quantization) -> QuantizedWeight:
    """GPTQ: codes packed along the inputs in words of 32 bits, [inputs / 8, outputs]; zero points along the outputs."""
    bits, inputs = BITS[how.kind], shape[1]
    codes = _words(_stored(source, f"{name}.qweight", 2, ("I32",)), bits, 0).t()
    scales = _stored(source, f"{name}.scales", 2, FLOATS).float().t()
    order = _order(source, name, "g_idx", inputs, _size(scales, inputs, how.group))
    words = _stored(source, f"{name}.qzeros", 2, ("I32",))
    if how.shifted:  # 1 was subtracted from words as a whole: where a zero point was 0, that borrowed from the next one
        words = words + ONES[bits]
    return _codes(how.kind, codes, *_even(scales, _words(words, bits, 1).t(), inputs, how.group), order)


def _awq(source: Source, name: str, shape: tuple[int, int], how: Quantization) -> QuantizedWeight:
    """AWQ: everything packed along the outputs, in an order of its own."""

    def ordered(part: str) -> Tensor:
        words = _words(_stored(source, f"{name}.{part}", 2, ("I32",)), 4, 1)
        return words.view(len(words), -1, 8)[:, :, AWQ_ORDER].flatten(1).t()

    zeros = ordered("qzeros") if source.has(f"{name}.qzeros") else None
    scales = _stored(source, f"{name}.scales", 2, FLOATS).float().t()
    return _codes(how.kind, ordered("qweight"), *_even(scales, zeros, shape[1], how.group))


def _packed(source: Source, name: str, shape: tuple[int, int], how: Quantization) -> QuantizedWeight:
    """compressed-tensors: codes packed along the inputs, [outputs, inputs / 8], zero points along the outputs."""
    if how.kind in FP4_BLOCKS:
        return _fp4(source, name, shape, how)
    if how.kind not in MIDDLES:
        raise Unsupported(f"{name} has packed integers, config.json says {how.kind}: {AGAIN}")
    bits = BITS[how.kind]
    words = _stored(source, f"{name}.weight_packed", 2, ("I32",))
    if words.shape[1] != -(-shape[1] * bits // 32):  # a word too few or too many does not mean other bits
        raise Unsupported(
            f"{name} has codes {[len(words), words.shape[1] * 32 // bits]}, config.json says {list(shape)}: they belong to "
            "different models"
        )
    codes = _words(words, bits, 1)[:, : shape[1]]
    scales = _each(_stored(source, f"{name}.weight_scale", 0, FLOATS).float(), shape[0])
    order = _order(source, name, "weight_g_idx", shape[1], _size(scales, shape[1], how.group))
    zeros = None
    if source.has(f"{name}.weight_zero_point"):
        found = _stored(source, f"{name}.weight_zero_point", 0, ("I32", "I8"))
        if found.dtype == torch.int8:  # of a whole tensor, and always in older versions: a signed byte each
            zeros = _each((found.short() + MIDDLES[how.kind]).byte(), shape[0])
        elif found.dim() == 2:
            zeros = _words(found, bits, 0)[: shape[0]]
        else:
            raise Unsupported(
                f"{name}.weight_zero_point is {list(found.shape)} of I32, words of outputs and groups are needed: {REMEDY}"
            )
    return _codes(how.kind, codes, *_even(scales, zeros, shape[1], how.group), order)


def _plain(source: Source, name: str, shape: tuple[int, int], how: Quantization) -> QuantizedWeight:
    """One code per byte. Scales of the tensor, of each output, of groups of its inputs, or of blocks of both."""
    if how.kind in FP4_BLOCKS:
        return _fp4(source, name, shape, how)
    if BITS[how.kind] != 8:
        raise Unsupported(f"{name} has a number in each byte, config.json says {how.kind}: {AGAIN}")
    stored = _stored(source, f"{name}.weight", 2, ("F8_E4M3",) if how.kind == "fp8" else ("I8",))
    codes = stored.view(torch.uint8) if how.kind == "fp8" else stored.view(torch.uint8) ^ SIGN
    scales = _stored(source, _scale(source, name), 0, (*FLOATS, *EXPONENTS[1:])).float()
    zeros = None
    if source.has(f"{name}.weight_zero_point"):
        zeros = _blocks(_stored(source, f"{name}.weight_zero_point", 0, ("I8",)).view(torch.uint8) ^ SIGN, name, shape, how)
    return _codes(how.kind, codes, _blocks(scales, name, shape, how), zeros)


def _scale(source: Source, name: str) -> str:
    """The name of the tensor with scales."""
    return f"{name}.{'weight_scale_inv' if source.has(f'{name}.weight_scale_inv') else 'weight_scale'}"


def _fp4(source: Source, name: str, shape: tuple[int, int], how: Quantization) -> QuantizedWeight:
    """FP4 codes, [outputs, inputs / 2]. Scales of groups are exponents (MXFP4), or FP8 (NVFP4): then there is one more factor for
    the whole tensor, by which ModelOpt multiplies and compressed-tensors divides."""
    divided, signed = how.method == "compressed-tensors", how.method == "fp8"  # the last: DeepSeek V4's
    stored = _stored(source, f"{name}.{'weight_packed' if divided else 'weight'}", 2, ("I8",) if signed else ("U8",))
    codes = fp4(stored.view(torch.uint8))
    if how.kind == "fp4":
        scales, factors = powers(_stored(source, _scale(source, name), 2, EXPONENTS[signed:][:1]).view(torch.uint8)), None
    else:
        scales = _stored(source, f"{name}.weight_scale", 2, ("F8_E4M3",)).float()
        factors = _factor(source, f"{name}.{'weight_global_scale' if divided else 'weight_scale_2'}", divided).expand(shape[0])
    if scales.shape[1] * how.group != codes.shape[1]:
        raise Unsupported(
            f"{name} has codes {list(codes.shape)}, scales {list(scales.shape)}, by config.json {how.group} inputs share one: "
            f"{AGAIN}"
        )
    return QuantizedWeight(how.kind, codes, scales, None, factors.contiguous() if factors is not None else None)


def _factor(source: Source, name: str, divisor: bool) -> Tensor:
    """The tensor's one factor, or the inverse of its divisor: [1] float32."""
    found = _stored(source, name, 0, ("F32",)).reshape(-1)
    factor = 1 / found if divisor else found
    if len(found) != 1 or not factor.isfinite().all():
        raise Unsupported(f"tensor {name} is {found[:2].tolist()}{'...' * (len(found) > 2)}, one number is needed: {AGAIN}")
    return factor


def fp4(held: Tensor) -> Tensor:
    """Unpacks the lower 4 bits of bytes, then the upper ones: [..., 2 * n]."""
    return torch.stack((held & 15, held >> 4), -1).flatten(-2)


def powers(exponents: Tensor) -> Tensor:
    """Powers of two from their stored exponents: float32."""
    return torch.exp2(exponents.float() - FP4_MIDDLE)


def stack(
    source: Source, name: str, shape: tuple[int, int, int], how: Quantization, inputs_first: bool = False
) -> Iterator[QuantizedWeight]:
    """Several FP8 matrices stacked in the tensor `name`, each as `_plain`. inputs_first: each is [inputs, outputs], with a scale
    for each output."""
    size = shape[1:]
    stored, scales = source.stored(name, ("F8_E4M3",)), source.stored(f"{name}_scale{'' if inputs_first else '_inv'}", FLOATS)
    if inputs_first and stored.dim() == 3:
        stored = stored.transpose(1, 2)
        scales = scales.view(*shape[:2], 1) if scales.numel() == shape[0] * shape[1] else scales
    if stored.shape != shape or scales.dim() != 3 or len(scales) != len(stored) or not scales.numel():
        raise Unsupported(
            f"{name} has codes {list(stored.shape)}, scales {list(scales.shape)}, config.json says {list(shape)}: they belong to "
            "different models"
        )
    for one, each in zip(stored, scales.float(), strict=True):
        codes = _codes(how.kind, one.view(torch.uint8), _blocks(each, name, size, how), None)
        _check(codes, name, size)
        source.progress(one.numel())
        yield codes


# By method, and the suffix of a tensor that shows that a matrix is quantized.
READERS: dict[tuple[str, str], Read] = {
    ("gptq", "qweight"): _gptq,
    ("awq", "qweight"): _awq,
    ("compressed-tensors", "weight_packed"): _packed,
    ("compressed-tensors", "weight_scale"): _plain,
    ("fp8", "weight_scale"): _plain,
    ("fp8", "weight_scale_inv"): _plain,
    ("modelopt", "weight_scale"): _plain,
}


def _stored(source: Source, name: str, dimensions: int, kinds: tuple[str, ...]) -> Tensor:
    """A tensor with elements, in so many dimensions; 0: up to 2."""
    found = source.stored(name, kinds)
    if not found.numel() or found.dim() > 2 or (dimensions and found.dim() != dimensions):
        needed = f"{dimensions or 'up to 2'} dimension{'' if dimensions == 1 else 's'}"
        raise Unsupported(f"tensor {name} is {list(found.shape)}, numbers in {needed} are needed: {AGAIN}")
    return found


def _check(codes: QuantizedWeight, name: str, shape: tuple[int, int]) -> None:
    """Raises Unsupported unless codes, scales and zero points have matching shapes."""
    scales, zeros = codes.scales.shape, codes.zeros.shape if codes.zeros is not None else codes.scales.shape
    if codes.codes.shape != shape or scales[0] != shape[0] or shape[1] % scales[1] or zeros != scales:
        parts = {"codes": codes.codes.shape, "scales": scales, "zeros": zeros}
        has = ", ".join(f"{part} {list(size)}" for part, size in parts.items())
        raise Unsupported(f"{name} has {has}, config.json says {list(shape)}: {AGAIN}")


def _codes(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None = None) -> QuantizedWeight:
    """Drops zero points that are all in the middle, as they change nothing, unless their shape is wrong, which is refused later.
    order: of inputs by groups, if the checkpoint has them in another order."""
    codes = codes if order is None or codes.shape[1] != len(order) else codes[:, order]
    if zeros is not None and zeros.shape == scales.shape and bool((zeros == MIDDLES.get(kind, 0)).all()):
        zeros = None
    held = zeros.byte().contiguous() if zeros is not None else None
    return QuantizedWeight(kind, codes.contiguous(), scales.contiguous(), held, order=order.int() if order is not None else None)


def _size(scales: Tensor, inputs: int, group: int) -> int:
    """Inputs that share a scale: as config.json says where the last group is partial, else by the number of scales."""
    return group if group and inputs % group and scales.shape[1] == -(-inputs // group) else max(1, inputs // scales.shape[1])


def _even(scales: Tensor, zeros: Tensor | None, inputs: int, group: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points repeated for smaller groups, which divide the inputs, where the last group is partial."""
    size = _size(scales, inputs, group)
    if size != group or inputs % size == 0:
        return scales, zeros
    each = gcd(size, inputs)

    def repeated(held: Tensor) -> Tensor:
        return held.repeat_interleave(size // each, 1)[:, : inputs // each]

    return repeated(scales), repeated(zeros) if zeros is not None else None


def _each(given: Tensor, outputs: int) -> Tensor:
    """Scales of the whole tensor, or of each output, as [outputs, groups]."""
    rows = _rows(given)
    return rows.expand(outputs, -1) if len(rows) == 1 else rows


def _rows(given: Tensor) -> Tensor:
    return given.reshape(len(given) if given.dim() else 1, -1)


def _blocks(given: Tensor, name: str, shape: tuple[int, int], how: Quantization) -> Tensor:
    """The same, where scales may be of blocks of outputs and inputs."""
    if given.numel() == 1:
        return _each(given, shape[0])
    found = _rows(given)
    outputs, inputs = (_block(name, *dimension) for dimension in zip(found.shape, shape, (how.block, how.group), strict=True))
    if len(found) != shape[0]:
        found = found.repeat_interleave(outputs, 0)[: shape[0]]
    if shape[1] % inputs:  # the last block is partial
        size = gcd(inputs, shape[1])
        found = found.repeat_interleave(inputs // size, 1)[:, : shape[1] // size]
    return found


def _block(name: str, count: int, size: int, told: int) -> int:
    """How many of `size` outputs or inputs share each of `count` scales; told: config.json's number, 0: none. Raises Unsupported
    where it is ambiguous."""
    if not told and count in (1, size):
        return size // count
    least, most = -(-size // count), -(-size // (count - 1)) - 1 if count > 1 else max(size, told)
    if most < least or not least <= (told or least) <= most:
        by = f"in blocks of {told}" if told else "more or fewer than any block would give"
        raise Unsupported(f"{name} has {count} scales for {size} numbers, {by}: {AGAIN}")
    if told or least <= USUAL_BLOCK <= most:
        return min(told or USUAL_BLOCK, size)
    twos = {1 << power for power in range(size.bit_length()) if least <= 1 << power <= most}
    if len(twos | {least} if size % count == 0 else range(least, most + 1)) > 1:
        raise Unsupported(
            f"{name} has {count} scales for {size} numbers, and config.json says no weight_block_size (compressed-tensors: "
            f"block_structure): it may be {least} to {most}; add it to quantization_config, [outputs, inputs], or {REMEDY}"
        )
    return least


def _words(words: Tensor, bits: int, dimension: int) -> Tensor:
    """Unpacks words of 32 bits along a dimension, the lowest bits first: uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    shifts = shifts.view([-1 if other == dimension + 1 else 1 for other in range(3)])
    held = (words.unsqueeze(dimension + 1) >> shifts) & ((1 << bits) - 1)
    return held.to(torch.uint8).flatten(dimension, dimension + 1)


def _order(source: Source, name: str, end: str, inputs: int, size: int) -> Tensor | None:
    """The order of inputs group by group, where a tensor gives the group (of `size` inputs) of each input (act-order); None: they
    are in order. Raises Unsupported where groups have other sizes."""
    if not source.has(f"{name}.{end}"):
        return None
    groups = _stored(source, f"{name}.{end}", 1, ("I32", "I64"))
    usual = torch.arange(inputs, dtype=groups.dtype, device=groups.device) // size
    order = groups.argsort(stable=True)
    if not groups[order].equal(usual):
        raise Unsupported(f"{name} has {inputs} inputs in groups of {size}, {end} others: {AGAIN}")
    return None if groups.equal(usual) else order
