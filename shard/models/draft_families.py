"""Shapes of draft models: independent ones, and heads that read the target's features (EAGLE-3, MTP; Medusa and MLP speculator in
`readout_families`). Imports no torch: the launcher plans with it."""

from dataclasses import replace
from typing import Any

from ...proto.speculation import Speculation, written
from .dense_families import llama
from .families import shape
from .fields import AGAIN, ELSE, Config, check, said, shown
from .readout_families import MedusaShape, ReadoutShape, is_readout, readout_shape
from .shape import Shape, Unsupported
from .traits import DraftFeatures, Latent

EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
LAYERS = "eagle_aux_hidden_state_layer_ids"
MOST_LAYERS = 16
NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # norms that some newer heads have besides
# Multi-token prediction (MTP) layers: the field of config.json that counts them, its default, and how they are read. {layers}: the
# number of the model's layers before them.
QWEN = (
    "mtp_num_hidden_layers",
    1,
    DraftFeatures(
        layers=(),
        widened=False,
        behind=True,
        table=False,
        names=(
            ("model.layers.0.enorm.", "mtp.pre_fc_norm_embedding."),
            ("model.layers.0.hnorm.", "mtp.pre_fc_norm_hidden."),
            ("model.layers.0.eh_proj.", "mtp.fc."),
            ("model.", "mtp."),
            ("lm_head.", "mtp.lm_head."),
        ),
    ),
)
DEEPSEEK = (
    "num_nextn_predict_layers",
    0,
    DraftFeatures(
        layers=(),
        widened=False,
        names=(
            ("model.layers.0.", "{root}layers.{layers}."),
            ("model.norm.", "{root}layers.{layers}.shared_head.norm."),
            ("model.embed_tokens.", "{root}layers.{layers}.embed_tokens."),
            ("lm_head.", "{root}layers.{layers}.shared_head.head."),
        ),
    ),
)
# By architecture. DeepSeek's field is in other config.json files, too, where it means layers of another kind.
OWN_LAYERS = {
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), QWEN),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), QWEN),
    **dict.fromkeys(("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"), DEEPSEEK),
    **dict.fromkeys(("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"), DEEPSEEK),
    **dict.fromkeys(("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"), DEEPSEEK),
    **dict.fromkeys(("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"), DEEPSEEK),
}

DraftShape = Shape | ReadoutShape


def draft_shape(config: Config, target: Shape, own: bool = False) -> DraftShape:
    """The shape of the draft model that `config` (a parsed config.json) describes, to draft for `target`. own: the target's own MTP
    layer drafts. Raises Unsupported."""
    if own:
        return _next(config, target)
    if is_readout(config):
        return readout_shape(config, target.hidden, target.vocabulary)
    found = _eagle3(_flat(config), target) if is_head(config) else shape(config)
    if found.placed:
        raise Unsupported("an index chooses blocks of tokens there, and such a model cannot draft for others: take another")
    return found


def check_speculation(target: Shape, speculation: Speculation) -> None:
    """Raises Unsupported for drafts that the model can't verify: trees, where it has recurrent state or sparse attention by
    blocks."""
    if speculation.chain or (target.recurrent is None and not target.placed):
        return
    reason = "where blocks, pools or entries of tokens are chosen," if target.recurrent is None else f"with {target.recurrent.name}"
    raise Unsupported(
        f"--speculate {written(speculation)}: {reason} drafts must be a chain: take a draft model's tokens=K, or ngram=K, "
        "and not both"
    )


def shaped(draft: DraftShape, speculation: Speculation, said: bool = True) -> Speculation:
    """The speculation with its shape filled in. said: the shape was given; else each head drafts one token. Raises Unsupported for
    more levels than heads."""
    if not isinstance(draft, ReadoutShape):
        return speculation
    if not said:
        return replace(speculation, widths=(1,) * draft.levels)
    if len(speculation.widths) > draft.levels:
        raise Unsupported(
            f"{len(speculation.widths)} tokens in a chain are asked for, and its {draft.levels} heads draft one each: "
            f"say tokens={draft.levels}, or a tree= of at most {draft.levels} numbers"
        )
    return speculation


def heard(draft: DraftShape) -> tuple[int, ...] | None:
    """The target's layers whose inputs the draft model reads; (): it reads the output of the last norm; None: it reads nothing."""
    if isinstance(draft, ReadoutShape):
        return ()
    return draft.features.layers if draft.features else None


def levels(draft: DraftShape) -> int:
    """The greatest depth of its trees; 0: no limit."""
    return draft.levels if isinstance(draft, ReadoutShape) else 0


def borrowed_elements(draft: DraftShape, target: Shape, ranks: int) -> int:
    """Elements of the target's vocabulary tables that the draft rank must hold whole, because a rank of `ranks` has only a part."""
    if ranks == 1:
        return 0
    tables = 0
    if isinstance(draft, MedusaShape):
        tables = 0 if draft.outputs else 1
    elif isinstance(draft, Shape) and draft.features:
        tables = 1 if draft.features.table or target.tied else 2
    return tables * target.vocabulary * target.hidden


def is_head(config: Config) -> bool:
    """Whether it is a head made for one model, whose tokens it shares."""
    names = config.get("architectures")
    return is_readout(config) or (isinstance(names, list) and any(name in EAGLE3 for name in names))


def _indexing(latent: Latent | None) -> Latent | None:
    """The latents of a layer with an index of its own, if the model has indexes."""
    return replace(latent, index=replace(latent.index, borrowing=frozenset())) if latent and latent.index else latent


def _next(config: Config, target: Shape) -> Shape:
    """The MTP layer of DeepSeek V3's form, or Qwen's. There may be several such layers; the first drafts all tokens."""
    text = config.get("text_config")
    fields = text if isinstance(text, dict) and text else config
    counted, usual, features = OWN_LAYERS.get(target.architecture, DEEPSEEK)
    count = fields.get(counted, usual)
    if type(count) is not int or count < 1 or target.architecture not in OWN_LAYERS:
        raise Unsupported(
            f"config.json says {counted} {shown(count)}: the model has no layer for predicting several tokens that is known here; "
            "leave draft=mtp out, or take a draft model"
        )
    return replace(
        target,
        architecture=f"{target.architecture}'s layer for predicting several tokens",
        layers=1,
        windows=target.windows[-1:],
        mixtures=target.mixtures[-1:],
        nope_layers=frozenset({0} if target.layers - 1 in target.nope_layers else ()),
        recurrent=None,
        latent=_indexing(target.latent),
        layer_factors=False,
        tied=False,
        features=features,
    )


def _flat(config: Config) -> Config:
    """The config in EAGLE's authors' form. The library `speculators` has the layer's fields in an object of their own."""
    inner = config.get("transformer_layer_config")
    if inner is None:
        return config
    if not isinstance(inner, dict):
        raise Unsupported(f"config.json says transformer_layer_config {shown(inner)}, an object is needed: {AGAIN}")
    return {"norm_before_residual": True, **inner, **said(config), "model_type": inner.get("model_type")}


def _eagle3(config: Config, target: Shape) -> Shape:
    """EAGLE-3 (Li et al. 2025, arXiv:2503.01840), as vLLM, SGLang and SpecForge read it."""
    if target.hyper or target.altup:
        raise Unsupported(f"an EAGLE-3 head goes by the residual stream, of which {target.architecture} has several: {ELSE}")
    if target.paired:
        raise Unsupported(f"an EAGLE-3 head counts layers, of which {target.architecture} has two in one: {ELSE}")
    try:
        check(config, "Llama", ["llama"])
        config = config | {"draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"]}
        base = llama(config)
    except KeyError as error:
        raise Unsupported(f"config.json of an EAGLE-3 head lacks {error}: is it complete?") from None
    for name, own, wanted in (
        ("hidden_size", base.hidden, target.hidden),
        ("target_hidden_size", config.get("target_hidden_size") or base.hidden, target.hidden),
        ("vocab_size", base.vocabulary, target.vocabulary),
        ("num_hidden_layers", base.layers, 1),
    ):
        if own != wanted:
            raise Unsupported(f"config.json of the EAGLE-3 head says {name} {own}, and for this model it must be {wanted}: {ELSE}")
    most = config["draft_vocab_size"]
    if type(most) is not int or not 0 < most <= base.vocabulary:
        raise Unsupported(f"config.json says draft_vocab_size {shown(most)}, an integer from 1 to vocab_size is needed: {AGAIN}")
    layers, first = _layers(config, _inner(config), target.layers), config.get("norm_before_residual", False) is True
    return replace(
        base,
        architecture=f"EAGLE-3 for {target.architecture}",
        vocabulary=most,
        # Its own number is what it was trained on, often less. Beyond that its drafts may be worse.
        max_positions=target.max_positions,
        features=DraftFeatures(layers=layers, widened=True, normalized=first),
    )


def _inner(config: Config) -> Config:
    """EAGLE's part of config.json. Raises Unsupported if a field there or beside it means what the decoder doesn't have."""
    own = config.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise Unsupported(f"config.json says eagle_config {shown(own)}, an object is needed: {AGAIN}")
    for name in NORMS:
        if config.get(name) or own.get(name):
            raise Unsupported(f"config.json of the EAGLE-3 head says {name} true, and the decoder has no such norm: {ELSE}")
    if own.get("use_aux_hidden_state", True) is not True:
        raise Unsupported(f"config.json of the EAGLE-3 head says use_aux_hidden_state false, and the decoder has true: {ELSE}")
    return own


def _layers(config: Config, own: Config, count: int) -> tuple[int, ...]:
    """The target layers, of `count`, whose inputs it reads. In `own`, EAGLE's part of config.json, SpecForge and SGLang name layers
    whose outputs are read; vLLM and speculators, which have no such part, those whose inputs are."""
    found: Any = own.get(LAYERS) or config.get(LAYERS) or [2, count // 2, count - 3]
    further = int(bool(own.get(LAYERS)))
    if (
        not isinstance(found, list)
        or not all(type(layer) is int and 0 <= layer < count - further for layer in found)
        or not 0 < len(found) == len(set(found)) <= MOST_LAYERS
    ):
        raise Unsupported(
            f"config.json says {LAYERS} {shown(found)} (nothing means what enters layer 2, the middle one and the last but 2), and "
            f"numbers of different layers from 0 to {count - 1 - further} are needed: {ELSE}"
        )
    return tuple(sorted(layer + further for layer in found))
