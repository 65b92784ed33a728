"""How many tokens of prompts the next step may take, and when those that wait may join. Pure; a new policy is a new class here.

Mixed   Prompts ride with decodes, as many tokens as keep the step within a time: streams never stall. The default.
Pause   Decodes pause while whole prompts are computed, as text-generation-inference does without chunks: more tokens a
        second for prompts, at the price of gaps in streams.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from .cost import Cost, Work

LEAST_TARGET = 0.05  # seconds; a step that is faster than this is fast enough for any reader
DECODE_SHARE = 2.0  # without a target, a step with prompts may take so many times what its decodes alone take
# Of what decodes alone take: so much time prompts get even where the target leaves less, beside what any number of their tokens
# takes, as to read the oldest one's context: else that would get a token a step, and all others, which wait behind it, none.
PROMPT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Standing:
    """What a policy sees of the scheduler: integers."""

    decodes: int  # sequences that decode in the next step
    keys: int  # that their tokens will see, all together
    sequences: int  # admitted, those of prompts in progress included
    prompts: int  # in progress
    position: int  # of the oldest prompt in progress: its tokens that are computed
    waiting: int  # jobs that wait
    steps: int  # since one computed a prompt


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step was, and how long it took."""

    prompt_tokens: int = 0
    prompt_keys: int = 0  # that they saw, summed
    decode_tokens: int = 0
    decode_keys: int = 0
    rows: int = 0  # that were sampled
    seconds: float = 0.0
    drafted: int = 0  # of the decodes' tokens, those that were guesses ...
    accepted: int = 0  # ... and those of them that were right
    rounds: int = 0  # runs of the draft model
    draft_seconds: float = 0.0  # what it took to find guesses ...
    later_seconds: float = 0.0  # ... and, of that, runs after the first one

    @property
    def decodes(self) -> int:
        """Sequences that decoded."""
        return self.decode_tokens - self.drafted

    @property
    def read(self) -> float:
        """Keys of these: a sequence's are read once, however many guesses it has."""
        return self.decode_keys * self.decodes / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def net(self) -> float:
        """Seconds without those of the draft model, which the model that is served has nothing to do with."""
        return self.seconds - self.draft_seconds if self.rounds else self.seconds

    @property
    def work(self) -> Work:
        """In the words of the model of cost. Of a prompt's context only the average over its tokens is known."""
        context = self.prompt_keys / self.prompt_tokens if self.prompt_tokens else 0.0
        seen = self.prompt_keys + self.decode_keys - self.read  # a guess is computed as a prompt's token is
        return Work(self.prompt_tokens + self.decode_tokens, seen, self.read + context, self.rows, self.prompt_tokens > 0)


def fit(cost: Cost, step: Measured) -> None:
    """Teaches the model what a step took; not those of decodes with guesses, which are no straight line (`drafting`)."""
    if step.prompt_tokens or not step.drafted:
        cost.observe(step.work, step.net, prompts=step.prompt_tokens > 0)


class Policy(Protocol):
    """One instance for one scheduler."""

    mixes: bool  # decodes ride in the steps that compute prompts
    cost: Cost | None  # what steps take, as far as it has learned; None: nobody needs to know

    def room(self, now: Standing) -> int:
        """Most tokens of prompts in the next step, at least 1."""

    def admits(self, now: Standing) -> bool:
        """Whether jobs that wait may join the next step, if there is room and memory."""

    def learn(self, step: Measured) -> None:
        """A step was answered."""


def prompt_share(step_tokens: int) -> int:
    """Tokens that prompts get in every step, however many sequences decode."""
    return max(1, step_tokens // 8)


def target_of(asked: float, alone: float) -> float:
    """Seconds that a step with decodes may take. asked: by the operator; alone: what the decodes alone take."""
    return asked or max(LEAST_TARGET, DECODE_SHARE * alone)


def largest_step(step_tokens: int, sequences: int) -> int:
    """Most query tokens that a step with at most so many sequences can have."""
    return max(step_tokens, sequences + prompt_share(step_tokens))


class Mixed:
    """See the module. `target`: seconds that a step with decodes may take; 0: by what decodes alone take."""

    mixes = True

    def __init__(self, step_tokens: int, cost: Cost | None = None, target: float = 0.0) -> None:
        self._step_tokens = step_tokens
        self._target = target
        self.cost = cost  # None: time does not matter, only tokens do

    def room(self, now: Standing) -> int:
        """What the step's tokens and, while anybody decodes, its time leave."""
        room = max(self._step_tokens - now.sequences, prompt_share(self._step_tokens))
        if self.cost is None or not now.decodes:
            return room
        alone = self.cost.predict(Work(tokens=now.decodes, read=now.keys, rows=now.decodes))
        seconds = max(target_of(self._target, alone) - alone, PROMPT_SHARE * alone + self.cost.beside(now.position))
        return max(1, min(room, self.cost.tokens_within(seconds, now.position)))

    def admits(self, now: Standing) -> bool:
        """Always."""
        return True

    def learn(self, step: Measured) -> None:
        """Fits the model of cost."""
        if self.cost is not None:
            fit(self.cost, step)


class Pause:
    """See the module. The two bounds are TGI's: --waiting-served-ratio and --max-waiting-tokens."""

    mixes = False

    def __init__(
        self, step_tokens: int, waiting_served_ratio: float = 0.3, waiting_tokens: int = 20, cost: Cost | None = None
    ) -> None:
        self._step_tokens = step_tokens
        self.cost = cost  # what somebody else needs to know; None: nobody does
        self._ratio = waiting_served_ratio
        self._waiting_tokens = waiting_tokens

    def room(self, now: Standing) -> int:
        """Everything: nobody rides along."""
        return self._step_tokens

    def admits(self, now: Standing) -> bool:
        """When nothing decodes; else when enough wait, or have waited long enough, and the prompts before them are through. As in
        TGI, whoever decodes gets a token before the next prompts begin, however many wait."""
        if now.prompts or (now.decodes and not now.steps):
            return False
        due = now.steps >= self._waiting_tokens or now.waiting >= math.floor(now.decodes * self._ratio)
        return not now.decodes or due

    def learn(self, step: Measured) -> None:
        """Fits the model of cost, for those who need it."""
        if self.cost is not None:
            fit(self.cost, step)
