"""Models that see images give transformers' logits by Triton's kernels, too."""

import random
from pathlib import Path

import pytest
import torch

from penstock.kernels import choose
from penstock.shard.step import Span

from ..shard import seeing
from ..shard.test_oracle import close
from ..shard.test_sight import SIZES, bench_of


@pytest.mark.parametrize("name", ["Glm4v", "Mistral3", "Qwen2_5_VL", "Qwen3VL"])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = seeing.made(name, tmp_path)
    prompt = seeing.seen(name, reference.config.model_type, random.Random(1), SIZES)
    with choose.forced("triton"):
        bench, sequence = bench_of(tmp_path, prompt)
        found = [bench.run([Span(sequence, 0, prompt.tokens[:7], wanted=7)])]
        found.append(bench.run([Span(sequence, 7, prompt.tokens[7:], wanted=len(prompt.tokens) - 7)]))
    close(torch.cat(found), seeing.logits(reference, name, prompt))
