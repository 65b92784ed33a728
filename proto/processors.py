"""Image processors of transformers that need no torch, for router and shards alike.

transformers is passed in by the caller, who knows when to import it.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

FIELDS = (
    *("do_resize", "size", "min_pixels", "max_pixels", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size"),
)
GEMMA4: dict[str, Any] = {"max_soft_tokens": 280, "pooling_kernel_size": 3}
STEP: dict[str, Any] = {
    **{"size": {"height": 728, "width": 728}, "patch_size": 504, "max_image_size": 3024},
    **{"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
}
LLAMA4: dict[str, Any] = {"size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False}
# Families whose own processor needs torch, by the model_type of config.json: an equivalent one, and the differing settings; Llama
# 4's and Step 3.7's resize as ViT's does. The hub's size for MiniMax M3 is not what it was trained with; transformers has the right
# one.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified": ("Gemma4ImageProcessorPil", GEMMA4),
    "llama4": ("ViTImageProcessorPil", LLAMA4),
    "step3p7": ("ViTImageProcessorPil", STEP),
    "minimax_m3_vl": ("Qwen2VLImageProcessorPil", {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 672 * 672}}),
}
WRONG = {"minimax_m3_vl": {"size": [672, 672]}}


def image_processor(library: Any, folder: Path) -> Any:
    """The image processor of the model in the folder, which has a config.json. library: transformers. Raises what that does."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in SAME:
        return library.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    name, differing = SAME[kind]
    maker = getattr(library, name)
    said, _ = maker.get_image_processor_dict(folder, local_files_only=True)
    own = {field: said[field] for field in (*FIELDS, *differing) if said.get(field) is not None}
    wrong = WRONG.get(kind, {})
    return maker(**deepcopy(differing) | {field: value for field, value in own.items() if value != wrong.get(field)})
