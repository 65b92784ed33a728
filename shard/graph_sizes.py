"""Step sizes for which CUDA graphs are recorded. Pure; imports no torch, so that the launcher can plan with it.

A step is padded to the next size. Pure decode steps have as many rows as tokens; mixed ones carry prompt chunks, too.
"""

from collections.abc import Sequence

# Tokens. The gap between two sizes is at most a fourth of the larger one: so much of a step may be padding.
DECODES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
MIXED = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
VERIFIED = (8, 16)  # also of mixed steps, for few sequences with their drafts
MIXED_ROWS = 256  # rows of a mixed step whose logits are wanted
# Rows from which a decode step has a second graph, for steps in which attention has one item for each row and nothing to merge:
# with so many rows nearly all are, unless prefixes are shared. Programs and launches for what seldom is there took 8 to 40 us a
# layer of an 8 B model with 256 rows (H200, 2026-11-27).
LEAN = 32
# What a graph takes besides the tensors that all graphs share: its nodes, on the device. An estimate until it is measured.
GRAPH_BYTES = 8 << 20


def parse(text: str) -> tuple[int, ...] | None:
    """ "auto": None, which stands for the sizes above; "0": none at all; "1,2,4": decodes of these sizes and no mixed steps.

    Raises ValueError.
    """
    if text == "auto":
        return None
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError('"auto", "0" or sizes of batches such as "1,2,4,8" are needed') from None
    if sizes[0] < 0 or (sizes[0] == 0 and len(sizes) > 1):
        raise ValueError('"0" stands alone, and sizes are whole numbers from 1')
    return tuple(sizes) if sizes[0] else ()


def decodes(chosen: tuple[int, ...] | None, rows: int) -> list[int]:
    """Sizes of decode steps, ascending. rows: the most that a step has."""
    if chosen is not None:
        return [size for size in chosen if size <= rows]
    below = [size for size in DECODES if size < rows]
    return [*below, rows] if 0 < rows <= DECODES[-1] else below


def lean(chosen: tuple[int, ...] | None, rows: int) -> list[int]:
    """Sizes of decode steps with a second, lean graph, ascending."""
    return [size for size in decodes(chosen, rows) if size >= LEAN]


def mixed(chosen: tuple[int, ...] | None, tokens: int, drafts: bool = False, remembers: bool = False) -> list[int]:
    """Sizes of mixed steps, ascending. tokens: the most that a step has; drafts: whether there are any; remembers: some layers have
    recurrent state, whose launches depend on the number of spans."""
    return [] if chosen is not None or remembers else [size for size in (*(VERIFIED if drafts else ()), *MIXED) if size <= tokens]


def recorded(
    chosen: tuple[int, ...] | None, rows: int, tokens: int, drafts: bool, remembers: Sequence[bool], invariant: bool = False
) -> list[int]:
    """Tokens of all steps that are recorded. remembers: of the model, and of a draft model, which has graphs of its own; invariant:
    batch-invariant steps have no lean graphs."""
    both = *decodes(chosen, rows), *([] if invariant else lean(chosen, rows))
    return [size for own in remembers for size in (*both, *mixed(chosen, tokens, drafts, own))]
