"""The demo model: its training data holds none of the held-out questions, its tokenizer and chat template are consistent, and its
weights answer held-out questions."""

import json
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from penstock.demo import lessons
from penstock.demo.words import spell

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from penstock.demo import eagle, evaluate, train  # noqa: E402

FOLDER = Path(lessons.__file__).parent
MODEL, DRAFT, EAGLE = FOLDER / "model", FOLDER / "draft", FOLDER / "eagle"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer() -> evaluate.PreTrainedTokenizerBase:
    return evaluate.load_tokenizer(MODEL)


def held_out_text(question: lessons.Question) -> str:
    """The message that must not be in the training data: the story, the introduction, or else the question itself."""
    contents = [message["content"] for message in question.messages]
    return max(contents, key=len) if question.kind == "reading" else contents[0 if question.kind == "name" else -1]


def leaked_messages(conversations: list[list[lessons.Message]], kind: str) -> list[str]:
    """The held-out messages of a kind that the conversations contain, in any turn."""
    held_out = {held_out_text(question) for question in islice(lessons.questions(3, kind), 200)}
    return sorted(held_out & {message["content"] for messages in conversations for message in messages})


@cache
def training_conversations(count: int) -> list[list[lessons.Message]]:
    return list(islice(lessons.conversations(1), count))


def test_demo_models_take_at_most_12_mb() -> None:
    shipped = [*FOLDER.glob("*.*"), *MODEL.iterdir(), *DRAFT.iterdir(), *EAGLE.iterdir()]
    assert sum(path.stat().st_size for path in shipped if path.is_file()) <= 12_000_000


def test_training_data_is_deterministic_per_seed() -> None:
    assert training_conversations(50) == list(islice(lessons.conversations(1), 50)) != list(islice(lessons.conversations(2), 50))
    for kind in lessons.KINDS:
        first, second = (list(islice(lessons.questions(1, kind), 5)) for _ in range(2))
        assert [(each.messages, each.answer) for each in first] == [(each.messages, each.answer) for each in second]


@pytest.mark.parametrize("kind", lessons.KINDS)
def test_checks_of_questions_accept_the_reference_answer_and_reject_a_wrong_one(kind: str) -> None:
    for question in islice(lessons.questions(2, kind), 50):
        assert question.check(question.answer)
        assert not question.check("The answer is green.")


# Small talk is a fixed list; none of it is held out.
@pytest.mark.parametrize("kind", sorted(set(lessons.KINDS) - {"small_talk"}))
def test_training_data_contains_no_held_out_message(kind: str) -> None:
    conversations = training_conversations(6000)
    assert leaked_messages(conversations, kind) == []
    leaked = next(lessons.questions(3, kind))
    assert leaked_messages([*conversations, list(leaked.messages)], kind) == [held_out_text(leaked)]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (15, "fifteen"), (47, "forty-seven"), (312, "three hundred and twelve"), (900, "nine hundred")],
)
def test_numbers_are_spelled_in_words(number: int, words: str) -> None:
    assert spell(number) == words


def test_model_folders_have_hugging_faces_layout() -> None:
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2
    assert shards == {path.name for path in MODEL.glob("*.safetensors")}
    for folder in (MODEL, DRAFT):
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["num_attention_heads"] % 4 == 0
        assert config["num_key_value_heads"] % 2 == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (MODEL / name).read_bytes() == (DRAFT / name).read_bytes()


@pytest.mark.parametrize(
    "text", ["Once upon a time", "naïve café", "日本語", "👩‍🚀 🎈", "tab\tand\nline", "  two  ", "12 + 30 = 42"]
)
def test_tokenizer_round_trips_any_text(tokenizer: evaluate.PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokenizer_round_trips_every_code_point_up_to_0x10fff(tokenizer: evaluate.PreTrainedTokenizerBase) -> None:
    for start in range(0, 0x11000, 64):
        text = "".join(chr(code) for code in range(start, start + 64) if not 0xD800 <= code < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokenizer_adds_the_begin_token_to_plain_text(tokenizer: evaluate.PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("Hello"))[0] == train.BEGIN == tokenizer.bos_token
    assert tokenizer.eos_token == train.END


def test_each_digit_is_one_token(tokenizer: evaluate.PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("a 427") == ["a", "Ġ", "4", "2", "7"]


def test_chat_template_renders_the_text_that_was_trained_on(tokenizer: evaluate.PreTrainedTokenizerBase) -> None:
    for messages in training_conversations(6000)[-50:]:
        if messages[0]["role"] != "text":
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
            assert rendered == "".join(text for text, _ in train.render(messages))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin|><|user|>Hi<|end|><|assistant|>"


def test_model_answers_held_out_questions_and_the_draft_model_agrees(tokenizer: evaluate.PreTrainedTokenizerBase) -> None:
    target, draft = evaluate.load_model(MODEL), evaluate.load_model(DRAFT)
    questions = [question for kind in lessons.KINDS for question in islice(lessons.questions(7, kind), 20)]
    result = evaluate.score(target, draft, tokenizer, questions, batch=20)
    assert result.right / len(result.given) >= evaluate.LEAST_RIGHT, result.wrong[:5]
    assert result.agreed / result.tokens >= evaluate.LEAST_AGREEMENT


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        *((train, flag) for flag in ("--tokens", "--draft-tokens", "--minutes", "--draft-minutes", "--threads")),
        *((eagle, flag) for flag in ("--tokens", "--minutes", "--threads")),
        *((evaluate, flag) for flag in ("--questions", "--threads")),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "many"])
def test_scripts_refuse_amounts_that_are_not_above_0(
    script: ModuleType, flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *(["--out", "x"] if script is not evaluate else []), f"{flag}={value}"])
    with pytest.raises(SystemExit) as ended:
        script.arguments()
    assert ended.value.code == 2
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize(("script", "flags"), [(train, ["--only", "draft"]), (train, ["--resume", "model"]), (eagle, [])])
def test_scripts_end_with_one_line_where_there_is_no_model(
    script: ModuleType, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script", "--out", ".", *flags])
    with pytest.raises(SystemExit, match=r"^model has no model: train it first, by python -m penstock.demo.train --out \. "):
        script.main()
