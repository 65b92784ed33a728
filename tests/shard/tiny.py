"""Tiny models with random weights, made by transformers' classes from `configurations`: their checkpoints, the logits and tokens
that transformers computes with them, and engines that run them."""

import atexit
import functools
import json
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

from penstock.kernels.dispatch import triton_on
from penstock.shard.config import ShardConfig
from penstock.shard.decoding import hypotheses
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.weights import Weights

from .configurations import EXTRA_MODELS, FAMILIES

Result = TypeVar("Result")

# Matrices this small are slower on two threads, and much slower where cores are shared with other processes.
torch.set_num_threads(1)

DEMO = Path(__file__).parents[2] / "demo" / "model"
CPU = torch.device("cpu")
DEVICE = CPU  # of engines; tests of kernels on a GPU change it
# Held while a model is created or loaded, since ranks that are threads may do so at the same time. While transformers loads a
# model, it patches `tie_weights` for the whole process: a model that another thread creates then has an output matrix of its own,
# and if two threads load at once, the patch may stay.
MODEL_LOCK = threading.RLock()
# Classes that transformers' AutoModelForCausalLM does not map these configurations to.
MODEL_CLASSES: dict[str, Callable[[Any], Any]] = {
    "mistral4": transformers.Mistral4ForCausalLM,
    "mistral-large4": transformers.MistralLarge4ForConditionalGeneration,
    **dict.fromkeys(("glm-5-next", "glm-5-pools"), transformers.Glm5NextForConditionalGeneration),
}
SAVED_BY_TRANSFORMERS_NAMES = (
    "mistral-large4",
    "deepseek-v4",
)  # tensors stored with transformers' names; those of other models have the hub's
RANDOM_BUFFERS = (
    "correction",
    "expert_bias",
    "layer_scalar",
    "act_fn",
)  # buffers that checkpoints hold; they are randomized like parameters


@functools.cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="penstock-tiny-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def folder(name: str) -> Path:
    """A folder with a model's checkpoint; "demo" is the trained model that is included."""
    with MODEL_LOCK:
        return DEMO if name == "demo" else _make_checkpoint(name)


@functools.cache
def _make_checkpoint(name: str) -> Path:
    transformers.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(len(name))
    config = (FAMILIES | EXTRA_MODELS)[name]()
    model = next(
        (builder for part, builder in MODEL_CLASSES.items() if part in name), transformers.AutoModelForCausalLM.from_config
    )(config)
    with torch.no_grad():
        buffers = ((key, value) for key, value in model.named_buffers() if any(word in key for word in RANDOM_BUFFERS))
        norms_around_zero = (
            "qwen3-next" in name
            or "qwen3.5" in name
            or "qwen4" in name
            or ("gemma" in name and "gemma4" not in name and "gemma3n" not in name)
        )
        norms_around_zero = norms_around_zero or ("nemotron" in name and "nemotron-h" not in name)
        centered_at_one = ("scalar", "linear_attn.norm") if norms_around_zero else ("scalar", "norm", "ln_")
        for key, value in (*model.named_parameters(), *buffers):
            # A wide spread, so that logits lie far apart; gains around 1, so that a missing norm shows; states that decay slowly.
            key = key.replace("norm_attn_norm", "")  # DBRX: not everything with this in its name is a norm
            mean = -3 if "A_log" in key else 1 if any(word in key for word in centered_at_one) else 0
            value.normal_(mean, 0.3, generator=generator)
        for _, table in (buffer for buffer in model.named_buffers() if "tid2eid" in buffer[0]):  # DeepSeek V4's experts by token id
            table.copy_(torch.rand(len(table), config.n_routed_experts, generator=generator).argsort(1)[:, : table.shape[1]])
    model.save_pretrained(_scratch() / name, save_original_format=name not in SAVED_BY_TRANSFORMERS_NAMES)
    return _scratch() / name


@functools.cache
@torch.inference_mode(False)  # whoever calls first: LongRoPE's frequencies are changed in place
def reference(name: str) -> Any:
    """transformers' model in float32, the oracle."""
    transformers.utils.logging.disable_progress_bar()
    [architecture] = json.loads((folder(name) / "config.json").read_text())["architectures"]
    with MODEL_LOCK:
        return getattr(transformers, architecture).from_pretrained(folder(name), dtype=torch.float32).eval()


def expected_logits(name: str, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary], by transformers."""
    return expected_logits_batch(name, [tokens])[0]


@torch.inference_mode()
def expected_logits_batch(name: str, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocabulary] for each of several prompts, in one batch padded on the right, where causal attention never looks."""
    longest = max(map(len, rows))
    logits = reference(name)(torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])).logits
    return [row_logits[: len(row)] for row, row_logits in zip(rows, logits, strict=True)]


@functools.cache
def greedy(name: str, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
    """`count` greedy tokens for each prompt, by transformers. To check given answers, `expected_next_tokens` needs one pass
    only."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(count):
        for row, row_logits in zip(rows, expected_logits_batch(name, rows), strict=True):
            row.append(int(row_logits[-1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def expected_next_tokens(
    name: str, prompts: tuple[tuple[int, ...], ...], answers: Mapping[int, Sequence[int]], count: int
) -> dict[int, list[int]]:
    """transformers' greedy token at each position of the answers, given the answer's tokens before it, by the prompt's number. This
    equals `answers` exactly if they are what `greedy` returns: not if a token differs, is missing or is one too many."""
    prefixes = tuple(tuple(answers.get(uid, ())[: count - 1]) for uid in range(len(prompts)))
    return dict(enumerate(_expected_next_tokens(name, prompts, prefixes)))


@functools.cache
def _expected_next_tokens(
    name: str, prompts: tuple[tuple[int, ...], ...], prefixes: tuple[tuple[int, ...], ...]
) -> list[list[int]]:
    logits = expected_logits_batch(name, [prompt + answer for prompt, answer in zip(prompts, prefixes, strict=True)])
    return [row_logits[len(prompt) - 1 :].argmax(-1).tolist() for prompt, row_logits in zip(prompts, logits, strict=True)]


def decoder(name: str) -> Decoder:
    """The shard's decoder with all weights, on one rank."""
    return _decoder(name, DEVICE.type, triton_on(DEVICE))


@functools.cache
def _decoder(name: str, device: str, by_triton: bool) -> Decoder:
    """by_triton: weights are laid out for Triton's kernels."""
    smallest = (
        4 if any(part in name for part in ("glm-5-next", "glm-5-pools", "qwen4")) else 1
    )  # a page holds whole pools of these models' indexers
    config = ShardConfig(folder=str(folder(name)), model=name, page_size=smallest, device=device)
    return load(config, lambda stage: None).decoder


def engine(name: str, page_size: int = 16, pages: int = 1024, prefix_caching: bool = True, ahead: bool = False) -> Engine:
    """A new engine with an empty page pool."""
    result = Engine(decoder(name), DEVICE, page_size, prefix_caching, overlap=ahead)
    result.resize(pages)
    return result


class ThreadedRanks:
    """Ranks as threads of one process, with the methods of `parallel.Ranks`."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, once all ranks have called this."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, work: Callable[[Ranks], Result]) -> list[Result]:
        """Calls `work` on each rank, in a thread of its own; returns the results in the order of ranks."""
        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(self._guarded, work, ThreadedRank(self, rank)) for rank in range(self.size)]
            return [future.result() for future in futures]

    def _guarded(self, work: Callable[[Ranks], Result], rank: Ranks) -> Result:
        try:
            return work(rank)
        except BaseException:
            self._barrier.abort()
            raise


class ThreadedRank(Ranks):
    """One rank of `ThreadedRanks`."""

    def __init__(self, threads: ThreadedRanks, rank: int) -> None:
        self.rank = rank
        self.size = threads.size
        self._threads = threads

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._threads.exchange(self.rank, x.clone())
        return x.copy_(sum(others, first))

    def gather(self, x: Tensor) -> Tensor | None:
        every = self._threads.exchange(self.rank, x)
        return torch.cat(every, -1) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._threads.exchange(self.rank, x.clone())[0])

    def minimum(self, value: int) -> int:
        return min(self._threads.exchange(self.rank, value))


def rank_engine(
    name: str, ranks: Ranks, page_size: int = 16, pages: int = 1024, prefix_caching: bool = True, ahead: bool = False
) -> Engine:
    """An engine with one rank's part of the weights."""
    model = shape(json.loads((folder(name) / "config.json").read_text()))
    weights = Weights(folder(name), torch.float32, DEVICE, lambda read: None)
    new_engine = Engine(Decoder(model, weights, ranks, DEVICE), DEVICE, page_size, prefix_caching, overlap=ahead)
    new_engine.resize(pages)
    return new_engine


def group(uid: int, tokens: Sequence[int], count: int, sampling: Sampling | None = None, **more: Any) -> Group:
    """A request for `count` tokens, greedy unless `sampling` says otherwise."""
    end_ids = frozenset(more.pop("end_ids", ()))
    names = ("choices", "continuations", "cache_key")
    search = more.get("search")
    if search is not None:
        more["search"] = replace(search, kept=[])
    running, waiting = sequences(tokens, **{"choices": 1} | {name: more.pop(name) for name in names if name in more})
    if search is not None:
        running[0].path = hypotheses.Path()
    more |= {"sampling": sampling or Sampling(), "end_ids": end_ids}
    return Group(uid=uid, sequences=running, waiting=waiting, max_new_tokens=count, **more)
