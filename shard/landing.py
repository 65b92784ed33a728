"""Applies the result of a step: sequences take their tokens, fork and end, groups fail, computed pages are published to the prefix
cache. It is the second half of a step; `engine` plans and begins it. Knows groups and strategies; no model and no logits.
"""

from array import array
from collections.abc import Sequence as Listing
from itertools import groupby

from .books import Books
from .broadcast import Found
from .cache import Cache
from .decoding.expansion import Candidate
from .decoding.methods import strategy_of
from .outcome import Outcome
from .pages import OutOfPages
from .sequence import Group, Sequence
from .step import Run


def conclude(runs: Listing[Run], picks: dict[int, Found], books: Books, cache: Cache, outcome: Outcome) -> None:
    """Concludes a step that has computed `runs`. picks: sampled tokens of the groups, by uid."""
    runs = books.living(runs)
    # A step with drafts waits for the verdict: they may be rejected.
    books.publish([(run.group, span.sequence) for run in runs if not run.problem for span in run.spans if not span.drafts])
    books.touch(runs)
    for run in runs:
        _judge(run, picks, books, cache, outcome)
    books.forks.copy()
    books.report(outcome)


def _judge(run: Run, picks: dict[int, Found], books: Books, cache: Cache, outcome: Outcome) -> None:
    group = run.group
    children: Listing[Candidate] = ()
    if run.problem:
        books.fail(group, run.problem, outcome)
        return
    if run.sampled:
        own = picks[group.uid]
        if group.waiting and None not in own:
            _begin(group, outcome)
        verdict = strategy_of(group).judge(group, own)
        if verdict.failure:
            books.fail(group, verdict.failure, outcome)
            return
        if group.drafts and any(span.drafts for span in run.spans):
            outcome.count_drafts(group, verdict)
            if verdict.moves:
                _move(verdict.moves, cache)
            books.publish([(group, sequence) for sequence in group.sequences])
        outcome.add(group, verdict)
        if verdict.ended:
            books.end(group, verdict.ended)
            if not books.has(group):
                return
        children = verdict.children
    try:
        if children:
            books.forks.fork(group, children)
        if not group.decodes:
            books.prompts.settle(group)
    except OutOfPages as error:
        books.fail(group, str(error), outcome)


def _begin(group: Group, outcome: Outcome) -> None:
    """Begins the choices that waited for the prompt."""
    if group.prompt_logprobs:
        outcome.prompts.append((group.uid, group.prompt_scores, group.prompt_tops))
        group.prompt_logprobs = False
    [first] = group.sequences
    if first.pictures is not None:
        first.pictures.forget()
    first.choice, *others = group.waiting
    for choice in others:
        begun = Sequence(array("I", first.tokens), first.prompt_length, choice, first.cache_key, first.adapter, first.pictures)
        begun.counts = first.counts.copy() if first.counts else None
        group.sequences.append(begun)
    group.waiting = []


def _move(moves: Listing[tuple[Sequence, int, int]], cache: Cache) -> None:
    """Moves keys and values of accepted drafts to their final slots."""
    size = cache.page_size
    rows = groupby(moves, key=lambda one: id(one[0]))
    cache.move([[(one.slot(source, size), one.slot(target, size)) for one, source, target in own] for _, own in rows])
