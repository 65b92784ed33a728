"""Checks of matrix products: of few rows, batch-invariant, of adapters, with quantized weights, of experts and their routes."""

import itertools
import random
from functools import partial
from typing import Any

import torch

from penstock.benchmarks.gpu_comparisons import (
    ROUNDINGS,
    SUMS,
    TYPES,
    Check,
    error,
    exact_norm,
    poisoned,
    random_values,
    relative_error,
)
from penstock.benchmarks.gpu_measure import Bench
from penstock.kernels import (
    adapters,
    codes,
    dispatch,
    experts,
    fused_quantized,
    fused_skinny_gemm,
    linear,
    low_rank,
    operations,
    quantized,
    reference,
)
from penstock.kernels.fused_routing import PAIRS, sort
from penstock.kernels.linear import Invariance
from penstock.kernels.reference import Activation

FEW = (2, 16, 17, 32, 33, 64)  # rows of products: as many as tiles have, and one more
MIXTURES = ((8, 2), (128, 8))  # experts, and how many of them a token uses


def checks(bench: Bench) -> dict[str, Check]:
    """All of these, by name."""
    found: dict[str, Check] = {"products of few rows": products, "products of few rows in parts, with the norm behind": parts}
    for name, dtype in TYPES.items():
        found[f"batch-invariant products, {name}"] = partial(invariant_products, dtype=dtype)
    found |= {"routes to experts": routes, "products of experts": mixtures, "products of adapters": adapted}
    for kind in codes.BITS:
        found[f"products of quantized experts, {kind}"] = partial(mixtures, kind=kind)
        found[f"products with quantized weights, {kind}"] = partial(quantized_products, kind=kind)
    return found


def _sizes(bench: Bench, chance: random.Random) -> list[tuple[int, int]]:
    """Inputs and outputs of products of few rows."""
    return [(40, 33), (64, 48)] if bench.tiny else [(4096, 6144), (14336, 4096), (chance.randint(30, 1100), chance.randint(1, 999))]


def products(bench: Bench, chance: random.Random) -> float:
    """Skinny GEMMs with and without fused prologues and epilogues."""
    worst, dtype = 0.0, torch.bfloat16
    kinds = ((False, False, False), (True, False, False), (True, True, False), (False, False, True))
    for inputs, outputs in _sizes(bench, chance):
        cases = [*itertools.product((1, chance.choice([2, 3, 16])), kinds), *((rows, chance.choice(kinds)) for rows in FEW[2:])]
        for rows, (norm, gated, add) in cases:
            x, out = (random_values(rows, size, dtype=dtype, device=bench.device) for size in (inputs, outputs))
            weight = random_values(outputs * (1 + gated), inputs, dtype=dtype, device=bench.device) * inputs**-0.5
            bias = random_values(len(weight), dtype=dtype, device=bench.device) if chance.random() < 0.5 else None
            gains = random_values(inputs, dtype=dtype, device=bench.device) if norm else None
            expected = (x.double() if gains is None else exact_norm(x, gains, 1e-5)) @ weight.double().T
            expected += bias.double() if bias is not None else 0
            if gated:
                gate, up = expected.chunk(2, -1)
                expected = gate * gate.sigmoid() * up
            if add:
                expected += out.double()
            else:
                out.fill_(torch.nan)
            fused_skinny_gemm.product(x, weight, bias, out, gains=gains, epsilon=1e-5, gated=gated, add=add)
            worst = max(worst, relative_error(out, expected, dtype))
    return worst


def parts(bench: Bench, chance: random.Random) -> float:
    """Split-K products: the sum of the parts, the residual stream with it added, and the norm of that."""
    worst, dtype = 0.0, torch.bfloat16
    for (inputs, outputs), rows in itertools.product(_sizes(bench, chance), FEW):
        x, residual = (random_values(rows, size, dtype=dtype, device=bench.device) for size in (inputs, outputs))
        weight = random_values(outputs, inputs, dtype=dtype, device=bench.device) * inputs**-0.5
        bias, gains = (random_values(outputs, dtype=dtype, device=bench.device) for _ in range(2))
        out = torch.full((chance.choice([2, 4]), rows, outputs), torch.nan, device=bench.device)
        fused_skinny_gemm.product(x, weight, bias, out)
        expected = x.double() @ weight.double().T + bias.double()
        largest = expected.abs().max()
        worst = max(worst, error(out.double().sum(0) / largest, expected / largest, SUMS))
        expected += residual.double()
        with poisoned():
            found = operations.add_rms_norm(out, residual, gains, 1e-5)
        worst = max(
            worst, relative_error(residual, expected, dtype), error(found, exact_norm(residual, gains, 1e-5), ROUNDINGS[dtype])
        )
    return worst


def invariant_products(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Batch-invariant products against float64, and bit-identical for some of the rows by themselves."""
    worst = 0.0
    for inputs, outputs in [(40, 33)] if bench.tiny else [(4096, 6144), (14336, 4096), (chance.randint(30, 1100), 999)]:
        rows = 5 if bench.tiny else 600
        x = random_values(rows, inputs, dtype=dtype, device=bench.device)
        weight = random_values(outputs, inputs, dtype=dtype, device=bench.device) * inputs**-0.5
        product = linear.invariant(weight, None)
        found, expected = product(x), x.double() @ weight.double().T
        worst = max(worst, relative_error(found, expected, dtype))
        for first, count in ((0, 1), (3, 1), (1, chance.randint(2, rows - 1))):
            if not product(x[first : first + count].clone()).equal(found[first : first + count]):
                return torch.inf
    return worst


def adapted(bench: Bench, chance: random.Random) -> float:
    """LoRA adapters of different ranks, for rows that use one of them or none."""
    worst, dtype, device = 0.0, torch.bfloat16, bench.device
    inputs, outputs = (24, 17) if bench.tiny else (chance.randint(100, 5000), chance.randint(100, 5000))
    ranks = (3, 16) if bench.tiny else (8, 64, 16, 100)
    pairs = [
        (random_values(rank, inputs, dtype=dtype, device=device), random_values(outputs, rank, dtype=dtype, device=device))
        for rank in ranks
    ]
    pairs = [(down * inputs**-0.5, up * len(down) ** -0.5) for down, up in pairs]
    lora = low_rank.lay_out(pairs)
    assert lora is not None
    for rows in (1, 9) if bench.tiny else (1, 64, 3000):
        x, out = (
            random_values(rows, inputs, dtype=dtype, device=device).contiguous(),
            random_values(rows, outputs, dtype=dtype, device=device),
        )
        out, numbers = out.contiguous(), torch.randint(-1, len(ranks), (rows,), device=device)
        expected = out.double()
        for number, (down, up) in enumerate(pairs):
            own = numbers == number
            expected[own] += x[own].double() @ down.double().T @ up.double().T
        lora.add(x, out, adapters.choose(numbers, len(ranks)))
        worst = max(worst, relative_error(out, expected, dtype))
    return worst


def quantized_products(bench: Bench, chance: random.Random, kind: str) -> float:
    """Quantized products of few rows, with tensor cores and without, of many, and with the weight dequantized first."""
    worst = 0.0
    for dtype, rows in itertools.product((torch.bfloat16, torch.float16), (1, 3, 40, fused_quantized.MOST + 1)):
        inputs, outputs = (64, 17) if bench.tiny else (chance.choice([2048, 4096, 14336]), chance.randint(1, 6144))
        rounded = codes.quantize(torch.randn(outputs, inputs, device=bench.device) * inputs**-0.5, kind)
        if kind not in codes.FP4_BLOCKS:
            rounded = rounded.refined(rounded.block // chance.choice([1, 2]))
        bias = random_values(outputs, dtype=dtype, device=bench.device) if chance.random() < 0.5 else None
        x = random_values(rows, inputs, dtype=dtype, device=bench.device)
        expected = x.double() @ codes.dequantized(rounded, torch.float64).T + (bias.double() if bias is not None else 0)
        found = quantized.lay_out(rounded, bias, Invariance.USUAL, dtype)(x)
        worst = max(worst, relative_error(found, expected, dtype))
    return worst


def routes(bench: Bench, chance: random.Random) -> float:
    """Router weights of experts, against the CPU, and pairs sorted by expert."""
    worst = 0.0
    for number, count, sets in ((8, 2, (1, 1, 2)), (128, 8, (1, 1, 2)), (160, 6, (8, 3, 1)), (256, 8, (8, 4, 2))):
        logits, correction = torch.randn(chance.randint(1, 99), number), torch.rand(number)
        how: dict[str, Any] = {"count": count, "normalized": True, "sigmoid": chance.random() < 0.5, "sets": sets}
        how["by_logits"] = how["sigmoid"] and chance.random() < 0.5
        with poisoned():
            shares, chosen = experts.route(logits.to(bench.device), correction=correction.to(bench.device), **how)
            order, starts = sort(chosen[: PAIRS // count], number)
        with dispatch.forced("reference"):
            expected, _ = experts.route(logits, correction=correction, **how)
        numbers, places = chosen[: PAIRS // count].flatten().sort(stable=True)
        begins = torch.searchsorted(numbers, torch.arange(number + 1, device=bench.device))
        exact = order.equal(places) and starts.equal(begins)
        worst = max(worst, error(shares.sort(-1).values, expected.sort(-1).values, 2e-6) if exact else torch.inf)
    return worst


def mixtures(bench: Bench, chance: random.Random, kind: str = "") -> float:
    """Experts that many tokens choose, few, and none; if quantized, with biases and limits, too."""
    worst, dtype, device = 0.0, torch.bfloat16, bench.device
    hidden, size = (24, 17) if bench.tiny else (chance.randint(100, 3000), chance.randint(100, 1000))
    if kind:
        hidden, size = (64, 32) if bench.tiny else (32 * chance.randint(4, 90), 32 * chance.randint(4, 30))
    limit = 7.0 if kind else 0.0
    for number, count in ((5, 2),) if bench.tiny else MIXTURES:
        gate_ups = [random_values(2 * size, hidden, dtype=dtype, device=device) * hidden**-0.5 for _ in range(number)]
        downs = [random_values(hidden, size, dtype=dtype, device=device) * size**-0.5 for _ in range(number)]
        biases = [random_values(number, width, dtype=dtype, device=device) for width in (2 * size, hidden)]
        if kind:
            few = [[codes.quantize(weight, kind) for weight in weights] for weights in (gate_ups, downs)]
            gate_ups, downs = ([codes.dequantized(weight, torch.float64) for weight in weights] for weights in few)
            laid_out = experts.lay_out(few[0], few[1], dtype, (biases[0], biases[1]), Activation(limit=limit))
        else:
            laid_out = experts.lay_out(gate_ups, downs, dtype)
            biases = [torch.zeros_like(bias) for bias in biases]
        for tokens in (1, 9) if bench.tiny else (1, 64, 3000):
            x = random_values(tokens, hidden, dtype=dtype, device=device)
            logits = torch.randn(tokens, number, device=device)
            logits[: tokens // 2, 0] += 9
            shares, chosen = experts.route(logits, count, True)
            expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
            for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                inner = x[rows].double() @ gate_up.double().T + biases[0][expert].double()
                made = reference.gated(inner, Activation(limit=limit)) @ down.double().T + biases[1][expert].double()
                expected.index_add_(0, rows, made * shares[rows, places, None].double())
            with poisoned():
                found = laid_out(x, shares, chosen)
            worst = max(worst, relative_error(found, expected, dtype))
    return worst
