"""Sampling stage of a step: computes logits from the hidden states of the wanted rows, and samples tokens or expands beams.

All ranks take part, since their slices of the logits are gathered; only rank 0 sees these, and broadcasts the tokens to the others.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from ..kernels.transfer import HostCopy, list_to_device
from .broadcast import Found, codes_of, found_from, length_of
from .decoding import verify
from .decoding.expansion import Beams, Candidate, elsewhere, expand
from .decoding.grammar import Unusable
from .decoding.hypotheses import candidates_of
from .decoding.methods import strategy_of
from .decoding.sampler import PendingPicks, Pick, Row, begin, known
from .decoding.stops import StopStrings
from .decoding.verify import Draft, VerificationRule
from .masks import PendingMasks
from .models.decoder import Decoder
from .out_of_memory import ALONE, MemoryFallback
from .sequence import Group
from .speculator import Speculator
from .step import DeviceSamples, Run

ELSEWHERE = "rank 0 says why"


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What a step's tokens are sampled from and with."""

    decoder: Decoder
    hidden: Tensor  # hidden states of the wanted rows
    speculator: Speculator
    memory_fallback: MemoryFallback
    masks: PendingMasks | None


Wanted = tuple[Run, list[Row]]  # a run, and its rows to be sampled, or expanded as beams
Broadcast = Callable[[Tensor], Tensor]  # on rank 0 sends to the other ranks; on these waits and overwrites the tensor
StepPicks = PendingPicks[dict[int, Found]]  # of a step: by uid of each sampled group, row by row of its runs


def nothing(device: torch.device) -> StepPicks:
    """The pending picks of a step that samples nothing. They are ready when the device has finished its work so far."""
    none = DeviceSamples(torch.empty(0, dtype=torch.int64, device=device))
    arrival = HostCopy(none.tokens)

    def take() -> dict[int, Found]:
        arrival.wait()
        return {}

    return PendingPicks(lambda: none, arrival.wait, take)


def choose(
    decoder: Decoder,
    runs: Listing[Run],
    hidden: Tensor,
    speculator: Speculator,
    memory_fallback: MemoryFallback,
    masks: PendingMasks | None = None,
    stops: StopStrings | None = None,
) -> StepPicks:
    """Samples all groups that want tokens. The same tokens on every rank."""
    wanted = [(run, strategy_of(run.group).rows(run.group)) for run in runs if run.sampled]
    if not wanted:
        return nothing(hidden.device)
    uids = [run.group.uid for run, _ in wanted]
    context = SamplingContext(decoder, hidden, speculator, memory_fallback, masks)
    pending = _begin(context, wanted)
    if pending is None:
        found = _found_now(context, wanted, stops)
        beams = any(run.group.search for run, _ in wanted)
        picked = None if beams else known([*chain.from_iterable(found)], hidden.device).picked
        return PendingPicks(picked, lambda: None, lambda: dict(zip(uids, found, strict=True)))

    def take() -> dict[int, Found]:
        found = pending.take()
        return dict(zip(uids, masks.settle(found) if masks is not None else found, strict=True))

    return PendingPicks(pending.picked, pending.wait, take)


def _begin(context: SamplingContext, wanted: Listing[Wanted]) -> PendingPicks[list[Found]] | None:
    """Sampling that the host need not wait for; None if the kind of sampling does not allow that, or memory is short."""
    ranks = context.decoder.ranks
    if context.speculator.rule is not VerificationRule.GUMBEL or any(_on_host(run.group, ranks.size > 1) for run, _ in wanted):
        return None

    def work() -> PendingPicks[list[Found]]:
        logits = _logits(context, wanted)
        mask = context.masks.join(context.hidden.device) if context.masks is not None else None
        return _pending(context, logits, wanted, mask, ranks.broadcast if ranks.size > 1 else None)

    return context.memory_fallback.whole(work, sum([len(rows) for _, rows in wanted]))


def _on_host(group: Group, several: bool) -> bool:
    """Whether only rank 0's host knows where a row's text ends. several: there are several ranks."""
    beams = group.search is not None
    return (group.grammar != "" and (several or beams)) or (beams and group.stops != ())


def _received(tokens: Tensor) -> PendingPicks[Found]:
    """Tokens that rank 0 has sampled."""
    arrival = HostCopy(tokens)

    def take() -> Found:
        [listed] = arrival.lists()
        return [Pick(token, 0.0) if token >= 0 else None for token in listed]

    return PendingPicks(lambda: DeviceSamples(tokens), arrival.wait, take)


def _found_now(context: SamplingContext, wanted: Listing[Wanted], stops: StopStrings | None) -> list[Found]:
    """Tokens of each run, on every rank, waiting for the device."""
    found, ranks = _in_parts(context, wanted), context.decoder.ranks
    if context.masks is not None:
        found = context.masks.settle(found)
    if stops is not None:
        found = [_stopped(*one, some, stops) for one, some in zip(wanted, found, strict=True)]
    if ranks.size > 1:
        counts = [(len(rows), _candidates(run.group)) for run, rows in wanted]
        samples = ranks.rank == 0
        seen = [None if run.problem else own for (run, _), own in zip(wanted, found, strict=True)]
        codes = codes_of(seen, counts) if samples else [0] * length_of(counts)
        codes = ranks.broadcast(torch.tensor(codes, device=context.hidden.device)).tolist()
        if not samples:
            found = [_taken(*one, own) for one, own in zip(wanted, found_from(codes, counts), strict=True)]
    return found


def _candidates(group: Group) -> int:
    """Candidates of beam search, whose rows are expanded together; 0: no beams."""
    return candidates_of(group.search.width, len(group.end_ids)) if group.search else 0


def _taken(run: Run, rows: Listing[Row], found: Found | None) -> Found:
    """What rank 0 has broadcast for a group."""
    if found is None:
        run.problem = ELSEWHERE
        return [None] * len(rows)
    return found


def _in_parts(context: SamplingContext, wanted: Listing[Wanted]) -> list[Found]:
    """Tokens of each run, all sampled at once if there is memory for it. One that is too large even alone gets a problem."""
    sizes, device = [len(rows) for _, rows in wanted], context.hidden.device
    starts = [0, *accumulate(sizes)]

    def some(own: Listing[int]) -> list[Found]:
        part = [wanted[i] for i in own]
        logits = _logits(context, part)
        mask = context.masks.join(device)[starts[own[0]] : starts[own[-1] + 1]] if context.masks is not None else None
        return _pending(context, logits, part, mask).take() if logits is not None else [[] for _ in part]

    found: list[Found] = []
    for (run, rows), own in zip(wanted, context.memory_fallback.rows(some, range(len(wanted)), sizes), strict=True):
        if own is None:
            run.problem = ALONE
        found.append(own if own is not None else [None] * len(rows))
    return found


def _logits(context: SamplingContext, wanted: Listing[Wanted]) -> Tensor | None:
    """Logits of all rows, in order. All choices of a prompt sample from the same logits, computed once."""
    hidden, device, own = context.hidden, context.hidden.device, list[int]()  # of each row, its hidden row
    for run, rows in wanted:
        own += [run.first + run.wanted - 1] * len(rows) if run.group.waiting else range(run.first, run.first + len(rows))
    distinct = [*dict.fromkeys(own)]
    logits = context.decoder.logits(hidden if len(distinct) == len(hidden) else hidden[list_to_device(device, distinct)])
    if logits is not None and len(own) > len(distinct):
        places = {row: place for place, row in enumerate(distinct)}
        logits = logits[list_to_device(device, [places[row] for row in own])]
    return logits


def _pending(
    context: SamplingContext,
    logits: Tensor | None,
    wanted: Listing[Wanted],
    mask: Tensor | None,
    broadcast: Broadcast | None = None,
) -> PendingPicks[list[Found]]:
    """Picks of each run. Beams are expanded together, and all other rows sampled together; the latter come behind the former in
    what is picked. broadcast: sends to other ranks, which have no logits."""
    parts = []
    for way, has_beams in ((_expanded, True), (_sampled, False)):
        chosen = [i for i, (run, _) in enumerate(wanted) if (run.group.search is not None) is has_beams]
        if chosen:
            own, own_mask = _part(logits, mask, wanted, chosen)
            parts.append((chosen, way(context, own, [wanted[i] for i in chosen], own_mask, broadcast)))
    if len(parts) == 1:
        return parts[0][1]
    (beams, expanded), (others, sampled) = parts

    def wait() -> None:
        expanded.wait()
        sampled.wait()

    def take() -> list[Found]:
        found = dict(zip((*beams, *others), (*expanded.take(), *sampled.take()), strict=True))
        return [found[i] for i in range(len(wanted))]

    return PendingPicks(lambda: _joined(expanded, sampled), wait, take)


def _joined(*some: PendingPicks[list[Found]]) -> DeviceSamples:
    """The picks of several `PendingPicks` on the device, concatenated."""
    picked = [one.picked() for one in some if one.picked]
    parents = [one.parents if one.parents is not None else torch.zeros_like(one.tokens) for one in picked]
    return DeviceSamples(torch.cat([one.tokens for one in picked]), torch.cat(parents))


def _expanded(
    context: SamplingContext, logits: Tensor | None, wanted: Listing[Wanted], mask: Tensor | None, broadcast: Broadcast | None
) -> PendingPicks[list[Found]]:
    """Candidates of runs of beams."""
    sets = []
    for run, rows in wanted:
        group = run.group
        assert group.search is not None
        scores = [sequence.path.score if sequence.path else 0.0 for sequence in group.sequences]
        sets.append(Beams(rows, scores, _candidates(group), group.search.width, group.end_ids))
    expansion = expand(logits, sets, mask) if logits is not None else elsewhere(sets, context.hidden.device)
    if broadcast is not None:
        broadcast(expansion.found)
        expansion = expansion.received()  # what lives on is derived from it on every rank alike
    return expansion.pending()


def _sampled(
    context: SamplingContext, logits: Tensor | None, wanted: Listing[Wanted], mask: Tensor | None, broadcast: Broadcast | None
) -> PendingPicks[list[Found]]:
    """Picks of runs without beams."""
    speculator, device = context.speculator, context.hidden.device
    rows = [row for _, own in wanted for row in own]
    if logits is None:
        assert broadcast is not None
        pending = _received(broadcast(torch.empty(len(rows), dtype=torch.int64, device=device)))
    elif speculator.rule is VerificationRule.GUMBEL:
        pending = begin(logits, rows, mask)
    else:
        drafts = [draft for run, own in wanted for draft in _drafts(run.group, len(own))]
        pending = known(verify.pick(logits, rows, drafts, speculator.rule, mask, speculator.probabilities), device)
    if broadcast is not None and logits is not None and pending.picked is not None:
        broadcast(pending.picked().tokens)
    return PendingPicks(pending.picked, pending.wait, lambda: _split(pending.take(), wanted))


def _drafts(group: Group, rows: int) -> list[Draft]:
    """Drafts of each of its sequences, or none for each choice that begins."""
    return [Draft()] * rows if group.waiting else [Draft(own.draft, own.tried) for own in group.sequences]


def _part(
    logits: Tensor | None, mask: Tensor | None, wanted: Listing[Wanted], chosen: Listing[int]
) -> tuple[Tensor | None, Tensor | None]:
    """The rows of some runs. The mask is None if none of these has a grammar."""
    if logits is None or len(chosen) == len(wanted):
        return logits, mask
    starts = [0, *accumulate(len(rows) for _, rows in wanted)]
    places = list_to_device(logits.device, [row for i in chosen for row in range(starts[i], starts[i + 1])])
    bound = mask is not None and any(wanted[i][0].group.grammar for i in chosen)
    return logits[places], mask[places] if mask is not None and bound else None


def _split(picks: Found, wanted: Listing[Wanted]) -> list[Found]:
    starts = accumulate([len(rows) for _, rows in wanted], initial=0)
    return [picks[start:end] for start, end in pairwise(starts)]


def _stopped(run: Run, rows: Listing[Row], found: Found, stops: StopStrings) -> Found:
    """Candidates of beams; those that complete a stop string are marked."""
    if run.group.search is None or not run.group.stops or run.problem:
        return found
    try:
        return [_marked(run.group, rows, candidate, stops) for candidate in found]
    except Unusable as error:
        run.problem = str(error)
        return [None]


def _marked(group: Group, rows: Listing[Row], candidate: Pick | None, stops: StopStrings) -> Pick | None:
    if not isinstance(candidate, Candidate):
        return candidate
    row = rows[candidate.row]
    complete = stops.completed_by(row.tokens, row.prompt_length, candidate.token, group.stops)
    return replace(candidate, complete=True) if complete else candidate
