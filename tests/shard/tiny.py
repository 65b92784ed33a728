"""Tiny random models, made with transformers' own classes from `configurations`; what transformers computes with them, and engines
that run them."""

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

from .configurations import FAMILIES, OTHERS

Result = TypeVar("Result")

# Matrices this small are slower on two threads, much slower where cores are shared.
torch.set_num_threads(1)

DEMO = Path(__file__).parents[2] / "demo" / "model"
CPU = torch.device("cpu")
DEVICE = CPU  # where engines are made; who tests kernels on a GPU changes it
# Ranks that are threads come at the same time; and while transformers reads a model, no model in the process has tied tables: who
# makes one then has an output matrix of its own, and two who read at once may leave it so.
MAKING = threading.RLock()
# What transformers doesn't make by itself of a config.
UNLISTED: dict[str, Callable[[Any], Any]] = {
    "mistral4": transformers.Mistral4ForCausalLM,
    "mistral-large4": transformers.MistralLarge4ForConditionalGeneration,
    **dict.fromkeys(("glm-5-next", "glm-5-pools"), transformers.Glm5NextForConditionalGeneration),
}
RENAMED = ("mistral-large4", "deepseek-v4")  # which are stored by transformers' names, and others by those of the hub
BUFFERS = ("correction", "expert_bias", "layer_scalar", "act_fn")  # that checkpoints have, too


@functools.cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="penstock-tiny-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def folder(name: str) -> Path:
    """The checkpoint of a family; "demo" is the trained one that ships."""
    with MAKING:
        return DEMO if name == "demo" else _made(name)


@functools.cache
def _made(name: str) -> Path:
    transformers.utils.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(len(name))
    config = (FAMILIES | OTHERS)[name]()
    model = next((own for part, own in UNLISTED.items() if part in name), transformers.AutoModelForCausalLM.from_config)(config)
    with torch.no_grad():
        buffers = ((key, value) for key, value in model.named_buffers() if any(word in key for word in BUFFERS))
        centered = (
            "qwen3-next" in name
            or "qwen3.5" in name
            or "qwen4" in name
            or ("gemma" in name and "gemma4" not in name and "gemma3n" not in name)
        )
        centered = centered or ("nemotron" in name and "nemotron-h" not in name)
        around = ("scalar", "linear_attn.norm") if centered else ("scalar", "norm", "ln_")
        for key, value in (*model.named_parameters(), *buffers):
            # Wide, so that logits lie far apart; norms around 1, so that leaving one out shows; memories fade slowly.
            key = key.replace("norm_attn_norm", "")  # DBRX's, of which not all is a norm
            middle = -3 if "A_log" in key else 1 if any(word in key for word in around) else 0
            value.normal_(middle, 0.3, generator=generator)
        for _, table in (each for each in model.named_buffers() if "tid2eid" in each[0]):  # experts by numbers of tokens
            table.copy_(torch.rand(len(table), config.n_routed_experts, generator=generator).argsort(1)[:, : table.shape[1]])
    model.save_pretrained(_scratch() / name, save_original_format=name not in RENAMED)
    return _scratch() / name


@functools.cache
@torch.inference_mode(False)  # whoever asks first: LongRoPE's waves are changed within
def reference(name: str) -> Any:
    """transformers' model, in float32."""
    transformers.utils.logging.disable_progress_bar()
    [architecture] = json.loads((folder(name) / "config.json").read_text())["architectures"]
    with MAKING:
        return getattr(transformers, architecture).from_pretrained(folder(name), dtype=torch.float32).eval()


def expected_logits(name: str, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary], by transformers."""
    return expected_together(name, [tokens])[0]


@torch.inference_mode()
def expected_together(name: str, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Likewise for each of several: all at once, padded on the right, where causal attention never looks."""
    longest = max(map(len, rows))
    logits = reference(name)(torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])).logits
    return [own[: len(row)] for row, own in zip(rows, logits, strict=True)]


@functools.cache
def greedy(name: str, prompts: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
    """`count` tokens for each prompt, by transformers. Where there are answers to compare, `following` says as much in one pass."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(count):
        for row, own in zip(rows, expected_together(name, rows), strict=True):
            row.append(int(own[-1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def following(
    name: str, prompts: tuple[tuple[int, ...], ...], answers: Mapping[int, Sequence[int]], count: int
) -> dict[int, list[int]]:
    """What transformers says in the place of each token of the answers, by the prompt's number, where it has those before it:
    `answers` itself if that is what `greedy` gives, and not if a token is another, lacks or is one too many."""
    begun = tuple(tuple(answers.get(uid, ())[: count - 1]) for uid in range(len(prompts)))
    return dict(enumerate(_following(name, prompts, begun)))


@functools.cache
def _following(name: str, prompts: tuple[tuple[int, ...], ...], begun: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    logits = expected_together(name, [prompt + answer for prompt, answer in zip(prompts, begun, strict=True)])
    return [own[len(prompt) - 1 :].argmax(-1).tolist() for prompt, own in zip(prompts, logits, strict=True)]


def decoder(name: str) -> Decoder:
    """Ours, on one rank."""
    return _decoder(name, DEVICE.type, triton_on(DEVICE))


@functools.cache
def _decoder(name: str, device: str, by_triton: bool) -> Decoder:
    """by_triton: weights are laid out for its kernels."""
    smallest = 4 if any(part in name for part in ("glm-5-next", "glm-5-pools", "qwen4")) else 1  # whose pages hold whole pools
    config = ShardConfig(folder=str(folder(name)), model=name, page_size=smallest, device=device)
    return load(config, lambda stage: None).decoder


def engine(name: str, page_size: int = 16, pages: int = 1024, prefix_caching: bool = True, ahead: bool = False) -> Engine:
    """A fresh one with an empty pool."""
    result = Engine(decoder(name), DEVICE, page_size, prefix_caching, ahead=ahead)
    result.resize(pages)
    return result


class Threads:
    """Ranks as threads of one process, with the methods of `parallel.Ranks`."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._shown: list[Any] = [None] * size

    def show(self, rank: int, value: Any) -> list[Any]:
        """All ranks' values, once all are there."""
        self._shown[rank] = value
        self._barrier.wait()
        every = list(self._shown)
        self._barrier.wait()
        return every

    def run(self, work: Callable[[Ranks], Result]) -> list[Result]:
        """What `work` returns on each of the ranks."""
        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(self._guarded, work, Threaded(self, rank)) for rank in range(self.size)]
            return [future.result() for future in futures]

    def _guarded(self, work: Callable[[Ranks], Result], rank: Ranks) -> Result:
        try:
            return work(rank)
        except BaseException:
            self._barrier.abort()
            raise


class Threaded(Ranks):
    """One of them."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.rank = rank
        self.size = threads.size
        self._threads = threads

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._threads.show(self.rank, x.clone())
        return x.copy_(sum(others, first))

    def gather(self, x: Tensor) -> Tensor | None:
        every = self._threads.show(self.rank, x)
        return torch.cat(every, -1) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._threads.show(self.rank, x.clone())[0])

    def minimum(self, value: int) -> int:
        return min(self._threads.show(self.rank, value))


def engine_of(
    name: str, ranks: Ranks, page_size: int = 16, pages: int = 1024, prefix_caching: bool = True, ahead: bool = False
) -> Engine:
    """One rank's engine."""
    model = shape(json.loads((folder(name) / "config.json").read_text()))
    weights = Weights(folder(name), torch.float32, DEVICE, lambda read: None)
    result = Engine(Decoder(model, weights, ranks, DEVICE), DEVICE, page_size, prefix_caching, ahead=ahead)
    result.resize(pages)
    return result


def group(uid: int, tokens: Sequence[int], count: int, sampling: Sampling | None = None, **more: Any) -> Group:
    """A request for `count` tokens, greedy unless it says otherwise."""
    end_ids = frozenset(more.pop("end_ids", ()))
    names = ("choices", "continuations", "cache_key")
    search = more.get("search")
    if search is not None:
        more["search"] = replace(search, kept=[])
    begun, waiting = sequences(tokens, **{"choices": 1} | {name: more.pop(name) for name in names if name in more})
    if search is not None:
        begun[0].path = hypotheses.Path()
    more |= {"sampling": sampling or Sampling(), "end_ids": end_ids}
    return Group(uid=uid, sequences=begun, waiting=waiting, max_new_tokens=count, **more)
