"""Matrix products with weights that are laid out once, at load time, for the machine that they run on. Knows tensors only.

On a CPU torch's own product (MKL on x86) leaves much on the table. In float32, measured 2026-11-21 on an EPYC (AVX2, one thread,
GFLOP/s at 1 / 8 / 32 / 512 rows of 1024 x 5632, and tokens a second of a 200 M parameter model):

    F.linear                    7 / 18 / 41 / 79       the whole model at 512 rows: 263 (transformers)
    oneDNN, weights packed      7 / 32 / 56 / 73       19 / 84 / 145 / 250
    OpenBLAS (numpy), [in, out] 9 / 35 / 65 / 92       26 / 90 / 160 / 300
    two threads, oneDNN                                29 / 140 / 240 / 450
    two threads, OpenBLAS                               8 / 33 / 60 / 290     (its spinning threads fight with torch's)

and on one with AVX-512 and bfloat16 units (2026-11-22, ms of 71 million weights at 1 / 8 / 32 / 128 rows):

    OpenBLAS                    10 / 27 / 54 / 170
    oneDNN, weights packed       8 / 12 / 27 / 85
    F.linear, bfloat16          10 / 11 / 19 / 48
    oneDNN, packed, bfloat16     4 / 6 / 14 / 42

So one thread with AVX2 alone takes OpenBLAS, all others take oneDNN; each needs one copy of a weight. On Intel's processors with
AVX-512, for which MKL has its best code, one thread takes that for small weights (2026-11-24, a Xeon, us of weights that come from
outside of L2, oneDNN / MKL with the outputs side by side at 1 / 8 / 32 / 256 rows):

    256 x 256            68 / 29     55 / 32     97 / 54      283 / 251
    704 x 256           107 / 62    110 / 99    191 / 125     887 / 885
    256 x 1408          154 / 95    242 / 230   297 / 264    1887 / 1642
    512 x 2816          568 / 398   652 / 814  1110 / 1034   5219 / 5300
    1024 x 1024         474 / 327   562 / 677   930 / 1302   3562 / 4436

Which route is taken depends on nothing that changes between two starts of the same server: the last bits of an answer do not
either.

On an accelerator few rows go by `fused_skinny_gemm`, together with what comes before and after them; more by torch's own.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .dispatch import on_hopper, triton_for

if TYPE_CHECKING:
    from .adapters import LoraMatrices  # circular at run time: LoRA products are weights

# oneDNN chooses its blocked weight layout by the number of rows it is told to expect. With 1 it is slow for batches (42 GFLOP/s at
# 32); with 4 to 512 one layout is good for all of them.
EXPECTED_ROWS = 32
# Multiply-adds of float32 that torch's own product, with the outputs contiguous, completes before oneDNN has begun. Measured
# 2026-11-22 on an EPYC with AVX-512, us: 128 x 128, one row 1.8 against 11.6, 16 rows 7.6 and 13; 2048 x 128, one row 19 and 36,
# five 102 and 33.
SHORT = 1 << 18
# Elements of a weight up to which MKL is at least as fast as oneDNN; see above.
SMALL = 3 << 18
# Inputs (K) up to which MKL 2024 sums in the same order, however many rows there are. With more inputs the order is one for up to
# some 160 rows, and another for more.
PIECE = 768
# Rows up to which AMX sums in the same order. With more rows, and a few hundred inputs or more, the order depends on their number.
ALIKE = 32
# Rows up to which a product is bound by reading the weight, and goes through `fused_skinny_gemm`; 0 is none. The first is for
# Hopper, the second for other devices. On an H200 its products of 32 rows take 1 to 4 us less than torch's 14 to 34 (2026-11-26);
# gate and up with SwiGLU 57.1 us, torch's and the activation after it 59.9 (2026-11-27). More rows were not measured.
FEW, FEWER = 32, 16
# Row counts that cover all kernels for few rows: one row has a kernel (GEMV) of its own, and others have tiles of 16 or 32.
SAMPLES = (1, 2, 32)
# dtypes of the kernels for few rows. In float32 torch's own product is quicker; float16 is not measured.
STREAMED = {torch.bfloat16}


class Invariance(IntEnum):
    """How much a row's result may depend on the rows beside it (batch invariance)."""

    GUESS = 0  # in its last bits, unpredictably: for draft models
    USUAL = 1  # no more than the fastest route causes
    INVARIANT = 2  # not by a bit


class Weight:
    """A weight [out, in] prepared for `x @ weight.T + bias` by the best route for this machine; `bytes` is what it takes in
    memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, exact: Invariance = Invariance.USUAL) -> None:
        self.lora: LoraMatrices | None = None  # LoRA adapters; the caller adds their products
        self.bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.shape = weight.shape
        streams = exact is not Invariance.INVARIANT and weight.dtype in STREAMED and triton_for(weight)
        self._plain = (weight, bias) if streams else None
        self._hopper = on_hopper(weight.device)
        route = _route(weight, exact)
        self.shared = route in (plain, invariant)  # shares memory with the given weight: it is not copied
        compiles = route in (packed, in_blocks)
        self.compiled = (weight.shape, weight.dtype, bias is not None) if compiles else None  # what oneDNN compiles a product for
        self.product = route(weight, bias)
        if exact is Invariance.GUESS and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() <= SHORT:
            self.bytes += weight.nbytes
            self.product = with_short_route(weight, bias, self.product)

    def __call__(self, x: Tensor, wide: bool = False) -> Tensor:
        """The product with x [rows, in]: [rows, out]; wide: the same numbers in float32."""
        if self.streams(x):
            return self.streamed(x, wide=wide)
        return self.product(x).float() if wide else self.product(x)

    def streams(self, x: Tensor) -> bool:
        """Whether x has so few rows that its product goes through one fused kernel, with the norm before it and the gate or
        residual after it."""
        return self._plain is not None and 0 < len(x) <= (FEW if self._hopper else min(FEW, FEWER))

    def streamed(
        self,
        x: Tensor,
        *,
        gains: Tensor | None = None,
        epsilon: float = 0.0,
        gated: bool = False,
        gelu: bool = False,
        wide: bool = False,
    ) -> Tensor:
        """The product of few rows x (see `streams`), or of their norm if there are gains: [rows, out]; gated: `reference.gated` of
        it, [rows, out / 2]; wide: the same numbers in float32."""
        dtype = torch.float32 if wide else x.dtype
        out = torch.empty(len(x), self.shape[0] // (1 + gated), dtype=dtype, device=x.device)
        return self._stream(x, out, gains=gains, epsilon=epsilon, gated=gated, gelu=gelu)

    def add(self, x: Tensor, sums: Tensor) -> Tensor | None:
        """Adds the product of few rows x (see `streams`) to the residual `sums` [rows, out], in place; or returns its split-K
        parts, [parts, rows, out] float32, for the caller to add."""
        from .fused_skinny_gemm import parts_of

        assert self._plain is not None
        if (parts := parts_of(x, self._plain[0])) == 1:
            self._stream(x, sums, add=True)
            return None
        return self._stream(x, torch.empty(parts, *sums.shape, dtype=torch.float32, device=x.device))

    def _stream(self, x: Tensor, out: Tensor, **how: Any) -> Tensor:
        from .fused_skinny_gemm import product

        assert self._plain is not None
        return product(x, *self._plain, out, **how)


Product = Callable[[Tensor], Tensor]


def plain(weight: Tensor, bias: Tensor | None) -> Product:
    """torch's own product, on the weight as it is."""
    return lambda x: functional.linear(x, weight, bias)


def invariant(weight: Tensor, bias: Tensor | None) -> Product:
    """The batch-invariant Triton kernel: torch's libraries choose other kernels for other numbers of rows."""
    from .fused_batch_invariant import product

    return lambda x: product(x, weight, bias, torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device))


def packed(weight: Tensor, bias: Tensor | None) -> Product:
    """oneDNN's, by the operators that torch.compile uses. A row's result does not depend on the rows beside it, to the last bit,
    except with AMX."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)

    def product(x: Tensor) -> Tensor:
        if lacking := usual(len(x)) - len(x):
            return product(functional.pad(x, (0, 0, 0, lacking)))[: len(x)]
        return torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")  # type: ignore[no-any-return]

    return product


def in_blocks(weight: Tensor, bias: Tensor | None) -> Product:
    """oneDNN's with AMX, in blocks of rows: so a row's result does not depend on the rows beside it, to the last bit, with AMX
    either."""
    product = packed(weight, bias)
    return lambda x: product(x) if len(x) <= ALIKE else torch.cat([product(part) for part in torch.split(x, ALIKE)])


def usual(rows: int) -> int:
    """`rows` rounded up, by an eighth at most, to one of eight numbers between two powers of two; 2 at least.

    oneDNN compiles a product anew for each number of rows that it has not seen, and steps have any number of rows. That takes 0.5
    to 0.7 ms and as many MiB for each shape of weight (measured 2026-11-22 on an EPYC with AVX-512). With one row it sums more than
    a thousand or so inputs in another order; two rows take as long.
    """
    rows = max(rows, 2)
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def compile_products(weights: Iterable[Weight], most: int) -> None:
    """Has oneDNN compile the products of up to `most` rows once for each shape of weight, so that no later step waits for that."""
    counts = sorted({usual(rows) for rows in range(1, most + 1)})
    for (shape, dtype, _), weight in {weight.compiled: weight for weight in weights if weight.compiled}.items():
        for rows in counts:
            weight(torch.zeros(rows, shape[1], dtype=dtype))


def transposed(weight: Tensor, bias: Tensor | None) -> Product:
    """numpy's (OpenBLAS in its wheels), which is fastest with the outputs contiguous in memory."""
    columns = weight.t().contiguous().numpy()
    if bias is None:
        return lambda x: torch.from_numpy(x.numpy() @ columns)
    return lambda x: torch.from_numpy(x.numpy() @ columns).add_(bias)


def by_mkl_columns(weight: Tensor, bias: Tensor | None) -> Product:
    """torch's own, with the outputs contiguous in memory. With MKL a row's result does not depend on the rows beside it, to the
    last bit, if there are two outputs or more: a single row, which it computes differently, is made two."""
    first, *others = torch.split(weight.t().contiguous(), PIECE)

    def product(x: Tensor) -> Tensor:
        if len(x) == 1:
            return product(x.expand(2, -1))[:1]
        pieces = torch.split(x, PIECE, 1)
        result = torch.mm(pieces[0], first) if bias is None else torch.addmm(bias, pieces[0], first)
        for piece, columns in zip(pieces[1:], others, strict=True):
            result.addmm_(piece, columns)
        return result

    return product


def with_short_route(weight: Tensor, bias: Tensor | None, product: Product) -> Product:
    """`product`, but torch's own where a call has so little to do that its overhead exceeds its arithmetic."""
    columns, most = weight.t().contiguous(), SHORT // weight.numel()

    def shortest(x: Tensor) -> Tensor:
        if len(x) > most:
            return product(x)
        return torch.mm(x, columns) if bias is None else torch.addmm(bias, x, columns)

    return shortest


def _route(weight: Tensor, exact: Invariance) -> Callable[[Tensor, Tensor | None], Product]:
    if exact is Invariance.INVARIANT and triton_for(weight):
        return invariant
    if weight.device.type != "cpu" or not by_onednn(weight.dtype):
        return plain
    if exact is Invariance.INVARIANT:
        return in_blocks if weight.dtype != torch.float32 and torch.cpu._is_amx_tile_supported() else packed
    if weight.dtype == torch.float16:  # single rows of which are quicker by torch's own
        return plain
    if weight.dtype == torch.bfloat16 or torch.get_num_threads() > 1:
        return packed
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return transposed
    # With one output, such as the gate of a shared expert, MKL's order of summation depends on the number of rows.
    return by_mkl_columns if len(weight) > 1 and weight.numel() <= SMALL and by_mkl() else packed


def by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype == torch.float32 or (dtype in supported and supported[dtype]())


@cache
def by_mkl() -> bool:
    """Whether this is an Intel processor with AVX-512, for which MKL has its best code."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text(encoding="utf-8", errors="replace")
