"""Execution engine of one rank: runs prefill and decode steps over named batches with continuous batching. A step is planned and
begun here, by what the groups are to compute next; what its tokens lead to, when it lands, is in `landing`. The two share `books`
only.

All ranks run the same engine on the same commands. Only rank 0 sees logits; it broadcasts the tokens, so that the ranks'
bookkeeping can't diverge. Knows groups, pages and decoding strategies; no protobuf and no text.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..kernels.dispatch import triton_on
from ..kernels.transfer import list_to_device
from . import landing, step
from .books import Books
from .cache import Cache
from .decoding.budget import Allowance
from .decoding.hypotheses import candidates_of
from .decoding.methods import strategy_of
from .decoding.sampler import compile_kernels
from .decoding.stops import StopStrings
from .flight import StepInFlight
from .forward import Forward, GraphExtent, Record
from .host_pages import HostPages
from .logits import choose, nothing
from .masks import Masks
from .models.decoder import Decoder
from .out_of_memory import ALONE, MemoryFallback
from .outcome import Outcome
from .pages import OutOfPages, PagePool
from .scores import score_prompts
from .sequence import Group
from .speculator import Speculator
from .states import settle
from .step import Run


class Engine:
    """One rank's batches, KV pages and model.

    `prefill` and `decode` are whole steps. `begin_prefill` and `begin_decode` may return while the device still computes: that step
    then lands with the next one, which is begun on top of it, with `land`, or with any other command.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        page_size: int,
        prefix_caching: bool = True,
        cache_dtype: torch.dtype | None = None,
        masks: Masks | None = None,
        stops: StopStrings | None = None,
        speculator: Speculator | None = None,
        overlap: bool = False,
    ) -> None:
        """cache_dtype: of the KV cache; by default, the weights' own. masks, stops: for grammars and for beams' stop strings, on
        rank 0. speculator: the source of drafts; by default, n-gram lookup. overlap: whether a step is begun before the tokens of
        the last one are known."""
        self.decoder = decoder
        self.device = device
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._cache_dtype = cache_dtype or decoder.embedding.dtype
        self._masks = masks
        self._stops = stops
        self.speculator = speculator or Speculator(decoder.ranks, device)
        self.overlaps = overlap
        self._flight: StepInFlight | None = None  # the step in flight
        self._free = 0.0  # when the device had finished the last step
        self.resize(0, sequences=0)

    def resize(self, pages: int, sequences: int = 64, keeps: bool = True, copies: int = 0) -> None:
        """Starts anew with an empty pool of `pages` pages. sequences: the most that run at once, for models with recurrent states;
        keeps: whether further state slots are kept for the prefix cache; copies: pages in host memory (KV offload)."""
        shape, ranks, dtype = self.decoder.shape, self.decoder.ranks.size, self.decoder.embedding.dtype
        kept = shape.kept_states(sequences, self._prefix_caching) if keeps else 0
        drafter = self.speculator.drafter
        features = drafter.features if drafter else 0
        self.cache = Cache(shape, ranks, pages, self.page_size, self._cache_dtype, self.device, sequences + kept, dtype, features)
        self.forward = Forward(self.decoder, self.cache)
        if drafter:
            drafter.resize(pages, self.page_size, self.cache.features)
            self.cache.cleared = drafter.forget
        self.pool = PagePool(pages, self.page_size)
        host = HostPages(self.cache.pages, copies) if copies else None
        self.books = Books(self.pool, self.cache, self._prefix_caching, kept if self.cache.states else None, host)
        self.memory_fallback = MemoryFallback(able=ranks == 1 and not self.cache.states)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token on this rank, a draft model's included."""
        drafts = self.speculator.drafter.token_bytes if self.speculator.drafter else 0
        return self.decoder.shape.kv_elements(self.decoder.ranks.size) * self._cache_dtype.itemsize + drafts

    @property
    def layer_bytes(self) -> int:
        """The most KV bytes per token in any layer of the model."""
        return max(prod(layer.shape[1:]) for layer in self.cache.layers.values()) * self._cache_dtype.itemsize

    def sequences(self, asked: int, room: int) -> tuple[int, int]:
        """How many sequences may run at once, and the bytes of their recurrent states on this rank. room: bytes for these and for
        the KV cache."""
        shape, caching = self.decoder.shape, self._prefix_caching
        where = self.decoder.ranks.size, self.decoder.embedding.dtype.itemsize
        count = shape.sequences(asked, room, *where, caching)
        return count, shape.states_bytes(*where, count, caching)

    def enter(self) -> None:
        """Selects the device for the calling thread: which one a thread launches kernels on, and waits for, is a setting per
        thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @torch.inference_mode()
    def compile(self, rows: int) -> None:
        """Compiles what steps of up to `rows` tokens need."""
        self.decoder.compile(rows)
        if triton_on(self.device) and self.decoder.ranks.rank == 0:
            compile_kernels(self.decoder.shape.vocabulary, self.device)
        if triton_on(self.device) and self.overlaps:
            self.forward.compile()
        if self.speculator.drafter:
            self.speculator.drafter.compile(rows)

    @torch.inference_mode()
    def record(self, record: Record, extent: GraphExtent, progress: Callable[[str], None]) -> None:
        """Records CUDA graphs of steps over the pool as it is now; see `forward`."""
        self.forward.record(record, extent, progress)
        if self.speculator.drafter:
            self.speculator.drafter.record(record, extent, lambda stage: progress(f"the draft model: {stage}"))

    def clear(self) -> None:
        """Drops every batch and empties the prefix cache."""
        self.filter(list(self.books.groups))
        self.books.prefixes.clear()

    def begin_prefill(
        self,
        batch: int,
        groups: Listing[Group],
        chunks: Listing[tuple[int, int]],
        prompt_tokens: int,
        decode: Listing[int],
        allowance: Allowance | None = None,
    ) -> "Future[Outcome]":
        """Adds `groups` to `batch`, then computes prompt chunks, as (uid, most tokens), of what groups lack, `prompt_tokens` in
        all, together with a decode step of the batches `decode`. Unknown uids are ignored: these groups may just have ended. The
        result is there when the step is over."""
        outcome, books = Outcome(), self.books
        if self._flight is not None and books.prompts.halted(books.groups[uid] for uid, _ in chunks if uid in books.groups):
            self.land()  # landing publishes the recurrent states kept there
        for group in groups:
            problem = self._problem(group)
            if problem:
                outcome.fail(group, problem)
                if group.uid in books.groups:
                    books.drop(books.groups[group.uid])
            else:
                self._join(batch, group)
                books.prompts.claim(group)
        decodes = self._decodes(decode, allowance, outcome)
        known = [(books.groups[uid], most) for uid, most in dict(chunks).items() if uid in books.groups]
        prompts = books.prompts.fill(self._ready(known, alone=not decodes), prompt_tokens)
        return self._step(prompts, decodes, outcome)

    def begin_decode(self, batches: Listing[int], allowance: Allowance | None = None) -> "Future[Outcome]":
        """One decode step for every group in `batches` whose prompt is computed. The result is there when the step is over."""
        outcome = Outcome()
        return self._step([], self._decodes(batches, allowance, outcome), outcome)

    def prefill(self, *arguments: Any, **named: Any) -> Outcome:
        """`begin_prefill`, when the step is over."""
        return self._whole(self.begin_prefill(*arguments, **named))

    def decode(self, *arguments: Any, **named: Any) -> Outcome:
        """`begin_decode`, when the step is over."""
        return self._whole(self.begin_decode(*arguments, **named))

    def _whole(self, landed: "Future[Outcome]") -> Outcome:
        self.land()
        return landed.result()

    @property
    def underway(self) -> Callable[[], None] | None:
        """Waits, on any thread, until the device is done with the step in flight; None: there is none."""
        return self._flight.wait if self._flight is not None else None

    def filter(self, drop: Iterable[int]) -> list[Group]:
        """Drops groups and frees their pages. Returns those that were known."""
        self.land()
        return [self.books.drop(self.books.groups[uid]) for uid in drop if uid in self.books.groups]

    def end(self, ends: Iterable[tuple[int, int]]) -> None:
        """Ends single choices, as (uid, choice); a group ends with its last one. Unknown ones are ignored."""
        self.land()
        for uid, choice in ends:
            if uid in self.books.groups:
                self.books.end_choice(self.books.groups[uid], choice)

    pause = filter  # preemption: the tokens of the groups it returns are all that is needed to resume them

    def concat(self, into: int, batches: Listing[int]) -> None:
        """Moves the groups of `batches` to the end of `into`."""
        self.land()
        self.books.concat(into, batches)

    @torch.inference_mode()
    def adapt(self, add: str = "", prepared: Listing[object] = (), drop: str = "") -> str:
        """Loads the LoRA adapter `add`, whose weights are `prepared`, and unloads `drop`. Returns why nothing was done; "":
        success."""
        self.land()
        if drop and any(group.adapter == drop for group in self.books.groups.values()):
            return f"there are groups that go by adapter {drop}: it can't be dropped"
        problem = self.decoder.adapters.put(add, prepared) if add else ""
        if drop and not problem:
            self.decoder.adapters.drop(drop)
        return problem

    def _problem(self, group: Group) -> str:
        vocabulary = self.decoder.shape.vocabulary
        if group.uid in self.books.groups:
            return f"the shard has a group {group.uid} already"
        if not group.prompt_length or not group.max_new_tokens:
            return "the prompt, or the answer, has no tokens"
        if group.prompt_length + group.max_new_tokens > self.decoder.shape.max_positions:
            return f"{group.prompt_length} tokens and {group.max_new_tokens} more are too many: {self.decoder.shape.max_positions}"
        if problem := self._unknown(group):
            return problem
        if group.thinking is not None and max(group.thinking.begin, group.thinking.end) >= vocabulary:
            return f"what thoughts begin and end with must be in the model's vocabulary of {vocabulary}"
        if max(group.end_ids, default=0) >= vocabulary or max((token for token, _ in group.sampling.bias), default=0) >= vocabulary:
            return f"end_ids and logit bias must be in the model's vocabulary of {vocabulary}"
        if not group.waiting and not all(0 < sequence.generated < group.max_new_tokens for sequence in group.sequences):
            return f"a continuation has from 1 to {group.max_new_tokens - 1} tokens, one fewer than max_new_tokens"
        if group.search is not None and candidates_of(group.search.width, len(group.end_ids)) > vocabulary:
            return f"{group.search.width} beams and {len(group.end_ids)} end tokens are too many for a vocabulary of {vocabulary}"
        if group.adapter and group.adapter not in self.decoder.adapters.names:
            return f"the shards have no adapter {group.adapter!r}"
        choices = group.waiting or [sequence.choice for sequence in group.sequences]
        return "" if len(set(choices)) == len(choices) else f"a choice comes twice among {choices}"

    def _unknown(self, group: Group) -> str:
        """What is wrong with a group's tokens and images; "": nothing."""
        vocabulary, shown = self.decoder.shape.vocabulary, list[int]()
        if group.images:
            vision = self.decoder.vision
            if vision is None:
                return "the shards see no images: what encodes them was not loaded (--max-images 0)"
            if group.prompt_logprobs or group.drafts:
                return "a prompt with images has neither log-probabilities nor drafts"
            found = vision.places(group.images)
            if found is None or found[-1] >= group.prompt_length:
                return "its images are not within the prompt, one behind the other, or have pixels of another shape"
            shown = found
        for sequence in group.sequences:
            highest = max(sequence.tokens)
            if highest < vocabulary and shown:
                return "the prompt has tokens of the model where its images should be"
            if highest >= vocabulary and [place for place, token in enumerate(sequence.tokens) if token >= vocabulary] != shown:
                return f"token {highest} is not in the model's vocabulary of {vocabulary}{', nor an image' if shown else ''}"
        return ""

    def _join(self, batch: int, group: Group) -> None:
        if self.overlaps and group.search is not None and not self.cache.states:
            group.may_inherit(self.pool.pages, self.page_size)
        if group.images:
            assert self.decoder.vision is not None
            first = group.sequences[0]
            pictures = self.decoder.vision.pictures(group.images, first.tokens, first.cache_key)
            for sequence in group.sequences:
                sequence.pictures = pictures
            group.images = ()
        if group.adapter:
            for sequence in group.sequences:
                sequence.adapter = self.decoder.adapters.names.index(group.adapter)
        if group.sampling.penalized:
            for sequence in group.sequences:
                sequence.counts = group.sampling.counts(sequence.prompt_length, self.decoder.shape.vocabulary)
        self.books.join(batch, group)

    def _decodes(self, batches: Iterable[int], allowance: Allowance | None, outcome: Outcome) -> list[Run]:
        """The decode runs of all groups that decode, with pages for them."""
        groups = self.books.members(batches)
        speculating = self.speculator.allowed(allowance) and any(group.drafts for group in groups)
        if self._flight is not None and (speculating or not all(group.roomy(self.page_size) for group in groups if group.search)):
            self.land()  # drafts continue the tokens, and beams without heirs take fewer pages
            groups = self.books.members(batches)
        drafting = [group for group in groups if group.decodes and group.drafts] if speculating else []
        if drafting:
            self._draft(drafting, allowance, outcome)
        runs, flight = [], self._flight
        for group in groups:
            spans = flight.follow(group, self.page_size) if flight is not None else None
            if spans is None:  # nothing of it is in flight
                spans = strategy_of(group).draft(group) if group.decodes else []
            if not spans:  # it doesn't decode yet, or ends with the step in flight
                continue
            group.decodes = True
            try:
                self.books.extend(group, spans)
                runs.append(Run(group, spans, True))
            except OutOfPages as error:
                self.books.fail(group, str(error), outcome)
        return runs

    @torch.inference_mode()
    def _draft(self, groups: Listing[Group], allowance: Allowance | None, outcome: Outcome) -> None:
        began = time.perf_counter()
        asked = self.speculator.ask(groups, allowance, self.pool, self.decoder.shape.chunk)
        if asked:
            self.books.renew()
            found = self.memory_fallback.attempt(lambda: self.speculator.propose(asked))
            if found is None:
                self.speculator.forget(asked)
            outcome.rounds, outcome.later_seconds = found or (0, 0.0)
        outcome.draft_seconds = time.perf_counter() - began

    def _ready(self, chunks: list[tuple[Group, int]], alone: bool) -> list[tuple[Group, int]]:
        """The chunks without groups whose grammars are still being compiled: nobody waits for these, but for a moment where there
        is nothing else to do. Compilation depends on timing, so rank 0 broadcasts what is ready."""
        asked = [group for group, _ in chunks if group.grammar and not group.compiled]
        if not asked:
            return chunks
        alone = alone and len(asked) == len(chunks)
        if alone:
            self.land()  # rather than make it wait
        ready = self._masks.ready(asked, alone) if self._masks else [False] * len(asked)
        if self.decoder.ranks.size > 1:
            ready = self.decoder.ranks.broadcast(torch.tensor(ready, dtype=torch.int64, device=self.device)).tolist()
        for group, compiled in zip(asked, ready, strict=True):
            group.compiled = bool(compiled)
        return [(group, most) for group, most in chunks if group.compiled or not group.grammar]

    @torch.inference_mode()
    def _step(self, prompts: list[Run], decodes: list[Run], outcome: Outcome) -> "Future[Outcome]":
        """Begins a step, then lands the one before it. Lands the new one at once, too, unless the next can overlap it."""
        began, before = time.perf_counter(), self._flight
        runs = prompts + decodes
        for run in prompts:
            outcome.count_prompt(run)
        outcome.count_decodes(decodes)
        if self.cache.states:
            runs = self._assign_states(runs, outcome)
        spans = [span for run in runs for span in run.spans]
        masks = self._masks.begin(runs) if self._masks and before is None and spans else None
        hidden = self._forward(runs, spans) if spans else None
        if before is not None:
            before.outcome.ahead = True
            self.books.touch(runs)
            self.land()
            runs, hidden = self._remaining(runs, hidden)
            masks = self._masks.begin(runs) if self._masks and hidden is not None else None
        if hidden is not None:
            score_prompts(self.decoder, runs, hidden, self.memory_fallback)
            pending = choose(self.decoder, runs, hidden, self.speculator, self.memory_fallback, masks, self._stops)
        else:
            pending = nothing(self.device)
        self._flight = StepInFlight(runs, pending, masks, outcome, began)
        landed = self._flight.landed
        if not (self.overlaps and spans and self._flight.simple(self.decoder.ranks.size == 1)):
            self.land()
        return landed

    def _forward(self, runs: Listing[Run], spans: Listing[step.Span]) -> Tensor | None:
        """Hidden states of the rows whose logits are wanted, run by run."""
        self.books.renew({span.sequence.pages[-1] for span in spans if span.front})
        spans = step.parted(spans)
        compute: Callable[[Listing[step.Span]], Tensor] = self.forward
        if self._flight is not None:
            assert self._flight.pending.picked is not None, "it could not be left under way"
            compute = partial(self.forward, picked=self._flight.pending.picked())
        hidden, lost = self.memory_fallback.forward(compute, spans, self.page_size)
        first = 0
        for run in runs:
            run.first = first
            for span in run.spans:
                first += span.wanted
        if lost:
            self._fail_holders(runs, lost)
        return hidden

    def _remaining(self, runs: list[Run], hidden: Tensor | None) -> tuple[list[Run], Tensor | None]:
        """The runs, and rows, without what has ended since the forward was begun."""
        remaining, ended = self.books.living(runs), [span for run in runs for span in run.spans if not span.sequence.pages]
        if len(remaining) == len(runs) and not ended:
            return runs, hidden
        rows: list[int] = []
        for run in remaining:
            row, spans, run.spans, run.first = run.first, run.spans, [], len(rows)
            for span in spans:
                if span.sequence.pages:
                    run.spans.append(span)
                    rows += range(row, row + span.wanted)
                row += span.wanted
        if hidden is None or len(rows) == len(hidden):
            return remaining, hidden
        return remaining, hidden[list_to_device(self.device, rows)]

    @torch.inference_mode()
    def land(self) -> None:
        """Waits for the step in flight, if there is one, and applies its result."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        outcome, picks = flight.outcome, flight.pending.take()
        done = flight.done or time.perf_counter()  # while a command is queued nobody else waits for the device
        if flight.masks is not None:
            outcome.mask_seconds, outcome.mask_wait_seconds = flight.masks.seconds, flight.masks.waited
        landing.conclude(flight.runs, picks, self.books, self.cache, outcome)
        outcome.exhausted = self.memory_fallback.take()
        # The device starts an overlapped step when it is done with the one before: only from then on its time is counted.
        over = done if outcome.ahead else time.perf_counter()
        outcome.seconds, self._free = over - max(flight.began, self._free) + outcome.draft_seconds, over
        flight.landed.set_result(outcome)

    def _fail_holders(self, runs: Listing[Run], pages: set[int]) -> None:
        """Fails the groups that hold any of these pages, and withdraws their pages from the prefix cache, so that nobody finds or
        reuses them."""
        before = self._flight.runs if self._flight is not None else []  # which would publish its pages again when it lands
        for run in [*before, *runs]:
            if any(not pages.isdisjoint(sequence.pages) for sequence in (*run.group.sequences, *run.group.heirs)):
                run.problem = ALONE
                self.books.withdraw(run.group)

    def _assign_states(self, runs: Listing[Run], outcome: Outcome) -> list[Run]:
        """Gives each sequence a recurrent state of its own, copying shared ones. Returns the runs of groups for which there is
        room: all, if the router keeps to the number of sequences it has asked for."""
        copies, failed = settle(self.books.groups.values(), self.cache.slots, self.books.prefixes.states)
        if copies:
            self.cache.copy_states(copies)
        for group in failed:
            self.books.withdraw(group)  # some of its published pages would have been computed now
            self.books.fail(group, f"what {self.cache.slots} sequences remember has room, and there are more", outcome)
        return self.books.living(runs)
