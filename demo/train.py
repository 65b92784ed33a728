"""Trains the demo model from the lessons alone: tokenizer, target model and draft model.

    python -m penstock.demo.train --out demo

writes `model/` and `draft/` under the output folder. The draft is distilled: it learns the target's distribution at every position,
not the text, since its purpose is to agree (Zhou et al. 2023, arXiv:2310.08461). The same seed and tokens give the same weights on
the same machine; `--minutes` only shortens a run on a slow one.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional

from .amounts import amount, positive
from .lessons import Message, conversations, first_lessons
from .network import Dimensions, Llama

PAD, BEGIN, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
MARKERS = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY = 2048
SHORT_WINDOW, LONG_WINDOW = 256, 512
BATCH_TOKENS = 1024
SHARD_BYTES = 4 * 2**20


class Plan(NamedTuple):
    """How long and how fast to train."""

    tokens: int
    minutes: float
    peak_rate: float
    lessons: Iterable[Sequence[Message]]
    teacher: Llama | None = None  # learn its distribution at every position, instead of the text


def render(messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """The text of a conversation in pieces, each with whether the model is to learn to generate it."""
    pieces = [(BEGIN, False)]
    for message in messages:
        spoken = message["role"] in ("assistant", "text")
        if message["role"] in MARKERS:
            pieces.append((MARKERS[message["role"]], False))
        pieces.append((message["content"] + END, spoken))
    return pieces


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE over the lessons' text; every byte is in it, and every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for messages in islice(conversations(seed), 20_000) for message in messages)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


class Piece(NamedTuple):
    """An encoded conversation, or several in a row: tokens, each one's weight in the loss, and the conversation that it belongs
    to."""

    tokens: list[int]
    weights: list[float]
    owners: list[int]


def encoded(tokenizer: Tokenizer, lessons: Iterable[Sequence[Message]], distilled: bool) -> Iterator[Piece]:
    """The conversations as tokens."""
    for owner, messages in enumerate(lessons):
        tokens: list[int] = []
        weights: list[float] = []
        for text, spoken in render(messages):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            # In a long turn, a story, most words are a free choice; the facts to be learnt are in the short ones. A teacher's
            # distribution covers all choices.
            weight = 0.1 if not spoken else 1.0 if distilled or len(ids) <= 64 else 0.4
            tokens += ids
            weights += [weight] * len(ids)
        yield Piece(tokens, weights, [owner] * len(tokens))


def window(source: Iterator[Piece], length: int) -> Piece:
    """Conversations in a row, the last one cut off at `length`: none is ever without its beginning."""
    filled = Piece([], [], [])
    while len(filled.tokens) < length:
        piece = next(source)
        filled.tokens.extend(piece.tokens)
        filled.weights.extend(piece.weights)
        filled.owners.extend(piece.owners)
    return Piece(filled.tokens[:length], filled.weights[:length], filled.owners[:length])


Batch = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, weights and an attention mask."""


def batches(tokenizer: Tokenizer, lessons: Iterable[Sequence[Message]], distilled: bool) -> Iterator[Batch]:
    """Tokens, weights and attention masks without end.

    Mostly short windows in which each conversation sees itself only, since that is learnt fastest; one batch in four has long
    windows in which all that went before is seen, so that far positions and crowded contexts are learnt too.
    """
    source = encoded(tokenizer, lessons, distilled)
    for number in count():
        crowded = number % 4 == 3
        length = LONG_WINDOW if crowded else SHORT_WINDOW
        rows = [window(source, length + 1) for _ in range(BATCH_TOKENS // length)]
        tokens = torch.tensor([row.tokens for row in rows])
        weights = torch.tensor([row.weights for row in rows])
        owners = torch.tensor([row.owners[:-1] for row in rows])
        mask = None if crowded else (owners[:, None, :, None] == owners[:, None, None, :]).tril()
        yield tokens, weights, mask


class Progress(NamedTuple):
    """Training progress before a step."""

    seen: int  # tokens
    seconds: float
    done: float  # the share of all that is to be done; 1 or more: that was the last
    average: float  # loss of the last steps


def descend(
    model: nn.Module, batches: Iterable[Batch], loss_of: Callable[[Batch], Tensor], tokens: int, minutes: float, peak_rate: float
) -> Iterator[Progress]:
    """Trains `model` on so many tokens, or for so long; yields before every step, and after the last."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
        fused=True,
    )
    started = time.monotonic()
    average = 0.0
    for step, batch in enumerate(batches):
        seconds, seen = time.monotonic() - started, step * BATCH_TOKENS
        done = max(seen / tokens, seconds / 60 / minutes)
        yield Progress(seen, seconds, done, average)
        if done >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * learning_rate(step, done)
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()


def train(model: Llama, tokenizer: Tokenizer, plan: Plan, folder: Path) -> None:
    """Trains `model` and writes it to `folder`, at intervals and at the end."""

    def loss_of(batch: Batch) -> Tensor:
        tokens, weights, mask = batch
        logits = model(tokens[:, :-1], mask)
        labels = tokens[:, 1:] if plan.teacher is None else view(plan.teacher, tokens[:, :-1], mask)
        return weighted_loss(logits, labels, weights[:, 1:])

    told = saved = 0.0
    source = batches(tokenizer, plan.lessons, plan.teacher is not None)
    for now in descend(model, source, loss_of, plan.tokens, plan.minutes, plan.peak_rate):
        if now.seconds - told > 20 and now.done < 1:
            told = now.seconds
            _report(folder.name, now)
        if now.seconds - saved > 240 or now.done >= 1:
            saved = now.seconds
            save_model(model, tokenizer, folder)


@torch.no_grad()
def relate_words(model: Llama, tokenizer: Tokenizer) -> None:
    """Initializes a word without the space before it, as in JSON, similar to the same word with it, as in a sentence."""
    vocabulary = tokenizer.get_vocab()
    weights = model.embed_tokens.weight
    difference = torch.randn(weights.shape[1]) * 0.5
    for word, token in vocabulary.items():
        if len(word) > 1 and word.isalpha() and f"Ġ{word}" in vocabulary:
            weights[token] = weights[vocabulary[f"Ġ{word}"]] + difference
            weights[token, 0] = 4.0


@torch.no_grad()
def view(teacher: Llama, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The teacher's probability of every token at every position."""
    logits: Tensor = teacher(tokens, mask)
    return logits.softmax(-1)


def _report(name: str, now: Progress) -> None:
    remaining, rate = now.seconds / now.done * (1 - now.done), now.seen / now.seconds
    print(
        f"{name}: {now.done:.1%} loss {now.average:.4f}, {now.seen} tokens, {rate:.0f} tokens/s, {remaining / 60:.1f} minutes left",
        flush=True,
    )


def learning_rate(step: int, done: float) -> float:
    """The share of the peak rate: 50 steps of warm-up, then a cosine decay to nearly nothing."""
    return min(1.0, (step + 1) / 50) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The mean cross entropy, each position by its weight. labels: tokens, or a probability for each token."""
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the whole Hugging Face folder, weights in bf16; large ones in several files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": value.detach().bfloat16().contiguous() for name, value in model.state_dict().items()}
    shards = _shards(state)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_tensors(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(value.nbytes for value in state.values())
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    write_json(folder / "config.json", model_config(model.dimensions, tokenizer))
    write_json(folder / "generation_config.json", generation_config(tokenizer))
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"))


def save_tensors(state: dict[str, Tensor], path: Path) -> None:
    """Replaces the file as a whole, since others may be reading the last checkpoint."""
    part = path.with_name(f"{path.name}.part")
    save_file(state, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(path)


def load_model(model: Llama, folder: Path) -> None:
    """Reads back what `save_model` wrote."""
    state: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        state |= {name.removeprefix("model."): value.float() for name, value in load_file(path).items()}
    model.load_state_dict(state)


def trained(folder: Path) -> Path:
    """The folder; ends the script if it has no trained model."""
    if not any(folder.glob("*.safetensors")):
        sys.exit(f"{folder} has no model: train it first, by python -m penstock.demo.train --out {folder.parent} --only model")
    return folder


def _shards(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in state.items():
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + value.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = value
    return shards


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def model_config(dimensions: Dimensions, tokenizer: Tokenizer) -> dict[str, object]:
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": dimensions.vocabulary,
        "hidden_size": dimensions.hidden,
        "intermediate_size": dimensions.intermediate,
        "num_hidden_layers": dimensions.layers,
        "num_attention_heads": dimensions.heads,
        "num_key_value_heads": dimensions.kv_heads,
        "head_dim": dimensions.head,
        "hidden_act": "silu",
        "max_position_embeddings": dimensions.positions,
        "rope_theta": dimensions.rope_theta,
        "rms_norm_eps": dimensions.epsilon,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **generation_config(tokenizer),
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    """The content of `generation_config.json`."""
    return {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    """The content of `tokenizer_config.json`."""
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(MARKERS.values()),
        "added_tokens_decoder": {str(tokenizer.token_to_id(token)): {"content": token, **special} for token in SPECIAL_TOKENS},
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def target_dimensions(vocabulary: int) -> Dimensions:
    """The size of the target."""
    return Dimensions(vocabulary, hidden=256, layers=4, heads=8, kv_heads=4, intermediate=704)


def draft_dimensions(vocabulary: int) -> Dimensions:
    """The size of the draft."""
    return Dimensions(vocabulary, hidden=128, layers=2, heads=4, kv_heads=2, intermediate=352)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model and its draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets model/ and draft/")
    parser.add_argument(
        "--only",
        choices=("model", "draft"),
        help="train one of the two (default: both); the draft learns from the model that is there",
    )
    parser.add_argument("--tokenizer", type=Path, help="keep this tokenizer.json instead of training one")
    parser.add_argument("--resume", type=Path, help="folder of a target to train further, without the first lessons")
    parser.add_argument("--tokens", type=amount, default=6_000_000, help="tokens to train the target on")
    parser.add_argument("--draft-tokens", type=amount, default=5_000_000, help="tokens to train the draft on")
    parser.add_argument("--minutes", type=positive, default=50, help="the most time for the target")
    parser.add_argument("--draft-minutes", type=positive, default=30, help="the most time for the draft")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of the target")
    parser.add_argument("--threads", type=amount, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Trains what the command line asks for."""
    options = arguments()
    if options.only == "draft":
        trained(options.out / "model")
    if options.resume:
        trained(options.resume)
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.tokenizer)) if options.tokenizer else train_tokenizer(options.seed)
    # Tensor-parallel ranks split the vocabulary, so its size is a round number.
    vocabulary = math.ceil(tokenizer.get_vocab_size() / 128) * 128
    print(f"{tokenizer.get_vocab_size()} tokens in the vocabulary", flush=True)
    if options.only != "draft":
        torch.manual_seed(options.seed)
        model, lessons = Llama(target_dimensions(vocabulary)), conversations(options.seed)
        if options.resume:
            load_model(model, options.resume)
        else:
            lessons = chain(first_lessons(options.seed), lessons)
            relate_words(model, tokenizer)
        train(model, tokenizer, Plan(options.tokens, options.minutes, options.rate, lessons), options.out / "model")
    if options.only != "model":
        teacher = Llama(target_dimensions(vocabulary))
        load_model(teacher, options.out / "model")
        torch.manual_seed(options.seed)
        model = Llama(draft_dimensions(vocabulary))
        relate_words(model, tokenizer)
        lessons = chain(first_lessons(options.seed + 1), conversations(options.seed + 1))
        plan = Plan(options.draft_tokens, options.draft_minutes, 2 * options.rate, lessons, teacher)
        train(model, tokenizer, plan, options.out / "draft")


if __name__ == "__main__":
    main()
