"""Evaluates the shipped weights: accuracy on held-out questions, and how often the draft model agrees with the target.

    python -m penstock.demo.evaluate

loads `model/` and `draft/` beside this file with transformers, in fp32, and answers greedily. It asks as many questions of each
kind, prints how each kind fares, and exits with 1 when less than 9 in 10 of all answers are right, or the draft agrees on less than
90 % of all tokens. The EAGLE-3 head in `eagle/` drafts a chain after every token of these answers.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from . import eagle
from .amounts import amount
from .lessons import KINDS, Question, questions

HERE = Path(__file__).parent
LEAST_RIGHT = 0.9
LEAST_AGREEMENT = 0.9
MOST_TOKENS = 240


class Answer(NamedTuple):
    """A question's prompt and the target's greedy reply, as tokens and as text."""

    question: Question
    prompt: list[int]
    reply: list[int]
    text: str

    @property
    def right(self) -> bool:
        """Whether the reply ended by itself and answers the question."""
        return len(self.reply) < MOST_TOKENS and self.question.check(self.text)


def load_model(folder: Path) -> LlamaForCausalLM:
    """The model in that folder, in fp32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in that folder, with its chat template."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """The question's prompt as token ids, up to where the reply begins."""
    messages = [{"role": message["role"], "content": message["content"]} for message in question.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer.encode(str(text), add_special_tokens=False)]


@torch.inference_mode()
def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question]) -> list[Answer]:
    """The greedy reply to each question, all of them in one batch."""
    prompts = [encode(tokenizer, question) for question in asked]
    longest = max(map(len, prompts))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    untyped: Any = model  # annotated in some versions of transformers only
    output = untyped.generate(
        tokens, attention_mask=(tokens != pad).long(), do_sample=False, max_new_tokens=MOST_TOKENS, pad_token_id=pad
    )
    replies = [_until(row, end) for row in output[:, longest:].tolist()]
    texts = [str(tokenizer.decode(reply, skip_special_tokens=True)) for reply in replies]
    return [Answer(*each) for each in zip(asked, prompts, replies, texts, strict=True)]


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@torch.inference_mode()
def agreed(draft: LlamaForCausalLM, given: Answer) -> int:
    """How many tokens of the target's reply the draft would have chosen greedily too, each given the target's own text before
    it."""
    logits = draft(torch.tensor([given.prompt + given.reply])).logits[0]
    said = logits[len(given.prompt) - 1 : -1].argmax(dim=-1)
    return int((said == torch.tensor(given.reply)).sum())


class Score(NamedTuple):
    """Answers, and how many of their tokens the draft agrees on."""

    given: list[Answer]
    agreed: int

    @property
    def right(self) -> int:
        """How many answers are right."""
        return sum(each.right for each in self.given)

    @property
    def tokens(self) -> int:
        """How many tokens all answers have."""
        return sum(len(each.reply) for each in self.given)

    @property
    def wrong(self) -> list[Answer]:
        """The answers that are wrong."""
        return [each for each in self.given if not each.right]

    def __str__(self) -> str:
        right, agreement = self.right / len(self.given), self.agreed / self.tokens
        return f"{right:6.1%} right, draft agrees on {agreement:6.1%} of {self.tokens} tokens"


def score(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    batch: int = 40,
) -> Score:
    """Answers all questions and counts."""
    given: list[Answer] = []
    for start in range(0, len(asked), batch):
        given += answer(target, tokenizer, asked[start : start + batch])
    return Score(given, sum(agreed(draft, each) for each in given))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out questions.")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder with model/, draft/ and eagle/")
    parser.add_argument("--questions", type=amount, default=200, help="questions of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show of each kind")
    parser.add_argument("--threads", type=amount, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Prints the scores of each kind and of all; returns 1 if those of all are too low."""
    options = arguments()
    torch.set_num_threads(options.threads)
    target, draft = load_model(options.folder / "model"), load_model(options.folder / "draft")
    plain, head = eagle.load_target(options.folder / "model"), eagle.load(options.folder / "eagle")
    tokenizer = load_tokenizer(options.folder / "model")
    total, drafted = Score([], 0), eagle.Tally()
    for kind in options.kinds:
        started = time.monotonic()
        result = score(target, draft, tokenizer, list(islice(questions(options.seed, kind), options.questions)))
        tally = reduce(eagle.Tally.plus, (eagle.tally(plain, head, each.prompt, each.reply) for each in result.given))
        total, drafted = Score(total.given + result.given, total.agreed + result.agreed), drafted.plus(tally)
        print(f"{kind:>13}: {result}, {time.monotonic() - started:.0f} s; head: {tally}", flush=True)
        for each in result.wrong[: options.show]:
            print(f"    {each.question.messages[-1]['content'][-100:]!r} -> {each.text!r}, not {each.question.answer!r}")
    print(f"{'all':>13}: {total}; head: {drafted}")
    return int(total.right < LEAST_RIGHT * len(total.given) or total.agreed < LEAST_AGREEMENT * total.tokens)


if __name__ == "__main__":
    sys.exit(main())
