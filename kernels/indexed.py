"""Sparse attention selection: which earlier tokens each token attends to, the best by an indexer (DeepSeek-AI 2025, DeepSeek-V3.2,
arXiv:2512.02556). This is the torch reference; `fused_index` and `indexed_attention` serve accelerators.

An indexer has query heads of its own for each token, one key shared by all of them, which is cached behind the token's latent, and
a weight for each head. A token's score of another is the sum of weights * max(0, query * key); the top-k tokens are chosen, of
equal ones the first. What a token doesn't see otherwise can't be chosen.

Or pools of tokens are chosen together, by keys of their own (GLM 5 Next, see `pools`; Qwen 4 Exp, see `means`), out of those that a
token sees all of. Of the pool that isn't complete yet it always sees what there is.

Or whole blocks of tokens are chosen, by each key head's query heads for themselves (MiniMax M3): there an indexer has one query for
each key head, and a block's score is the highest dot product of that with a key in it. The last blocks that a token sees always
come first.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6  # epsilon of the layer norm of the indexer's keys
# Bytes of memory per score, with all that is derived from it here. Measured 2026-11-24 on a CPU, in float32, 64 tokens at once
# among 100,000 and 200,000: 29 and 25.
SCORE_BYTES = 32
CHOSEN_BYTES = 8  # bytes per chosen token
# Bytes per score of a key head, where blocks are chosen. Measured 2026-11-26 in the same way: 13 in float32, 17 to 21 in bfloat16.
PRODUCT_BYTES = 20


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """An indexer's queries and head weights for a step's tokens, with which they choose single tokens to attend to."""

    queries: Tensor  # [tokens, heads, size]
    weights: Tensor  # [tokens, heads] float32
    most: int  # how many tokens one attends to
    # Choices already made, by the first token of each group in the step: layers without an indexer of their own reuse them.
    chosen: dict[int, Tensor] = field(default_factory=dict)
    members: int = 1  # tokens of one unit of choice (a pool, a compressed entry)
    keys: Tensor | None = None  # a layer's separate index keys, of all tokens, [slots, 1, 1, size]; None: they are behind latents

    def held(self, layer: Tensor, latent: int) -> Tensor:
        """The indexer's keys of all tokens: in a layer of the cache behind latents of so many features, or in their own tensor."""
        return layer[..., latent:] if self.keys is None else self.keys

    def best(self, found: Tensor, last: Tensor) -> Tensor:
        """The units that tokens attend to, given their scores of all, [tokens, units]. last: the tokens' positions, [tokens, 1]."""
        return found.topk(self.most).indices

    def of(self, start: int, rows: int, queries: int) -> tuple[Tensor, Tensor]:
        """Queries and weights of the tokens of `rows` rows from `start` on: [rows, queries, heads, size], [rows, queries,
        heads]."""
        own = slice(start, start + rows * queries)
        return self.queries[own].view(rows, queries, *self.queries.shape[1:]), self.weights[own].view(rows, queries, -1)

    def masked(self, keys: Tensor, start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
        """The attention mask `hidden`, [rows, 1, queries, length] with -inf where a key is masked, which also masks all that isn't
        chosen.

        keys: [rows, length or more, size], the indexer's, or of no size in a layer without one; start: the rows' first token in the
        step.
        """
        keys = keys if hidden is None else keys[:, : hidden.shape[3]]
        if keys.shape[1] <= self.most:
            return hidden
        if start not in self.chosen:
            found = scores(*self.of(start, len(keys), queries), keys)
            if hidden is not None:
                found += hidden[:, 0]
            best = found.sort(dim=2, descending=True, stable=True).indices
            self.chosen[start] = best[:, :, : self.most].clone()  # a copy, so that the sorted indices of all keys are freed
        others = torch.full((len(keys), queries, keys.shape[1]), -torch.inf, device=keys.device)
        others = others.scatter_(2, self.chosen[start], 0.0).unsqueeze(1)
        return (others if hidden is None else others + hidden).to(self.queries.dtype)


@dataclass(frozen=True, slots=True)
class PoolSelection(TokenSelection):
    """As `TokenSelection`, but whole pools of tokens are chosen. For chains only: tokens stand by their positions."""

    def best(self, found: Tensor, last: Tensor) -> Tensor:
        """The best complete pools, followed by the incomplete one, of which a token always sees what there is."""
        count, whole = self.most // self.members, (last.long() + 1) // self.members
        best = functional.pad(found.topk(count).indices, (0, 1))
        return best.scatter_(1, whole.clamp(max=count), whole)

    def masked(self, keys: Tensor, start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
        """See TokenSelection. keys may be followed by gates."""
        keys = keys if hidden is None else keys[:, : hidden.shape[3]]
        rows, length, pool, size = *keys.shape[:2], self.members, self.queries.shape[2]
        if length <= self.most:
            return hidden
        seen = torch.full((1, 1, 1), length, device=keys.device)
        if hidden is not None:
            seen = hidden[:, 0].isfinite().sum(2, keepdim=True)
        whole = seen // pool  # number of pools that a token sees all of: [rows, queries, 1]
        if start not in self.chosen:
            found = scores(*self.of(start, rows, queries), keys[:, pool - 1 :: pool, :size])
            unseen = torch.arange(found.shape[2], device=keys.device) >= whole
            best = found.masked_fill_(unseen, -torch.inf).sort(dim=2, descending=True, stable=True).indices
            self.chosen[start] = best[:, :, : self.most // pool].clone()
        last = whole.expand(rows, queries, 1)
        others = torch.full((rows, queries, length // pool + 1), -torch.inf, device=keys.device)
        others = others.scatter_(2, self.chosen[start], 0.0).scatter_(2, last, 0.0)
        others = others.repeat_interleave(pool, 2)[..., :length].unsqueeze(1)
        return (others if hidden is None else others + hidden).to(self.queries.dtype)


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """An indexer's queries and keys with which a step's tokens choose blocks of keys, for each key head by itself."""

    queries: Tensor  # [tokens, kv_heads, size]
    keys: Tensor  # index keys of a layer, of all tokens: [slots, 1, 1, size]
    most: int  # how many tokens one attends to; whole blocks
    block: int  # tokens of a block
    local: int  # number of last visible blocks that are chosen whatever their scores are; 1 at least

    def prefer(self, scores: Tensor, last: Tensor) -> Tensor:
        """Scores of blocks, [..., blocks], with those of the last visible ones set to infinity. last: position of the last key that
        a token sees, [..., 1]."""
        behind = last // self.block - torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill_((behind >= 0) & (behind < self.local), torch.inf)

    def masked(self, keys: Tensor, start: int, queries: int, hidden: Tensor | None) -> Tensor | None:
        """As `TokenSelection.masked`, but a mask of each key head: [rows, kv_heads, queries, length]. For chains only, whose keys
        stand by their positions."""
        keys = keys if hidden is None else keys[:, : hidden.shape[3]]
        rows, length, size = keys.shape
        if length <= self.most:
            return hidden
        asking = self.queries[start : start + rows * queries].view(rows, queries, -1, size).transpose(1, 2)
        found = asking.float() @ keys.float().transpose(1, 2).unsqueeze(1)
        seen = torch.full((1, 1, 1), length, device=keys.device)
        if hidden is not None:
            found += hidden
            seen = hidden.isfinite().sum(3)
        blocks = -(-length // self.block)
        found = functional.pad(found, (0, blocks * self.block - length), value=-torch.inf)
        best = self.prefer(found.view(*found.shape[:3], blocks, self.block).amax(4), seen.unsqueeze(3) - 1)
        chosen = best.sort(dim=3, descending=True, stable=True).indices[..., : self.most // self.block]
        others = torch.full_like(best, -torch.inf).scatter_(3, chosen, 0.0).repeat_interleave(self.block, 3)[..., :length]
        return (others if hidden is None else others + hidden).to(self.queries.dtype)


def scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The indexer's scores of all keys: [rows, queries, length] float32. Computed head by head, since all at once may be large.

    queries: [rows, queries, heads, size]; weights: [rows, queries, heads]; keys: [rows, length, size].
    """
    result = queries.new_zeros(len(keys), queries.shape[1], keys.shape[1], dtype=torch.float32)
    turned = keys.float().transpose(1, 2)
    for head in range(queries.shape[2]):
        found = queries[:, :, head].float() @ turned
        result.addcmul_(found.relu_(), weights[:, :, head, None])
    return result
