"""Qwen 4 Exp: Qwen 3.5's linear attention in three layers of four, in the others sparse attention to pools of tokens that an index
chooses; gated hyper-connections; and n-gram embeddings in some layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .fields import AGAIN, FULL, INDEXED, LINEAR, Config, expect, shown, whole
from .hybrid_families import QWEN3_NEXT, hybrid
from .ngrams import NgramShape
from .recurrent_shapes import LinearAttentionShape
from .ropes import rotary_size
from .shape import Shape, Unsupported
from .sparse_families import one_for_all
from .traits import GatedHyperConnections, HeadIndex

INDEX = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
MOST_HEADS = 1 << 12  # of n-grams, in all layers together
IMAGE = 248_056
SILU, SIGMOID = "silu", "sigmoid"


def qwen_4(config: Config) -> Shape:
    """The language model."""
    expect(config, attn_output_gate=True)
    given = QWEN3_NEXT | config
    given |= {"intermediate_size": given["moe_intermediate_size"], "layer_types": _kinds(given)}
    base = hybrid(given, 4, turned=1.0)
    opening = given.get("output_gate_type") or SILU
    if opening not in (SILU, SIGMOID):
        raise Unsupported(f"output_gate_type {shown(opening)} is not supported: for this family the decoder has silu and sigmoid")
    kept = base.recurrent
    assert kept is None or isinstance(kept, LinearAttentionShape)
    attending = frozenset(range(base.layers)) - (kept.layers if kept else frozenset())
    streams = _whole(given, "hc_count", 4, 1 << 6, least=2)
    return replace(
        base,
        recurrent=replace(kept, sigmoid=opening == SIGMOID) if kept else None,
        joined=("in_proj_qkv",),
        mixtures=(one_for_all(given, given["norm_topk_prob"]),) * base.layers,
        hyper=GatedHyperConnections(count=streams, rank=_whole(given, "hc_lowrank", 320, 1 << 16)),
        blocks=_index(given, attending, rotary_size(given, base.head_size)),
        ngrams=_grams(given, base, streams),
        norms=("", "", "", ""),
        last_norm="",
    )


def _kinds(given: Config) -> list[Any]:
    """The kind of each layer by transformers' names; the model's own config.json calls those with an index full attention."""
    interval, layers = given["full_attention_interval"], given["num_hidden_layers"]
    kinds = given.get("layer_types") or [LINEAR if (layer + 1) % interval else INDEXED for layer in range(layers)]
    return [INDEXED if kind == FULL else kind for kind in kinds]


def _whole(given: Config, name: str, default: int, most: int, least: int = 1) -> int:
    return whole(name, given.get(name, default), least, most)


def _index(given: Config, layers: frozenset[int], turned: int) -> HeadIndex:
    lacking = [name for name in (*INDEX, "indexer_kv_heads") if given.get(name) is None]
    if lacking:
        raise Unsupported(f"config.json says nothing of {', '.join(lacking)}, by which tokens are chosen: {AGAIN}")
    expect(given, indexer_kv_heads=1)
    heads, size, most, pool = (whole(name, given[name], 1, 1 << 20) for name in INDEX)
    if most % pool:
        raise Unsupported(
            f"config.json says indexer_budget {most} and indexer_compress_ratio {pool}, of which the first must be a multiple: "
            f"{AGAIN}"
        )
    if size < turned or size % 2:
        raise Unsupported(
            f"config.json says indexer_head_dim {size}, and {turned} features of a head turn: an even number of as many is needed: "
            f"{AGAIN}"
        )
    return HeadIndex(layers=layers, heads=heads, size=size, most=most, pool=pool)


def _grams(given: Config, base: Shape, streams: int) -> NgramShape | None:
    """The n-gram embeddings, if any layer has them."""
    named: Any = given.get("ple_layer_ids") or []
    if not isinstance(named, list) or not all(type(one) is int and 0 < one <= base.layers for one in named):
        raise Unsupported(
            f"config.json says ple_layer_ids {shown(named)}, numbers from 1 to {base.layers} are needed, of layers: {AGAIN}"
        )
    layers = tuple(sorted({one - 1 for one in named}))
    if not layers:
        return None
    others = sorted(set(layers) - (base.recurrent.layers if base.recurrent else frozenset()))
    if others:
        raise Unsupported(f"ple_layer_ids {others[0] + 1} is not supported: that layer has no linear attention")
    found = NgramShape(
        layers=layers,
        most=_whole(given, "ngram_size", 3, 1 << 6, least=2),
        heads=_whole(given, "heads_per_ngram", 8, MOST_HEADS),
        size=_whole(given, "ple_embed_dim", base.hidden, 1 << 20) if given.get("ple_embed_dim") is not None else base.hidden,
        base=_whole(given, "ngram_vocab_size_base", 20_000_000, 1 << 30),
        unit=_whole(given, "make_ngram_vocab_size_divisible_by", 128, 1 << 20),
        parts=_whole(given, "split_ngram_parts", 512, 1 << 16),
        vocabulary=base.vocabulary,
        seed=_whole(given, "seed", 1234, 1 << 62, least=0),
        end=_end(given, base.vocabulary),
        width=_whole(given, "ple_conv_kernel_size", 4, 1 << 6, least=2),
        streams=streams,
        image=_image(given, base.vocabulary),
    )
    if len(layers) * found.count > MOST_HEADS:
        raise Unsupported(
            f"config.json means {len(layers) * found.count} heads of n-grams (ngram_size, heads_per_ngram, ple_layer_ids), the "
            f"decoder has up to {MOST_HEADS}: {AGAIN}"
        )
    if found.size % found.count:
        raise Unsupported(
            f"config.json says ple_embed_dim {found.size}, and there are {found.count} heads of n-grams (ngram_size, "
            f"heads_per_ngram), of which it must be a multiple: {AGAIN}"
        )
    return found


def _end(given: Config, vocabulary: int) -> int:
    """The token that ends a text; the first of several."""
    said: Any = given.get("eos_token_id")
    first = said[0] if isinstance(said, list) and said else said
    if type(first) is not int or not 0 <= first < vocabulary:
        raise Unsupported(
            f"config.json says eos_token_id {shown(said)}, where n-grams end: a token of the {vocabulary} is needed: {AGAIN}"
        )
    return first


def _image(given: Config, vocabulary: int) -> int:
    """The token id that stands for image tokens; 0 if it is outside the vocabulary."""
    said: Any = given.get("image_token_id", IMAGE)
    return said if type(said) is int and 0 <= said < vocabulary else 0


QWEN4: dict[str, Callable[[Config], Shape]] = {"Qwen4ExpForCausalLM": qwen_4}
