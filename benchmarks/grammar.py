"""What grammars cost: `make bench WHAT=grammar`.

    benchmarks/grammar.py [--tokens N] [--seconds S]

For the demo model's vocabulary and for one of 128,000 tokens, made here: how long it takes to read the tokenizer, to compile a
grammar, and to fill a token's mask, alone, in a batch of 64, and after each of 8 drafts of 16 sequences, in time of one core.
Texts are random walks through the grammars: what they come to is as new as it is in service, and odder.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from penstock.bench.flags import checked, count, positive
from penstock.launcher.hub import DEMO_FOLDER
from penstock.router import grammar as sources
from penstock.shard.decoding.grammar import Grammars, GrammarState
from penstock.shard.decoding.tree import Tree, chain

MILLION = 1e6
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        },
        "friends": {"type": "array", "maxItems": 3, "items": {"$ref": "#"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "any object": sources.json_object(),
    "a person": sources.json_schema(PERSON),
    "200 properties": sources.json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}),
    "regex": sources.regex(r"([a-z]{1,8} ){3,30}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "expressions": sources.lark('start: e\ne: t (("+" | "-") t){0,40}\nt: /[0-9]{1,6}/ | "(" e ")"'),
    "1000 choices": sources.choice([f"option {i}" for i in range(1000)]),
}


@dataclass(frozen=True)
class Result:
    """Measured times, in seconds."""

    compiled: float
    masks: Sequence[float]
    batch: float  # median, for each of 64 sequences
    drafts: float  # median, for each row of 16 sequences with 8 drafts


def main() -> None:
    """Prints a table for each vocabulary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=checked(count), default=128_000, help="of the large vocabulary")
    parser.add_argument("--seconds", type=checked(positive), default=3.0, help="for each grammar and vocabulary")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder)
        make_tokenizer(large / "tokenizer.json", options.tokens)
        for name, place, size in (("the demo model", DEMO_FOLDER, 2048), ("a large model", large, options.tokens)):
            began = time.perf_counter()
            grammars = Grammars(place, size)
            grammars.compile(sources.written(sources.regex("a"))).result()
            print(f"\n{name}: {size} tokens, tokenizer read in {time.perf_counter() - began:.2f} s")
            print(
                f"{'grammar':>16} {'compile':>10} {'first mask':>11} {'median':>9} {'p99':>9} {'of 64, each':>12} {'a draft':>11}"
            )
            everything: list[float] = []
            for title, grammar in GRAMMARS.items():
                result = measure(grammars, sources.written(grammar), options.seconds)
                everything += result.masks[1:]
                times = (
                    result.masks[0],
                    quantile(result.masks[1:], 0.5),
                    quantile(result.masks[1:], 0.99),
                    result.batch,
                    result.drafts,
                )
                first, median, last, each, draft = (f"{seconds * MILLION:.0f} µs" for seconds in times)
                print(f"{title:>16} {result.compiled * 1000:7.1f} ms {first:>11} {median:>9} {last:>9} {each:>12} {draft:>11}")
            print(
                f"{'all':>16} {'':>22} {quantile(everything, 0.5) * MILLION:6.0f} µs {quantile(everything, 0.99) * MILLION:6.0f} µs"
            )


def measure(grammars: Grammars, grammar: str, seconds: float) -> Result:
    """Measures a grammar on random texts; `seconds` are divided among the loops."""
    began = time.perf_counter()
    beginning = grammars.compile(grammar).result()
    compiled = time.perf_counter() - began
    chance = random.Random(1)
    masks: list[float] = []
    end = time.perf_counter() + seconds / 3
    while time.perf_counter() < end:
        masks += walk(grammars, [beginning.copy()], chance)
    batches: list[float] = []
    end = time.perf_counter() + seconds / 3
    while time.perf_counter() < end:
        batches += walk(grammars, [beginning.copy() for _ in range(64)], chance)
    chains: list[float] = []
    end = time.perf_counter() + seconds / 3
    while time.perf_counter() < end:
        chains += drafted(grammars, [beginning.copy() for _ in range(16)], chance)
    return Result(compiled, masks, quantile(batches, 0.5), quantile(chains, 0.5))


def drafted(grammars: Grammars, states: list[GrammarState], chance: random.Random, longest: int = 20) -> Iterator[float]:
    """Seconds per row of steps in which each sequence has a chain of drafts, of which some are accepted."""
    texts: list[list[int]] = [[] for _ in states]
    for _ in range(longest):
        trees = [drafts_of(grammars, state, text, chance) for state, text in zip(states, texts, strict=True)]
        began = time.process_time()
        for state, text in zip(states, texts, strict=True):
            state.follow(text)
        rows, _ = grammars.masks_along(states, trees)
        yield (time.process_time() - began) / len(rows)
        texts = [[*text, *tree.tokens[: chance.randint(1, 4)]] for text, tree in zip(texts, trees, strict=True)]
        if not all(map(len, trees)):
            return


def drafts_of(grammars: Grammars, state: GrammarState, text: list[int], chance: random.Random) -> Tree:
    """Eight draft tokens that the grammar allows, if so many are possible."""
    ahead, path = state.copy(), list[int]()
    while len(path) < 8:
        ahead.follow([*text, *path])
        token = one_of(grammars.masks([ahead])[0], chance)
        if token < 0:
            break
        path.append(token)
    return chain(path)


def walk(grammars: Grammars, states: list[GrammarState], chance: random.Random, longest: int = 200) -> Iterator[float]:
    """Seconds per mask, the advance by the last token included, as in a shard; until the texts end or are long."""
    texts: list[list[int]] = [[] for _ in states]
    for _ in range(longest):
        began = time.process_time()
        for state, text in zip(states, texts, strict=True):
            state.follow(text)
        rows = grammars.masks(states)
        yield (time.process_time() - began) / len(states)
        following = [one_of(row, chance) for row in rows]
        going = [place for place, token in enumerate(following) if token >= 0]
        states, texts = [states[place] for place in going], [[*texts[place], following[place]] for place in going]
        if not states:
            return


def one_of(row: NDArray[numpy.int32], chance: random.Random) -> int:
    """A random allowed token; -1 if there is none."""
    allowed = numpy.unpackbits(row.view(numpy.uint8), bitorder="little").nonzero()[0]
    return int(allowed[chance.randrange(len(allowed))]) if len(allowed) else -1


def quantile(values: Sequence[float], part: float) -> float:
    """Quantile by rank; 0 without values."""
    return sorted(values)[int(part * (len(values) - 1))] if values else 0.0


def make_tokenizer(path: Path, size: int) -> None:
    """A tokenizer with all bytes, and words of syllables with and without a space before them, as in byte-level BPE: shorter ones
    first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys(alphabet)
    merges: list[tuple[str, str]] = []
    chance = random.Random(7)
    parts = [c for c in alphabet if c.isascii() and c.isalnum()] + list("Ġ,.:;{}[]\"'_-()/")
    grown = list(parts)
    while len(pieces) < size - 1:
        left, right = chance.choice(grown), chance.choice(parts if chance.random() < 0.7 else grown)
        if len(left + right) <= 14 and left + right not in pieces:
            pieces[left + right] = None
            merges.append((left, right))
            grown.append(left + right)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path))


if __name__ == "__main__":
    main()
