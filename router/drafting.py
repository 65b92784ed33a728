"""Cost and budget of speculative decoding: what drafts cost in a step, and how many the next one may have. Pure arithmetic on a few
floats; the shards decide which sequences get them, by their acceptance (docs/speculation.md).

    seconds = plain(sequences, keys) + first + draft * drafts + round * runs of the draft model

The draft model's first run has to catch up with what was accepted, and to load its weights anew: what it takes beyond the others is
a part of `first`.

`cost.Cost` gives the average cost of a token among many; that a few more beside a few are nearly free on a memory-bound device, and
expensive on a compute-bound one, is not linear. So all four are learned for each load separately, that is for each power of two of
decoding sequences, from steps that do nothing else. What was learned of a load is kept while others are seen: drafts come back when
the load falls. Until something was measured, a draft costs what one more sequence does; it hardly ever costs more, so excess time
is first of all attributed to `first`, the fixed cost of steps with drafts.

Steps with drafts can't say what they would have taken without, and steps without not what drafts would cost. So there is
  a step without   now and then where those with drafts are usual
  a trial          now and then where they are not: some steps in a row, since a draft model that was idle for long has to
                   catch up first. What the last one has cost bounds how often
  another number   of drafts now and then where it is always the same: the reported costs are varied within what fits the data
Whatever the cost estimates, if steps with drafts were slower than those without, drafting stops until the next trial.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .cost import Cost, Work
from .loads import FadingMean, LoadStatistics
from .policies import PROMPT_SHARE, Measured, target_of

LOADS = 16  # powers of two
KNOWN = 6.0  # steps without drafts needed before any are allowed: the first ones after prompts are not typical
PLAIN = 64  # steps with drafts after which there is one without
TRIAL = 6  # steps of a trial; ...
LEAST_TRIAL = 3  # ... of many sequences, which learn as much in fewer
HOPELESS = 3  # trials counted as made where drafts have lost with fewer sequences
IDLE = 2  # consecutive steps without drafts that do not count as an interruption of drafting yet
CALM = 8  # steps after the last prompt before a trial: how answers begin says little of how they go on; ...
BUSY = 64  # ... and steps without drafts after which it is made all the same
TRYING = 0.005  # share of the time without drafts that trials may lose ...
LEARNING = 0.01  # ... and the first ones: so much for the second, half of it for the next, ...
SLOPES = 16  # steps after which the cost model is read again: fitting it takes longer than all that is done here
MARGIN = 1.03  # factor that a gain has to exceed, as costs are wrong by that much


@dataclass(frozen=True, slots=True)
class Allowance:
    """Budget of drafts: what those of a step probably cost, in seconds, and how many there may be."""

    step: float  # without drafts
    first: float  # fixed cost of having any
    draft: float  # per draft
    round: float  # per run of the draft model
    most: int
    target: float  # between two tokens of a stream that has a latency target


class DraftBudget:
    """Learns the cost of drafts for one scheduler, and decides their number."""

    def __init__(self, cost: Cost, step_tokens: int, drafts: int, target: float = 0.0) -> None:
        """cost: the cost model, read as it evolves; drafts: most per sequence; target: seconds that a step may take, by the
        operator's setting; 0: relative to a step without prompts and drafts."""
        self._cost = cost
        self._step_tokens = step_tokens
        self._drafts = drafts
        self._target = target
        self._loads = [LoadStatistics() for _ in range(LOADS)]
        self._slopes = cost.slopes
        self._age = 0  # steps since these were read
        self._calm = 0  # steps since a prompt

    def learn(self, step: Measured) -> None:
        """Learns from a measured step. Those with prompts say little of what drafts cost."""
        self._calm = 0 if step.prompt_tokens else self._calm + 1
        if step.prompt_tokens or step.decodes <= 0 or step.net <= 0:
            return
        self._age += 1
        if self._age >= SLOPES:
            self._slopes, self._age = self._cost.slopes, 0
        load = self._load(step.decodes)
        if step.rounds:
            load.openings.add(max(step.draft_seconds - step.later_seconds, 1e-9))
        if step.rounds > 1:
            load.rounds.add(max(step.later_seconds / (step.rounds - 1), 1e-9))
        if not step.drafted:
            load.plain.add(step.net, step.decodes, step.read)
            load.turns += load.since > 0
            load.since, load.idle = 0, load.idle + 1
            load.saved += max(TRYING, LEARNING / 2**load.trials) * step.net
            return
        plain = self._plain(load, step.decodes, step.read)
        load.add(step.drafted, step.net - plain, step.net)
        load.gain(step.decodes, step.decodes + step.accepted, step.decodes * step.seconds / plain)
        if load.trial:
            cost = max(step.seconds - plain * (1 + step.accepted / step.decodes), 0.0)
            load.saved, load.cost = load.saved - cost, load.cost + cost
        load.since, load.idle = load.since + 1, 0
        load.trial = max(load.trial - 1, 0)

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        """Budget of the next step. keys: that decoding sequences attend to; prompts: what it computes beside them."""
        load = self._load(decodes)
        if not load.trials:
            self._expect(decodes)
        alone = self._plain(load, decodes, keys)
        token, key, _ = self._slopes
        first, draft = load.fit(token + key * keys / decodes, alone)
        each = draft + first * load.often  # no less than that, even if there are more than usual
        first, draft = load.tilted(first, draft)
        target = target_of(self._target, alone)
        step, share = alone, 1.0
        if prompts.tokens:
            both = Work(decodes + prompts.tokens, prompts.seen, keys + prompts.read, decodes, prompts.prompts)
            step = alone + self._cost.predict(both) - self._cost.predict(Work(decodes, 0.0, keys, decodes))
            share = PROMPT_SHARE
        room = max(0, self._step_tokens - decodes - int(prompts.tokens) - 1)  # and one that the shards may try
        if each > 0:
            room = min(room, int(max(target - step, share * alone) / each))
        run = self._run(decodes, lambda load: load.rounds)
        first += max(0.0, self._run(decodes, lambda load: load.openings) - run)
        return self._decided(load, Allowance(step, first, draft, run, room, target), decodes, not prompts.tokens)

    def _decided(self, load: LoadStatistics, found: Allowance, decodes: int, alone: bool) -> Allowance:
        """The budget after deciding whether to draft at all. alone: no prompts are in the step."""
        none = replace(found, most=0)
        if load.plain.count < KNOWN:
            return none
        calm = self._calm >= CALM or load.idle > BUSY
        if alone and calm and not load.trial and load.idle > IDLE and load.saved >= 0:
            load.trial, load.saved, load.trials = max(TRIAL // max(1, decodes // 4), LEAST_TRIAL), 0.0, load.trials + 1
            load.cost = 0.0
        if alone and load.trial:
            return replace(found, first=0.0, draft=0.0, round=0.0, most=min(found.most, self._drafts * decodes))
        return found if load.since < PLAIN and not load.loses and self._may_pay(found, decodes) else none

    def _may_pay(self, found: Allowance, decodes: int) -> bool:
        """Whether drafts would pay if all were accepted. Else the shards need not consider them."""
        drafts = min(found.most, decodes * self._drafts)
        seconds = found.step + found.first + found.draft * drafts + found.round
        return (decodes + drafts) / seconds > MARGIN * decodes / found.step

    def _expect(self, decodes: int) -> None:
        """Drafts gain less the more sequences there are: where they have lost with fewer, the first trial has to be saved for."""
        for fewer in reversed(self._loads[: _place(decodes)]):
            if fewer.trials:
                load = self._load(decodes)
                load.saved, load.trials = (-fewer.cost, HOPELESS) if fewer.lost else (load.saved, load.trials)
                return

    def _plain(self, load: LoadStatistics, decodes: float, keys: float) -> float:
        """Seconds of a step without drafts: as others at this load, corrected by the difference that `Cost` predicts."""
        mean = load.plain
        if not mean.count:
            return self._cost.predict(Work(decodes, 0.0, keys, decodes))
        token, _, key = self._slopes
        return max(mean.seconds + token * (decodes - mean.sequences) + key * (keys - mean.keys), mean.seconds / 2)

    def _run(self, decodes: int, kind: Callable[[LoadStatistics], FadingMean]) -> float:
        """Seconds of a run of the draft model, at the nearest load at which one was measured. None measured: 0, so that one is
        made."""
        place = _place(decodes)
        known = [(abs(i - place), i) for i, load in enumerate(self._loads) if kind(load).count]
        return kind(self._loads[min(known)[1]]).seconds if known else 0.0

    def _load(self, decodes: int) -> LoadStatistics:
        return self._loads[_place(decodes)]


def _place(decodes: int) -> int:
    return min(max(decodes - 1, 0).bit_length(), LOADS - 1)


def needed(elapsed: float, tokens: int, target: float, ahead: float, steps: int) -> float:
    """Tokens that the next step has to give a stream so that it has one per `target` seconds when that is over.

    elapsed: seconds since its first token, after which `tokens` came; ahead: seconds until the next step is over; steps: how many
    are in flight before it, each of which gives one.
    """
    return max(0.0, (elapsed + ahead) / target - tokens - steps)
