"""The special and added tokens of a model folder whose files contradict each other: they are read as transformers' tokenizers read
them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from penstock.router.folder import Unusable
from penstock.router.template import Chat
from penstock.router.text import Tokenizer

TEXTS = ["hello", "a<|im_start|>b<|im_end|>", "x <tool> y</s>", "<s>z", "naïve <|im_end|>  <tool>"]


def write(folder: Path, marks: str = "", known: tuple[str, ...] = (), **settings: Any) -> int:
    """Writes a byte-level tokenizer with <s> and </s>, and tokens `known` in its vocabulary that are not marked as added. Returns
    the size of its vocabulary.

    marks: "b" and "e" if its post-processor adds the beginning and end tokens to a text.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(["<s>", "</s>", *alphabet, *known])}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(["<s>", "</s>"])
    if marks:
        single = [*["<s>"] * ("b" in marks), "$A", *["</s>"] * ("e" in marks)]
        found.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=[("<s>", 0), ("</s>", 1)])
    found.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **settings}))
    return len(vocabulary)


def assert_as_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == plain
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)


def added_tokens(*tokens: tuple[int, str, bool]) -> dict[str, Any]:
    return {
        str(id): {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": special}
        for id, text, special in tokens
    }


BASE = ((0, "<s>", True), (1, "</s>", True))


def test_tokens_listed_only_in_added_tokens_decoder_are_added(tmp_path: Path) -> None:
    size = write(tmp_path)
    # In order of their ids, which is not that of their names.
    more = ((size + 1, "<|im_end|>", True), (size, "<|im_start|>", True), (size + 2, "<tool>", False))
    write(tmp_path, added_tokens_decoder=added_tokens(*BASE, *more))
    assert Tokenizer(tmp_path).encode("<|im_end|><tool>") == [size + 1, size + 2]
    assert_as_transformers(tmp_path)


def test_vocabulary_tokens_marked_in_added_tokens_decoder_are_matched_in_text(tmp_path: Path) -> None:
    size = write(tmp_path, known=("<|im_start|>", "<|im_end|>"))
    more = ((size - 2, "<|im_start|>", True), (size - 1, "<|im_end|>", True))
    write(tmp_path, known=("<|im_start|>", "<|im_end|>"), added_tokens_decoder=added_tokens(*BASE, *more))
    assert Tokenizer(tmp_path).encode("<|im_end|>") == [size - 1]
    assert_as_transformers(tmp_path)


def test_tokens_in_added_tokens_json_are_added(tmp_path: Path) -> None:
    size = write(tmp_path, pad_token="<|im_end|>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size + 1, "<|im_end|>": size}))
    ours = Tokenizer(tmp_path)
    assert ours.encode("<|im_end|><tool>") == [size, size + 1]
    assert ours.is_special(size)
    assert not ours.is_special(size + 1)
    assert_as_transformers(tmp_path)


@pytest.mark.parametrize("field", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("mapped", [False, True])
def test_listed_extra_special_tokens_are_matched_in_text(tmp_path: Path, field: str, mapped: bool) -> None:
    given = {field: ["<|im_start|>", "<|im_end|>"]}
    write(tmp_path, known=("<|im_start|>", "<|im_end|>"), **({} if mapped else given))
    if mapped:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({**given, "bos_token": "<s>", "eos_token": "</s>"}))
    assert len(Tokenizer(tmp_path).encode("<|im_end|>")) == 1
    assert_as_transformers(tmp_path)


def test_eos_tokens_named_only_in_text_config_are_read(tmp_path: Path) -> None:
    """As of Llama 4, Qwen 3 VL and Qwen 3.5, where generation_config.json is missing: transformers goes by them, too."""
    write(tmp_path)
    fields: dict[str, Any] = {"text_config": {"eos_token_id": [5, 7]}}
    for said, expected in ({}, (5, 7, 1)), ({"eos_token_id": None}, (5, 7, 1)), ({"eos_token_id": 6}, (6, 1)):
        (tmp_path / "config.json").write_text(json.dumps(fields | said))
        assert Tokenizer(tmp_path).eos_ids == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    assert Tokenizer(tmp_path).eos_ids == (8, 1)


def test_vocabulary_token_named_as_eos_token_is_special(tmp_path: Path) -> None:
    size = write(tmp_path, known=("<|im_end|>",), eos_token="<|im_end|>")
    ours = Tokenizer(tmp_path)
    assert ours.encode("<|im_end|>") == [size - 1]
    assert ours.eos_ids == (size - 1,)
    assert_as_transformers(tmp_path)


def test_named_extra_special_tokens_are_template_variables(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = "{{ bos_token }}{{ image_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    write(tmp_path, known=("<image>",), extra_special_tokens={"image_token": "<image>"}, chat_template=source)
    messages = [{"role": "user", "content": "x"}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert asyncio.run(Tokenizer(tmp_path).chat_prompt(Chat(messages=messages))) == expected == "<s><image>x"
    assert_as_transformers(tmp_path)


def test_added_token_with_a_contradicting_id_is_refused(tmp_path: Path) -> None:
    size = write(tmp_path)
    write(tmp_path, added_tokens_decoder=added_tokens(*BASE, (size + 7, "<tool>", False)))
    with pytest.raises(Unusable, match=rf"'<tool>' the id {size + 7}, by tokenizer.json it would be {size}"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("found", [[5], {"x": {"content": "y"}}, {"1": 5}, {"1": {"content": 5}}, 7])
def test_malformed_added_tokens_decoder_is_refused(tmp_path: Path, found: Any) -> None:
    write(tmp_path, added_tokens_decoder=found)
    with pytest.raises(Unusable, match="lists added tokens in a way of its own"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("id", ["[1]", "{}", "Infinity", "null", '"x"'])
def test_malformed_added_tokens_json_is_refused(tmp_path: Path, id: str) -> None:
    write(tmp_path)
    (tmp_path / "added_tokens.json").write_text(f'{{"<tool>": {id}}}')
    with pytest.raises(Unusable, match=r"added_tokens\.json lists added tokens in a way of its own"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("marks", ["", "b", "be"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_beginning_and_end_tokens_follow_tokenizer_json_and_not_its_config(
    tmp_path: Path, marks: str, flags: dict[str, bool]
) -> None:
    write(tmp_path, marks, **flags)
    assert_as_transformers(tmp_path)


def prepending(folder: Path, normalized: bool, **settings: Any) -> Tokenizer:
    """As Llama 2's: a space before each part of a text that is no special token."""
    pieces = ["<s>", "</s>", "\u2581", "a", "b", "<", "s", ">", "/", "[", "]", "I", "\u2581a"]
    found = tokenizers.Tokenizer(tokenizers.models.BPE({piece: id for id, piece in enumerate(pieces)}, [("\u2581", "a")]))
    found.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    found.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    found.add_special_tokens([tokenizers.AddedToken(token, normalized=normalized) for token in ("<s>", "</s>")])
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings}))
    return Tokenizer(folder)


def test_special_tokens_are_matched_before_normalization(tmp_path: Path) -> None:
    """As in the first conversions of Llama 2: `</s><s>` between two turns would be letters, and `<s>` a part of answers."""
    found = prepending(tmp_path, normalized=True)
    text = "<s>[I]a</s><s>[I]b"
    assert found.encode(text) == prepending(tmp_path, normalized=False).encode(text)
    assert [id for id in found.encode(text) if id < 2] == [0, 1, 0]
    assert found.decode(found.encode("<s>a</s>")).strip() == "a"
    assert [found.special_id(token) for token in ("<s>", "</s>")] == [0, 1]


def test_added_tokens_of_tokenizer_config_are_matched_before_normalization(tmp_path: Path) -> None:
    mark = {"content": "<sep>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": True, "special": True}
    found = prepending(tmp_path, normalized=False, added_tokens_decoder={**added_tokens(*BASE), "13": mark})
    assert found.encode("a<sep>b<sep>").count(13) == 2
