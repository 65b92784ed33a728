"""Wire format of rank 0's broadcast: the tokens chosen in a step, as integers. Only rank 0 sees logits.

A pick is its token, and whether it completes its row. A beam's candidate is that, the row that it continues, and its score, bit for
bit: all ranks keep the same books. A group that can't go on for a reason known to rank 0 alone has a mark instead.
"""

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Listing

from .decoding.expansion import Candidate
from .decoding.sampler import Pick

Found = list[Pick | None]  # of a group: a pick of each row, or its candidates; None where none could be chosen

NONE, BROKEN, REFUSED = -1, -2, -3  # no candidate; a pick of None; the whole group can't go on, though its logits are finite

# What all ranks know of each group: its rows, and the most candidates that it may have; 0: it has no beams.
Counts = Listing[tuple[int, int]]


def length_of(counts: Counts) -> int:
    """Length of the broadcast."""
    return sum(2 * candidates or rows for rows, candidates in counts)


def codes_of(found: Listing[Found | None], counts: Counts) -> list[int]:
    """Encodes. found: None for a group that can't go on."""
    result: list[int] = []
    for own, (rows, candidates) in zip(found, counts, strict=True):
        if own is None:
            result += [REFUSED] * (2 * candidates or rows)
            continue
        codes = [code for pick in own for code in (_pair(pick) if candidates else (_code(pick),))]
        result += codes + [NONE] * (2 * candidates - len(codes))
    return result


def found_from(codes: Listing[int], counts: Counts) -> list[Found | None]:
    """Decodes."""
    found: list[Found | None] = []
    first = 0
    for rows, candidates in counts:
        own = codes[first : first + (2 * candidates or rows)]
        first += len(own)
        if own[0] == REFUSED:
            found.append(None)
        else:
            found.append(list(_candidates(iter(own), candidates)) if candidates else [_pick(code) for code in own])
    return found


def _code(pick: Pick | None) -> int:
    return BROKEN if pick is None else 2 * pick.token + pick.complete


def _pick(code: int) -> Pick | None:
    return None if code < 0 else Pick(code // 2, 0.0, complete=bool(code % 2))


def _pair(candidate: Pick | None) -> tuple[int, int]:
    if not isinstance(candidate, Candidate):
        return BROKEN, 0
    bits: int = struct.unpack("<i", struct.pack("<f", candidate.score))[0]
    return candidate.row << 33 | _code(candidate), bits


def _candidates(codes: Iterator[int], count: int) -> Iterator[Candidate | None]:
    for _ in range(count):
        code, bits = next(codes), next(codes)
        if code == BROKEN:
            yield None
        elif code != NONE:
            score: float = struct.unpack("<f", struct.pack("<i", bits))[0]
            yield Candidate(code >> 1 & 0xFFFFFFFF, 0.0, (), bool(code & 1), code >> 33, score)
