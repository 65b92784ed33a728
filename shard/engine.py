"""Executes commands over named batches: which groups run, what they may hold, what a step meant for each.

All ranks run the same engine on the same commands. Only rank 0 sees logits; the others are told the tokens, so that their
bookkeeping can't diverge. Knows groups, pages and strategies; no protobuf and no text.
"""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import step
from .cache import Cache
from .decoding.sample import Sample
from .decoding.sampler import Pick, pick
from .decoding.strategy import Emitted, Strategy
from .models.decoder import Decoder
from .pages import OutOfPages, PagePool
from .sequence import Batch, Group

# Rows whose logits are held at once for prompt log-probabilities: 64 x 128k float32 are 33 MB.
SCORED_ROWS = 64


@dataclass(slots=True)
class Outcome:
    """What a step did, per group."""

    emitted: list[tuple[int, Emitted]] = field(default_factory=list)  # (uid, token)
    prompts: list[tuple[int, list[float]]] = field(default_factory=list)  # (uid, logprobs) of prompts now complete
    standing: list[tuple[int, int, int]] = field(default_factory=list)  # (uid, pages held, pages the next step may add)
    failed: list[tuple[int, str]] = field(default_factory=list)  # (uid, why); they are gone
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """A group's part of a step."""

    group: Group
    spans: list[step.Span]
    sampled: bool  # its last wanted rows (one per sampler row) become tokens
    first: int = 0  # of its wanted rows among those of the step

    @property
    def wanted(self) -> int:
        """Rows whose logits it wants."""
        return sum(span.wanted for span in self.spans)


class Engine:
    """One rank's batches, and the model that moves them on."""

    def __init__(self, decoder: Decoder, device: torch.device, page_size: int) -> None:
        self.decoder = decoder
        self.device = device
        self.strategy: Strategy = Sample()
        self._windows = sorted(set(decoder.shape.windows))
        self._elements = decoder.shape.kv_elements(decoder.ranks.size) // decoder.shape.layers
        self.resize(0, page_size)

    def resize(self, pages: int, page_size: int) -> None:
        """Starts anew with an empty pool of that size."""
        shape, ranks = self.decoder.shape, self.decoder.ranks.size
        self.cache = Cache(shape, ranks, pages, page_size, self.decoder.embedding.dtype, self.device)
        self.pool = PagePool(pages, page_size)
        self.batches: dict[int, Batch] = {}

    def clear(self) -> None:
        """Drops every batch."""
        self.filter([group.uid for batch in self.batches.values() for group in batch.groups])

    def prefill(self, batch: int, groups: Listing[Group], chunks: Listing[tuple[int, int]], decode: Listing[int]) -> Outcome:
        """Adds `groups` to `batch`, then computes chunks, as (uid, tokens), of prompts, together with a decode step of the
        batches `decode`."""
        outcome = Outcome()
        home = self.batches.setdefault(batch, Batch(batch))
        known = {group.uid: group for other in self.batches.values() for group in other.groups}
        for group in groups:
            problem = self._problem(group, known)
            if problem:
                outcome.failed.append((group.uid, problem))
            else:
                known[group.uid] = group
                home.groups.append(group)
        counts = dict(chunks)
        asked = [uid for uid, _ in chunks]
        for uid in counts.keys() - dict(outcome.failed).keys():
            if uid not in known or not counts[uid] or asked.count(uid) > 1:
                outcome.failed.append((uid, "the shard doesn't know this group, or its chunk in this step is empty, or its second"))
        self.filter(uid for uid, _ in outcome.failed)
        gone = dict(outcome.failed)
        runs = [_chunk(known[uid], count) for uid, count in counts.items() if uid not in gone]
        runs += [run for run in self._decodes(decode) if run.group.uid not in counts]
        return self._run(runs, outcome)

    def decode(self, batches: Listing[int]) -> Outcome:
        """One step for every group in `batches` whose prompt is computed."""
        return self._run(self._decodes(batches), Outcome())

    def filter(self, drop: Iterable[int]) -> None:
        """Forgets groups, wherever they are, and frees their pages."""
        uids = set(drop)
        for batch in self.batches.values():
            for group in batch.groups:
                if group.uid in uids:
                    self._release(group)
            batch.drop(uids)
        self.batches = {uid: batch for uid, batch in self.batches.items() if batch.groups}

    def pause(self, uids: Iterable[int]) -> list[Group]:
        """Like `filter`, but returns the groups, whose tokens are all that resumes them."""
        wanted = set(uids)
        paused = [group for batch in self.batches.values() for group in batch.groups if group.uid in wanted]
        self.filter(wanted)
        return paused

    def concat(self, into: int, batches: Listing[int]) -> None:
        """Moves the groups of `batches` to the end of `into`."""
        home = self.batches.setdefault(into, Batch(into))
        for uid in batches:
            if uid != into and uid in self.batches:
                home.groups += self.batches.pop(uid).groups

    def _problem(self, group: Group, known: dict[int, Group]) -> str:
        vocabulary = self.decoder.shape.vocabulary
        tokens = group.sequences[0].tokens
        if group.uid in known:
            return f"the shard has a group {group.uid} already"
        if not tokens:
            return "the prompt has no tokens"
        if max(tokens) >= vocabulary:
            return f"token {max(tokens)} is not in the model's vocabulary of {vocabulary}"
        if max(group.end_ids, default=0) >= vocabulary or max((token for token, _ in group.sampling.bias), default=0) >= vocabulary:
            return f"end_ids and logit bias must be in the model's vocabulary of {vocabulary}"
        return ""

    def _decodes(self, batches: Iterable[int]) -> list[Run]:
        groups = [group for uid in dict.fromkeys(batches) if uid in self.batches for group in self.batches[uid].groups]
        ready = [group for group in groups if all(s.running and s.lacking == 1 for s in group.sequences)]
        return [Run(group, self.strategy.draft(group), sampled=True) for group in ready]

    @torch.inference_mode()
    def _run(self, runs: list[Run], outcome: Outcome) -> Outcome:
        began = time.perf_counter()
        runs = self._take_pages(runs, outcome)
        if runs:
            spans = [span for run in runs for span in run.spans]
            plan = step.plan(spans, self.pool.page_size, self._windows, self._elements, self.device)
            hidden = self.decoder(plan, self.cache)
            first = 0
            for run in runs:
                run.first, first = first, first + run.wanted
            self._score_prompts(runs, hidden)
            picks = self._pick(runs, hidden)
            for span in spans:
                span.sequence.computed += len(span.tokens)
            for run in runs:
                self._judge(run, picks, outcome)
        outcome.seconds = time.perf_counter() - began
        return outcome

    def _take_pages(self, runs: list[Run], outcome: Outcome) -> list[Run]:
        fitting = []
        for run in runs:
            try:
                for span in run.spans:
                    self.pool.extend(span.sequence.pages, span.sequence.computed + len(span.tokens))
                fitting.append(run)
            except OutOfPages as error:
                outcome.failed.append((run.group.uid, f"the pool is full: {error}"))
                self.filter([run.group.uid])
        return fitting

    def _score_prompts(self, runs: list[Run], hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that this step's rows predict. All ranks walk through it: logits are joined."""
        for run in runs:
            if not run.group.prompt_logprobs:
                continue
            span = run.spans[0]
            sequence = span.sequence
            targets = sequence.tokens[sequence.computed + 1 : min(sequence.computed + 1 + len(span.tokens), sequence.prompt_length)]
            for start in range(0, len(targets), SCORED_ROWS):
                part = targets[start : start + SCORED_ROWS]
                logits = self.decoder.logits(hidden[run.first + start : run.first + start + len(part)])
                if logits is not None:
                    chosen = logits.gather(1, torch.tensor(part, device=logits.device).unsqueeze(1)).squeeze(1)
                    run.group.prompt_scores += (chosen - logits.logsumexp(-1)).tolist()

    def _pick(self, runs: list[Run], hidden: Tensor) -> dict[int, list[Pick | None]]:
        """Per group that is sampled: its picks; None for what can't be chosen. The same tokens on every rank."""
        sampled = [run for run in runs if run.sampled]
        if not sampled:
            return {}
        rows = [self.strategy.rows(run.group) for run in sampled]
        flat = [row for some in rows for row in some]
        ends = [run.first + run.wanted for run in sampled]
        places = [place for end, some in zip(ends, rows, strict=True) for place in range(end - len(some), end)]
        wanted = hidden if len(places) == len(hidden) else hidden[places]
        logits = self.decoder.logits(wanted)
        picks: list[Pick | None] = pick(logits, flat) if logits is not None else [None] * len(flat)
        if self.decoder.ranks.size > 1:
            tokens = torch.tensor([-1 if choice is None else choice.token for choice in picks], device=self.device)
            told = self.decoder.ranks.tell(tokens).tolist()
            if logits is None:
                picks = [None if token < 0 else Pick(token, 0.0) for token in told]
        result, start = {}, 0
        for run, some in zip(sampled, rows, strict=True):
            result[run.group.uid] = picks[start : start + len(some)]
            start += len(some)
        return result

    def _judge(self, run: Run, picks: dict[int, list[Pick | None]], outcome: Outcome) -> None:
        group = run.group
        if run.sampled:
            own = [choice for choice in picks[group.uid] if choice is not None]
            if len(own) < len(picks[group.uid]):
                outcome.failed.append((group.uid, "the model's logits are not finite numbers: non_finite_logits"))
                for sequence in group.sequences:
                    sequence.running = False
                self.filter([group.uid])
                return
            if group.prompt_logprobs:
                outcome.prompts.append((group.uid, group.prompt_scores))
                group.prompt_logprobs = False
            for sequence in group.sequences:
                sequence.running = True
            verdict = self.strategy.judge(group, own)
            outcome.emitted += [(group.uid, emitted) for emitted in verdict.emitted]
            if verdict.ended:
                self.filter([group.uid])
                return
        outcome.standing.append((group.uid, group.pages, group.grow(self.pool.page_size)))

    def _release(self, group: Group) -> None:
        for sequence in group.sequences:
            if not sequence.running:
                self.cache.clear(sequence.pages)
            self.pool.release(sequence.pages)
            sequence.pages, sequence.computed, sequence.running = [], 0, False


def _chunk(group: Group, count: int) -> Run:
    """The next `count` tokens of a prompt (or of what restores a group), at most what it lacks."""
    sequence = group.sequences[0]
    tokens = sequence.tokens[sequence.computed : sequence.computed + count]
    complete = len(tokens) == sequence.lacking
    return Run(group, [step.Span(sequence, tokens, wanted=len(tokens) if group.prompt_logprobs else int(complete))], complete)
