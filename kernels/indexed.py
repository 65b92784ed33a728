"""Which of the tokens before it each one attends to: the best by an index (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556).

An index has heads of its own for a token's queries, one key for all of them, which is cached behind the token's latent, and a
weight for each. A token's score of another is the sum of weights * max(0, query * key); so many with the highest scores are
chosen, and of equal ones the first. What a token doesn't see otherwise can't be chosen.

Or pools of tokens are chosen together, by keys of their own (GLM 5 Next, see `pools`; Qwen 4 Exp, see `means`): of those that a
token sees all of. Of the pool that isn't full yet it sees what there is, whatever it has chosen.

Or whole blocks of them are chosen, by each key head's query heads for themselves (MiniMax M3): there an index has one query for
each of these, and a block's score is the highest product of that with a key in it. The last blocks that a token sees come first.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6  # of the layer norm of keys
# Bytes that a score takes with all that becomes of it here. Measured 2026-11-24 on a CPU, in float32, 64 tokens at once among
# 100,000 and 200,000: 29 and 25.
SCORE_BYTES = 32
CHOSEN_BYTES = 8  # of one that is chosen
# Of a key head's, where blocks are chosen. Measured 2026-11-26 likewise: 13 in float32, 17 to 21 in bfloat16.
PRODUCT_BYTES = 20


@dataclass(frozen=True, slots=True)
class Choosing:
    """What a step's tokens choose by."""

    queries: Tensor  # [tokens, heads, size]
    weights: Tensor  # [tokens, heads] float32
    most: int  # tokens that one attends to
    # What some of them have chosen, by the first of these in the step: layers without an index attend to it, too.
    chosen: dict[int, Tensor] = field(default_factory=dict)

    @property
    def members(self) -> int:
        """Tokens that are chosen together."""
        return 1

    def held(self, layer: Tensor, latent: int) -> Tensor:
        """Keys of all tokens, of a layer of the cache: behind latents of so many features."""
        return layer[..., latent:]

    def best(self, found: Tensor, last: Tensor) -> Tensor:
        """What tokens attend to, by their scores of all, [tokens, what there is]. last: their places, [tokens, 1]."""
        return found.topk(self.most).indices

    def of(self, start: int, rows: int, queries: int) -> tuple[Tensor, Tensor]:
        """Queries and weights of so many rows' tokens from `start` on: [rows, queries, heads, size], [rows, queries, heads]."""
        own = slice(start, start + rows * queries)
        return self.queries[own].view(rows, queries, *self.queries.shape[1:]), self.weights[own].view(rows, queries, -1)


@dataclass(frozen=True, slots=True)
class ChoosingPools(Choosing):
    """The same of pools, whose tokens stand by their positions."""

    members: int = 1  # what is chosen are so many tokens
    keys: Tensor | None = None  # where heads have keys of their own: a layer's, of all tokens, [slots, 1, 1, size]

    def held(self, layer: Tensor, latent: int) -> Tensor:
        """The same; or those of a tensor of their own."""
        return layer[..., latent:] if self.keys is None else self.keys

    def best(self, found: Tensor, last: Tensor) -> Tensor:
        """The same, and behind those that a token sees whole the one that it doesn't."""
        count, whole = self.most // self.members, (last.long() + 1) // self.members
        best = functional.pad(found.topk(count).indices, (0, 1))
        return best.scatter_(1, whole.clamp(max=count), whole)


@dataclass(frozen=True, slots=True)
class ChoosingBlocks:
    """What a step's tokens choose blocks of keys by."""

    queries: Tensor  # [tokens, kv_heads, size]
    keys: Tensor  # a layer's, of all tokens: [slots, 1, 1, size]
    most: int  # tokens that one attends to, of whole blocks
    block: int  # tokens
    local: int  # of the last blocks that a token sees so many are chosen whatever their scores are; 1 at least

    def prefer(self, scores: Tensor, last: Tensor) -> Tensor:
        """Scores of blocks, [..., blocks], in which these of the last ones are the highest. last: what a token sees ends with, by
        its place, [..., 1]."""
        behind = last // self.block - torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill_((behind >= 0) & (behind < self.local), torch.inf)


def scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[rows, queries, length] float32. Head by head, since all at once may be large.

    queries: [rows, queries, heads, size]; weights: [rows, queries, heads]; keys: [rows, length, size].
    """
    result = queries.new_zeros(len(keys), queries.shape[1], keys.shape[1], dtype=torch.float32)
    turned = keys.float().transpose(1, 2)
    for head in range(queries.shape[2]):
        found = queries[:, :, head].float() @ turned
        result.addcmul_(found.relu_(), weights[:, :, head, None])
    return result


def narrowed(asked: Choosing, keys: Tensor, start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
    """`hidden`, [rows, 1, queries, length] with -inf where a key is hidden, hiding all that isn't chosen, too.

    keys: [rows, length or more, size], the index's, or of no size in a layer that has none; start: of the rows' tokens in the step.
    """
    keys = keys if hidden is None else keys[:, : hidden.shape[3]]
    if keys.shape[1] <= asked.most:
        return hidden
    if start not in asked.chosen:
        found = scores(*asked.of(start, len(keys), queries), keys)
        if hidden is not None:
            found += hidden[:, 0]
        best = found.sort(dim=2, descending=True, stable=True).indices
        asked.chosen[start] = best[:, :, : asked.most].clone()  # and not all that were sorted
    others = torch.full((len(keys), queries, keys.shape[1]), -torch.inf, device=keys.device)
    others = others.scatter_(2, asked.chosen[start], 0.0).unsqueeze(1)
    return (others if hidden is None else others + hidden).to(asked.queries.dtype)


def narrowed_by_pools(asked: ChoosingPools, keys: Tensor, start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
    """The same where pools are chosen: behind keys may stand gates. Of chains, whose keys stand by their positions."""
    keys = keys if hidden is None else keys[:, : hidden.shape[3]]
    rows, length, pool, size = *keys.shape[:2], asked.members, asked.queries.shape[2]
    if length <= asked.most:
        return hidden
    seen = hidden[:, 0].isfinite().sum(2, keepdim=True) if hidden is not None else torch.full((1, 1, 1), length, device=keys.device)
    whole = seen // pool  # pools that a token sees all of: [rows, queries, 1]
    if start not in asked.chosen:
        found = scores(*asked.of(start, rows, queries), keys[:, pool - 1 :: pool, :size])
        unseen = torch.arange(found.shape[2], device=keys.device) >= whole
        best = found.masked_fill_(unseen, -torch.inf).sort(dim=2, descending=True, stable=True).indices
        asked.chosen[start] = best[:, :, : asked.most // pool].clone()
    last = whole.expand(rows, queries, 1)
    others = torch.full((rows, queries, length // pool + 1), -torch.inf, device=keys.device)
    others = others.scatter_(2, asked.chosen[start], 0.0).scatter_(2, last, 0.0)
    others = others.repeat_interleave(pool, 2)[..., :length].unsqueeze(1)
    return (others if hidden is None else others + hidden).to(asked.queries.dtype)


def narrowed_by_blocks(asked: ChoosingBlocks, keys: Tensor, start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
    """The same for each key head: [rows, kv_heads, queries, length]. Of chains, whose keys stand by their positions."""
    keys = keys if hidden is None else keys[:, : hidden.shape[3]]
    rows, length, size = keys.shape
    if length <= asked.most:
        return hidden
    asking = asked.queries[start : start + rows * queries].view(rows, queries, -1, size).transpose(1, 2)
    found = asking.float() @ keys.float().transpose(1, 2).unsqueeze(1)
    seen = torch.full((1, 1, 1), length, device=keys.device)
    if hidden is not None:
        found += hidden
        seen = hidden.isfinite().sum(3)
    blocks = -(-length // asked.block)
    found = functional.pad(found, (0, blocks * asked.block - length), value=-torch.inf)
    best = asked.prefer(found.view(*found.shape[:3], blocks, asked.block).amax(4), seen.unsqueeze(3) - 1)
    chosen = best.sort(dim=3, descending=True, stable=True).indices[..., : asked.most // asked.block]
    others = torch.full_like(best, -torch.inf).scatter_(3, chosen, 0.0).repeat_interleave(asked.block, 3)[..., :length]
    return (others if hidden is None else others + hidden).to(asked.queries.dtype)
