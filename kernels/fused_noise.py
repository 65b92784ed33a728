"""The Gumbel noise of `noise.py` in Triton: the same Philox words, and `logarithm.gumbel` of them, both to the last bit.
`fused_sampling` generates it inside its kernels; the kernels here are for a draft model's rows, and for beams.

    word = Philox4x32-10(key = seed, counter = (id // 4, position, choice, 0))[id % 4]
    noise = -log(-log(1 - (word + 1/2) / 2^32))

A program makes the noise of SIZE tokens of one row. For all tokens it uses all four words of each counter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import logarithm
from .compilation import AMD, NVIDIA, Compilation
from .dispatch import on_nvidia

SIZE = 1024  # numbers per program
PER_ROW = ["seeds", "choices", "positions"]  # see `row_logits.PER_ROW`

LOG_2_HIGH = tl.constexpr(logarithm.LOG_2_HIGH)
LOG_2_LOW = tl.constexpr(logarithm.LOG_2_LOW)
SERIES_0, SERIES_1, SERIES_2, SERIES_3 = map(tl.constexpr, logarithm.SERIES)
ROOT, ONE = tl.constexpr(logarithm.ROOT), tl.constexpr(logarithm.ONE)
NEARLY = tl.constexpr(5e-5)  # most that `nearly_gumbel` is off


@triton.jit
def _word(value):  # type: ignore[no-untyped-def]
    """The low 32 bits of an integer."""
    return (value & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox(seed, choice, position, quads):  # type: ignore[no-untyped-def]
    """The four words of each of `quads` (int32, token id // 4) for scalars seed, choice and position (int64)."""
    key_0, key_1 = _word(seed), _word(seed >> 32)
    word_0 = quads.to(tl.uint32)
    word_1 = word_0 * 0 + _word(position)
    word_2 = word_0 * 0 + _word(choice)
    word_3 = word_0 * 0  # noise.STREAM
    for _ in tl.static_range(10):
        product_0, product_1 = word_0.to(tl.uint64) * 0xD2511F53, word_2.to(tl.uint64) * 0xCD9E8D57
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1, word_3 = _word(product_1), _word(product_0)
        key_0, key_1 = _word(key_0.to(tl.uint64) + 0x9E3779B9), _word(key_1.to(tl.uint64) + 0xBB67AE85)
    return word_0, word_1, word_2, word_3


@triton.jit
def _times(left, right, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product that is never contracted with a sum. ptxas 12.9 (Triton 3.6) contracts them for Blackwell where it multiplies two
    pairs at once, though told not to: so an instruction for one pair is requested."""
    product = left * right
    if CUDA:
        product = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, is_pure=True, pack=1)
    return product


@triton.jit
def _log(x, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """`logarithm.log`."""
    bits = x.to(tl.int32, bitcast=True) + (ONE - ROOT)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x007FFFFF) + ROOT).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    w = z * z
    r = _times(z, _times(w, SERIES_2, CUDA) + SERIES_0, CUDA) + _times(w, _times(w, SERIES_3, CUDA) + SERIES_1, CUDA)
    half = _times(f * 0.5, f, CUDA)
    sums = _times(s, half + r, CUDA) + _times(exponent, LOG_2_LOW, CUDA)
    return ((sums - half) + f) + _times(exponent, LOG_2_HIGH, CUDA)


@triton.jit
def gumbel_of_words(words, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """`logarithm.gumbel`. CUDA: on NVIDIA. Negation would be 0 - x here, which changes the sign of a zero, hence the factor -1."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    y = 1.0 - uniform
    return _log(-(_log(y, CUDA) + tl.div_rn((1.0 - y) - uniform, y)), CUDA) * -1.0


@triton.jit
def nearly_log_2(x, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """The binary logarithm by one instruction: Triton's takes twenty."""
    logarithm = x
    if CUDA:
        logarithm = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        logarithm = tl.log2(x)
    return logarithm


@triton.jit
def nearly_exp(x, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """The exponential as Triton has it, but 0 where it would be denormal, which takes it three more instructions."""
    power = x * 1.4426950408889634
    if CUDA:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, is_pure=True, pack=1)
    else:
        power = tl.exp2(power)
    return power


@triton.jit
def nearly_gumbel(words, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise as the hardware's logarithms have it, off by less than `NEARLY`: a fifth of the instructions.

    These are off by 2^-22 (PTX ISA, lg2.approx): -log(1 - u), at least 0.064 where it is not the series, by 3e-6 of it, as much as
    the series' next term; the noise, of logarithms up to 33, by 8e-6 more.
    """
    uniform = tl.minimum(tl.fma(words.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10), 0.999999940395355224609375)
    series = tl.fma(tl.fma(tl.fma(uniform, 0.25, 0.3333333432674408), uniform, 0.5), uniform, 1.0) * uniform
    exponential = tl.where(uniform < 0.0625, series, nearly_log_2(1.0 - uniform, CUDA) * -0.6931471824645996)
    return nearly_log_2(exponential, CUDA) * -0.6931471824645996


@triton.jit
def nearly_gumbel_of_quads(seed, choice, position, quads, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """`nearly_gumbel` of the four tokens of each of `quads`, concatenated: [4 * quads]."""
    word_0, word_1, word_2, word_3 = philox(seed, choice, position, quads)
    even = tl.join(nearly_gumbel(word_0, CUDA), nearly_gumbel(word_2, CUDA))
    pairs = tl.join(even, tl.join(nearly_gumbel(word_1, CUDA), nearly_gumbel(word_3, CUDA)))
    return tl.reshape(pairs, [4 * quads.shape[0]])


@triton.jit
def gumbel_of_quads(seed, choice, position, quads, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise of the four tokens of each of `quads`, concatenated: [4 * quads]."""
    word_0, word_1, word_2, word_3 = philox(seed, choice, position, quads)
    even = tl.join(gumbel_of_words(word_0, CUDA), gumbel_of_words(word_2, CUDA))
    pairs = tl.join(even, tl.join(gumbel_of_words(word_1, CUDA), gumbel_of_words(word_3, CUDA)))
    return tl.reshape(pairs, [4 * quads.shape[0]])


@triton.jit
def gumbel_of_ids(seed, choice, position, ids, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise of each of `ids` (int32)."""
    word_0, word_1, word_2, word_3 = philox(seed, choice, position, ids // 4)
    lane = ids % 4
    return gumbel_of_words(tl.where(lane == 0, word_0, tl.where(lane == 1, word_1, tl.where(lane == 2, word_2, word_3))), CUDA)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def all_kernel(
    noises: tl.tensor,  # [rows, vocabulary] float32, out
    seeds: tl.tensor,  # [rows] int64
    choices: tl.tensor,
    positions: tl.tensor,
    vocabulary: tl.tensor,
    SIZE: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Noise of SIZE tokens of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    quads, column = part * (SIZE // 4) + tl.arange(0, SIZE // 4), part * SIZE + tl.arange(0, SIZE)
    found = gumbel_of_quads(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row), quads, CUDA)
    tl.store(noises + row * vocabulary + column, found, mask=column < vocabulary)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=PER_ROW)
def some_kernel(
    noises: tl.tensor,  # [rows, count] float32, out
    ids: tl.tensor,  # [rows, count] int64
    seeds: tl.tensor,  # [rows] int64
    choices: tl.tensor,
    positions: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Noise of SIZE of one row's ids."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    own = tl.load(ids + row * count + column, mask=column < count, other=0).to(tl.int32)
    found = gumbel_of_ids(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row), own, CUDA)
    tl.store(noises + row * count + column, found, mask=column < count)


def gumbel_all(seeds: Tensor, choices: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """As `noise.gumbel_all`."""
    noises = torch.empty(len(seeds), vocabulary, device=seeds.device)
    if len(seeds):
        grid = len(seeds), triton.cdiv(vocabulary, SIZE)
        given = noises, seeds.contiguous(), choices.contiguous(), positions.contiguous(), vocabulary
        all_kernel[grid](*given, SIZE=SIZE, CUDA=on_nvidia(seeds.device), enable_fp_fusion=False)
    return noises


def gumbel(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """As `noise.gumbel`."""
    noises = torch.empty(ids.shape, device=ids.device)
    if noises.numel():
        grid = len(seeds), triton.cdiv(ids.shape[1], SIZE)
        given = noises, ids.contiguous(), seeds.contiguous(), choices.contiguous(), positions.contiguous(), ids.shape[1]
        some_kernel[grid](*given, SIZE=SIZE, CUDA=on_nvidia(seeds.device), enable_fp_fusion=False)
    return noises


def compilations() -> list[Compilation]:
    """For NVIDIA's and AMD's."""
    rows = {"seeds": "*i64", "choices": "*i64", "positions": "*i64"}
    every, some = {"noises": "*fp32", **rows, "vocabulary": "i32"}, {"noises": "*fp32", "ids": "*i64", **rows, "count": "i32"}
    return [
        Compilation(
            kernel=kernel,
            name=f"noise {name}{'' if cuda else ' amd'}",
            types=signature,
            constants={"SIZE": SIZE, "CUDA": cuda},
            targets=NVIDIA if cuda else AMD,
        )
        for name, kernel, signature in (("all", all_kernel, every), ("some", some_kernel, some))
        for cuda in (True, False)
    ]
