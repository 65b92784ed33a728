"""How prompts hold images, for each family that sees: read by launcher, router and shards. Standard library only.

An image is a grid of tokens, row by row. Where the prompt's text has the family's placeholder, the router puts ids that are in no
vocabulary, `vocabulary` and above: they follow from what the image shows, so that whoever compares tokens (cached prefixes,
replicas that are chosen by them) tells images apart and knows the same one again. What the model computes there are the image's
features, which the shards make of its pixels.
"""

from dataclasses import dataclass

COLOURS = 3  # of a pixel, a byte each
# Bytes of a request's pixels, and of all that begin in one step if they are several: half of what a message holds (`proto.rpc`).
MOST = 128 << 20
DESCRIPTIONS = (
    "preprocessor_config.json",
    "processor_config.json",
)  # of a model's folder: one of them says how pictures are prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Of one family."""

    breaks: tuple[str, str] | None = (
        None  # tokens of the vocabulary behind each row of an image, and behind its last; None: there are none
    )

    def length(self, rows: int, columns: int) -> int:
        """Tokens of an image."""
        return rows * (columns + bool(self.breaks))


GRID = Form()
# By the model_type of config.json.
FORMS = {
    "glm46v": GRID,
    "glm4v": GRID,
    "glm4v_moe": GRID,
    "mistral3": Form(breaks=("[IMG_BREAK]", "[IMG_END]")),
    "qwen2_5_vl": GRID,
    "qwen2_vl": GRID,
    "qwen3_5": GRID,
    "qwen3_5_moe": GRID,
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
}
