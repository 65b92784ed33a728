"""Slots of recurrent states: assigns one to each sequence, of models with recurrent layers (`spans.RecurrentStates`). All ranks
agree.

A recurrent state follows from all computed tokens of a sequence, and each step changes it in place. So each sequence has a slot of
its own, `Sequence.state`, 0 for none. A fork takes its parent's number along, and gets a copy before the next step. Nothing is
released explicitly: what no sequence has is free.
"""

from collections.abc import Iterable

from .sequence import Group, Sequence


def settle(groups: Iterable[Group], slots: int, kept: Iterable[int] = ()) -> tuple[list[tuple[int, int]], list[Group]]:
    """Gives each sequence that has begun a slot of its own, from 1 to `slots`. groups: all that there are; kept: slots of the
    prefix cache, which stay as they are.

    Returns the copies to make for that, as (source, target), of which no target is a source; and the groups for which there are too
    few slots: these can only be dropped.
    """
    taken, lacking = set(kept), list[tuple[Group, Sequence]]()
    for group in groups:
        for sequence in group.sequences:
            if sequence.state and sequence.state not in taken:
                taken.add(sequence.state)
            elif sequence.computed:
                lacking.append((group, sequence))
    if not lacking:
        return [], []
    copies, failed = list[tuple[int, int]](), dict[int, Group]()
    free = (slot for slot in range(1, slots + 1) if slot not in taken)
    for group, sequence in lacking:
        slot = next(free, 0)
        if not slot:
            failed[group.uid] = group
        elif sequence.state:
            copies.append((sequence.state, slot))
        sequence.state = slot
    return copies, list(failed.values())
