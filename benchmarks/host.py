"""What a step costs the host of a GPU: bookkeeping, plan, parameters; without a GPU, and without what would be launched on it.

    python benchmarks/host.py                      256 sampled rows, without and with penalties, 32, and 8 groups of 4 beams

Plans are those of the Triton kernels, padded for a graph. The model and the sampling are stubs, so gRPC, launches and copies are
not counted. Overlapped steps hide this part as long as it is shorter than what the device needs for a step.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bench.flags import checked, count
from penstock.benchmarks.gpu_measure import replaced
from penstock.benchmarks.gpu_model import write
from penstock.kernels import dispatch, lookahead
from penstock.kernels.beam import Continuations
from penstock.shard import logits
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.expansion import Beams, Expansion
from penstock.shard.decoding.hypotheses import Path as BeamPath
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.decoding.sampler import PendingPicks, Pick, Row, draws_of, known, penalties_of
from penstock.shard.engine import Engine
from penstock.shard.forward import GraphExtent
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.step import Step

WARM, PAGE, VOCABULARY = 10, 16, 320
CHANCE = random.Random(0)


class Still(Decoder):
    """A decoder that computes nothing."""

    def __call__(self, step: Step, *rest: Any) -> Tensor:
        return self.embedding.new_zeros(len(step.rows), 8)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def begin(found: Tensor, rows: Sequence[Row], mask: Tensor | None = None) -> PendingPicks[list[Pick | None]]:
    """Stub of the sampler; only its parameters are made."""
    draws_of(rows, found.device)
    if any(row.sampling.penalized for row in rows):
        penalties_of(rows, found)
    return known([Pick(CHANCE.randrange(VOCABULARY), -1.0) for _ in rows], found.device)


def expand(found: Tensor, sets: Sequence[Beams], mask: Tensor | None = None) -> Expansion:
    """Stub of beam expansion: continuations of random parents."""
    first, best, alive = 0, [], []
    for beams in sets:
        rows = range(first, first := first + len(beams.rows))
        best.append([(-0.1 * rank, CHANCE.choice(rows), CHANCE.randrange(VOCABULARY), -1.0) for rank in range(beams.count)])
        alive += [(token, row - rows.start) for _, row, token, _ in best[-1][: beams.width]]  # none ends
    tokens, parents = torch.tensor(alive).unbind(1)
    return Expansion(sets, Continuations(torch.tensor(best, dtype=torch.float64).permute(2, 0, 1), (tokens, parents)))


def engine_of(rows: int, context: int, steps: int, folder: Path) -> Engine:
    """An engine that plans as for a GPU."""
    config = ShardConfig(folder=str(write(folder, tiny=True)), model="still", load_format="dummy", overlap="on")
    engine = load(config, lambda stage: None)
    engine.decoder.__class__ = Still
    dispatch.force("triton")
    engine.resize(4 * rows * -(-(context + steps) // PAGE))
    engine.cache.copy_rows = lambda *columns: None  # type: ignore[method-assign]
    engine.cache.inherit = lambda heirs, parents: None  # type: ignore[method-assign]
    extent = GraphExtent(rows, rows, context + steps, engine.pool.pages, (rows,))
    engine.record(lambda run: run, extent, lambda stage: None)
    return engine


def groups_of(rows: int, context: int, width: int, penalty: float, new: int) -> list[Group]:
    """`rows` sequences, or groups of `width` beams, for `new` tokens at most. penalty: for repetition; 1 is off."""
    groups = []
    for uid in range(rows // max(1, width)):
        begun, waiting = sequences([CHANCE.randrange(VOCABULARY) for _ in range(context)], 1)
        search = Search(width, 1) if width else None
        if search is not None:
            begun[0].path = BeamPath()
        sampling = Sampling() if width else Sampling(temperature=0.8, top_p=0.95, repetition_penalty=penalty, seed=uid)
        groups.append(Group(uid, begun, waiting, sampling, new, frozenset(), search=search))
    return groups


def measure(rows: int, context: int, steps: int, width: int, penalty: float) -> float:
    """Median seconds of a step."""
    with (
        dispatch.forced(""),  # restores the setting that is forced below
        replaced(logits, "begin", begin),
        replaced(logits, "expand", expand),
        replaced(lookahead, "fill", lambda *given: None),
        tempfile.TemporaryDirectory() as scratch,
    ):
        return _measure(engine_of(rows, context, steps + 2 * WARM, Path(scratch)), rows, context, steps, width, penalty)


def _measure(engine: Engine, rows: int, context: int, steps: int, width: int, penalty: float) -> float:
    groups = groups_of(rows, context, width, penalty, engine.decoder.shape.max_positions - context)
    engine.prefill(0, groups, [(group.uid, context) for group in groups], rows * context, [])
    seconds = []
    for _ in range(steps + WARM):
        began = time.perf_counter()
        engine.begin_decode([0])
        seconds.append(time.perf_counter() - began)
    assert engine.forward.replayed >= steps
    return statistics.median(seconds[WARM:])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=checked(count), default=100, help="of each kind (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for what, rows, context, width, penalty in (
        ("256 sampled rows, 512 tokens", 256, 512, 0, 1.0),
        ("the same with penalties", 256, 512, 0, 1.1),
        ("32 sampled rows, 256 tokens", 32, 256, 0, 1.0),
        ("8 groups of 4 beams, 256 tokens", 32, 256, 4, 1.0),
    ):
        print(f"{what:34}{measure(rows, context, options.steps, width, penalty) * 1e3:8.2f} ms a step")


if __name__ == "__main__":
    main()
