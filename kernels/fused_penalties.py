"""Penalties and logit biases in Triton: applied to logits in place, and undone at the end, since they touch only the tokens that
they name. The reference is `sampling.penalize`.

    logit = logit / repetition if logit > 0 else logit * repetition         of each token that was there before
    logit = logit - count * frequency - (count > 0) * presence              count: how often it is in the output
    logit = logit + bias

A program takes ENTRIES occurrences of tokens. `tally_kernel` counts each token's occurrences with atomics, in a buffer as large
as the logits that is otherwise zero; in `penalize_kernel` one occurrence of each token takes its count, leaves a zero there, and
changes the logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .sampling import LARGEST, Penalties

ENTRIES = 256  # entries of `Penalties` per program
MOST = tl.constexpr(LARGEST)


@triton.jit(do_not_specialize=["entries"])
def tally_kernel(
    tallies: tl.tensor,  # [rows, vocabulary] int32, zero
    rows: tl.tensor,  # [entries]
    ids: tl.tensor,
    output: tl.tensor,
    entries: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Marks tokens that were seen (2^30) and counts those in the output. BLOCK entries per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    place = tl.load(rows + entry, mask=inside, other=0) * vocabulary + tl.load(ids + entry, mask=inside, other=0)
    counted = tl.load(output + entry, mask=inside, other=0.0).to(tl.int32)
    tl.atomic_or(tallies + place, 1 << 30, mask=inside)
    tl.atomic_add(tallies + place, counted, mask=inside)


@triton.jit(do_not_specialize=["entries"])
def penalize_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32, changed in place
    tallies: tl.tensor,  # zero again afterwards
    saved: tl.tensor,  # [entries] float32: the logit before; NaN where another entry has changed it
    rows: tl.tensor,
    ids: tl.tensor,
    repetition: tl.tensor,  # [rows]
    frequency: tl.tensor,
    presence: tl.tensor,
    entries: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Each token's tally is claimed by one of its entries, which penalizes the token. BLOCK entries per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row, token = tl.load(rows + entry, mask=inside, other=0), tl.load(ids + entry, mask=inside, other=0)
    tally = tl.atomic_xchg(tallies + row * vocabulary + token, 0, mask=inside)
    owner = inside & (tally != 0)
    place = logits + row * stride + token
    value = tl.load(place, mask=owner, other=float("nan"))
    tl.store(saved + entry, tl.where(owner, value, float("nan")), mask=inside)
    factor = tl.load(repetition + row, mask=owner, other=1.0)
    count = (tally & 0x3FFFFFFF).to(tl.float32)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value = tl.clamp(value, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    value -= count * tl.load(frequency + row, mask=owner, other=0.0)
    value -= tl.where(count > 0, tl.load(presence + row, mask=owner, other=0.0), 0.0)
    tl.store(place, value, mask=owner)


@triton.jit(do_not_specialize=["entries"])
def restore_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    saved: tl.tensor,  # [entries]
    rows: tl.tensor,
    ids: tl.tensor,
    entries: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Writes back the logits that BLOCK entries have changed."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    value = tl.load(saved + entry, mask=inside, other=float("nan"))
    row, token = tl.load(rows + entry, mask=inside, other=0), tl.load(ids + entry, mask=inside, other=0)
    tl.store(logits + row * stride + token, value, mask=inside & (value == value))


# A buffer of zeros, which every use leaves as zeros: making it anew would cost as much as reading the logits.
_tallies: dict[torch.device, Tensor] = {}


def _zeros(count: int, device: torch.device) -> Tensor:
    """Takes the buffer; to be put back once it holds zeros again. After a use that fails, e.g. out of memory, it may hold
    anything."""
    found = _tallies.pop(device, None)
    return found if found is not None and len(found) >= count else torch.zeros(count, dtype=torch.int32, device=device)


def penalize_(logits: Tensor, penalties: Penalties) -> Tensor:
    """`sampling.penalize` in place. Returns what `restore_` needs."""
    rows, vocabulary = logits.shape
    tallies = _zeros(rows * vocabulary, logits.device)
    entries = len(penalties.ids)
    saved = torch.empty(entries, device=logits.device)
    if entries:
        grid = (triton.cdiv(entries, ENTRIES),)
        tally_kernel[grid](
            tallies, penalties.rows, penalties.ids, penalties.output, entries, vocabulary, BLOCK=ENTRIES, enable_fp_fusion=False
        )
        penalize_kernel[grid](
            logits, tallies, saved, penalties.rows, penalties.ids, penalties.repetition, penalties.frequency, penalties.presence,
            entries, vocabulary, logits.stride(0), BLOCK=ENTRIES, enable_fp_fusion=False,
        )  # fmt: skip
    _tallies[logits.device] = tallies
    if not len(penalties.bias_ids):
        return saved
    biased = logits[penalties.bias_rows, penalties.bias_ids]
    logits[penalties.bias_rows, penalties.bias_ids] = biased + penalties.bias_values
    return torch.cat((saved, biased))


def restore_(logits: Tensor, penalties: Penalties, saved: Tensor) -> None:
    """Undoes `penalize_`."""
    entries = len(penalties.ids)
    if len(saved) > entries:
        logits[penalties.bias_rows, penalties.bias_ids] = saved[entries:]
    if entries:
        restore_kernel[(triton.cdiv(entries, ENTRIES),)](
            logits, saved, penalties.rows, penalties.ids, entries, logits.stride(0), BLOCK=ENTRIES, enable_fp_fusion=False
        )


def compilations() -> list[Compilation]:
    """All three kernels."""
    types = dict.fromkeys(("logits", "output", "saved", "repetition", "frequency", "presence"), "*fp32")
    types |= dict.fromkeys(("rows", "ids"), "*i64") | {"tallies": "*i32", "entries": "i32"}
    types |= dict.fromkeys(("vocabulary", "stride"), "i32:16")
    return [
        Compilation(
            kernel=kernel,
            name=f"sampling {name}",
            types=types,
            constants={"BLOCK": ENTRIES},
        )
        for name, kernel in (("tally", tally_kernel), ("penalize", penalize_kernel), ("restore", restore_kernel))
    ]
