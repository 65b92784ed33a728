"""Grammar masks (structured output): which tokens a grammar allows in each row of a step, computed on the CPU while the forward
runs, since the next mask depends only on tokens that are known. Also masks for a draft model's drafts.

On rank 0 only, which samples. Knows groups and rows. A group whose grammar can't go on fails alone.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from concurrent import futures
from dataclasses import dataclass, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.sampling import allow
from ..kernels.transfer import list_to_device, to_device
from .decoding.expansion import Candidate
from .decoding.grammar import NOWHERE, Grammars, GrammarState, Unusable, bit
from .decoding.growth import Frontier, Model
from .decoding.sampler import Pick
from .decoding.tree import ROOT, Tree
from .sequence import Group, Sequence
from .step import Run

# Seconds that a step without other work waits for a grammar to be compiled. Commands that come meanwhile, for other requests, wait
# as long; the first grammar takes longest, since the tokenizer is read for it (14 s with a vocabulary of 262,000 tokens).
PATIENCE = 0.05


@dataclass(slots=True)
class StepMasks:
    """The token masks of a step."""

    mask: Tensor  # [distinct rows, words]; all bits are set in the last one, which is for unconstrained rows
    places: list[int]  # of each row of the step: its row there
    closed: list[bool]  # of each row, whether it is a draft's after which no token is allowed
    problems: dict[int, str]  # by uid: why a group can't go on
    seconds: float


class Masks:
    """Computes the grammar masks of one engine, on a thread of its own."""

    def __init__(self, grammars: Grammars, vocabulary: int) -> None:
        self._grammars = grammars
        self._words = -(-vocabulary // 32)
        self._thread = futures.ThreadPoolExecutor(1, "masks")

    def ready(self, groups: Listing[Group], wait: bool) -> list[bool]:
        """Which groups' grammars are compiled. wait: until at least one is, but no longer than PATIENCE."""
        beginnings = [self._beginning(group) for group in groups]
        if wait:
            futures.wait(beginnings, PATIENCE, return_when=futures.FIRST_COMPLETED)
        return [beginning.done() for beginning in beginnings]

    def begin(self, runs: Listing[Run]) -> "PendingMasks | None":
        """Starts computing the masks of the sampled runs; None if none of them has a grammar."""
        sampled = [run for run in runs if run.sampled]
        if not any(run.group.grammar for run in sampled):
            return None
        return PendingMasks(sampled, self._thread.submit(self._find, sampled).result)

    def kept_by(self, model: Model) -> "MaskedDraftModel":
        """The draft model, restricted to tokens that grammars allow."""
        return MaskedDraftModel(model, self._grammars)

    def _find(self, sampled: Listing[Run]) -> StepMasks:
        began = time.perf_counter()
        problems: dict[int, str] = {}
        bound: list[tuple[Group, Sequence, GrammarState]] = []
        places: list[int] = []  # of each row of the step: its row among those of `bound`; -1: the one behind them
        first = 0
        for run in sampled:
            group, count = run.group, len(run.group.waiting)
            states = self._states(group, problems)
            for sequence, state in zip(group.sequences, states, strict=False):
                own = range(first, first + 1 + len(sequence.draft))
                places += [first] * count or own
                bound.append((group, sequence, state))
                first = own.stop
            if not states:
                places += [-1] * (count or run.wanted)
        mask, closed = numpy.full((1, self._words), -1, numpy.int32), [False]
        if bound:
            allowed, ends = self._allowed(bound, problems)
            mask, closed = numpy.concatenate((allowed, mask)), ends + closed
        places = [place % len(mask) for place in places]
        closed = [closed[place] for place in places]
        return StepMasks(torch.from_numpy(mask), places, closed, problems, time.perf_counter() - began)

    def _allowed(
        self, bound: Listing[tuple[Group, Sequence, GrammarState]], problems: dict[int, str]
    ) -> tuple[NDArray[numpy.int32], list[bool]]:
        """Masks [rows, words] after each sequence's last token, then after each of its drafts; and which of them are closed. Closed
        rows, and those with a problem, have all bits set: something has to be sampled."""
        trees = [sequence.draft for _, sequence, _ in bound]
        mask, complete = self._grammars.masks_along([state for _, _, state in bound], trees)
        closed = [False] * len(mask)
        row = 0
        for (group, sequence, state), tree in zip(bound, trees, strict=True):
            for depth in (0, *(1 + depth for depth in tree.depths)):
                _allow_ends(mask[row], group, sequence.generated + depth, complete[row])
                if not mask[row].any() and group.search is None:  # beams have other candidates
                    mask[row] = -1
                    if depth:
                        closed[row] = True
                    else:
                        problems[group.uid] = state.problem or NOWHERE
                row += 1
        return mask, closed

    def _states(self, group: Group, problems: dict[int, str]) -> list[GrammarState]:
        """Grammar states of its sequences, each advanced to its sequence's end. They are created here, for new and resumed
        groups."""
        states: list[GrammarState] = []
        if not group.grammar:
            return states
        try:
            for sequence in group.sequences:
                state = sequence.grammar_state = sequence.grammar_state or self._beginning(group).result().copy()
                state.follow(sequence.tokens[sequence.prompt_length :])
                states.append(state)
        except Unusable as error:
            problems[group.uid] = str(error)
            return []
        except RuntimeError as error:  # no thread could start
            problems[group.uid] = f"its grammar can't be compiled now: {error}"
            return []
        return states

    def _beginning(self, group: Group) -> "futures.Future[GrammarState]":
        """The compiled grammar. The group keeps it: more groups may wait than compiled grammars are cached."""
        group.beginning = group.beginning or self._grammars.compile(group.grammar)
        return group.beginning


class MaskedDraftModel:
    """A draft model whose logits exclude tokens that grammars don't allow. See `growth.Model`."""

    def __init__(self, model: Model, grammars: Grammars) -> None:
        self._model = model
        self._grammars = grammars

    def ready(self, sequences: Listing[Sequence]) -> list[bool]:
        """See `growth.Model`."""
        return self._model.ready(sequences)

    def logits(self, wanted: Listing[Frontier]) -> Tensor:
        """See `growth.Model`. Where no token but an end may come, nothing is excluded: such a draft is rejected anyway."""
        logits = self._model.logits(wanted)
        places = [(one, node) for one in wanted for node in one.nodes]
        states = {row: state for row, place in enumerate(places) if (state := _after(*place))}
        if states:
            masks = self._grammars.masks(list(states.values()))
            masks[~masks.any(1)] = -1
            rows = torch.tensor(list(states), device=logits.device)
            logits[rows] = allow(logits[rows], torch.from_numpy(masks).to(logits.device))
        return logits


def _after(wanted: Frontier, node: int) -> GrammarState | None:
    """Grammar state after a node; None: the path breaks the grammar, or there is none."""
    sequence, path = wanted.sequence, list[int]()
    if sequence.grammar_state is None:
        return None
    sequence.grammar_state.follow(sequence.tokens[sequence.prompt_length :])
    while node != ROOT:
        path.append(wanted.tokens[node])
        node = wanted.parents[node]
    return sequence.grammar_state.after(path[::-1]) if path else sequence.grammar_state


class PendingMasks:
    """Masks that are being computed."""

    def __init__(self, sampled: Listing[Run], result: Callable[[], StepMasks]) -> None:
        self._sampled = sampled
        self._result = result
        self.waited = 0.0  # seconds

    @property
    def seconds(self) -> float:
        """How long they took."""
        return self._result().seconds

    def join(self, device: torch.device) -> Tensor:
        """[rows, words], for the rows of all sampled runs, in order."""
        began = time.perf_counter()
        found = self._result()
        self.waited += time.perf_counter() - began
        # A mask of all rows can have megabytes, and be that of a single constrained one.
        return to_device(found.mask, device).index_select(0, list_to_device(device, found.places))

    def settle(self, picks: Listing[list[Pick | None]]) -> list[list[Pick | None]]:
        """The picks of these runs, without those of failed groups, whose runs get the reason, and of drafts after which no token is
        allowed. In groups without end tokens, a pick that completes the grammar ends its sequence."""
        found = self._result()
        settled, first = [], 0
        for run, own in zip(self._sampled, picks, strict=True):
            group = run.group
            closed = found.closed[first : first + (len(group.waiting) or run.wanted)]
            first += len(closed)
            if group.uid in found.problems:
                if None not in own:  # else its logits are the worse problem: then nothing it computed may be cached
                    run.problem = found.problems[group.uid]
                own = [None] * len(own)
            elif group.grammar and group.search is None:
                own = [None if is_closed else pick for is_closed, pick in zip(closed, own, strict=True)]
            if group.grammar and not group.end_ids:
                own = _expanded(group, own) if group.search else _completed(group, own)
            settled.append(own)
        return settled


def _expanded(group: Group, candidates: Listing[Pick | None]) -> list[Pick | None]:
    """A group's candidates; those that complete its grammar are marked."""
    return [
        replace(one, complete=True) if isinstance(one, Candidate) and _completing(group.sequences[one.row], [one]) else one
        for one in candidates
    ]


def _completed(group: Group, picks: Listing[Pick | None]) -> list[Pick | None]:
    """A group's picks; on the path along those of a sequence, the one that completes its grammar is marked."""
    settled, first = list(picks), 0
    for sequence, tree in [(group.sequences[0], Tree())] * len(group.waiting) or [(one, one.draft) for one in group.sequences]:
        own = picks[first : first + 1 + len(tree)]
        path = [1 + node for node in (ROOT, *tree.accepted([one.token if one else None for one in own]))]
        along = [one for row in path if (one := own[row])]
        count = _completing(sequence, along)
        if count:
            settled[first + path[count - 1]] = replace(along[count - 1], complete=True)
        first += len(own)
    return settled


def _completing(sequence: Sequence, picks: Listing[Pick]) -> int:
    """How many of these next tokens complete its grammar; 0 if they don't."""
    return sequence.grammar_state.completed_by([one.token for one in picks]) if sequence.grammar_state else 0


def _allow_ends(row: NDArray[numpy.int32], group: Group, generated: int, complete: bool) -> None:
    """Allows end tokens where the text may end, but not before min_new_tokens, unless no other token is allowed."""
    early = generated < group.min_new_tokens
    if early:
        others = row.copy()
        for token in group.end_ids:
            others[token // 32] &= ~bit(token)
        if others.any():
            row[:] = others
            return
    if complete:
        for token in group.end_ids:
            row[token // 32] |= bit(token)
