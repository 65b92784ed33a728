"""Tokenizer and detokenization: streamed text equals `decode` of all tokens, up to a stop string; a folder's chat templates."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from penstock.router.config import RouterConfig
from penstock.router.folder import Unusable
from penstock.router.request import Refused
from penstock.router.template import Chat
from penstock.router.text import LONG_TEXT, PROBE, Finder, Tokenizer
from penstock.router.validation import Validator

CORPUS = ["the cat sat on the mat and the dog sat too", "naïve café 你好世界 你 好", "👩‍👧‍👦 👍🏽 e\u0301 नमस्ते ", "a\n\n  b\tc"]
TEXTS = [
    "the cat sat",
    "naïve café, 你好世界!",
    "👩‍👧‍👦 and 👍🏽 and 🇳🇱",
    "e\u0301 नमस्ते \u2028 x",
    "  two  spaces\n\n\ttab ",
    "ÿþ ¡ Ġ ▁ <0x41> \ufffd",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<｜end▁of｜>"]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3, Qwen."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "a b", "été"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece with byte fallback, as in Llama 2, Mistral, Gemma."""
    letters = ["▁", "the", "▁the", "▁cat", "▁▁", "a", "b", "c", "s", "t", "o", "n", "é", "你", "▁sat", "\n", ".", "x", "d", "e"]
    names = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """SentencePiece without bytes, as in T5."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    """As in BERT: a token that begins with ## continues a word; others follow a space, but for punctuation such as commas."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, PROBE, "isn't, is it?"], trainer)
    return tokenizer


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace, "wordpiece": wordpiece}


def save(folder: Path, tokenizer: tokenizers.Tokenizer, **settings: object) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer(folder)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return save(tmp_path, KINDS[request.param]())


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], **options: object) -> str:
    """The text of a stream; the deltas and the stream's own text must agree."""
    stream = tokenizer.stream(prompt, **options)  # type: ignore[arg-type]
    text = ""
    for id in ids:
        piece = stream.push(id)
        text += piece.delta
        if piece.stop:
            break
    text += stream.end()
    assert stream.text == text
    return text


def decoded_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """The text that the ids add to the prompt's, by `decode`."""
    before = tokenizer.decode(prompt, skip)
    text = tokenizer.decode([*prompt, *ids], skip)
    assert text.startswith(before)
    return text[len(before) :]


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Any ids; but byte-fallback tokens only as whole characters or as single invalid bytes: see `TextStream`."""
    ids: list[int] = []
    while len(ids) < 40:
        if rng.random() < 0.5:
            ids += tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)
        else:
            id = rng.randrange(tokenizer._tokenizer.get_vocab_size())
            ids += [id] if not str(tokenizer._tokenizer.id_to_token(id)).startswith("<0x") else []
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_decoded_text_after_any_prompt(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("the cat")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, prompt, ids) == decoded_after(tokenizer, prompt, ids, True)
    assert streamed(tokenizer, [], ids) == tokenizer.decode(ids)
    assert streamed(tokenizer, [0], ids) == tokenizer.decode(ids)
    assert streamed(tokenizer, [0], ids, skip_special_tokens=False) == decoded_after(tokenizer, [0], ids, False), (
        "<s> is text before it"
    )
    for echoed in (ids, [0, *ids]):  # an echoed prompt has no text before it
        assert streamed(tokenizer, [], echoed, skip_special_tokens=False) == tokenizer.decode(echoed, skip_special_tokens=False)


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_of_random_tokens_equals_decoded_text(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(1)
    prompt = tokenizer.encode("the cat", add_special_tokens=False)
    for _ in range(200):
        ids = random_ids(tokenizer, rng)
        assert streamed(tokenizer, prompt, ids, skip_special_tokens=skip) == decoded_after(tokenizer, prompt, ids, skip)


def test_streamed_text_of_random_byte_level_tokens_equals_decoded_text(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    rng = random.Random(2)
    prompt = tokenizer.encode("the cat", add_special_tokens=False)
    for _ in range(500):
        ids = [rng.randrange(tokenizer._tokenizer.get_vocab_size()) for _ in range(30)]
        assert streamed(tokenizer, prompt, ids) == decoded_after(tokenizer, prompt, ids, True)


def test_incomplete_character_at_the_end_is_streamed_as_decode_gives_it(tmp_path: Path) -> None:
    for kind in ("byte-level", "byte-fallback"):
        tokenizer = save(tmp_path, KINDS[kind]())
        prompt = tokenizer.encode("the cat", add_special_tokens=False)
        ids = tokenizer.encode("👍", add_special_tokens=False)[-4:]
        for count in (1, 2, 3):
            assert streamed(tokenizer, prompt, ids[:count]) == decoded_after(tokenizer, prompt, ids[:count], True)


def test_character_before_an_invalid_byte_is_kept(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_fallback())
    byte = {value: tokenizer._tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in (*"世".encode(), 0xFF)]
    assert streamed(tokenizer, [], ids) == "世\ufffd"


def test_character_of_several_tokens_is_streamed_whole(tokenizer: Tokenizer) -> None:
    for text in TEXTS[1:4]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.stream([], ())
        pieces = [stream.push(id) for id in ids]
        assert all("\ufffd" not in piece.text for piece in pieces)
        assert all(piece.text == piece.delta for piece in pieces if piece.text.strip() not in SPECIAL)


def test_character_begun_in_the_prompt_is_completed(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    ids = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(ids) > 1
    assert streamed(tokenizer, ids[:-1], ids[-1:]) == "🦊"


def test_special_token_has_token_text_but_no_delta_unless_not_skipped(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids
    stream = tokenizer.stream(tokenizer.encode("a"))
    piece = stream.push(end)
    assert (piece.text.strip(), piece.delta) == ("</s>", "")  # WordPiece puts a space before every word
    assert tokenizer.is_special(end)
    not_skipped = tokenizer.stream(tokenizer.encode("a"), skip_special_tokens=False).push(end)
    assert (not_skipped.text.strip(), not_skipped.delta.strip()) == ("</s>", "</s>")


def test_id_without_a_token_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.stream([]).push(99_999).text == ""


def test_id_without_a_token_within_a_character_is_ignored(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    *first, last = tokenizer.encode("🦊", add_special_tokens=False)
    ids = [*first, 99_999, last]
    assert streamed(tokenizer, [], ids) == tokenizer.decode(ids) == "🦊"


def test_finder_finds_the_first_occurrence_of_a_stop_string_in_pieces() -> None:
    """Prefixes of the stop string recur within it, and before it in a text that comes in pieces."""
    rng = random.Random(6)
    for _ in range(3000):
        string = "".join(rng.choices("abc", (5, 2, 1), k=rng.randint(1, 10)))
        text = "".join(string[: rng.randint(1, len(string))] for _ in range(9)) + rng.choice(("", string))
        finder, position, end = Finder(string), 0, 0
        while position < len(text) and not end:
            piece = text[position : position + rng.randint(1, 9)]
            end = finder.find(piece)
            position += end or len(piece)
        assert (position if end else -1) == (text.find(string) + len(string) if string in text else -1), (string, text)


def cut_at(text: str, stops: Sequence[str], include: bool) -> str:
    """The reference: the text up to the stop string that ends first, the longest of those that end there."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end if include else end + length]


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_across_and_inside_tokens_end_the_text(tokenizer: Tokenizer, include: bool) -> None:
    rng = random.Random(3)
    prompt = tokenizer.encode("the cat", add_special_tokens=False)
    stopped = 0
    for _ in range(600):
        ids = random_ids(tokenizer, rng)
        text = decoded_after(tokenizer, prompt, ids, True)
        stops = []
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(max(1, len(text) - 1))
            stops.append(text[start : start + rng.randint(1, 7)] + rng.choice(["", "", "~"]) or "~")
        expected = cut_at(text, stops, include)
        stopped += expected != text
        assert streamed(tokenizer, prompt, ids, stop=tuple(stops), include_stop=include) == expected, (text, stops)
    assert stopped > 100


@pytest.mark.parametrize(
    ("text", "stops", "with_stop", "without_stop"),
    [
        ("aabaabaac", ("aabaac",), "aabaabaac", "aab"),  # overlaps itself: a search that restarts after a mismatch misses it
        ("abcabd", ("abd",), "abcabd", "abc"),
        ("a b c", (" b", "b c"), "a b", "a"),  # the stop string that ends first
        ("xabcx", ("c", "abc"), "xabc", "x"),  # both end here: the longer one
        ("abab", ("bab", "aba"), "aba", ""),
        ("ab", ("abc",), "ab", "ab"),  # only a prefix
        ("你好世界", ("好世",), "你好世", "你"),
    ],
)
def test_stop_string_that_ends_first_and_is_longest_wins(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], with_stop: str, without_stop: str
) -> None:
    for string in (text, " " + text + " and more" * (without_stop != text)):
        prompt = tokenizer.encode("the", add_special_tokens=False)
        ids = [id for letter in string for id in tokenizer.encode(letter, add_special_tokens=False)]
        decoded = decoded_after(tokenizer, prompt, ids, True)
        if any(tokenizer.token_text(id) == "<unk>" for id in ids) or string not in decoded:
            continue
        assert streamed(tokenizer, prompt, ids, stop=stops).strip() == with_stop
        assert streamed(tokenizer, prompt, ids, stop=stops, include_stop=False).strip() == without_stop


def test_text_that_may_become_a_stop_string_is_held_back(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    stream = tokenizer.stream([], ("###END",), include_stop=False)
    deltas = [stream.push(id).delta for letter in "ok ###EN ###END" for id in tokenizer.encode(letter, add_special_tokens=False)]
    assert "".join(deltas) == "ok ###EN "
    assert deltas[:9] == ["o", "k", " ", "", "", "", "", "", "###EN "]


def test_text_is_not_held_back_if_the_stop_string_is_included(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    stream = tokenizer.stream([], ("###",), include_stop=True)
    assert stream.push(tokenizer.encode("##")[0]).delta.startswith("#")


def test_detokenization_takes_less_than_20_microseconds_per_token(tmp_path: Path) -> None:
    """1 us is usual, and 5 us are acceptable; the bound leaves room for a busy machine."""
    tokenizer = save(tmp_path, byte_level())
    ids = tokenizer.encode("the cat sat on the mat 你好 " * 500)
    stream = tokenizer.stream(ids, ("###", "\n\n\n"), include_stop=False)
    start = time.thread_time()
    for id in ids:
        stream.push(id)
    assert (time.thread_time() - start) / len(ids) < 20e-6


def test_encoding_a_long_text_releases_the_gil_between_parts(tmp_path: Path) -> None:
    """tokenizers' `encode` holds the GIL to its end, so that a thread alone wouldn't help."""
    tokenizer = save(tmp_path, byte_level())
    text = "the cat sat on the mat 你好 " * 20_000
    assert tokenizer.encode(text[: 5 * LONG_TEXT]) == tokenizer._tokenizer.encode(text[: 5 * LONG_TEXT]).ids
    ended: list[int] = []
    turns = 0
    thread = threading.Thread(target=lambda: ended.append(len(tokenizer.encode(text))))
    thread.start()
    while not ended:
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert turns > 10


def test_offsets_of_tokens_are_in_bytes(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    text = "the 你 cat"
    spans = tokenizer.offsets(text)
    assert spans[0][1] == 0
    assert spans[-1][2] == len(text.encode())
    assert [id for id, _, _ in spans] == tokenizer.encode(text)


def test_eos_ids_are_read_from_generation_config_or_config_and_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert save(tmp_path, byte_level()).eos_ids == (0, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert save(tmp_path, byte_level()).eos_ids == (2, 3, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 2]}')  # -1 means none in some checkpoints
    assert save(tmp_path, byte_level()).eos_ids == (2, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert save(tmp_path, byte_level()).eos_ids == (0, 1)


def test_tokenizer_whose_decoder_rewrites_earlier_text_is_refused(tmp_path: Path) -> None:
    """CTC merges repeated tokens: text that was streamed would have to be taken back."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.CTC(pad_token="<s>")
    with pytest.raises(Unusable, match="decoder is of an unknown kind"):
        save(tmp_path, tokenizer)


def test_folder_without_tokenizer_json_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"tokenizer\.json does not exist.*save_pretrained"):
        Tokenizer(tmp_path)


def test_malformed_tokenizer_config_is_named_in_the_error(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(Unusable, match=r"tokenizer_config\.json is no JSON"):
        Tokenizer(tmp_path)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'system' and loop.index > 1 %}{{ raise_exception('system comes first') }}{% endif %}\n"
    "[{{ message.role }}]{{ message.content | trim }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}\n"
)
MESSAGES = [{"role": "user", "content": "hi <b> "}]


def chat_prompt(tokenizer: Tokenizer, template: str | None = None, **chat: object) -> str:
    return asyncio.run(tokenizer.chat_prompt(Chat(**{"messages": MESSAGES} | chat), template))  # type: ignore[arg-type]


def test_chat_template_is_rendered_like_transformers_does(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level(), chat_template=TEMPLATE)
    assert chat_prompt(tokenizer) == "<s>[user]hi <b>\n[assistant]"
    messages = [*MESSAGES, {"role": "assistant", "content": "well, "}]
    assert chat_prompt(tokenizer, messages=messages, continue_final_message=True) == "<s>[user]hi <b>\n[assistant]well,"


@pytest.mark.parametrize("place", ["string", "named", "mapped", "jinja", "json"])
def test_chat_template_is_read_from_every_place_where_checkpoints_keep_it(tmp_path: Path, place: str) -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    settings: dict[str, object] = {}
    match place:
        case "string":
            settings = {"chat_template": source}
        case "named":
            settings = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": source}]}
        case "mapped":
            settings = {"chat_template": {"default": source}}
        case "jinja":
            (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
        case "json":
            (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}), encoding="utf-8")
    tokenizer = save(tmp_path, byte_level(), **settings)
    assert chat_prompt(tokenizer, messages=MESSAGES * 2) == '{"role": "user", "content": "hi <b> "}'


def test_template_is_chosen_by_name_tools_or_documents(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("short", encoding="utf-8")
    named = [
        {"name": "tool_use", "template": "old"},
        {"name": "rag", "template": "rag"},
        {"name": "default", "template": "default"},
    ]
    tokenizer = save(tmp_path, byte_level(), chat_template=named)
    assert chat_prompt(tokenizer) == "default"
    assert chat_prompt(tokenizer, tools=[{}]) == "tools"
    assert chat_prompt(tokenizer, documents=[{}]) == "rag"
    assert chat_prompt(tokenizer, "short", tools=[{}]) == "short"


@pytest.mark.parametrize(("added_tokens_listed", "eos"), [(False, "<b>"), (True, "<a>")])
def test_special_tokens_map_counts_only_without_added_tokens_decoder(tmp_path: Path, added_tokens_listed: bool, eos: str) -> None:
    """As in transformers, for older checkpoints."""
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<b>"}))
    settings: dict[str, object] = {"added_tokens_decoder": {}} if added_tokens_listed else {}
    tokenizer = save(tmp_path, byte_level(), eos_token="<a>", chat_template="{{ eos_token }}", **settings)
    assert chat_prompt(tokenizer) == eos


def test_request_chat_template_is_refused_unless_trusted(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level(), chat_template="own")
    with pytest.raises(Refused, match=r'the model\'s own are "default".*--trust-request-chat-template'):
        chat_prompt(tokenizer, "{{ 1 }}")
    trusting = Tokenizer(tmp_path, trust_templates=True)
    assert [chat_prompt(trusting, template) for template in ("{{ 1 }}", "default", None)] == ["1", "own", "own"]


def test_chat_template_option_overrides_the_folders_template_and_detected_parsers(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].role }}: [TOOL_CALLS]", encoding="utf-8")
    save(tmp_path, byte_level(), chat_template="<tool_call><think>")
    assert Tokenizer(tmp_path).parsers == ("hermes", "deepseek_r1")
    tokenizer = Tokenizer(tmp_path, str(path))
    assert chat_prompt(tokenizer) == "user: [TOOL_CALLS]"
    assert tokenizer.parsers == ("mistral", None)
    assert Tokenizer(tmp_path, str(path), parsers=("none", "granite")).parsers == (None, "granite")
    path.write_text("{{ messages[0].role }}", encoding="utf-8-sig")  # as some editors save it
    assert chat_prompt(Tokenizer(tmp_path, str(path))) == "user"
    with pytest.raises(Unusable, match="cannot be read"):
        Tokenizer(tmp_path, str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps({"chat_template": TEMPLATE}), "is JSON: write the text of its chat_template into a file"),
        ("# How to send messages\n\nRead {{ this }}.", "never reads `messages`: name a file that is one"),
    ],
    ids=["tokenizer_config.json", "markdown"],
)
def test_chat_template_option_that_names_no_template_is_refused_at_startup(tmp_path: Path, text: str, reason: str) -> None:
    """Otherwise the whole file would be the prompt of every chat."""
    path = tmp_path / "mine.jinja"
    path.write_text(text, encoding="utf-8")
    save(tmp_path, byte_level())
    with pytest.raises(Unusable, match=reason):
        Tokenizer(tmp_path, str(path))


def test_malformed_chat_template_is_refused_at_startup(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r'"default" cannot be used.*--chat-template'):
        save(tmp_path, byte_level(), chat_template="{% for %}")


def test_special_tokens_in_shown_are_part_of_the_text(tmp_path: Path) -> None:
    """Readers of tool calls need markers that are special tokens."""
    tokenizer = save(tmp_path, byte_level())
    ids = tokenizer.encode("a<｜end▁of｜>b</s>", add_special_tokens=False)
    shown = tokenizer.added_id("<｜end▁of｜>")
    assert shown is not None
    assert tokenizer.added_id("<think>") is not None
    assert tokenizer.added_id("a") is None
    assert streamed(tokenizer, [], ids) == "ab"
    assert streamed(tokenizer, [], ids, shown=(shown,)) == "a<｜end▁of｜>b"


def test_longest_token_is_known_before_the_first_request(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, byte_level())
    original = tokenizer._tokenizer
    tokenizer._tokenizer = object()
    found = tokenizer.longest
    assert found == max(map(len, original.get_vocab(with_added_tokens=True)))


def test_long_prompt_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """1 MB through the template and the tokenizer blocks the loop for at most 50 ms. One of 8 runs must succeed: a fault in the
    code shows in every run, a busy machine's delays don't."""
    tokenizer = save(tmp_path, byte_level(), chat_template=TEMPLATE)
    validator = Validator(RouterConfig(folder="", model=""), tokenizer)
    chat = Chat(messages=[{"role": "user", "content": "the cat sat on the mat and " * 40_000}])

    async def encoded() -> list[int]:
        return await validator.encode(await tokenizer.chat_prompt(chat))

    async def longest_wait() -> float:
        await tokenizer.chat_prompt(Chat(messages=MESSAGES))
        task = asyncio.create_task(encoded())
        longest, last = 0.0, time.monotonic()
        while not task.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert len(task.result()) > 100_000
        return longest

    assert any(asyncio.run(longest_wait()) < 0.05 for _ in range(8))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TEMPLATE, "system comes first"),
        ("{{ messages[0].content.missing.more }}", "has no attribute"),
        ("{{ messages[7].role }}", "no element|has no"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_exception_in_a_chat_template_refuses_the_request(tmp_path: Path, source: str, message: str) -> None:
    tokenizer = save(tmp_path, byte_level(), chat_template=source)
    with pytest.raises(Refused, match=message):
        chat_prompt(tokenizer, messages=[*MESSAGES, {"role": "system", "content": ""}])


def test_chat_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no chat template"):
        chat_prompt(save(tmp_path, byte_level()))


def test_templates_may_use_strftime_now_and_generation_tags(tmp_path: Path) -> None:
    source = "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}"
    assert len(chat_prompt(save(tmp_path, byte_level(), chat_template=source))) == 4
