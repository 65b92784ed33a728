"""Speculative decoding inside one shard, against its theoretical best: see `speculation`.

The drafts of an oracle, right with a known probability, cost nothing, so the additional time of a step with them is the price of
verification, which an oracle that is always right shows; the rest of the loss is due to the budget's estimates, and the shard's own
work. Times are CPU seconds of one thread.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path

import torch
from tokenizers import Tokenizer

from penstock.benchmarks import checkpoint
from penstock.launcher.hub import DEMO_FOLDER, DRAFT_FOLDER
from penstock.proto.speculation import parse
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.decoding.proposers import DraftRequest, NgramProposer, Proposal, Proposer
from penstock.shard.decoding.tree import chain
from penstock.shard.decoding.verify import deterministic_draft
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.speculator import Speculator

ACCEPTED, DRAFTS = 0.8, 4
DRAWS = 4  # random draws of the oracle's errors per answer: luck moves the tokens of a single step by 7 % in 160 of them
ORACLE_GOAL, REPEATED_GOAL = 0.90, 2.5
FREE = Allowance(LinearCost(1.0, 0.0, 0.0), 1 << 20)  # drafts cost nothing: as many as possible
STORY = "<|user|>Tell me a story about a cat called {name}.<|assistant|>"
NAMES = ("Tom", "Mia", "Ben", "Lily", "Max", "Anna", "Sam", "Eva")
PERIOD, MOST = 40, 1200  # tokens: a model with random weights ends in loops, mostly short ones, and rather soon


class Oracle:
    """A proposer that knows the answer; each of its drafts is right with a given probability, if those before it are."""

    def __init__(self, said: dict[int, list[int]], right: float, seed: int = 0) -> None:
        self._said = said
        self._right = right
        self._chance = random.Random(seed)

    def propose(self, asked: Sequence[DraftRequest]) -> Proposal:
        """See Proposer."""
        drafts = []
        for one in asked:
            first = one.sequence.generated
            true = self._said[one.group.uid][first : first + min(one.nodes, one.depth)]
            drafts.append(
                deterministic_draft(chain([token if self._chance.random() < self._right else token ^ 1 for token in true]))
            )
        return Proposal(drafts)


@dataclass
class Told:
    """Result of decoding: tokens and times."""

    tokens: list[list[int]]
    seconds: float  # of a step
    steps: int
    forwards: int  # of each answer, summed

    @property
    def speed(self) -> float:
        """Tokens per CPU second, of all answers."""
        return sum(map(len, self.tokens)) / (self.seconds * self.steps)


def decode(engine: Engine, prompts: Sequence[Sequence[int]], new: int, drafts: int, sampling: Sampling = Sampling()) -> Told:  # noqa: B008
    """Decodes `new` tokens for each prompt; only the decode steps are measured, not the prefill."""
    engine.clear()
    groups = []
    for uid, prompt in enumerate(prompts):
        begun, waiting = sequences(prompt, 1)
        groups.append(Group(uid, begun, waiting, sampling, new, frozenset(), drafts=drafts))
    answers: list[list[int]] = [[] for _ in prompts]
    outcome = engine.prefill(0, groups, [(one.uid, 1 << 20) for one in groups], 1 << 20, [])
    seconds: list[float] = []
    forwards = len(groups)
    while True:
        for uid, emitted in outcome.emitted:
            answers[uid].append(emitted.pick.token)
        if not engine.books.groups:
            return Told(answers, statistics.fmean(seconds), len(seconds), forwards)
        forwards += len(engine.books.groups)
        began = time.process_time()
        outcome = engine.decode([0], FREE)
        seconds.append(time.process_time() - began)


def by(engine: Engine, proposer: Proposer) -> None:
    """Switches the engine to a proposer, without learned acceptance."""
    engine.speculator = Speculator(engine.decoder.ranks, engine.device)
    engine.speculator.proposer = proposer


def prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    chance = random.Random(seed)
    return [[chance.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def oracle(engine: Engine, new: int, rounds: int) -> None:
    """The closed form: with acceptance a and k drafts a step brings (1 - a^(k+1)) / (1 - a) tokens."""
    brought = (1 - ACCEPTED ** (DRAFTS + 1)) / (1 - ACCEPTED)
    ratios, gains, prices = [], [], []
    for turn in range(rounds):
        asked = prompts(1, 64, checkpoint.SHAPE["vocab_size"], turn)
        plain = decode(engine, asked, new, 0)
        said = dict(enumerate(plain.tokens))
        by(engine, Oracle(said, 1.0))
        price = decode(engine, asked, new, DRAFTS).seconds / plain.seconds
        speeds = []
        for draw in range(DRAWS):
            by(engine, Oracle(said, ACCEPTED, turn * DRAWS + draw))
            drafted = decode(engine, asked, new, DRAFTS)
            same = sum(map(eq, drafted.tokens[0], plain.tokens[0]))
            if same < new:  # several tokens in a forward round differently than one: nearly equal logits may fall either way
                print(f"({same} of {new} tokens are the same: near ties fell otherwise)")
            speeds.append(drafted.speed)
        gains.append(statistics.harmonic_mean(speeds) / plain.speed)
        prices.append(price)
        ratios.append(gains[-1] / (brought / price))
    verdict = "met" if statistics.median(ratios) >= ORACLE_GOAL else "MISSED"
    print(
        f"oracle, acceptance {ACCEPTED}, {DRAFTS} drafts: {statistics.median(gains):.2f}x plain decoding; a step brings "
        f"{brought:.2f} tokens in the closed form and takes {statistics.median(prices):.2f}x: {statistics.median(ratios):.2f} of "
        f"that, goal {ORACLE_GOAL}: {verdict}",
        flush=True,
    )


def loops(text: list[int]) -> bool:
    """Whether its end repeats itself."""
    end = text[-2 * PERIOD :]
    return any(len(end) == 2 * PERIOD and end[period:] == end[:-period] for period in range(1, PERIOD))


def repeated(engine: Engine, new: int, rounds: int) -> None:
    """N-gram lookup on repetitive text, batch 1: a model with random weights ends in a loop, where the measurement begins."""
    ratios, steps = [], []
    for turn in range(rounds):
        [prompt] = prompts(1, 64, checkpoint.SHAPE["vocab_size"], 100 + turn)
        while len(prompt) <= MOST and not loops(prompt):  # a text that does not loop by then probably never will
            by(engine, NgramProposer())
            prompt += decode(engine, [prompt], 4 * PERIOD, 8).tokens[0]
        asked = [prompt]
        plain = decode(engine, asked, new, 0)
        by(engine, NgramProposer())
        drafted = decode(engine, asked, new, 8)
        ratios.append(drafted.speed / plain.speed)
        steps.append(new / drafted.steps)
    verdict = "met" if statistics.median(ratios) >= REPEATED_GOAL else "MISSED"
    print(
        f"look-up on repetitive text, 8 drafts: {statistics.median(ratios):.2f}x plain decoding, {statistics.median(steps):.1f} "
        f"tokens a step, goal {REPEATED_GOAL}x: {verdict}",
        flush=True,
    )


def shapes(new: int, rounds: int) -> None:
    """A chain against trees of as many nodes, by the demo model and its draft model."""
    config = ShardConfig(folder=str(DEMO_FOLDER), model="demo", kv_pages=512, speculate=f"draft={DRAFT_FOLDER},tokens=8")
    engine = load(config, lambda stage: None)
    engine.resize(512)
    drafter, read = engine.speculator.drafter, Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    asked = [read.encode(STORY.format(name=name)).ids for name in NAMES]
    for temperature in (0.0, 1.0):
        for said in ("tokens=8", "tree=2x1x1x1", "tree=4x1", "nodes=8"):
            wanted = parse(f"draft=x,{said}")
            engine.speculator = Speculator(engine.decoder.ranks, engine.device, wanted, drafter)
            brought = []
            for turn in range(rounds):
                told = decode(engine, asked, new, wanted.most, Sampling(temperature=temperature, seed=turn))
                brought.append(sum(map(len, told.tokens)) / told.forwards)
            print(f"8 nodes, temperature {temperature}, {said:14} {statistics.median(brought):.2f} tokens a step", flush=True)


def main(new: int, rounds: int) -> None:
    """Runs and prints everything."""
    torch.set_num_threads(1)
    folder = checkpoint.write(Path("build/benchmark").absolute() / "random-200m-float32", torch.float32)
    engine = load(ShardConfig(folder=str(folder), model="200m", kv_pages=256), lambda stage: None)
    engine.resize(256)
    oracle(engine, new, rounds)
    repeated(engine, new, rounds)
    del engine
    shapes(new, rounds)
