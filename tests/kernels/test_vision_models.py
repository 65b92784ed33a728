"""Vision models compute transformers' logits with Triton's kernels, too."""

import random
from pathlib import Path

import pytest
import torch

from penstock.kernels import dispatch
from penstock.shard.step import Span, parted

from ..shard import vision_models
from ..shard.test_against_transformers import assert_logits_close
from ..shard.test_vision import SIZES, runner_with_prompt


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter needs CPU tensors")
@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", "Glm4v", "HYV4VL", "Mistral3", "Qwen2_5_VL", "Qwen3VL"])
def test_logits_of_vision_models_match_transformers(name: str, tmp_path: Path) -> None:
    reference = vision_models.make_model(name, tmp_path)
    prompt = vision_models.image_prompt(name, reference.config.model_type, random.Random(1), SIZES)
    with dispatch.forced("triton"):
        bench, sequence = runner_with_prompt(tmp_path, prompt)
        _, first = sequence.pictures.reach(0, 7)  # not within an image that is computed at once
        parts = prompt.tokens[:first], prompt.tokens[first:]
        spans = [Span(sequence, start, part, wanted=len(part)) for start, part in zip((0, first), parts, strict=True)]
        found = [bench.run(parted([span])) for span in spans]
    assert_logits_close(torch.cat(found), vision_models.logits(reference, name, prompt))
