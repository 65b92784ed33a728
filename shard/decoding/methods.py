"""Which strategy a group has. A new method is a new file, and a line here."""

from ..sequence import Group
from .beam import BeamSearch
from .sample import Sample
from .strategy import Strategy

SAMPLE: Strategy = Sample()
BEAM_SEARCH: Strategy = BeamSearch()


def strategy_of(group: Group) -> Strategy:
    """How it goes on."""
    return SAMPLE if group.search is None else BEAM_SEARCH
