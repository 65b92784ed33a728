"""Penalties and logit biases in Triton, for the tokens that they name; the logits stay as they are. The reference is
`sampling.penalize`.

    logit = logit / repetition if logit > 0 else logit * repetition         of each token that was there before
    logit = logit - count * frequency - (count > 0) * presence              count: how often it is in the output
    logit = logit + bias

A token that they name has a *mark*: bit i of word w of its row is token 32 w + i. Its new logit stands in a buffer as large as the
logits, `Changes.logits`, where readers find it instead of the old one. So whoever reads all logits reads a thirty-second more, and
nothing is to be restored.

1. `tally_kernel` sets the marks, and counts each token's occurrences with atomics, in the place of its new logit. The occurrence
   that sets a token's mark is its *owner*.
2. `penalize_kernel`, once the largest logits of all buckets are known among those without a mark: each owner replaces its count
   with the new logit, and raises its bucket's largest to that.
3. `clear_kernel`: owners leave zeros, for the next use.

A program takes ENTRIES occurrences of tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .sampling import LARGEST, Penalties

ENTRIES = 256  # entries of `Penalties` per program
MOST = tl.constexpr(LARGEST)


@triton.jit(do_not_specialize=["entries", "biased", "mask_stride"], do_not_specialize_on_alignment=["owners"])
def tally_kernel(
    marks: tl.tensor,  # [rows, words] int32, zero
    tallies: tl.tensor,  # [rows, vocabulary] int32, zero; or float32 for biases
    owners: tl.tensor,  # [entries] int8, out
    rows: tl.tensor,  # [entries]
    ids: tl.tensor,
    numbers: tl.tensor,  # [entries] float32: 1 if that occurrence is counted, or a bias
    entries: tl.tensor,
    vocabulary: tl.tensor,
    words: tl.tensor,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Marks tokens, and counts those in the output, or writes their biases down. BLOCK entries per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row, token = tl.load(rows + entry, mask=inside, other=0), tl.load(ids + entry, mask=inside, other=0)
    number = tl.load(numbers + entry, mask=inside, other=0.0)
    bit = token % 32
    before = tl.atomic_or(marks + row * words + token // 32, (1 << bit).to(tl.int32), mask=inside, sem="relaxed")
    tl.store(owners + entry, 1 - ((before >> bit) & 1).to(tl.int8), mask=inside)
    if BIASES:
        tl.store(tallies + row * vocabulary + token, number, mask=inside)
    else:
        counted = number.to(tl.int32)
        tl.atomic_add(tallies + row * vocabulary + token, counted, mask=inside & (counted != 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries", "biased", "mask_stride"], do_not_specialize_on_alignment=["owners"])
def penalize_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,  # [rows, words] int32: what a grammar allows; unused with a stride of 0
    maxima: tl.tensor,  # [rows, buckets] float32, in and out: the largest of every 32 allowed logits
    tallies: tl.tensor,  # [rows, vocabulary] int32: counts; out: bits of the new logits
    biases: tl.tensor,  # [rows, vocabulary] float32; unused if there are none
    owners: tl.tensor,  # [entries] int8
    rows: tl.tensor,
    ids: tl.tensor,
    repetition: tl.tensor,  # [rows]
    frequency: tl.tensor,
    presence: tl.tensor,
    entries: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    buckets: tl.tensor,
    biased: tl.tensor,  # the vocabulary, or 0 if there are no biases
    SEEN: tl.constexpr,  # whether these are occurrences, not biases of tokens that don't occur
    BLOCK: tl.constexpr,
) -> None:
    """The new logit of each token, by its owner. BLOCK entries per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    owner = inside & (tl.load(owners + entry, mask=inside, other=0) != 0)
    row, token = tl.load(rows + entry, mask=owner, other=0), tl.load(ids + entry, mask=owner, other=0)
    place = row * vocabulary + token
    value = tl.load(logits + row * stride + token, mask=owner, other=0.0)
    if SEEN:
        count = tl.load(tallies + place, mask=owner, other=0).to(tl.float32)
        factor = tl.load(repetition + row, mask=owner, other=1.0)
        value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        value = tl.clamp(value, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        value -= count * tl.load(frequency + row, mask=owner, other=0.0)
        value -= tl.where(count > 0, tl.load(presence + row, mask=owner, other=0.0), 0.0)
    value += tl.load(biases + place, mask=owner & (token < biased), other=0.0)
    value = tl.where(value == 0.0, 0.0, value)  # of a zero with a sign atomics would make another number
    tl.store(tallies + place, value.to(tl.int32, bitcast=True), mask=owner)
    allowed = tl.load(mask + row * mask_stride + token // 32, mask=owner & (token // 32 < mask_stride), other=-1)
    owner = owner & (((allowed >> (token % 32)) & 1) != 0)
    tl.atomic_max(maxima + row * buckets + token // 32, value, mask=owner, sem="relaxed")


@triton.jit(do_not_specialize=["entries", "biased", "mask_stride"], do_not_specialize_on_alignment=["owners"])
def clear_kernel(
    marks: tl.tensor,  # [rows, words] int32
    tallies: tl.tensor,  # [rows, vocabulary] int32
    biases: tl.tensor,  # [rows, vocabulary] float32; unused if there are none
    owners: tl.tensor,  # [entries] int8
    rows: tl.tensor,  # [entries]
    ids: tl.tensor,
    entries: tl.tensor,
    vocabulary: tl.tensor,
    words: tl.tensor,
    biased: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Zeros all that BLOCK entries have written."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    owner = inside & (tl.load(owners + entry, mask=inside, other=0) != 0)
    row, token = tl.load(rows + entry, mask=owner, other=0), tl.load(ids + entry, mask=owner, other=0)
    tl.store(marks + row * words + token // 32, 0, mask=owner)
    tl.store(tallies + row * vocabulary + token, 0, mask=owner)
    tl.store(biases + row * vocabulary + token, 0.0, mask=owner & (token < biased))


# Buffers of zeros, which every use leaves as zeros: making them anew would cost as much as reading the logits.
_tallies: dict[torch.device, Tensor] = {}  # int32
_marks: dict[torch.device, Tensor] = {}  # int32
_biases: dict[torch.device, Tensor] = {}  # float32


def _zeros(kept: dict[torch.device, Tensor], count: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Takes a buffer; to be put back once it holds zeros again. After a use that fails, e.g. out of memory, it may hold
    anything."""
    found = kept.pop(device, None)
    return found if found is not None and len(found) >= count else torch.zeros(count, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Changes:
    """Logits that penalties and biases have changed. To be `clear`ed."""

    penalties: Penalties
    words: int  # of a row's marks
    marks: Tensor  # [rows * words] int32, or more
    tallies: Tensor  # [rows * vocabulary] int32, or more: bits of the new logits of marked tokens; before `apply` their counts
    biases: Tensor | None
    owners: Tensor  # [entries + biases] int8

    @property
    def _biases(self) -> Tensor:
        """Of biases, or if there are none, of anything."""
        return self.biases if self.biases is not None else self.penalties.repetition

    def apply(self, logits: Tensor, mask: Tensor | None, maxima: Tensor) -> None:
        """Computes the new logits. maxima: [rows, buckets], the largest of every 32 tokens that `mask` allows and that have no
        mark, raised to the new logits."""
        given, entries = self.penalties, len(self.penalties.ids)
        for rows, ids, owners, seen in (
            (given.rows, given.ids, self.owners[:entries], True),
            (given.bias_rows, given.bias_ids, self.owners[entries:], False),
        ):
            if len(ids):
                penalize_kernel[(triton.cdiv(len(ids), ENTRIES),)](
                    logits, mask if mask is not None else self.marks, maxima, self.tallies, self._biases, owners, rows, ids,
                    given.repetition, given.frequency, given.presence, len(ids), logits.shape[1], logits.stride(0),
                    mask.stride(0) if mask is not None else 0, maxima.shape[1],
                    logits.shape[1] if self.biases is not None else 0, SEEN=seen, BLOCK=ENTRIES, enable_fp_fusion=False,
                )  # fmt: skip

    def clear(self, vocabulary: int) -> None:
        """Leaves zeros in the buffers, and puts these back."""
        given, entries = self.penalties, len(self.penalties.ids)
        for rows, ids, owners in (
            (given.rows, given.ids, self.owners[:entries]),
            (given.bias_rows, given.bias_ids, self.owners[entries:]),
        ):
            if len(ids):
                clear_kernel[(triton.cdiv(len(ids), ENTRIES),)](
                    self.marks, self.tallies, self._biases, owners, rows, ids, len(ids), vocabulary, self.words,
                    vocabulary if self.biases is not None else 0, BLOCK=ENTRIES, enable_fp_fusion=False,
                )  # fmt: skip
        device = self.marks.device
        _marks[device], _tallies[device] = self.marks, self.tallies
        if self.biases is not None:
            _biases[device] = self.biases


def mark(penalties: Penalties, rows: int, vocabulary: int) -> Changes:
    """Marks all tokens that penalties or biases name, and counts them."""
    device, words, entries, biased = penalties.ids.device, triton.cdiv(vocabulary, 32), len(penalties.ids), len(penalties.bias_ids)
    marks, tallies = _zeros(_marks, rows * words, device), _zeros(_tallies, rows * vocabulary, device)
    biases = _zeros(_biases, rows * vocabulary, device, torch.float32) if biased else None
    owners = torch.empty(entries + biased, dtype=torch.int8, device=device)
    if entries:
        tally_kernel[(triton.cdiv(entries, ENTRIES),)](
            marks, tallies, owners, penalties.rows, penalties.ids, penalties.output, entries, vocabulary, words, BIASES=False,
            BLOCK=ENTRIES, enable_fp_fusion=False,
        )  # fmt: skip
    if biased:
        tally_kernel[(triton.cdiv(biased, ENTRIES),)](
            marks, biases, owners[entries:], penalties.bias_rows, penalties.bias_ids, penalties.bias_values, biased, vocabulary,
            words, BIASES=True, BLOCK=ENTRIES, enable_fp_fusion=False,
        )  # fmt: skip
    return Changes(penalties, words, marks, tallies, biases, owners)


def compilations() -> list[Compilation]:
    """All three kernels."""
    types = dict.fromkeys(("logits", "maxima", "numbers", "biases", "repetition", "frequency", "presence"), "*fp32")
    types |= dict.fromkeys(("rows", "ids"), "*i64") | dict.fromkeys(("mask", "marks", "tallies"), "*i32") | {"owners": "*i8"}
    types |= dict.fromkeys(("vocabulary", "stride", "buckets"), "i32:16") | dict.fromkeys(
        ("words", "mask_stride", "entries", "biased"), "i32"
    )
    return [
        Compilation(
            kernel=kernel,
            name=f"sampling {name}",
            types=types | ({"tallies": "*fp32"} if constants.get("BIASES") else {}),
            constants={"BLOCK": ENTRIES, **constants},
        )
        for name, kernel, constants in (
            ("tally", tally_kernel, {"BIASES": False}),
            ("tally biases", tally_kernel, {"BIASES": True}),
            ("penalize", penalize_kernel, {"SEEN": True}),
            ("clear", clear_kernel, {}),
        )
    ]
