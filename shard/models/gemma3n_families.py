"""Gemma 3n: AltUp (several residual streams, of which layers compute one), per-layer embeddings, LAuReL, and last layers that share
keys and values.

Of multimodal checkpoints only text is served: image and sound tokens are embedded as text here, where a whole checkpoint has tables
of their own for them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .dense_families import AROUND, gemma
from .fields import AGAIN, Config, boolean, shown, whole
from .gemma4_families import per_layer_inputs, sharing_keys
from .parts import cap, layer_kinds, windows_of
from .ropes import rope, ropes_by_kind, with_only_rope
from .shape import Shape, Unsupported
from .traits import AltUpShape

# transformers' defaults, which some checkpoints rely on.
TEXT: Config = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}


def _gemma3n(config: Config) -> Shape:
    """Gemma 3n: full attention in one layer of five, with another rotary embedding than in layers with a sliding window."""
    config = TEXT | config
    full, local = ropes_by_kind(config, 1e6, 1e4)
    widths = _widths(config)
    base = gemma(with_only_rope(config | {"intermediate_size": max(widths)}, full), "hidden_activation")
    kinds = layer_kinds(config, base.layers, lambda layer: (layer + 1) % 5 > 0)
    base = replace(
        base,
        centered_norms=False,
        norms=AROUND,
        windows=windows_of(config, kinds),
        local_rope=rope(with_only_rope(config, local)),
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        widths=widths if len(set(widths)) > 1 else (),
        mlp_closed=_closed(config, base.layers),
        final_softcap=cap(config, "final_logit_softcapping", 30.0),
        laurel=config["laurel_rank"],
        altup=_altup(config),
    )
    return replace(sharing_keys(base, config), inputs=per_layer_inputs(config, least=1))


def _altup(config: Config) -> AltUpShape:
    count = config["altup_num_inputs"]
    return AltUpShape(
        count=count,
        active=whole("altup_active_idx", config.get("altup_active_idx", 0), 0, count - 1),
        scaled=boolean("altup_correct_scale", config.get("altup_correct_scale", True)),
    )


def _widths(config: Config) -> tuple[int, ...]:
    """Intermediate features of each layer's MLP, given as one number or a list."""
    given, layers = config["intermediate_size"], config["num_hidden_layers"]
    return tuple(_of_each("intermediate_size", given if isinstance(given, list) else [given] * layers, layers))


def _closed(config: Config, layers: int) -> tuple[float, ...]:
    """The fraction of each layer's gates that is zeroed; by default in the first ten layers, if there are more."""
    name = "activation_sparsity_pattern"
    given = config.get(name)
    found = _of_each(name, [0.95 * (layer < 10 < layers) for layer in range(layers)] if given is None else given, layers)
    if not all(type(part) in (int, float) and 0 <= part < 1 for part in found):
        raise Unsupported(f"config.json says {name} {shown(given)}, numbers from 0 on and below 1 are needed: {AGAIN}")
    return tuple(map(float, found)) if any(found) else ()


def _of_each(name: str, given: Any, layers: int) -> list[Any]:
    if not isinstance(given, list) or len(given) != layers:
        raise Unsupported(f"config.json says {name} {shown(given)}, a number for each of num_hidden_layers is needed: {AGAIN}")
    return given


GEMMA3N: dict[str, Callable[[Config], Shape]] = {"Gemma3nForCausalLM": _gemma3n}
