"""Prompts: random words of a wanted length, with or without a shared prefix, or the prompts of a dataset file.

How many tokens a word has is measured at the server beforehand, as a `TokenScale`. Knows no network.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .traffic import Lengths

# Common words, so that most vocabularies have a token for each.
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education
""".split()  # noqa: SIM905 (a list of so many would fill the page)


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Tokens of a prompt as a linear function of its words: a fixed number (a chat's template), and a number for each word."""

    fixed: float = 0.0
    word: float = 1.0

    @classmethod
    def of(cls, measured: tuple[tuple[int, int], tuple[int, int]]) -> "TokenScale":
        """From two prompts of different lengths: (words, tokens)."""
        (few, less), (many, more) = measured
        word = max((more - less) / (many - few), 0.1)
        return cls(max(less - few * word, 0.0), word)

    def words(self, tokens: float) -> int:
        """The number of words that make about so many tokens, fixed ones included; at least 1."""
        return max(1, round((tokens - self.fixed) / self.word))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request: a text, or the messages of a chat."""

    text: str
    output: int  # tokens of the answer
    messages: tuple[dict[str, Any], ...] = ()

    def chat(self) -> list[dict[str, Any]]:
        """The prompt as messages."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A source of random prompts. There are `prefixes` beginnings of `shared` tokens, each shared by some of the requests."""

    prompt: Lengths
    output: Lengths
    shared: int = 0
    prefixes: int = 1

    def prompts(self, seed: int, scale: TokenScale) -> Iterator[Prompt]:
        """Prompts without end."""
        dice = random.Random(seed)
        begin = [" ".join(words(dice, max(1, round(self.shared / scale.word)))) for _ in range(self.prefixes if self.shared else 0)]
        while True:
            tokens, output = self.prompt.draw(dice), self.output.draw(dice)
            own = " ".join(words(dice, scale.words(tokens - self.shared)))
            yield Prompt(f"{dice.choice(begin)} {own}" if begin else own, output)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The prompts of a dataset, shuffled by the seed, again and again. `output`: lengths of answers, instead of the file's."""

    rows: tuple[tuple[Prompt, str], ...]  # with the recorded answer, if the file has it and no number of tokens
    output: Lengths | None

    def prompts(self, seed: int, scale: TokenScale) -> Iterator[Prompt]:
        """Prompts without end."""
        dice = random.Random(seed)
        rows = list(self.rows)
        dice.shuffle(rows)
        for prompt, answer in itertools.cycle(rows):
            output = prompt.output
            if self.output is not None:
                output = self.output.draw(dice)
            elif answer:
                output = max(1, round(len(answer.split()) * scale.word))
            yield Prompt(prompt.text, output, prompt.messages)


def words(dice: random.Random, count: int) -> list[str]:
    """Random words; two such texts share a prefix only by chance."""
    return dice.choices(WORDS, k=count)


def read(path: Path, output: Lengths | None, default: int) -> Recorded:
    """Reads a file of JSON lines, or of one JSON list. Raises ValueError, OSError.

    A row is {"prompt": text} or {"messages": [...]}, with "output_tokens" or "max_tokens" if they are known, or ShareGPT's
    {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}]}, of which the first two are taken.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 (byte {error.start})") from None
    rows: list[tuple[Prompt, str]] = []
    if text.lstrip().startswith("["):
        content: list[Any] = _json(text, str(path))
    else:
        lines = text.split("\n")  # and nowhere else: JSON may have line separators of Unicode in it
        content = [_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    for number, row in enumerate(content, 1):
        try:
            rows += _row(row, default)
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no prompt in it")
    return Recorded(tuple(rows), output)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no JSON: {error}") from None


def _row(row: Any, default: int) -> list[tuple[Prompt, str]]:
    """The prompts of a row; [] for a recorded conversation that is too short. Raises ValueError with what is wrong with it."""
    row = row if isinstance(row, dict) else {}
    name = "output_tokens" if "output_tokens" in row else "max_tokens"
    output = row.get(name, default)
    if not isinstance(output, int) or output < 1:
        raise ValueError(f"{name} {json.dumps(output)}: a whole number from 1 is needed")
    if isinstance(row.get("prompt"), str):
        return [(Prompt(row["prompt"], output), "")]
    messages, talk = row.get("messages"), row.get("conversations")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        text = "\n".join(message["content"] for message in messages if isinstance(message.get("content"), str))
        return [(Prompt(text, output, tuple(messages)), "")]
    if isinstance(talk, list):
        values = [turn.get("value") for turn in talk[:2] if isinstance(turn, dict)]
        texts = [value for value in values if isinstance(value, str) and value]
        return [(Prompt(texts[0], output), texts[1])] if len(texts) == 2 else []
    raise ValueError('no "prompt" text, no "messages" and no "conversations"')
