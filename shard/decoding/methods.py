"""Selects a group's decoding strategy. A new method is a new file, and a line here."""

from ..sequence import Group
from .beam import BeamSearch
from .sample import Sample
from .speculate import Speculate
from .strategy import Strategy

SAMPLE = Sample()
SPECULATE = Speculate()
BEAM_SEARCH = BeamSearch()


def strategy_of(group: Group) -> Strategy:
    """The strategy for this step: beam search, speculative decoding if there are drafts, or plain sampling."""
    if group.search is not None:
        return BEAM_SEARCH
    return SPECULATE if group.drafts and any(len(sequence.draft) for sequence in group.sequences) else SAMPLE
