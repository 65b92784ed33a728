"""What the attention of all steps of a model has in common: page size, kinds of layers, dtypes, sparse selection. No tensors."""

from dataclasses import dataclass

import torch

TOGETHER = 16  # on the Triton route, most query heads in one tile that reads an MLA latent once


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layers that attend alike, with this rank's numbers of heads. Kinds of a model are told apart by their windows."""

    window: int  # sliding window: positions that a token sees, its own included; 0: full attention
    kv_heads: int  # key heads; for MLA the groups of query heads that read the shared latent together
    ratio: int  # query heads per key head, or per group
    size: int  # features of a key
    latent: bool = False  # MLA: the value is a part of the cached key
    joined: bool = False  # queries of rows that are `whole` see each other (bidirectional attention within an image)
    chunked: bool = False  # windows are fixed chunks: they begin at their multiples and don't slide; no row crosses the end of one
    turned: int = 0  # the last so many of a key's `size` features are shared by all heads (expanded MLA); 0 for latents


@dataclass(frozen=True, slots=True)
class Expansion:
    """The heads' own keys and values that MLA's latents can be expanded to, on one rank (see `expanded`). Numbers of features, but
    for `heads`."""

    heads: int
    latent: int
    plain: int  # of a key, made from the latent
    turned: int  # of a key, behind those: rotary features that all heads share, which stand behind the latent in the cache
    values: int


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The attention layout of a model on one rank, the same for all steps."""

    page_size: int  # tokens per page
    kinds: tuple[LayerKind, ...]  # kinds of layers
    dtype: torch.dtype  # dtype of queries
    device: torch.device
    latent: int = 0  # MLA: the first so many features of the key that all heads share are the value; 0: separate values
    expansion: Expansion | None = None  # MLA: keys and values that latents are expanded to for long rows; None: never
    softcap: float = 0.0  # soft cap of attention logits; 0: none
    sinks: bool = False  # heads have attention sinks: logits without values
    most: int = 0  # sparse attention: tokens that each one attends to, chosen by an indexer; 0: all
    block: int = 0  # tokens of a block that each key head chooses as a whole (MiniMax M3); 0: no blocks
    members: int = 0  # tokens of a pool that is chosen as a whole, by a key of its own, for all heads alike; 0: no pools
    near: int = 0  # sliding window in layers with compressed entries: positions that a token sees, its own included
    # For each kind of layers with compressed entries (DeepSeek V4): tokens per entry, and how many entries a token attends to, 0
    # for all. See `compressed`.
    entries: tuple[tuple[int, int], ...] = ()
    eight_bits: bool = False  # the KV cache is quantized to 8 bits
    # Batch invariance: a token's output must be bit for bit the same whatever else is in the step.
    invariant: bool = False

    @property
    def elements(self) -> int:
        """Numbers that a token's keys and values take in the cache, in the largest kind of layers."""
        return max(kind.size * (1 if kind.latent else 2 * kind.kv_heads) for kind in self.kinds)

    @property
    def ratio(self) -> int:
        """The most query heads that share a key."""
        return max(kind.ratio * (kind.kv_heads if kind.latent else 1) for kind in self.kinds)

    @property
    def size(self) -> int:
        """Features of the largest key."""
        return max(kind.size for kind in self.kinds)

    @property
    def windowed(self) -> bool:
        """Whether some layers don't see the whole context."""
        return any(kind.window for kind in self.kinds)

    @property
    def chunk(self) -> int:
        """Positions of an attention chunk, a window that doesn't slide; 0: no layers are chunked."""
        return next((kind.window for kind in self.kinds if kind.chunked), 0)

    @property
    def special(self) -> bool:
        """Whether torch's `scaled_dot_product_attention` is not enough."""
        return self.softcap > 0 or self.sinks or self.most > 0


def kind(window: int, heads: int, kv_heads: int, size: int, latent: bool, joined: bool = False, chunked: bool = False) -> LayerKind:
    """The kind of layers with these numbers of heads. For MLA, query heads are grouped, as many as fit into one tile, to read
    latents together."""
    if latent:
        kv_heads = heads // next(count for count in range(TOGETHER, 0, -1) if heads % count == 0)
    return LayerKind(window, kv_heads, heads // kv_heads, size, latent, joined, chunked)
