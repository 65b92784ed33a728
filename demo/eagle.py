"""The demo model's EAGLE-3 draft head: its training, and how it drafts (Li et al. 2025, arXiv:2503.01840).

    python -m penstock.demo.eagle --out demo

trains a head for the target in `model/` under the output folder and writes it to `eagle/` there, in the public format.

The head is one layer over pairs. Pair i is the embedding of token i + 1 and the feature of position i: three of the target's hidden
states there, combined by `fc`. It predicts token i + 2, out of a draft vocabulary smaller than the target's. The layer's output is
used as the feature of position i + 1 until the target has computed that one. So in training as well the head continues from its own
features for some steps, or it would only ever have seen the target's.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from operator import add
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .amounts import amount, positive
from .lessons import conversations
from .network import Dimensions, FeedForward, Llama, rotary_tables, rotate
from .train import (
    batches,
    descend,
    encoded,
    load_model,
    model_config,
    save_tensors,
    target_dimensions,
    trained,
    weighted_loss,
    write_json,
)

LAYERS = (1, 2, 3)
"""The head sees the target's residual stream as it enters these layers, the first of which is 0."""

DRAFT_VOCABULARY = 1024
STEPS = 4
"""So many tokens in a row are drafted in training."""

DECAY = 0.8
"""How much each step counts in training, of what the step before it counts: it matters only if that one was right."""

Chain = list[tuple[Tensor, Tensor]]
"""The keys and values of a chain's steps so far: those of the first step, which all chains share, then each chain's own."""


class Attention(nn.Module):
    """Grouped-query attention over pairs, with rotary position embedding."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.dimensions = dimensions
        width = dimensions.kv_heads * dimensions.head
        self.q_proj = nn.Linear(2 * dimensions.hidden, dimensions.hidden, bias=False)
        self.k_proj = nn.Linear(2 * dimensions.hidden, width, bias=False)
        self.v_proj = nn.Linear(2 * dimensions.hidden, width, bias=False)
        self.o_proj = nn.Linear(dimensions.hidden, dimensions.hidden, bias=False)

    def forward(self, pairs: Tensor, mask: Tensor, chain: Chain) -> Tensor:
        """Attend to the first step's pairs as `mask` says, and to the later pairs of the own chain; `chain` grows by this step."""
        rows, starts, _ = pairs.shape
        shape = (rows, starts, -1, self.dimensions.head)
        cosine, sine = (table[len(chain) :] for table in rotary_tables(self.dimensions, starts + len(chain)))
        groups = self.dimensions.heads // self.dimensions.kv_heads
        query = rotate(self.q_proj(pairs).view(shape).transpose(1, 2), cosine, sine) * self.dimensions.head**-0.5
        key = rotate(self.k_proj(pairs).view(shape).transpose(1, 2), cosine, sine).repeat_interleave(groups, dim=1)
        value = self.v_proj(pairs).view(shape).transpose(1, 2).repeat_interleave(groups, dim=1)
        chain.append((key, value))
        (first_keys, first_values), *own = chain
        scores = (query @ first_keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)  # [rows, heads, starts, starts]
        own_scores = [(query * keys).sum(-1, keepdim=True) for keys, _ in own]  # [rows, heads, starts, 1] each
        shares = torch.cat((scores, *own_scores), dim=-1).softmax(-1)
        mixed = shares[..., :starts] @ first_values
        for place, (_, values) in enumerate(own, starts):
            mixed = mixed + shares[..., place : place + 1] * values
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, starts, -1))
        return result


class Layer(nn.Module):
    """A decoder layer whose attention input is the pair, each half normed by itself, and whose residual stream is the feature."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)
        self.hidden_norm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)
        self.self_attn = Attention(dimensions)
        self.post_attention_layernorm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)
        self.mlp = FeedForward(dimensions)

    def forward(self, embedded: Tensor, features: Tensor, mask: Tensor, chain: Chain) -> Tensor:
        """The features of the next positions."""
        pairs = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)
        states = features + self.self_attn(pairs, mask, chain)
        result: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return result


class Head(nn.Module):
    """The whole draft head, with the public format's parameter names. `chosen`: the target's tokens in the draft vocabulary,
    ascending."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, dimensions: Dimensions, chosen: Tensor) -> None:
        super().__init__()
        self.dimensions = dimensions
        self.fc = nn.Linear(len(LAYERS) * dimensions.hidden, dimensions.hidden, bias=False)
        self.midlayer = Layer(dimensions)
        self.norm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)
        self.lm_head = nn.Linear(dimensions.hidden, len(chosen), bias=False)
        # The format stores the offset of each draft token's id to its id in the target's vocabulary.
        self.register_buffer("d2t", chosen - torch.arange(len(chosen)))
        self.register_buffer("t2d", torch.isin(torch.arange(dimensions.vocabulary), chosen))

    @property
    def chosen(self) -> Tensor:
        """The target's token id of each token of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t))

    def features(self, streams: list[Tensor]) -> Tensor:
        """The feature of every position, from the target's residual streams."""
        result: Tensor = self.fc(torch.cat([streams[layer] for layer in LAYERS], dim=-1))
        return result

    def forward(self, embedded: Tensor, features: Tensor, mask: Tensor, chain: Chain) -> Tensor:
        """One step of the chains that start at each pair: returns the features of the next positions. `chain` grows by this
        step."""
        result: Tensor = self.midlayer(embedded, features, mask, chain)
        return result

    def logits(self, features: Tensor) -> Tensor:
        """Logits over the draft vocabulary for the token after the next one of these features' positions."""
        result: Tensor = self.lm_head(self.norm(features))
        return result

    def best(self, features: Tensor) -> Tensor:
        """The most probable token, as the target's id."""
        return self.chosen[self.logits(features).argmax(-1)]

    @torch.no_grad()
    def start_from(self, target: Llama) -> None:
        """Initializes the head: the feature is nearly the input of the target's last layer, and is read out as the target's output
        is.

        Its norm is scaled down, so that it is less certain: the feature mostly says which token comes first, and the head is to
        predict the second.
        """
        hidden = self.dimensions.hidden
        for name, parameter in self.midlayer.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(8 * hidden if adds else 2 * hidden) ** -0.5)
        nn.init.normal_(self.fc.weight, std=0.1 * hidden**-0.5)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        self.norm.weight.copy_(0.3 * target.norm.weight)
        self.lm_head.weight.copy_(target.embed_tokens.weight[self.chosen])


def head_dimensions(vocabulary: int) -> Dimensions:
    """The size of the head. `fc` and `lm_head` leave little to the layer if the file is to stay below 1.6 MB."""
    return Dimensions(vocabulary, hidden=256, layers=1, heads=8, kv_heads=2, intermediate=80)


def draft_vocabulary(tokenizer: Tokenizer, seed: int, size: int, lessons: int = 20_000) -> Tensor:
    """The most frequent tokens of the assistant's turns in the lessons, then those of all turns, then any; ascending ids."""
    said: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    for piece in islice(encoded(tokenizer, conversations(seed), distilled=True), lessons):
        seen.update(piece.tokens)
        said.update(token for token, weight in zip(piece.tokens, piece.weights, strict=True) if weight == 1.0)
    often = sorted(range(tokenizer.get_vocab_size()), key=lambda token: (-said[token], -seen[token]))
    return torch.tensor(sorted(often[:size]))


def unrolled_loss(target: Llama, head: Head, tokens: Tensor, weights: Tensor, mask: Tensor | None) -> Tensor:
    """The head's distillation loss against the target's probabilities, for chains from every position. Arguments as `batches` gives
    them.

    Step k of the chain that starts at pair s is at pair s + k - 1. It knows the tokens up to s + k, but the target's features only
    up to s, and is to predict the target's distribution at s + k.
    """
    length = tokens.shape[1] - 1
    starts = length - STEPS
    sees = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if mask is None else mask
    with torch.no_grad():
        streams = target.streams(tokens[:, :-1], mask)
        views = target.logits(streams[-1])[..., head.chosen].softmax(-1)
        embedded = target.embed_tokens(tokens)
    features = head.features([stream[:, :starts] for stream in streams])
    chain: Chain = []
    total = torch.zeros(())
    for step in range(1, STEPS + 1):
        features = head(embedded[:, step : step + starts], features, sees[..., :starts, :starts], chain)
        within = sees.diagonal(-step, -2, -1)[:, 0, :starts]  # a chain ends with its conversation
        counted = weights[:, step + 1 : step + 1 + starts] * within
        total = total + DECAY ** (step - 1) * weighted_loss(head.logits(features), views[:, step : step + starts], counted)
    return total / sum(DECAY**step for step in range(STEPS))


def train(target: Llama, head: Head, tokenizer: Tokenizer, tokens: int, minutes: float, rate: float, seed: int) -> Iterator[str]:
    """Trains the head; yields progress lines, some twenty seconds apart, and once at the end."""
    source = batches(tokenizer, conversations(seed), distilled=True)
    told = 0.0
    for now in descend(head, source, lambda batch: unrolled_loss(target, head, *batch), tokens, minutes, rate):
        if now.seconds - told > 20 or now.done >= 1:
            told = now.seconds
            yield f"{min(1, now.done):.1%} loss {now.average:.4f}, {now.seen} tokens in {now.seconds / 60:.1f} minutes"


def causal(length: int) -> Tensor:
    """The causal mask over pairs."""
    return torch.ones(length, length, dtype=torch.bool).tril()


@torch.no_grad()
def drafts(target: Llama, head: Head, tokens: list[int], count: int) -> list[int]:
    """The head's greedy chain after these tokens, two or more, of which the target has computed all but the last.

    Every step recomputes all pairs, each of which sees all before it; nothing is cached from one step to the next.
    """
    features = head.features(target.streams(torch.tensor([tokens[:-1]])))
    drafted: list[int] = []
    for _ in range(count):
        embedded = target.embed_tokens(torch.tensor([[*tokens[1:], *drafted]]))
        following = head(embedded, features, causal(features.shape[1]), [])
        drafted.append(int(head.best(following[0, -1])))
        features = torch.cat((features, following[:, -1:]), dim=1)
    return drafted


@torch.no_grad()
def all_drafts(target: Llama, head: Head, tokens: list[int], count: int) -> Tensor:
    """Row i is the result of `drafts` for tokens[: i + 2], all computed at once: [len(tokens) - 1, count]."""
    features = head.features(target.streams(torch.tensor([tokens[:-1]])))
    following = torch.tensor([tokens[1:]])
    chain: Chain = []
    drafted: list[Tensor] = []
    for _ in range(count):
        features = head(target.embed_tokens(following), features, causal(len(tokens) - 1), chain)
        following = head.best(features)
        drafted.append(following[0])
    return torch.stack(drafted, dim=-1)


class Tally(NamedTuple):
    """Acceptance statistics. By depth: chains in which all drafts before were right and the reply went on, and those right there
    too."""

    reached: tuple[int, ...] = (0,) * STEPS
    right: tuple[int, ...] = (0,) * STEPS
    rounds: int = 0
    accepted: int = 0

    def plus(self, other: "Tally") -> "Tally":
        """The sum of both."""
        reached = tuple(map(add, self.reached, other.reached))
        right = tuple(map(add, self.right, other.right))
        return Tally(reached, right, self.rounds + other.rounds, self.accepted + other.accepted)

    @property
    def shares(self) -> list[float]:
        """The acceptance rate by depth: how often a draft is right when all before it in its chain are."""
        return [right / max(1, reached) for right, reached in zip(self.right, self.reached, strict=True)]

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.shares)
        return f"{shares} right at depths 1 to {STEPS}, {self.accepted / max(1, self.rounds):.2f} accepted a round"


def tally(target: Llama, head: Head, prompt: list[int], reply: list[int]) -> Tally:
    """Drafts a chain after each token of the target's greedy reply, and counts the drafts that would have been accepted."""
    drafted = all_drafts(target, head, prompt + reply, STEPS)[len(prompt) - 1 :].tolist()
    rests = [reply[start : start + STEPS] for start in range(1, len(reply) + 1)]
    lengths = [_agreed(row, rest) for row, rest in zip(drafted, rests, strict=True)]
    chains = list(zip(lengths, rests, strict=True))
    reached = tuple(sum(length >= depth < len(rest) for length, rest in chains) for depth in range(STEPS))
    right = tuple(sum(length > depth for length in lengths) for depth in range(STEPS))
    # A server continues after the accepted tokens and the one that the target adds to them.
    place = rounds = accepted = 0
    while place < len(reply) - 1:
        rounds, accepted, place = rounds + 1, accepted + lengths[place], place + lengths[place] + 1
    return Tally(reached, right, rounds, accepted)


def _agreed(drafted: list[int], said: list[int]) -> int:
    return next((place for place, token in enumerate(said) if drafted[place] != token), len(said))


def save(head: Head, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the head in the public format, weights in bf16. The embedding is left out: it is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    save_tensors(state, folder / "model.safetensors")
    write_json(folder / "config.json", head_config(head, tokenizer))


def load(folder: Path) -> Head:
    """Reads back what `save` wrote, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    dimensions = Dimensions(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
    )
    head = Head(dimensions, state["d2t"] + torch.arange(config["draft_vocab_size"]))
    head.load_state_dict(state)  # copies into fp32 parameters
    return head.requires_grad_(False)


def load_target(folder: Path) -> Llama:
    """The target of the head, in fp32."""
    target = Llama(target_dimensions(json.loads((folder / "config.json").read_text())["vocab_size"]))
    load_model(target, folder)
    return target.requires_grad_(False)


def head_config(head: Head, tokenizer: Tokenizer) -> dict[str, object]:
    """The content of `config.json`."""
    return model_config(head.dimensions, tokenizer) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(head.d2t),
        "tie_word_embeddings": False,
        # The format counts outputs of layers there.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS], "use_aux_hidden_state": True},
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the EAGLE-3 head of the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder that has model/ and gets eagle/")
    parser.add_argument("--tokens", type=amount, default=4_000_000, help="tokens to train on")
    parser.add_argument("--minutes", type=positive, default=60, help="the most time")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--threads", type=amount, default=1)
    parser.add_argument("--seed", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Trains the head that the command line asks for."""
    options = arguments()
    torch.set_num_threads(options.threads)
    folder = trained(options.out / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    target = load_target(folder)
    torch.manual_seed(options.seed)
    vocabulary = target.dimensions.vocabulary
    head = Head(head_dimensions(vocabulary), draft_vocabulary(tokenizer, options.seed, DRAFT_VOCABULARY))
    head.start_from(target)
    for report in train(target, head, tokenizer, options.tokens, options.minutes, options.rate, options.seed):
        print(report, flush=True)
        save(head, tokenizer, options.out / "eagle")


if __name__ == "__main__":
    main()
