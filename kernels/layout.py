"""What all steps of a model have in common for attention: pages, kinds of layers, types. No tensors."""

from dataclasses import dataclass

import torch

TOGETHER = 16  # query heads at most that read a latent together on Triton's route


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that attend alike, on one rank. Their windows tell kinds apart."""

    window: int  # positions that a token may look back, itself included; 0: all
    kv_heads: int  # or parts of the query heads, which share latents
    ratio: int  # query heads of a key head, or part
    size: int  # of a key
    latent: bool = False  # which its values are a part of
    joined: bool = False  # queries of rows that are `whole` see each other
    chunked: bool = False  # windows don't slide: they begin at their multiples, and no row goes beyond the end of one
    turned: int = 0  # of `size`, the last features, which all heads have in common; of latents it is not said


@dataclass(frozen=True, slots=True)
class Expansion:
    """The keys and values of heads that latents can be expanded to, on one rank: see `expanded`. Features but for heads."""

    heads: int
    latent: int
    plain: int  # of a key, made of the latent
    turned: int  # of a key, behind those, which all heads have in common: they stand behind the latent
    values: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What all steps of a model on one rank have in common."""

    page_size: int  # tokens
    kinds: tuple[Kind, ...]  # of layers
    dtype: torch.dtype  # of queries
    device: torch.device
    latent: int = 0  # features of values, which are the first of the one key that all heads share; 0: values are apart
    expansion: Expansion | None = None  # what such keys can be expanded to, for rows that are long enough; None: they never are
    softcap: float = 0.0  # of its logits, 0 for none
    sinks: bool = False  # logits that no values belong to
    most: int = 0  # tokens that one attends to, chosen by an index; 0: all
    block: int = 0  # of which so many, side by side, are chosen together, by each key head for itself; 0: each by itself
    members: int = 0  # or by all alike, as a pool with a key of its own
    near: int = 0  # in layers with entries: positions that a token may look back, itself included
    # Of layers with entries, tokens that one stands for, and how many of them are chosen, 0 for all: of each kind of layers. See
    # `compressed`.
    entries: tuple[tuple[int, int], ...] = ()
    eight_bits: bool = False  # of cached keys and values
    invariant: bool = False  # a token's answer may not depend by a bit on what else is in the step

    @property
    def elements(self) -> int:
        """The most that a layer has of keys and values of a token."""
        return max(kind.size * (1 if kind.latent else 2 * kind.kv_heads) for kind in self.kinds)

    @property
    def ratio(self) -> int:
        """The most query heads that share a key."""
        return max(kind.ratio * (kind.kv_heads if kind.latent else 1) for kind in self.kinds)

    @property
    def size(self) -> int:
        """Of the largest key."""
        return max(kind.size for kind in self.kinds)

    @property
    def windowed(self) -> bool:
        """Some layers don't see all that is before a token."""
        return any(kind.window for kind in self.kinds)

    @property
    def chunk(self) -> int:
        """Positions of a window that doesn't slide; 0: there are none."""
        return next((kind.window for kind in self.kinds if kind.chunked), 0)

    @property
    def special(self) -> bool:
        """Torch's own attention is not enough."""
        return self.softcap > 0 or self.sinks or self.most > 0


def kind(window: int, heads: int, kv_heads: int, size: int, latent: bool, joined: bool = False, chunked: bool = False) -> Kind:
    """Of layers with so many heads, of which as many as have room read a latent together."""
    if latent:
        kv_heads = heads // next(count for count in range(TOGETHER, 0, -1) if heads % count == 0)
    return Kind(window, kv_heads, heads // kv_heads, size, latent, joined, chunked)
