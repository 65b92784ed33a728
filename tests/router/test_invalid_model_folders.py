"""Model folders with invalid or missing files of tokenizers, chat templates and token ids: each is reported in one line, before
requests are served with it."""

import asyncio
import errno
import json
from pathlib import Path

import pytest
from tokenizers import decoders

from penstock.router.config import RouterConfig
from penstock.router.folder import Unusable
from penstock.router.request import Limits, Refused
from penstock.router.text import Tokenizer
from penstock.router.validation import Parameters, Validator
from penstock.tests.router.fake_batcher import make_tokenizer
from penstock.tests.router.test_text import byte_fallback, save

# A normalizer for which the library panics: pyo3's PanicException is no Exception.
PANIC = (
    b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": null}, "model": {"type": "BPE", "vocab": {}, "merges": []}}'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", "tokenizer.json is no tokenizer"),
        ("tokenizer.json", b"[]", "tokenizer.json is no tokenizer"),
        ("tokenizer.json", b'{"a":' * 100_000, "tokenizer.json is no tokenizer"),
        ("tokenizer.json", PANIC, "tokenizer.json is no tokenizer (Precompiled: "),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is no JSON"),
        ("tokenizer_config.json", b'{"a":' * 100_000, "tokenizer_config.json is no JSON"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is no JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": "{% for %}"}', 'the chat template "default" cannot be used'),
        ("tokenizer_config.json", b'{"chat_template": "{% break %}"}', 'the chat template "default" cannot be used'),
        ("tokenizer_config.json", b'{"chat_template": {"default": 5}}', "have no names or no texts"),
        ("tokenizer_config.json", b'{"chat_template": [{"template": "x"}]}', "have no names or no texts"),
        ("special_tokens_map.json", b"5", "special_tokens_map.json holds no JSON object"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "says eos_token_id 'x'"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}', "says eos_token_id [[1]]"),
        ("chat_template.jinja", b"\xff\xff", "chat_template.jinja cannot be read"),
    ],
)
def test_invalid_file_of_a_model_folder_is_refused_in_one_line(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(Unusable) as caught:
        Tokenizer(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "method"), [("tokenizer.json", "read_bytes"), ("tokenizer_config.json", "read_text")])
def test_file_without_read_permission_is_reported_as_such(
    folder: Path, name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: str) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (folder / name).touch()
    monkeypatch.setattr(Path, method, refused)
    with pytest.raises(Unusable, match=rf"/{name} can't be read: Permission denied$"):
        Tokenizer(folder)


@pytest.mark.parametrize("token", [5, ["</s>"], {}, {"content": 5}, {"text": "x"}, "\ud83d", {"content": "\ud83d"}])
def test_special_tokens_that_are_no_texts_are_ignored(folder: Path, token: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, "additional_special_tokens": [token]}))
    assert Tokenizer(folder).eos_ids == ()


def test_prompt_with_token_ids_beyond_the_models_vocabulary_is_refused(folder: Path) -> None:
    """A tokenizer may have more ids than the model: an id beyond the model's would end the shard."""
    tokenizer = Tokenizer(folder)
    limits = Limits(max_input_tokens=100, max_total_tokens=128, vocabulary=tokenizer.size - 1)
    validator = Validator(RouterConfig(folder="", model="m"), tokenizer)
    highest = next(chr(code) for code in range(1 << 16) if tokenizer.size - 1 in tokenizer.encode(chr(code), False))
    assert asyncio.run(validator.request("abc", Parameters(), limits)).prompt
    with pytest.raises(
        Refused, match=rf"`inputs` has the token id {tokenizer.size - 1}; the model knows 0 to {tokenizer.size - 2}"
    ):
        asyncio.run(validator.request(f"abc{highest}", Parameters(), limits))


def test_missing_tokens_and_chat_template_are_reported_at_the_start(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}", "eos_token": "</s>"}))
    whole = Tokenizer(folder)
    assert [*whole.missing(whole.size)] == []
    [message] = whole.missing(whole.size - 1)
    assert message.startswith(f"the tokenizer has {whole.size} tokens, the model knows {whole.size - 1}")
    (folder / "tokenizer_config.json").write_text("{}")
    end_message, chat_message = Tokenizer(folder).missing(whole.size)
    assert "no file of the model names a token that ends answers" in end_message
    assert "no chat template: chats are refused; --chat-template" in chat_message


def test_decoder_that_removes_spaces_is_reported_at_the_start(tmp_path: Path) -> None:
    """As in a tokenizer.json of Yi, which strips each token where the text as a whole was meant."""
    raw = byte_fallback()
    said = [*save(tmp_path, raw).missing(raw.get_vocab_size())]
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.ByteFallback(), decoders.Fuse()]
    )
    more = [one for one in save(tmp_path, raw).missing(raw.get_vocab_size()) if one not in said]
    assert len(more) == 1
    assert "takes the spaces between words away" in more[0]


def test_token_ids_beyond_the_tokenizers_have_no_text(folder: Path) -> None:
    """A tokenizer may have fewer ids than the model, whose embedding table is often padded."""
    tokenizer = Tokenizer(folder)
    stream = tokenizer.stream([5])
    assert tokenizer.token_text(tokenizer.size + 7) == ""
    assert stream.push(tokenizer.size + 7).delta == ""


@pytest.mark.parametrize("isolated", [False, True])
def test_prefix_cache_keys_differ_by_tenant_only_with_isolate_tenants(folder: Path, isolated: bool) -> None:
    config = RouterConfig(folder="", model="m", isolate_tenants=isolated)
    limits = Limits(max_input_tokens=100, max_total_tokens=128, vocabulary=300)
    validator = Validator(config, Tokenizer(folder))
    keys = [asyncio.run(validator.request("abc", Parameters(tenant=name), limits)).cache_key for name in ("a", "b", "")]
    assert keys == (["a", "b", ""] if isolated else ["", "", ""])
