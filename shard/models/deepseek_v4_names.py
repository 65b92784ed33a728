"""Maps tensor names of DeepSeek V4: our names, which are those of transformers' modules, to those of DeepSeek's own code, as in
checkpoints on the hub, or as transformers saves them."""

from collections.abc import Iterator
from functools import reduce

from .renamed import MappedSource

# Parts of our names and their replacements, applied one after the other.
PAIRS = (
    (".self_attn.compressor.indexer.scorer.weights_proj.", ".attn.indexer.weights_proj."),
    (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".gate_proj.weight", ".wgate.weight"),
    (".shared_experts.wgate.", ".shared_experts.w1."),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
    (".position_bias", ".ape"),
    (".kv_proj.", ".wkv."),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".q_a_norm.", ".q_norm."),
    (".sinks", ".attn_sink"),
    (".e_score_correction_bias", ".bias"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    ("hc_head.hc_", "hc_head_"),
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
)
EXPERTS = ((".wgate.", ".w1."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."))
SCALES = (".weight_scale_inv", ".scale")  # of blocks
# transformers renames the keys' norm when it saves a model.
KEYS = (".attn.kv_norm.", ".attn.norm.")


class DeepseekV4Names(MappedSource):
    """A checkpoint with DeepSeek's own names, or transformers'."""

    def name(self, name: str) -> str:
        """See MappedSource."""
        if self._source.has(name):
            return name
        return next(filter(self._source.has, _others(name)), name)


def _others(name: str) -> Iterator[str]:
    """Names that the tensor may have instead."""
    found = reduce(lambda made, pair: made.replace(*pair), PAIRS, name)
    if ".experts." in found:
        found = reduce(lambda made, pair: made.replace(*pair), EXPERTS, found)
    for each in dict.fromkeys((found.replace(*SCALES), found)):
        yield each.removeprefix("model.")
        yield each
        yield each.replace(*KEYS)
