"""Finds image encoders' tensors in checkpoints: by the names by which transformers 5 saves them, or by those of the hub, some of
them in fused tensors."""

import re
from dataclasses import dataclass

from torch import Tensor

from ..weights import Source

ROOTS = ("model.", "")  # prefixes: as transformers 5 saves them, and as most checkpoints have them
# transformers' prefixes and the hub's: Gemma 3's, PaddleOCR's, Gemma 4 12B's, MiniMax M3's.
HUBS = (
    *(("vision_tower.", "vision_tower.vision_model."), ("projector.", "mlp_AR.")),
    *(("embed_vision.multimodal_embedder.", "embed_vision."), ("embed_vision.p", "vision_embedder.p")),
    ("vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
    *(("vision_tower.layers.", "vision_tower.vision_model.encoder.layers."), ("multi_modal_projector.merge_", "patch_merge_mlp.")),
)
# Parts of transformers' names and the hub's: Step 3.7's.
STEP = (
    ("multi_modal_projector.", "vit_large_projector."),
    ("vision_model.embeddings.patch_embedding.", "vision_model.conv1."),
    ("vision_model.embeddings.position_embedding.weight", "vision_model.positional_embedding"),
    ("vision_model.layers.", "vision_model.transformer.resblocks."),
    *(("vision_model.pre_layernorm.", "vision_model.ln_pre."), ("vision_model.downsampler", "vision_model.vit_downsampler")),
    *((".lambda_1", ".ls_1.gamma"), (".lambda_2", ".ls_2.gamma"), (".mlp.fc1.", ".mlp.c_fc."), (".mlp.fc2.", ".mlp.c_proj.")),
    *((".self_attn.", ".attn."), (".layernorm_before.", ".ln_1."), (".layernorm_after.", ".ln_2.")),
)
# The same of Hy 4, DeepSeek-OCR 2, LFM 3 and Mistral Large 4.
HY_4 = (
    *(("vision_tower.", "vit."), (".mlp.fc1.", ".mlp.dense_h_to_4h."), (".mlp.fc2.", ".mlp.dense_4h_to_h.")),
    *((".layer_norm1.", ".input_layernorm."), (".layer_norm2.", ".post_attention_layernorm.")),
    *((".patch_merger.before_rms.", ".perceive.norm."), (".patch_merger.proj_conv.", ".perceive.proj.0.")),
    *((".patch_merger.proj_out.", ".perceive.proj.2."), (".patch_merger.", ".perceive.")),
)
OCR_2 = (
    *(("vision_tower.sam_encoder.", "sam_model."), ("sam_model.layers.", "sam_model.blocks."), (".layer_norm1.", ".norm1.")),
    *((".layer_norm2.", ".norm2."), ("sam_model.patch_embed.projection.", "sam_model.patch_embed.proj.")),
    *(("sam_model.neck.conv1.", "sam_model.neck.0."), ("sam_model.neck.norm1.", "sam_model.neck.1.")),
    *(("sam_model.neck.conv2.", "sam_model.neck.2."), ("sam_model.neck.norm2.", "sam_model.neck.3.")),
    *(("sam_model.proj.conv1.", "sam_model.net_2."), ("sam_model.proj.conv2.", "sam_model.net_3.")),
    ("vision_tower.vision_encoder.layers.", "qwen2_model.model.model.layers."),
    ("vision_tower.vision_encoder.norm.", "qwen2_model.model.model.norm."),
    *((f"vision_tower.query_{side}_resolution.", f"qwen2_model.query_{side}.") for side in (768, 1024)),
    *(("multi_modal_projector.", "projector.layers."), ("view_separator", "view_seperator")),
)
LFM_3 = (("vision_tower.patch_embed.", "vision_tower.patchifier."), (".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm."))
MISTRAL_LARGE_4 = (
    *(("multi_modal_projector.norm.", "pre_mm_projector_norm."), ("multi_modal_projector.patch_merger.", "patch_merger.")),
    *((f"multi_modal_projector.linear_{i}.", f"vision_language_adapter.w_{side}.") for i, side in ((1, "in"), (2, "out"))),
    *(("vision_tower.", "vision_encoder."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),
    *((f".{part}_proj.", f".w{part}.") for part in "qkvo"),
)
TURNED = (".wq.", ".wk.")  # tensors whose rotary features are interleaved, where transformers has them half a head apart
# By the model_type of config.json.
PARTS = {"deepseek_ocr2": OCR_2, "hy_v4_vl": HY_4, "lfm3_vl": LFM_3, "mistral_large4": MISTRAL_LARGE_4, "step3p7": STEP}
JOINT = re.compile(r"(.*)\.attn\.([qkv])_proj\.(weight|bias)")  # of Step 3.7, fused on the hub


@dataclass(frozen=True, slots=True)
class VisionNames:
    """The image encoder's tensors of one family's checkpoint."""

    source: Source
    parts: tuple[tuple[str, str], ...] = ()  # see STEP
    heads: int = 0  # of its attention

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name in transformers. Raises Unsupported."""
        names = [name, *(name.replace(*pair, 1) for pair in HUBS if name.startswith(pair[0])), self._renamed(name)]
        stored = next((root + each for root in ROOTS for each in names if self.source.has(root + each)), "")
        joint = JOINT.fullmatch(names[-1])
        if not stored and joint:
            return self._part(joint[1], joint[2], joint[3], shape)
        found = self.source.tensor(stored or ROOTS[0] + name, shape)
        return self._apart(found) if any(part in stored for part in TURNED) else found

    def _renamed(self, name: str) -> str:
        for pair in self.parts:
            name = name.replace(*pair)
        return name

    def _part(self, before: str, part: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """A part of fused queries, keys and values, of which the first two have interleaved rotary features as in `TURNED`."""
        name, start = f"{before}.attn.in_proj_{kind}", "qkv".index(part) * shape[0]
        root = next((root for root in ROOTS if self.source.has(root + name)), ROOTS[0])
        found = self.source.tensor(root + name, (3 * shape[0], *shape[1:]), (0, start, start + shape[0]))
        return found if part == "v" else self._apart(found)

    def _apart(self, rows: Tensor) -> Tensor:
        return rows.view(self.heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
