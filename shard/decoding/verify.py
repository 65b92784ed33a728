"""Verification of drafts: decides which draft tokens of a step are accepted. A rule chooses the token after a sequence's last one
and after every draft; the answer is the path along these tokens, as far as there are drafts for it, and one more token after it.

    gumbel      what plain sampling would emit: each row is sampled with the noise of its own output position, so the answer equals
                plain sampling token for token, whatever is drafted. At temperature 0 there is no noise, and the rule is the same.
    rejection   speculative (rejection) sampling: drafts that were drawn from known distributions are accepted at random, so that
                the answer has the distribution of plain sampling: along a chain (Leviathan et al. 2023, arXiv:2211.17192;
                Chen et al. 2023, arXiv:2302.01318), and with several tries at every node (SpecInfer: Miao et al. 2024,
                arXiv:2305.09781).
    typical     LOSSY: whatever the model finds probable enough is accepted (Medusa: Cai et al. 2024, arXiv:2401.10774).

All randomness is noise of (seed, choice, output position), as in `kernels.noise`; nothing has a state. Knows trees and rows, no
page.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import overload

import torch
from torch import Tensor

from ...kernels import noise
from ...kernels.sampling import Draws, Filtered, allow, draw, filtered
from ..sequence import Group, Sequence
from . import sampler
from .sample import sampling_of
from .sampler import Pick, Row, draws_of, penalized
from .strategy import Finish, finish_of
from .tree import DraftToken, Tree

# The last word of the noise's counter gives each use of the seed its own stream; `noise.STREAM`, 0, is for sampling tokens.
PROPOSED = 1  # tokens that a draft model draws
ACCEPTED = 2  # whether they are accepted
# Medusa's typical acceptance with its published values: probable enough is what is above the lower of a constant and a share of
# exp(-entropy).
THRESHOLD = 0.09
SHARE = 0.3


class VerificationRule(StrEnum):
    """A verification rule; see the module."""

    GUMBEL = "gumbel"
    REJECTION = "rejection"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft tokens proposed for a sequence."""

    tree: Tree = Tree()  # noqa: RUF009 - it is frozen
    # For `rejection`: the children of the sequence's last token, then of every node, as they were drawn, independently of each
    # other and of the order in which they are tried. A token that was drawn twice is here twice, and once in the tree.
    drawn: tuple[tuple[DraftToken, ...], ...] = ()


def deterministic_draft(tree: Tree) -> Draft:
    """A draft that depends deterministically on its sequence's tokens, such as one from n-gram lookup."""
    return Draft(tree, tuple(tuple(DraftToken(tree.tokens[node], -1) for node in family) for family in tree.children))


class TokensView(Listing[int]):
    """A sequence's tokens followed by some more, as a view without a copy."""

    __slots__ = ("_length", "_more", "_tokens")

    def __init__(self, tokens: Listing[int], more: Listing[int]) -> None:
        self._tokens = tokens
        self._more = more
        self._length = len(tokens) + len(more)  # asked for often

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain(self._tokens, self._more)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self[i] for i in range(self._length)[place]]
        place, before = range(self._length)[place], len(self._tokens)
        return self._tokens[place] if place < before else self._more[place - before]


def row(group: Group, sequence: Sequence, path: Listing[int]) -> Row:
    """The sampling row after this path of drafts, sampled as if they were the sequence's own tokens."""
    tokens = TokensView(sequence.tokens, path) if path else sequence.tokens
    own, bound = sampling_of(group, tokens), bool(group.grammar)
    return Row(own, tokens, sequence.prompt_length, sequence.choice, group.top_n, bound, sequence.counts, len(path))


def rows(group: Group, sequence: Sequence, tree: Tree) -> list[Row]:
    """One row after the sequence's last token, then one after every node."""
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append([*paths[parent], token] if parent >= 0 else [token])
    return [row(group, sequence, path) for path in ([], *paths)]


def room(group: Group, sequence: Sequence) -> int:
    """The greatest depth of a tree: the token after the last accepted draft may be the last that the group is allowed."""
    return max(0, group.max_new_tokens - sequence.generated - 1)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The verification result for one sequence."""

    path: list[int]  # accepted nodes whose keys and values stay: all new tokens but the last
    picks: list[Pick]  # the new tokens; empty: none can follow the last one
    finish: Finish  # of the last new token
    right: list[int]  # nodes that were right: the path, and the draft of the last new token, if there is one


def accept(group: Group, sequence: Sequence, tree: Tree, picks: Listing[Pick | None]) -> Accepted:
    """The accepted path and new tokens, ending where plain decoding would have ended. picks: after the sequence's last token, then
    after every node. Changes nothing."""
    path = tree.accepted([one.token if one else None for one in picks])
    kept: list[Pick] = []
    finish = Finish.NOT
    for node in (-1, *path):
        one = picks[node + 1]
        if one is None:
            break  # the next step meets it again, and fails as plain decoding would
        kept.append(one)
        finish = finish_of(group, one, sequence.generated + len(kept))
        if finish:
            break
    return Accepted(path[: max(0, len(kept) - 1)], kept, finish, path[: len(kept)])


def pick(
    logits: Tensor,
    rows: Listing[Row],
    drafts: Listing[Draft],
    rule: VerificationRule,
    mask: Tensor | None = None,
    probabilities: Tensor | None = None,
) -> list[Pick | None]:
    """Chooses the token after each row by the verification rule: `sampler.pick`, except for rows that have drafts to accept or
    reject.

    logits, rows, mask: as there, 1 + len(tree) rows for each draft one after the other; probabilities: [sources, vocabulary]
    float32, the distributions that drafts were drawn from.
    """
    picks = sampler.pick(logits, rows, mask)
    if rule is VerificationRule.GUMBEL:
        return picks
    assert len(rows) == sum(1 + len(draft.tree) for draft in drafts)
    tried: list[Listing[DraftToken]] = []
    for draft in drafts:
        drawn = draft.drawn if rule is VerificationRule.REJECTION else deterministic_draft(draft.tree).drawn
        tried += [*drawn, *[()] * (1 + len(draft.tree) - len(drawn))]
    asked = [i for i, one in enumerate(rows) if tried[i] and one.sampling.temperature > 0 and picks[i]]
    if not asked:
        return picks
    some = [rows[i] for i in asked]
    draws = draws_of(some, logits.device)
    target = distributions(logits[asked], some, mask[asked] if mask is not None else None)
    if rule is VerificationRule.REJECTION:
        tokens = _by_rejection(target, draws, [tried[i] for i in asked], probabilities)
    else:
        probable = _probable(target, [[one.token for one in tried[i]] for i in asked])
        chosen = _longest(drafts, dict(zip(asked, probable, strict=True)))
        tokens = torch.tensor([chosen.get(i, one.token) for i in asked if (one := picks[i])], device=logits.device)
    return _replaced(picks, asked, some, tokens, logits, target)


def distributions(logits: Tensor, rows: Listing[Row], mask: Tensor | None = None) -> Tensor:
    """The probabilities that plain sampling draws from: [rows, vocabulary] float32. Every row has a temperature."""
    scores = penalized(logits, rows)
    if mask is not None:
        scores = allow(scores, mask)
    result = torch.zeros_like(scores)
    for part in filtered(scores, draws_of(rows, logits.device)):
        own = part.scores.softmax(-1)
        result[part.rows] = own if part.ids is None else torch.zeros_like(scores[part.rows]).scatter_(1, part.ids, own)
    return result


def propose(probabilities: Tensor, draws: Draws, count: int) -> Tensor:
    """Independent draws from each row of `probabilities` [rows, vocabulary]: [rows, count] int64."""
    sums = probabilities.double().cumsum(-1)
    found = torch.searchsorted(sums, _uniform(draws, count, PROPOSED) * sums[:, -1:], right=True)
    return found.clamp_(max=probabilities.shape[1] - 1)  # of NaN nothing is found


def _uniform(draws: Draws, count: int, stream: int) -> Tensor:
    """Uniform random numbers in (0, 1): [rows, count] float64."""
    seeds, choices, positions = draws.seeds.unsqueeze(1), draws.choices.unsqueeze(1), draws.positions.unsqueeze(1)
    places = torch.arange(count, device=seeds.device).unsqueeze(0)
    key = seeds & noise.MASK, seeds >> 32 & noise.MASK
    words = noise.philox(key, (places, positions, choices, torch.full_like(choices, stream)))
    return (words[0].double() + 0.5) * 2.0**-32


def _by_rejection(target: Tensor, draws: Draws, tried: Listing[Listing[DraftToken]], probabilities: Tensor | None) -> Tensor:
    """The first try that is accepted, or a draw from the residual distribution: [rows] int64."""
    device = target.device
    most = max(map(len, tried))
    padded = [[*((one.token, one.source) for one in some), *[(-1, -1)] * (most - len(some))] for some in tried]
    tokens, sources = torch.tensor(padded, device=device).unbind(-1)
    accepted, rest = refuse(target, tokens, sources, probabilities, _uniform(draws, most, ACCEPTED))
    drawn = draw(Filtered(torch.arange(len(rest), device=device), rest.log(), None), draws)
    return torch.where(accepted >= 0, accepted, drawn)


def refuse(target: Tensor, tokens: Tensor, sources: Tensor, probabilities: Tensor | None, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Multi-try rejection sampling: tries the tokens of every row in turn. Each was drawn from its own distribution q; a rejected
    one leaves, for the next try and at last for the token drawn without a draft, the residual of the target distribution that q did
    not cover.

    target: [rows, vocabulary] probabilities; tokens, sources: [rows, tries] as in `DraftToken`, tokens -1 where there are no more;
    probabilities: [sources, vocabulary]; uniform: [rows, tries]. Returns [rows] the accepted token, or -1; [rows, vocabulary] the
    residual to draw from.
    """
    accepted = torch.full_like(tokens[:, 0], -1)
    rest = target.clone()
    for i in range(tokens.shape[1]):
        open_rows = ((accepted < 0) & (tokens[:, i] >= 0)).nonzero().squeeze(1)
        if not len(open_rows):
            break
        token = tokens[open_rows, i].unsqueeze(1)
        left, proposed = rest[open_rows], _proposed(token, sources[open_rows, i], probabilities, rest.shape[1])
        good = _accepts(left.gather(1, token), proposed.gather(1, token), uniform[open_rows, i].unsqueeze(1)).squeeze(1)
        accepted[open_rows[good]] = token[good].squeeze(1)
        rest[open_rows[~good]] = _residual(left[~good], proposed[~good])
    return accepted, rest


def _proposed(token: Tensor, sources: Tensor, probabilities: Tensor | None, vocabulary: int) -> Tensor:
    """The distribution that each token was drawn from: [rows, vocabulary]."""
    sure = torch.zeros(len(token), vocabulary, device=token.device)
    if probabilities is None:
        return sure.scatter_(1, token, 1.0)
    known = sources >= 0
    if bool(known.all()):
        return probabilities[sources]
    sure[known] = probabilities[sources[known]]
    return torch.where(known.unsqueeze(1), sure, torch.zeros_like(sure).scatter_(1, token, 1.0))


def _accepts(target: Tensor, proposed: Tensor, uniform: Tensor) -> Tensor:
    """Accepts with the probability min(1, target / proposed)."""
    return uniform * proposed < target


def _residual(target: Tensor, proposed: Tensor) -> Tensor:
    """The residual distribution after a token drawn from `proposed` was rejected. Where rounding leaves nothing, the target
    itself."""
    left = (target - proposed).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, target)


def _probable(target: Tensor, tokens: Listing[Listing[int]]) -> list[list[bool]]:
    """Which of each row's tokens meet Medusa's typical acceptance criterion."""
    entropy = -torch.special.xlogy(target, target).sum(-1)
    least = (SHARE * (-entropy).exp()).clamp(max=THRESHOLD)
    counts = torch.tensor([len(some) for some in tokens], device=target.device)
    lines = torch.arange(len(tokens), device=target.device).repeat_interleave(counts)
    flags = iter((target[lines, list(chain.from_iterable(tokens))] > least[lines]).tolist())
    return [[next(flags) for _ in some] for some in tokens]


def _longest(drafts: Listing[Draft], probable: dict[int, list[bool]]) -> dict[int, int]:
    """By row: the token of the child from which the longest path of probable drafts follows, the first of several; rows without a
    probable child are missing. probable: by row, a flag for each of its children."""
    found: dict[int, int] = {}
    first = 0
    for draft in drafts:
        children = draft.tree.children
        lengths = [0] * len(children)
        for line in reversed(range(len(children))):
            good = [node for node, is_good in zip(children[line], probable.get(first + line, ()), strict=False) if is_good]
            if good:
                best = max(good, key=lambda node: (lengths[node + 1], -node))
                lengths[line] = lengths[best + 1] + 1
                found[first + line] = draft.tree.tokens[best]
        first += len(children)
    return found


def _replaced(
    picks: list[Pick | None], asked: Listing[int], rows: Listing[Row], tokens: Tensor, logits: Tensor, target: Tensor
) -> list[Pick | None]:
    """Replaces the tokens of the rows `asked`, with their log-probabilities; `rows` and `target` are of these only."""
    lines = torch.tensor(asked, device=logits.device)
    own = logits[lines, tokens] - logits[lines].logsumexp(-1)
    final = target.gather(1, tokens.unsqueeze(1)).squeeze(1).log()
    reported = torch.where(torch.tensor([one.final for one in rows], device=logits.device), final, own)
    for i, token, logprob in zip(asked, tokens.tolist(), reported.tolist(), strict=True):
        one = picks[i]
        if one and one.token != token:
            picks[i] = replace(one, token=token, logprob=logprob)
    return picks
