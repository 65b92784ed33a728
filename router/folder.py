"""Reads a model folder's tokenizer, special tokens, end tokens and chat templates.

Where files contradict each other, they are read as transformers reads them. Whether a text gets a first and a last token is up to
tokenizer.json, also where the settings say `add_bos_token` or `add_eos_token`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from .parsing.values import encodable
from .template import DEFAULT

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SETTINGS = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens_decoder"
AGAIN = "transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)"


class Unusable(Exception):
    """The folder has no usable tokenizer; the message says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A model's tokenizer, with special tokens, end tokens and chat templates."""

    tokenizer: tokenizers.Tokenizer
    names: dict[str, str]  # special tokens by their role: bos_token, eos_token...
    eos_ids: tuple[int, ...]  # tokens that end a sequence
    templates: dict[str, str]  # sources of chat templates by name


def read(folder: Path, chat_template: str = "") -> TokenizerFiles:
    """`chat_template`: a file with the operator's template, instead of the model's. Raises Unusable."""
    settings, mapped = _read(folder / SETTINGS), _read(folder / MAP)
    names = _named(settings, mapped)
    tokenizer = _tokenizer(folder / "tokenizer.json")
    _add_tokens(tokenizer, folder, settings, names)
    return TokenizerFiles(
        tokenizer=tokenizer,
        names=names,
        eos_ids=_eos_ids(folder, tokenizer, names.get("eos_token")),
        templates={DEFAULT: _operators(Path(chat_template))} if chat_template else _templates(folder, settings),
    )


def model_config(folder: Path) -> dict[str, Any]:
    """config.json of the model; {} if there is none. Raises Unusable."""
    return _read(folder / "config.json")


def _tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise Unusable(f"{path} does not exist. Save the tokenizer in the fast format first: {AGAIN}")
    try:
        data = path.read_bytes()
        found = tokenizers.Tokenizer.from_buffer(data)
        if any(map(partial(_is_changed, found.normalizer), found.get_added_tokens_decoder().values())):
            found = tokenizers.Tokenizer.from_str(_as_written(data))
    except OSError as error:
        raise Unusable(f"{path} can't be read: {error.strerror}") from None
    except BaseException as error:  # the library has none narrower than Exception, and its panics are not even that
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise Unusable(f"{path} is no tokenizer ({_line(error)}): download it again") from None
        raise
    found.no_truncation()
    found.no_padding()
    return found


def _is_changed(normalizer: Any, token: tokenizers.AddedToken) -> bool:
    """Whether a special token is searched for in a text as the normalizer would write it."""
    return bool(
        token.special and token.normalized and normalizer is not None and normalizer.normalize_str(token.content) != token.content
    )


def _as_written(data: bytes) -> str:
    """tokenizer.json with special tokens that stand in a text as they are. Older files of Llama 2 and Yi have them normalized: the
    library then finds `<s>` only behind a space, and shows it in answers. transformers 5 finds them everywhere."""
    content = json.loads(data)
    content["added_tokens"] = [_unnormalized(token) for token in content["added_tokens"]]
    return json.dumps(content)


def _unnormalized(token: Mapping[str, Any]) -> Mapping[str, Any]:
    """An added token; if it is special, one that is found in texts as it is written."""
    return {**token, "normalized": False} if token.get("special") else token


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Adds tokens that tokenizer.json lacks, or has as ordinary ones of its vocabulary, and marks special ones that are not added
    tokens yet."""
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for id, token in _listed(folder, settings, names):
        if token.content in there:
            continue
        tokenizer.add_tokens([token])
        there.add(token.content)
        got = tokenizer.token_to_id(token.content)
        if got != id:
            raise Unusable(
                f"the files of {folder} give the token {token.content!r} the id {id}, by tokenizer.json it would be {got}: "
                f"save the tokenizer again, {AGAIN}"
            )
    special = [*names.values(), *_unnamed(settings), *_unnamed(_read(folder / MAP))]
    lacking = [token for token in special if token not in there and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens(list(dict.fromkeys(lacking)))


def _listed(folder: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    """The added tokens by id: from the settings, or from older checkpoints' own file."""
    file = SETTINGS if ADDED in settings else "added_tokens.json"
    try:
        if ADDED in settings:
            listed = settings[ADDED]
        else:
            special = set(names.values())
            listed = {
                id: {"content": text, "normalized": text not in special, "special": text in special}
                for text, id in _read(folder / file).items()
            }
        tokens = {int(id): tokenizers.AddedToken(**_unnormalized(token)) for id, token in listed.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unusable(f"{folder / file} lists added tokens in a way of its own ({_line(error)}): download it again") from None
    yield from sorted(tokens.items(), key=lambda item: item[0])


def _unnamed(settings: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens without a particular role."""
    for field in ("additional_special_tokens", "extra_special_tokens"):
        for token in settings[field] if isinstance(settings.get(field), list) else ():
            if text := _word(token):
                yield text


def _eos_ids(folder: Path, tokenizer: tokenizers.Tokenizer, named: str | None) -> tuple[int, ...]:
    """All that generation_config.json names (config.json where that has none, or its description of the text), and the tokenizer's
    own."""
    for name in ("generation_config.json", "config.json"):
        fields = _read(folder / name)
        text, found = fields.get("text_config"), fields.get("eos_token_id")
        if found is None and isinstance(text, dict):
            found = text.get("eos_token_id")
        if found is not None:
            break
    ids = [] if found is None else [found] if isinstance(found, int) else found
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise Unusable(f"{folder / name} says eos_token_id {found!r}, a token id or a list of them is needed")
    ids = [id for id in ids if id >= 0]  # -1: none, in some checkpoints
    own = tokenizer.token_to_id(named) if named else None
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names to texts."""
    extra = settings.get("extra_special_tokens")
    given = {name: settings.get(name) for name in SPECIAL_NAMES} | (extra if isinstance(extra, dict) else {})
    return {name: text for name, token in given.items() if (text := _word(token))}


def _word(token: Any) -> str:
    """The text of a special token, written as a string or as an object with its content; "": none that a text may have."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and encodable(text) else ""


def _named(settings: dict[str, Any], mapped: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role. As in transformers, the map takes precedence in older checkpoints, whose settings do not list the
    added tokens."""
    both = [_special_tokens(mapped), _special_tokens(settings)]
    first, last = both if ADDED in settings else both[::-1]
    return {**first, **last}


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """A model's templates by name. Files of their own take precedence over the tokenizer's settings."""
    found: dict[str, str] = {}
    source = settings.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if isinstance(source, dict):
        found = dict(source)
        if not all(isinstance(word, str) for item in found.items() for word in item):
            raise Unusable(f"the chat templates of {folder} have no names or no texts: --chat-template FILE takes another")
    elif isinstance(source, str):
        found = {DEFAULT: source}
    for path in [*folder.glob("chat_template.jinja"), *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        found[DEFAULT if path.parent == folder else path.stem] = _text(path)
    return found


def _operators(path: Path) -> str:
    """A template that the operator names. tokenizer_config.json is text, too, and would be each prompt as a whole; the mark that
    some editors put in front would begin each."""
    text = _text(path).removeprefix("\ufeff")
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(text), dict):
            raise Unusable(f"the chat template {path} is JSON: write the text of its chat_template into a file, and name that")
    return text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"the chat template {path} cannot be read: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """A JSON file's object; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} is no JSON ({_line(error)}): download it again") from error
    if not isinstance(content, dict):
        raise Unusable(f"{path} holds no JSON object: download it again")
    return content


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
