"""Prefill policies: how many prompt tokens the next step may take, and when waiting requests may join. Pure; a new policy is a new
class here.

Mixed   Chunked prefill: prompt chunks share steps with decodes, as many tokens as keep the step within a time limit: streams never
        stall. The default.
Pause   Decodes pause while whole prompts are computed, as text-generation-inference does without chunks: higher prefill
        throughput, at the price of gaps in streams.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from .cost import Cost, Work

LEAST_TARGET = 0.05  # seconds; a step faster than this is fast enough for any reader
DECODE_SHARE = 2.0  # without a target, a step with prompts may take this many times what its decodes alone take
# Share of the decodes' time that prompts get even where the target leaves less, beside the fixed cost of adding prompt tokens, such
# as reading the oldest one's context: else that one would get a token a step, and all others, which wait behind it, none.
PROMPT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The scheduler's state as a policy sees it: integers."""

    decodes: int  # sequences that decode in the next step
    keys: int  # that their tokens attend to, all together
    sequences: int  # admitted, those of prompts in progress included
    prompts: int  # prompts in progress
    position: int  # of the oldest prompt in progress: its tokens that are computed
    waiting: int  # waiting jobs
    steps: int  # since the last one that computed a prompt


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step computed, and how long it took."""

    prompt_tokens: int = 0
    prompt_keys: int = 0  # that these attended to, summed
    decode_tokens: int = 0
    decode_keys: int = 0
    rows: int = 0  # that were sampled
    seconds: float = 0.0
    drafted: int = 0  # of the decodes' tokens, drafts ...
    accepted: int = 0  # ... and of these, accepted ones
    rounds: int = 0  # runs of the draft model
    draft_seconds: float = 0.0  # time for drafting ...
    later_seconds: float = 0.0  # ... and, of that, runs after the first one

    @property
    def decodes(self) -> int:
        """Sequences that decoded."""
        return self.decode_tokens - self.drafted

    @property
    def read(self) -> float:
        """Keys read for decodes: a sequence's are read once, however many drafts it has."""
        return self.decode_keys * self.decodes / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def net(self) -> float:
        """Seconds without those of the draft model, which are not part of the served model's cost."""
        return self.seconds - self.draft_seconds if self.rounds else self.seconds

    @property
    def work(self) -> Work:
        """The features of the cost model. Of a prompt's context only the average over its tokens is known."""
        context = self.prompt_keys / self.prompt_tokens if self.prompt_tokens else 0.0
        seen = self.prompt_keys + self.decode_keys - self.read  # a draft is computed like a prompt's token
        return Work(self.prompt_tokens + self.decode_tokens, seen, self.read + context, self.rows, self.prompt_tokens > 0)


def fit(cost: Cost, step: Measured) -> None:
    """Adds a measured step to the cost model; not those of decodes with drafts, which are not linear (`drafting`)."""
    if step.prompt_tokens or not step.drafted:
        cost.observe(step.work, step.net, prompts=step.prompt_tokens > 0)


class Policy(Protocol):
    """Decides for one scheduler how prompts are scheduled."""

    mixes: bool  # decodes share the steps that compute prompts
    cost: Cost | None  # the learned cost of steps; None: not needed

    def room(self, now: SchedulerState) -> int:
        """Most prompt tokens in the next step, at least 1."""

    def admits(self, now: SchedulerState) -> bool:
        """Whether waiting jobs may join the next step, if there is room and memory."""

    def learn(self, step: Measured) -> None:
        """A step was answered: fits the cost model, if there is one."""
        if self.cost is not None:
            fit(self.cost, step)


def prompt_share(step_tokens: int) -> int:
    """Tokens that prompts get in every step, however many sequences decode."""
    return max(1, step_tokens // 8)


def target_of(asked: float, alone: float) -> float:
    """Seconds that a step with decodes may take. asked: the operator's setting; alone: what the decodes alone take."""
    return asked or max(LEAST_TARGET, DECODE_SHARE * alone)


def largest_step(step_tokens: int, sequences: int) -> int:
    """Most query tokens that a step with at most `sequences` sequences can have."""
    return max(step_tokens, sequences + prompt_share(step_tokens))


class ChunkedPrefill(Policy):
    """Chunked prefill, see the module. `target`: seconds that a step with decodes may take; 0: relative to the decodes alone."""

    mixes = True

    def __init__(self, step_tokens: int, cost: Cost | None = None, target: float = 0.0) -> None:
        self._step_tokens = step_tokens
        self._target = target
        self.cost = cost  # None: only tokens are limited, not time

    def room(self, now: SchedulerState) -> int:
        """What the step's token budget and, while anything decodes, its time limit leave."""
        room = max(self._step_tokens - now.sequences, prompt_share(self._step_tokens))
        if self.cost is None or not now.decodes:
            return room
        alone = self.cost.predict(Work(tokens=now.decodes, read=now.keys, rows=now.decodes))
        seconds = max(target_of(self._target, alone) - alone, PROMPT_SHARE * alone + self.cost.beside(now.position))
        return max(1, min(room, self.cost.tokens_within(seconds, now.position)))

    def admits(self, now: SchedulerState) -> bool:
        """Always."""
        return True


class WholePrefill(Policy):
    """Unchunked prefill, see the module. The two bounds are TGI's: --waiting-served-ratio and --max-waiting-tokens."""

    mixes = False

    def __init__(
        self, step_tokens: int, waiting_served_ratio: float = 0.3, waiting_tokens: int = 20, cost: Cost | None = None
    ) -> None:
        self._step_tokens = step_tokens
        self.cost = cost  # for other users; None: there are none
        self._ratio = waiting_served_ratio
        self._waiting_tokens = waiting_tokens

    def room(self, now: SchedulerState) -> int:
        """The whole token budget: no decodes share the step."""
        return self._step_tokens

    def admits(self, now: SchedulerState) -> bool:
        """When nothing decodes; else when enough jobs wait, or have waited long enough, and the prompts before them are computed.
        As in TGI, decoding sequences get a token before the next prompts begin, however many wait."""
        if now.prompts or (now.decodes and not now.steps):
            return False
        due = now.steps >= self._waiting_tokens or now.waiting >= math.floor(now.decodes * self._ratio)
        return not now.decodes or due
