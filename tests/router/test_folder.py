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


@pytest.mark.parametrize("marks", ["", "b", "be"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_beginning_and_end_tokens_follow_tokenizer_json_and_not_its_config(
    tmp_path: Path, marks: str, flags: dict[str, bool]
) -> None:
    write(tmp_path, marks, **flags)
    assert_as_transformers(tmp_path)
