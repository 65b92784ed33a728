"""Tokenization and incremental detokenization: the tokenizer, streams of tokens to text, and stop strings.

Knows the text of one sequence. Knows no request, no API and no torch.

A token stands for fixed bytes, wherever it occurs; so the text of a sequence is its bytes, decoded as they come. That is exact for
byte-level BPE and for SentencePiece with byte fallback, takes about 1 us per token, and can't drift as decoding a sliding window
can. What a tokenizer's `decode` does at the very start of a text (it strips one space) matters only if nothing visible precedes.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import AUTO
from .folder import Unusable, read
from .parsing import chosen, detect
from .rendering import Renderer
from .request import Piece, Refused
from .template import DEFAULT, Chat, ChatTemplate, choose

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBE = "Hello, world! It's 12:30 -- naïve\n\n  你好 👩‍👧"
# Characters. Shorter texts are tokenized on the event loop; that takes 4 ms at most, and 1 us per character (x86, one core).
LONG_TEXT = 4096
CONTEXT = 4  # tokens of the prompt that may hold the beginning of the first generated character: UTF-8 has at most 4 bytes


class Tokenizer:
    """The tokenizer of a model's folder, with its chat templates and end tokens."""

    def __init__(
        self, folder: Path, chat_template: str = "", *, trust_templates: bool = False, parsers: tuple[str, str] = (AUTO, AUTO)
    ) -> None:
        """`chat_template`: a file with the operator's template, instead of the model's. `trust_templates`: clients may send their
        own. `parsers`: the operator's choice for tool calls and reasoning."""
        words = read(folder, chat_template)
        self._tokenizer, self._names, self._templates, self.eos_ids = words.tokenizer, words.names, words.templates, words.eos_ids
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token.content: id for id, token in added.items()}
        self._added_ids = frozenset(added)
        self._special = frozenset(id for id, token in added.items() if token.special) | frozenset(self.eos_ids)
        for name, source in self._templates.items():
            compiled = _compile(name, source, self._names)
            if chat_template and not compiled.reads_messages:
                raise Unusable(f"the chat template {chat_template} never reads `messages`: name a file that is one")
        self._trust_templates = trust_templates
        self._renderer = Renderer()
        # (tools, reasoning): parsers of the model's formats; None: it has none
        self.parsers = chosen(parsers, detect("\n".join(self._templates.values())))
        decoders = _kinds(_written(self._tokenizer.decoder), "decoders")
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in decoders else None
        self._byte_fallback = "ByteFallback" in decoders
        # tokenizers writes one U+FFFD for each byte of a broken byte-fallback run, and one for a broken character elsewhere.
        self.errors = EACH_BYTE if self._byte_fallback else "replace"
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._pieces: dict[int, str | bytes] = {}
        self.whole: dict[int, Piece] = {}  # cached Pieces of tokens that are whole characters and not special
        self.longest = self._longest()  # the most characters that a token stands for; 0: unknown
        self._check()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens. Releases the GIL if it is longer than LONG_TEXT."""
        if len(text) > LONG_TEXT:  # a batch of one: only batches release the GIL
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """(id, start, stop) of each token; offsets in the text's bytes, as TGI counts."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        if text.isascii():
            return [(id, *span) for id, span in zip(encoding.ids, encoding.offsets, strict=True)]
        at = [0]
        for character in text:
            at.append(at[-1] + len(character.encode()))
        return [(id, at[start], at[stop]) for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)]

    def _longest(self) -> int:
        """`longest`, which is unknown where parts of a text may be removed before it is split. Takes 0.1 s for 150,000 tokens."""
        normalizer, splitter = _written(self._tokenizer.normalizer), _written(self._tokenizer.pre_tokenizer)
        known = _kinds(normalizer, "normalizers") <= {"Sequence", "Prepend", "Replace"}
        known &= _kinds(splitter, "pretokenizers") <= {"Sequence", "ByteLevel", "Split", "Digits", "Metaspace"}
        known &= '"Removed"' not in json.dumps(splitter) and '"content": ""' not in json.dumps(normalizer)
        added = self._tokenizer.get_added_tokens_decoder().values()
        if not known or not (self._byte_level or self._byte_fallback) or any(token.lstrip or token.rstrip for token in added):
            return 0
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)

    @property
    def info(self) -> dict[str, str | None]:
        """The special tokens by role, and the chat template that is used unless a request names another."""
        return {
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            **self._names,
            "chat_template": self._templates.get(DEFAULT),
        }

    @property
    def size(self) -> int:
        """Size of the vocabulary; ids are usually smaller."""
        count: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return count

    def missing(self, vocabulary: int) -> Iterator[str]:
        """What the operator should know before clients find out. vocabulary: how many tokens the model knows."""
        if self.size > vocabulary:
            yield (
                f"the tokenizer has {self.size} tokens, the model knows {vocabulary}: texts that need others are refused; are "
                "both of the same model?"
            )
        if not self.eos_ids:
            yield "no file of the model names a token that ends answers (eos_token_id): they go on to their full length"
        if self.decode(self.encode("a a", add_special_tokens=False)) == "aa":
            yield "the tokenizer's decoder takes the spaces between words away: answers will have none; save the tokenizer again"
        if not self._templates:
            yield "the model has no chat template: chats are refused; --chat-template FILE gives it one"

    def is_special(self, id: int) -> bool:
        """Whether a token is no part of a text for a reader."""
        return id in self._special

    def added_id(self, text: str) -> int | None:
        """The added token with this text, which stands for these characters wherever they come, special or not."""
        return self._added.get(text)

    def is_added(self, id: int) -> bool:
        """Whether it is the id of an added token."""
        return id in self._added_ids

    def special_id(self, text: str) -> int | None:
        """The special token with this text, if there is one."""
        id = self._tokenizer.token_to_id(text)
        return id if id is not None and self.is_special(id) else None

    def piece(self, id: int) -> str | bytes:
        """What the token adds to a text; bytes if they are not whole characters. "" for an id without a token."""
        piece = self._pieces.get(id)
        if piece is None:
            token = self._tokenizer.id_to_token(id)
            if token is None:  # mostly of an image: there are billions of these ids, not worth caching
                return ""
            piece = self._pieces[id] = self._find_piece(id, token)
            if isinstance(piece, str) and not self.is_special(id):
                self.whole[id] = Piece(piece, piece, "")
        return piece

    def token_text(self, id: int) -> str:
        """The token by itself, special tokens written out, U+FFFD for a part of a character."""
        piece = self.piece(id)
        return piece if isinstance(piece, str) else piece.decode(errors=self.errors)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, as the tokenizers library gives it."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def knows(self, id: int) -> bool:
        """Whether there is such a token."""
        return self._tokenizer.id_to_token(id) is not None

    async def chat_prompt(self, chat: Chat, template: str | None = None) -> str:
        """Renders a chat as the prompt's text, special tokens included: encode it without adding more. Does not block the event
        loop, and is limited in time and memory.

        `template`: what the client wants instead of the model's usual one: the name of another of the model's, or a source.
        """
        return await self._renderer.render(self._template(chat, template), self._names, chat)

    def _template(self, chat: Chat, asked: str | None) -> str:
        if asked is not None and asked not in self._templates and not self._trust_templates:
            names = ", ".join(f'"{name}"' for name in self._templates)
            known = f"the model's own are {names}" if names else "the model has none"
            raise Refused(
                f"`chat_template` must be the name of one of the model's templates, and {known}; templates that clients write "
                "need --trust-request-chat-template",
                "chat_template",
            )
        source = choose(self._templates, chat) if asked is None else self._templates.get(asked, asked)
        if source is None:
            raise Refused("the model has no chat template: use /v1/completions or /generate", "messages")
        return source

    def stream(
        self,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = True,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> "TextStream":
        """The detokenizer for text after the prompt. `shown`: special tokens that are kept in the text, for parsers."""
        return TextStream(self, prompt, stop, include_stop, skip_special_tokens, shown)

    def starts_text(self, id: int) -> str | bytes:
        """The piece of a token at the start of visible text: SentencePiece's first space is missing."""
        piece = self.piece(id)
        return self.decode([id], skip_special_tokens=False) if isinstance(piece, str) and piece.startswith(" ") else piece

    def _find_piece(self, id: int, token: str) -> str | bytes:
        if self._byte_level is not None:
            data = bytes(self._byte_level.get(character, 256) for character in token) if self._all_bytes(token) else token.encode()
        elif self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        else:
            return self.decode([*self._anchor, id], False)[len(self.decode(self._anchor, False)) :]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def _all_bytes(self, token: str) -> bool:
        """Whether byte-level decoding maps all of the token's characters to bytes; otherwise it leaves the token as it is."""
        return self._byte_level is not None and all(character in self._byte_level for character in token)

    def _check(self) -> None:
        """Raises Unusable for a decoder whose tokens are not fixed bytes: it would give wrong text unnoticed."""
        ids = self.encode(PROBE, add_special_tokens=False)
        stream = self.stream(ids[:1], skip_special_tokens=False)
        found = "".join(stream.push(id).delta for id in ids[1:]) + stream.end()
        whole, first = self.decode(ids, False), self.decode(ids[:1], False)
        if whole != first + found:
            raise Unusable(
                f"the tokenizer's decoder is of an unknown kind: it makes {whole!r} of what we would call {first + found!r}"
            )


class TextStream:
    """Incremental detokenizer of one sequence. All deltas and `end()` together are the text, cut at the stop string.

    With several stop strings, the one that ends first counts, of those the longest. A character never comes in parts. Where
    `decode` turns a whole run of byte tokens into U+FFFD because its end is broken, the good characters before stay.
    """

    __slots__ = ("_errors", "_finders", "_fresh", "_held", "_include_stop", "_parts", "_pending", "_shown", "_skip", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
        shown: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._skip = skip_special_tokens
        self._include_stop = include_stop
        self._errors = tokenizer.errors
        self._finders = [Finder(string) for string in stop]
        self._pending = b""  # the beginning of an incomplete character
        self._held = ""  # text held back, which may be the beginning of a stop string; "" if stop strings are included
        self._parts: list[str] = []
        # No visible text precedes.
        self._fresh = all(map(tokenizer.is_special, prompt)) if skip_special_tokens else not prompt
        for id in prompt[-CONTEXT:]:
            self._decode(id)

    @property
    def text(self) -> str:
        """All deltas so far."""
        return "".join(self._parts)

    def push(self, id: int) -> Piece:
        """Adds the next token. After one with a `stop`, only `end` may follow."""
        piece = self._tokenizer.whole.get(id)
        if piece is not None and not (self._finders or self._pending or self._fresh):  # the common case: nothing before it matters
            self._parts.append(piece.text)
            return piece
        if self._skip and self._tokenizer.is_special(id) and id not in self._shown:
            return Piece(self._tokenizer.token_text(id), "", "")
        text = self._decode(id)
        if not text or not self._finders:
            self._parts.append(text)
            return Piece(text, text, "")
        delta, stop = self._until_stop(text)
        self._parts.append(delta)
        return Piece(text, delta, stop)

    def end(self) -> str:
        """Ends the stream: returns what was held back, and U+FFFD for an incomplete character."""
        rest = self._held + codecs.utf_8_decode(self._pending, self._errors, True)[0]
        self._held, self._pending = "", b""
        self._parts.append(rest)
        return rest

    def _decode(self, id: int) -> str:
        piece = self._tokenizer.starts_text(id) if self._fresh else self._tokenizer.piece(id)
        self._fresh = self._fresh and self._skip and self._tokenizer.is_special(id)
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            text = codecs.utf_8_decode(self._pending, self._errors, True)[0] + piece  # no byte has continued the character
            self._pending = b""
            return text
        data = self._pending + piece
        text, length = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[length:]
        return text

    def _until_stop(self, text: str) -> tuple[str, str]:
        """How much of the held and the new text may be sent now, and the stop string that ends it, if one does."""
        ends = [(end, -len(finder.string), finder.string) for finder in self._finders if (end := finder.find(text)) > 0]
        whole = self._held + text
        if ends:
            end, length, stop = min(ends)
            cut = len(self._held) + end if self._include_stop else len(self._held) + end + length
            self._held, self._pending = "", b""
            return whole[:cut], stop
        if self._include_stop:
            return whole, ""
        size = max(finder.matched for finder in self._finders)
        self._held = whole[len(whole) - size :]
        return whole[: len(whole) - size], ""


class Finder:
    """Finds one string in a text that comes in pieces, in linear time (Knuth, Morris, Pratt).

    `matched` characters at the text's end are the beginning of the string.
    """

    __slots__ = ("_back", "matched", "string")

    def __init__(self, string: str) -> None:
        assert string
        self.string = string
        self.matched = 0
        # _back[n]: the longest prefix of the string, shorter than n, that is also a suffix of its first n characters
        self._back = back = [0, 0]
        for character in string[1:]:
            length = back[-1]
            while length and string[length] != character:
                length = back[length]
            back.append(length + (string[length] == character))

    def find(self, text: str) -> int:
        """How many characters of `text` lead to the string's first end; 0 if it does not end in them."""
        string, back, matched = self.string, self._back, self.matched
        if not matched and string[0] not in text:
            return 0
        for index, character in enumerate(text, 1):
            while matched and string[matched] != character:
                matched = back[matched]
            matched += string[matched] == character
            if matched == len(string):
                return index
        self.matched = matched
        return 0


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


EACH_BYTE = "penstock-each-byte"
codecs.register_error(EACH_BYTE, _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's byte-to-printable-character map, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _written(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as in tokenizer.json. Serializing the whole would take 0.3 s, because of its vocabulary."""
    if part is None:
        return None
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def _kinds(part: dict[str, Any] | None, parts: str) -> set[str]:
    """Types of a tokenizer.json's decoder or normalizer, and of its parts."""
    if part is None:
        return set()
    return {part["type"]}.union(*(_kinds(one, parts) for one in part.get(parts, ())))


def _compile(name: str, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The compiled chat template. Raises Unusable if that is not possible."""
    try:
        return ChatTemplate(source, special_tokens)
    except Refused as refused:
        raise Unusable(f'the chat template "{name}" cannot be used: {refused}; --chat-template FILE takes another') from refused
