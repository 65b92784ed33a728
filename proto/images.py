"""Format of images in prompts, for each vision-language family: read by launcher, router and shards. Standard library only.

An image is a grid of tokens, row by row; some families cut it into tiles, each of which is an image by itself. In place of the
family's placeholder in the prompt, the router puts ids outside the vocabulary, `vocabulary` and above, derived from the image's
content, so that comparing tokens (prefix cache, prefix-aware placement of replicas) tells images apart and recognizes equal ones.
The model's input there are the image's features, which the shards compute from its pixels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COLOURS = 3  # of a pixel, a byte each
# Bytes of a request's pixels, and of all that begin in one step if they are several: half of what a message holds (`proto.rpc`).
MOST = 128 << 20
# Files of a model's folder, one of which configures the image processor.
DESCRIPTIONS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The text around the tiles of an image, row by row, with the whole image after them."""

    start: str = ""
    one: str = ""  # before each tile, with its row and column, from 1 on
    shut: str = ""  # after each
    between: str = ""  # between those of a row
    end: str = ""  # of a row
    line: str = ""  # between rows
    behind: str = ""  # after the last row
    whole: str  # before the whole image
    stop: str
    once: bool = False  # where images follow each other, the text before the first tile is not repeated

    def written(self, word: str, rows: int, columns: int) -> str:
        """The text with `word` for each tile and for the whole image. rows, columns: of tiles; 0: only the whole image."""
        lines = [
            self.between.join(self.one.format(row=row + 1, column=column + 1) + word + self.shut for column in range(columns))
            + self.end
            for row in range(rows)
        ]
        return self.start + self.line.join(lines) + self.behind * (rows > 0) + self.whole + word + self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The image format of one family."""

    word: str  # placeholder token of the vocabulary: an image's tokens take its place
    around: tuple[str, str] = ("", "")  # tokens before and after it, if the vocabulary has them
    margin: str = ""  # text around all that
    written: str = ""  # what is written in a prompt for all that; "": all that
    fixed: bool = False  # every image has the size given by config.json (vision_config.image_size)
    breaks: tuple[str, str] | None = None  # tokens that end each row of an image, and its last; None: there are none
    tiles: Tiles | None = None  # None: images are not cut

    def length(self, rows: int, columns: int) -> int:
        """Tokens of an image."""
        return rows * (columns + bool(self.breaks))


QWEN = Form(word="<|image_pad|>", around=("<|vision_start|>", "<|vision_end|>"))
GLM = Form(word="<|image|>", around=("<|begin_of_image|>", "<|end_of_image|>"))
MISTRAL = Form(word="[IMG]", breaks=("[IMG_BREAK]", "[IMG_END]"))
AROUND = "<fake_token_around_image>"
IDEFICS2 = Form(word="<image>", written="<image>", tiles=Tiles(one=AROUND, whole=AROUND, stop=AROUND, once=True))
IDEFICS = Form(
    word="<image>",
    written="<image>",
    tiles=Tiles(one=AROUND + "<row_{row}_col_{column}>", end="\n", behind="\n", whole=AROUND + "<global-img>", stop=AROUND),
)
LLAMA4 = Form(
    word="<|patch|>",
    written="<|image|>",
    tiles=Tiles(
        start="<|image_start|>",
        between="<|tile_x_separator|>",
        end="<|tile_y_separator|>",
        whole="<|image|>",
        stop="<|image_end|>",
    ),
)
STEP = Form(
    word="<im_patch>",
    written="<im_patch>",
    tiles=Tiles(one="<patch_start>", shut="<patch_end>", line="<patch_newline>", whole="<im_start>", stop="<im_end>"),
)
# By the model_type of config.json.
FORMS = {
    "deepseek_ocr2": Form(word="<image>", written="<image>", tiles=Tiles(whole="", stop="")),
    "gemma3": Form(
        word="<image_soft_token>",
        around=("<start_of_image>", "<end_of_image>"),
        margin="\n\n",
        written="<start_of_image>",
        fixed=True,
    ),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Form(word="<|image|>", around=("<|image>", "<image|>"), written="<|image|>")),
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr"), GLM),
    "idefics2": IDEFICS2,
    **dict.fromkeys(("idefics3", "smolvlm"), IDEFICS),
    "internvl": Form(word="<IMG_CONTEXT>", around=("<img>", "</img>"), written="<IMG_CONTEXT>"),
    "llama4": LLAMA4,
    "llava": Form(word="<image>", written="<image>", fixed=True),
    **dict.fromkeys(("llava_next", "llava_onevision"), Form(word="<image>", written="<image>")),
    "minimax_m3_vl": Form(word="]<]image[>[", around=("]<]start of image[>[", "]<]end of image[>["), written="]<]image[>["),
    **dict.fromkeys(("mistral3", "mistral_large4"), MISTRAL),
    **dict.fromkeys(("exaone4_5", "hy_v4_vl", "lfm3_vl", "lighton_ocr"), Form(word="<|image_pad|>", written="<|image_pad|>")),
    "step3p7": STEP,
    "paddleocr_vl": Form(word="<|IMAGE_PLACEHOLDER|>", around=("<|IMAGE_START|>", "<|IMAGE_END|>")),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp"), QWEN),
}


def image_format_of(config: Mapping[str, Any]) -> Form | None:
    """The format for the model with this config.json; None: no known vision-language family."""
    kind, vision = config.get("model_type"), config.get("vision_config")
    if kind == "llava" and isinstance(vision, Mapping) and vision.get("model_type") == "pixtral":
        return MISTRAL
    return FORMS.get(kind) if isinstance(kind, str) else None
