"""Prompts by latents as they are, and by what these are expanded to for long chunks: two layers of DeepSeek V2 Lite's sizes with
random weights, on one CPU thread; both sides take turns in one process.

    python benchmarks/latents.py                                  five minutes
    python benchmarks/latents.py --chunks 192x4096 128x4096       so many tokens on so many

Medians of CPU seconds: of the whole step, and of what differs, from queries, and latents in the cache, to what heads find.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from penstock.bench.flags import checked, count
from penstock.kernels import expanded
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.latents import LatentAttention
from penstock.shard.sequence import sequences
from penstock.shard.step import Span

CHUNKS = ("1024x0", "2048x0", "4096x0", "2048x2048")
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16_384,
}


class Clocked:
    """Takes the place of `LatentAttention._attended`, and sums up its CPU seconds."""

    def __init__(self) -> None:
        self.seconds, self._right, self._within = 0.0, LatentAttention._attended, False

    def __call__(self, layer: LatentAttention, *given: object) -> Tensor:
        if self._within:
            return self._right(layer, *given)  # type: ignore[arg-type]
        self._within, began = True, time.process_time()
        found = self._right(layer, *given)  # type: ignore[arg-type]
        self._within = False
        self.seconds += time.process_time() - began
        return found


def made_up(dtype: str, tokens: int) -> Engine:
    """An engine with room for a sequence of so many tokens."""
    with tempfile.TemporaryDirectory(prefix="penstock-latents-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        decoder = load(ShardConfig(folder=folder, model="m", dtype=dtype, load_format="dummy"), lambda stage: None).decoder
    engine = Engine(decoder, torch.device("cpu"), 16, False)
    engine.resize(-(-tokens // 16))
    return engine


@torch.inference_mode()
def step(engine: Engine, clocked: Clocked, queries: int, context: int) -> tuple[float, float]:
    """CPU seconds of a chunk's step, and of its attention. Its context is not computed: the cache's contents don't matter."""
    [sequence], _ = sequences([5] * (queries + context), 1)
    engine.pool.extend(sequence.pages, queries + context)
    clocked.seconds, began = 0.0, time.process_time()
    engine.forward([Span(sequence, context, sequence.tokens[context:])])
    took = time.process_time() - began
    engine.pool.release(sequence.pages)
    return took, clocked.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", nargs="+", default=CHUNKS, metavar="TOKENSxCONTEXT")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=checked(count), default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chunks = [tuple(map(int, chunk.split("x"))) for chunk in options.chunks]
    engine, clocked = made_up(options.dtype, max(map(sum, chunks))), Clocked()
    LatentAttention._attended = lambda *given: clocked(*given)  # type: ignore[method-assign]
    expanded.MARGIN = -1e9  # whatever it costs
    print(f"{options.dtype}, CPU ms by latents and expanded: chunk | step | attention")
    for queries, context in chunks:
        found: dict[int, list[tuple[float, float]]] = {1 << 30: [], 1: []}
        for turn in range(options.rounds + 1):
            for fewest, own in found.items():
                expanded.MIN_QUERIES = fewest
                took = step(engine, clocked, queries, context)
                own += [took] if turn else []
        before, after = ([statistics.median(column) * 1e3 for column in zip(*own, strict=True)] for own in found.values())
        parts = (f"{a:8.1f} {b:8.1f} {a / b:5.2f}x" for a, b in zip(before, after, strict=True))
        print(f"{queries:5} on {context:5} |{' |'.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
