"""Sizes the KV pool at warm-up: measures the peak memory of the largest step and gives the rest to KV pages."""

import logging
import math
import resource
import sys
import time
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..kernels import compressed, expanded, indexed
from ..kernels.attention import TILE
from ..kernels.dispatch import triton_on
from ..kernels.layout import AttentionLayout
from ..kernels.spans import CHUNKED_FROM
from ..proto.process import available_memory
from .engine import Engine
from .forward import expansion_of
from .graph_sizes import GRAPH_BYTES
from .host_pages import device_bytes, page_bytes
from .models.shape import Unsupported
from .outcome import Outcome
from .sequence import Group, Sampling, sequences

log = logging.getLogger(__name__)

# On a CPU activations grow in proportion to the tokens of a step, so a small step is measured and multiplied: a full one of a large
# model would take minutes.
SAMPLE_TOKENS = 64
UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of the system's peak resident size
CUT = 512  # tokens before one that is then attended to in parts, which are merged
REMEDY = "should memory run out, give a smaller --kv-pages"
# Sampling parameters that use every feature of the sampler that takes memory.
GREEDIEST = Sampling(temperature=1.0, top_p=0.999999, typical_p=0.99, repetition_penalty=1.1, bias=((0, 1.0),), final_logprobs=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens, memory and time of a step that was measured."""

    tokens: int
    bytes: int  # taken beside weights and pages
    seconds: float
    image_seconds: float = 0.0  # estimated seconds to encode the largest image


def size_pool(
    engine: Engine,
    pages: int,
    fraction: float,
    tokens: int,
    rows: int,
    sequences: int,
    total: int,
    graphs: Listing[int] = (),
    reserved: int = 0,
) -> tuple[int, int, Measured]:
    """The number of pages for this rank's pool, how many sequences may run at once, and the measured step that both were derived
    from.

    pages: what the operator asked for, 0 to decide here; fraction: of the memory that may be used; tokens, rows: of the largest
    step; sequences: that run at once; total: tokens of the longest; graphs: tokens of the steps that will be recorded; reserved:
    bytes for something else. Raises Unsupported if it isn't enough for anything.
    """
    page_size, page_bytes = engine.page_size, engine.token_bytes * engine.page_size
    # The measured step has no context. On a CPU a long one is gathered, and copied once more by head, one layer at a time.
    context = 0 if triton_on(engine.device) else 2 * total * engine.layer_bytes
    context += sum(bytes_of(engine, tokens, total) for bytes_of in (_expansion_bytes, _selection_bytes, _entries_bytes))
    sample = _sample(engine, tokens, min(rows, tokens), _together(engine, sequences, fraction), total)
    seeing, seconds = _image_needs(engine, tokens)
    # Graphs keep the memory of their steps, from a pool that all of them share.
    recorded = len(graphs) * GRAPH_BYTES + sample.bytes * max(graphs, default=0) // sample.tokens
    needed = sample.bytes * -(-tokens // sample.tokens) + context + recorded + seeing + engine.decoder.adapters.later + reserved
    available = _usable(engine, fraction)
    sequences, states = engine.sequences(sequences, available - needed)
    needed += states
    room = (available - needed) // page_bytes
    useful = sequences * -(-total // page_size)  # each at full length: more pages would only hold cached prefixes
    if pages > room or room < 1:
        raise Unsupported(
            f"{available / 1e9:.2f} GB of memory can be used and a step needs {needed / 1e9:.2f} GB: room for {max(0, room)} pages "
            f"of {page_bytes} bytes, {pages or 1} are wanted. Lower --kv-pages, --max-batch-prefill-tokens or "
            "--max-batch-size, or use more ranks"
        )
    chosen = pages or min(room, useful)
    why = f", all that {sequences} sequences of {total} can fill" if chosen == useful else ""
    log.info(
        f"pool: {chosen} pages of {page_size} tokens ({chosen * page_size} tokens{why}, {chosen * page_bytes / 1e9:.2f} GB); "
        f"a step takes up to {needed / 1e9:.2f} GB{_part(recorded, 'graphs')}"
        f"{_part(seeing, 'images')}"
        f"{_part(reserved, 'copies of pages')}"
        f"{_part(states, f'what {sequences} sequences remember')}, room for {room} pages"
    )
    return int(chosen), sequences, replace(sample, image_seconds=seconds)


def size_copies(engine: Engine, gib: float) -> tuple[int, int]:
    """How many pages this rank can copy to `gib` of host memory, which the ranks of a machine share; and the device memory that the
    copying takes, in bytes. Raises Unsupported."""
    if not gib:
        return 0, 0
    sharing, size = engine.decoder.ranks.neighbours, page_bytes(engine.cache.pages)
    memory, room = int(gib * (1 << 30)) // sharing, available_memory() // sharing
    asked = f"--kv-offload-gib {gib:g}, for each of the ranks here ({sharing}) {memory:,} bytes"
    if memory < size:
        raise Unsupported(f"{asked}, is less than a page has, {size:,}: raise it")
    if memory > room:
        raise Unsupported(f"{asked}, is more than the memory that is available, {room:,}: lower it")
    log.info(f"host: copies of {memory // size} pages, {memory / 1e9:.2f} GB")
    return memory // size, memory if engine.device.type == "cpu" else device_bytes(size)


def _expansion_bytes(engine: Engine, tokens: int, total: int) -> int:
    """Bytes that heads' own keys and values take in such a step, where latents are expanded to them."""
    expansion, dtype = expansion_of(engine.decoder), engine.decoder.embedding.dtype
    if expansion is None:
        return 0
    if not triton_on(engine.device):
        return expanded.scratch_bytes(expansion, total, dtype)
    from ..kernels import expanded_attention

    return expanded_attention.scratch_bytes(expansion, tokens, total, dtype)


def _selection_bytes(engine: Engine, tokens: int, total: int) -> int:
    """Bytes that sparse attention's choice of keys takes in a step of `tokens` tokens, each with a context of up to `total`."""
    shape, item, ranks = engine.decoder.shape, engine.decoder.embedding.dtype.itemsize, engine.decoder.ranks.size
    blocks = shape.blocks
    if not shape.most:
        return 0
    if not triton_on(engine.device) and blocks and blocks.block:  # scores of each key head, and a mask of each query head
        each = indexed.PRODUCT_BYTES * blocks.own(ranks) + item * shape.heads // ranks
        return each * min(tokens, TILE) * total
    chosen, index = tokens * min(shape.most, total), shape.index  # kept for layers without an index
    # Index queries, while layers without an index reuse them.
    queries = tokens * index.heads * index.size * item if index and index.borrowing else 0
    if not triton_on(engine.device):
        return indexed.SCORE_BYTES * min(tokens, TILE) * total + indexed.CHOSEN_BYTES * chosen + queries
    from ..kernels import indexed_attention

    scores = indexed_attention.SCORE_BYTES * min(tokens * total, indexed_attention.SCORES)
    return scores + indexed_attention.CHOSEN_BYTES * chosen + queries


def _entries_bytes(engine: Engine, tokens: int, total: int) -> int:
    """The same for compressed attention: scores, and a CPU's logits, or tables of the entries that each token attends to, which are
    kept for layers alike."""
    latent = engine.decoder.shape.compressed
    if latent is None:
        return 0
    most = max((total // rate for rate, chosen in latent.kinds if chosen), default=0)
    if not triton_on(engine.device):
        logits = compressed.LOGIT_BYTES * min(compressed.LOGITS, tokens * engine.decoder.shape.heads * total)
        return logits + indexed.SCORE_BYTES * min(tokens, TILE) * most
    from ..kernels import indexed_attention

    scores = indexed_attention.SCORE_BYTES * min(tokens * most, indexed_attention.SCORES)
    seen = latent.window + max((min(total // rate, chosen or total) for rate, chosen in latent.kinds), default=0)
    return scores + 3 * 8 * tokens * seen  # as places, as slots, and as tables of either kind of layers


@torch.inference_mode()
def _image_needs(engine: Engine, tokens: int) -> tuple[int, float]:
    """Bytes that encoding the largest image takes, features that are kept and those of a step of `tokens` tokens included; and the
    seconds it takes. On a CPU a small image is measured and multiplied, as steps are: memory grows in proportion to the image's
    tokens."""
    vision = engine.decoder.vision
    if vision is None:
        return 0, 0.0
    largest = vision.largest
    few = min(largest, SAMPLE_TOKENS) if engine.device.type == "cpu" else largest
    vision.encode(vision.blank(1))
    before, began = _peak(engine.device, reset=True), time.perf_counter()
    features = vision.encode(vision.blank(few)).cpu()  # which waits for the device
    seconds, measured = time.perf_counter() - began, max(0, _peak(engine.device) - before)
    times = largest / len(features)
    return math.ceil(measured * times) + (tokens + vision.most) * features[0].nbytes, seconds * times


def _part(count: int, what: str) -> str:
    return f", {count / 1e9:.2f} of it for {what}" if count else ""


def _together(engine: Engine, sequences: int, fraction: float) -> int:
    """The most of these sequences that a step can have, the same on all ranks: recurrent states of more don't fit, not even while a
    step is measured."""
    if not engine.decoder.shape.recurrent:
        return sys.maxsize
    return engine.decoder.ranks.minimum(engine.sequences(sequences, _usable(engine, fraction))[0])


def _sample(engine: Engine, tokens: int, rows: int, most: int, total: int) -> Measured:
    """Measures a step like the largest one, of at most `most` prompts. A tiny one runs before it: first-use initialization takes
    much longer than the step. On an accelerator several sizes run before, since kernels are compiled per size, and at last the step
    itself. total: tokens of the longest sequence."""
    sample = tokens if engine.device.type == "cuda" else min(tokens, SAMPLE_TOKENS)
    longest = engine.decoder.shape.max_positions
    rows = -(-rows * sample // tokens)  # as many per token as the largest step has, and at least one
    if engine.decoder.shape.recurrent and triton_on(engine.device):
        most = min(most, max(1, sample // CHUNKED_FROM))  # long spans, which go by chunks and take more memory than short ones
    if triton_on(engine.device) and expansion_of(engine.decoder) is not None:
        # Too short to be expanded: attention to latents takes more memory, but for scratch, which is counted separately. Beside
        # beams long prompts attend to latents, too.
        rows = max(rows, -(-sample // (expanded.MIN_QUERIES_TRITON - 1)))
    prompts = max(-(-sample // longest), min(rows, most))
    choices = -(-rows // prompts)
    lengths = [sample // prompts + (i < sample % prompts) for i in range(prompts)]
    first = [([1], 1, GREEDIEST)]
    if engine.device.type == "cuda":
        first += [([1 << power], 1, GREEDIEST) for power in range(1, min(tokens, longest).bit_length())]
        _run_in_chunks(engine, [min(CUT, longest // 2), 1])
        _run_selecting(engine)
        _compile_expanded(engine, total)
        first.append((lengths, choices, GREEDIEST))
    for few, drawn, sampling in first:
        _make_room(engine, few, drawn)
        _run(engine, few, drawn, sampling)
    _make_room(engine, lengths, choices)
    before = _peak(engine.device, reset=True)
    outcome = _run(engine, lengths, choices, GREEDIEST)
    measured = max(0, _peak(engine.device) - before)
    engine.resize(0, sequences=0)
    return Measured(outcome.prompt_tokens, measured, outcome.seconds)


@torch.inference_mode()
def _make_room(engine: Engine, lengths: list[int], choices: int) -> None:
    """Makes a pool that prompts of these lengths, and the choices forked from them, fill exactly, and in which no step ends early.
    Recurrent states are touched here, so that they take memory on a CPU, too: they don't grow with a step's tokens and are counted
    separately."""
    engine.resize(0, sequences=0)  # there are never two pools at once
    pages = sum(-(-length // engine.page_size) + choices - 1 for length in lengths)
    engine.resize(pages, len(lengths), keeps=False)
    engine.forward.narrows = False  # as in a step whose rows are all wanted
    for state in (*engine.cache.states.values(), *engine.cache.ngrams.values()):
        state.windows.zero_()
        state.memories.zero_()


def _run_selecting(engine: Engine) -> None:
    """Runs steps of one token and of more, far enough into a context that sparse attention has to choose, if it ever has to."""
    longest, most = engine.decoder.shape.max_positions, engine.decoder.shape.sparse_beyond
    if 0 < most < longest:
        _run_in_chunks(engine, [most, *(1 << power for power in range(8))])


def _run_in_chunks(engine: Engine, lengths: list[int]) -> None:
    """Runs a step for each chunk of a prompt."""
    longest = engine.decoder.shape.max_positions
    _make_room(engine, [sum(lengths)], 1)
    begun, waiting = sequences([0] * min(longest, sum(lengths)), 1)
    groups = [Group(0, begun, waiting, GREEDIEST, 2, frozenset())]
    for length in lengths:
        engine.prefill(0, groups, [(0, length)], length, [])
        groups = []


@torch.inference_mode()
def _compile_expanded(engine: Engine, total: int) -> None:
    """Compiles what attends to expanded latents of sequences of up to `total` tokens."""
    expansion, weights = expansion_of(engine.decoder), engine.decoder.embedding
    if expansion is not None and triton_on(engine.device):
        from ..kernels import expanded_attention

        layout = AttentionLayout(engine.page_size, (), weights.dtype, weights.device, expansion=expansion)
        expanded_attention.compile_for(layout, total)


def _run(engine: Engine, lengths: list[int], choices: int, sampling: Sampling) -> Outcome:
    """Runs the step of prompts of these lengths, each with `choices` sampled tokens."""
    groups = []
    for uid, length in enumerate(lengths):
        # separate cache keys: no prompt finds another's pages
        begun, waiting = sequences([0] * length, choices, cache_key=str(uid))
        groups.append(Group(uid, begun, waiting, sampling, 2, frozenset(), top_n=5))
    return engine.prefill(0, groups, list(enumerate(lengths)), sum(lengths), [])


def _peak(device: torch.device, reset: bool = False) -> int:
    """The most memory in use since it was last reset, in bytes; with `reset`, what is in use now."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set
    except OSError as error:
        log.warning(f"what a step takes is seen only in part, since the peak of memory can't be reset ({error}); {REMEDY}")
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):  # not on Linux, or in an incomplete sandbox
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def _usable(engine: Engine, fraction: float) -> int:
    """Bytes that this rank may still allocate."""
    sharing = engine.decoder.ranks.neighbours if engine.device.type == "cpu" else 1
    return int(_available(engine.device) * fraction) // sharing


def _available(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()  # what the measured step has left for the next one
    free = torch.cuda.mem_get_info(device)[0]
    if torch.cuda.get_device_properties(device).is_integrated:  # then cached files, such as the weights', count as used memory
        return max(free, available_memory())
    return free
