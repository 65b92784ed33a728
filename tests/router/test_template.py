"""Chat templates as families of models have them, compared with transformers: every feature that they use, not their words."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.router.api.openai_messages import messages_of
from penstock.router.request import Refused
from penstock.router.template import Chat, ChatTemplate, choose

# chatml, llama3, gemma, phi, zephyr: the plain ones. deepseek: begins the reasoning. gemma3: content as text or in parts.
# llama31: tojson with an indent, strftime_now, variables with defaults. qwen25: a message's neighbours, tools' answers in one turn.
# qwen3: namespaces, messages backwards, reasoning. mistral: turns that are checked, ids of nine letters, selectattr.
# mixed: break and continue, generation marks, macros, filters, spaces that blocks leave.
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}
CHATML, LLAMA3, GEMMA3, QWEN25 = (TEMPLATES[name] for name in ("chatml", "llama3", "gemma3", "qwen25"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": " Be brief. "}
QUESTION = {"role": "user", "content": "What <|is> e?"}
ANSWER = {"role": "assistant", "content": " 2.718\n", "reasoning_content": "Euler"}
THOUGHT = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "sun", "arguments": {"city": "Zürich <"}}}],
}
FOUND = {"role": "tool", "content": "21 °C", "tool_call_id": "abcdefghi", "name": "sun"}
CHATS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [SYSTEM, QUESTION],
    [QUESTION, ANSWER, QUESTION],
    [SYSTEM, QUESTION, THOUGHT, QUESTION, THOUGHT],
    [QUESTION, CALL, FOUND, ANSWER, QUESTION],
    [QUESTION, CALL, FOUND, FOUND],
    [QUESTION, QUESTION],
    [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sun",
            "description": "Is it <sunny>?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
BEGUN = ["Well,", "Well, ", " Well,\n", "<", "e", "|", "assistant", "\n\nSo:\n", "What <|is> e?"]


STRANGE = {"role": "nobody", "content": "x"}


@pytest.mark.parametrize(
    ("name", "messages", "dropped"),
    [
        ("chatml", [STRANGE, QUESTION], ""),  # it writes whatever role there is
        ("llama3", [QUESTION, STRANGE, STRANGE], ""),
        ("llama31", [QUESTION, CALL, FOUND], ""),
        ("mistral", [QUESTION, CALL, FOUND], ""),
        ("qwen25", [SYSTEM, QUESTION, CALL, FOUND, FOUND, ANSWER, SYSTEM], ""),
        ("qwen25", [QUESTION, STRANGE], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, {"role": "nobody", "content": None}], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, {"role": "nobody", "content": []}], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, {"role": "nobody", "content": [{"type": "text", "text": "x"}]}], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, CALL, {**FOUND, "role": "function"}, FOUND], 'messages[2].role` "function"'),
        ("zephyr", [QUESTION, STRANGE | {"role": "x" * 1000}], f'messages[1].role` "{"x" * 64}"'),
        ("zephyr", [QUESTION, CALL, FOUND, QUESTION], 'messages[2].role` "tool"'),
    ],
)
def test_no_message_is_left_out_in_silence_for_its_role(name: str, messages: list[dict[str, Any]], dropped: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    chat = Chat(messages=messages)
    told = template.render(chat)
    if not dropped:
        template.check_roles(chat)
        assert "x" in told or STRANGE not in messages
        return
    with pytest.raises(Refused, match=re.escape(dropped)) as refused:
        template.check_roles(chat)
    assert str(refused.value).endswith("use one of system, user, assistant, or one that the template knows")
    assert refused.value.parameter == "messages"


def test_a_template_may_write_a_role_in_its_own_way() -> None:
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'critic' %}{{ m.content | upper }}{% endif %}{% endfor %}", {})
    template.check_roles(Chat(messages=[QUESTION, {"role": "critic", "content": "hm"}]))
    with pytest.raises(Refused, match=re.escape('`messages[0].role` "Critic"')):
        template.check_roles(Chat(messages=[{"role": "Critic", "content": "hm"}, QUESTION]))


LEAVES_OUT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
LATER = {"role": "system", "content": "so"}
REMINDER = "<system-reminder>\nso\n</system-reminder>"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([LATER, QUESTION], "[system]so[user]What <|is> e?"),
        ([QUESTION, LATER], f"[user]What <|is> e?\n\n{REMINDER}"),
        ([QUESTION, LATER, LATER], f"[user]What <|is> e?\n\n{REMINDER}\n\n{REMINDER}"),
        ([LATER, LATER, QUESTION], "[system]so\n\nso[user]What <|is> e?"),
        ([FOUND, {"role": "system", "content": [{"type": "text", "text": "so"}]}], f"[tool]21 °C\n\n{REMINDER}"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}, LATER], f"[user]a\n\n{REMINDER}"),
        ([{"role": "user", "content": []}, LATER], f"[user]{REMINDER}"),
        ([QUESTION, {"role": "assistant", "content": "2"}, LATER], f"[user]What <|is> e?[assistant]2[user]{REMINDER}"),
    ],
)
def test_a_later_system_message_may_join_the_one_before(messages: list[dict[str, Any]], said: str) -> None:
    assert ChatTemplate(LEAVES_OUT, {}).render(Chat(messages=messages, folds_system=True)) == said


@pytest.mark.parametrize(
    ("source", "folds"),
    [
        (TEMPLATES["chatml"], False),
        (TEMPLATES["qwen3"], False),
        (LEAVES_OUT, True),
        (TEMPLATES["mistral"], True),  # refuses it
        (TEMPLATES["deepseek"], True),  # puts it first, instead of the first
        (LEAVES_OUT.replace("m.content", "m.content[0].text"), True),
    ],
)
def test_it_joins_only_where_the_template_has_no_place_for_it(source: str, folds: bool) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert (REMINDER in ChatTemplate(source, SPECIAL).render(Chat(messages=[*parts, LATER], folds_system=True))) == folds


def rendered_by_transformers(source: str, chat: Chat) -> str:
    """Raises whatever it raises."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    [text], _ = reference.render_jinja_template(
        [chat.messages],
        tools=chat.tools,
        documents=chat.documents,
        chat_template=source,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **SPECIAL,
        **chat.variables,
    )
    return str(text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_it_renders_what_transformers_renders(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    same = 0  # the rest is refused by both
    for messages in CHATS:
        for tools in (None, TOOLS):
            for asked in ({}, {"enable_thinking": False}, {"date_string": "today", "custom_tools": None}):
                for prompted in (True, False):
                    chat = Chat(messages=messages, tools=tools, variables=asked, add_generation_prompt=prompted)
                    if isinstance(messages[0]["content"], list) and not template.takes_parts:
                        continue  # transformers would let the template fail, or write the list
                    try:
                        expected = rendered_by_transformers(TEMPLATES[name], chat)
                    except Exception:
                        with pytest.raises(Refused):
                            template.render(chat)
                        continue
                    assert template.render(chat) == expected
                    same += 1
    assert same >= 20


def continued(source: str, content: str | None) -> str:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    return ChatTemplate(source, SPECIAL).render(Chat(messages=messages, continue_final_message=True))


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA3, QWEN25])
@pytest.mark.parametrize("content", BEGUN)
def test_it_ends_where_transformers_ends_it(source: str, content: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    chat = Chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert continued(source, content) == rendered_by_transformers(source, chat)


LOOPS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
SOME = (  # loops over tools' results alone
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LIKEWISE = LOOPS + "{% if tools is iterable and tools is not string %}{% endif %}"  # asks, but not what contents are
STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('a system prompt is needed') }}{% endif %}" + LOOPS


@pytest.mark.parametrize("source", [LOOPS, LIKEWISE, STRICT])
def test_a_text_comes_in_parts_where_nothing_else_is_read(source: str) -> None:
    assert ChatTemplate(source, SPECIAL).render(Chat(messages=[SYSTEM, QUESTION])) == "[system] Be brief. [user]What <|is> e?"


def test_a_text_stays_one_where_only_some_contents_are_looped_over() -> None:
    chat = Chat(messages=[SYSTEM, QUESTION, {"role": "tool", "content": [{"type": "text", "text": "21"}]}])
    text = ChatTemplate(SOME, SPECIAL).render(chat)
    assert text == rendered_by_transformers(SOME, chat) == "[system] Be brief. [user]What <|is> e?[tool]21"


NAMED = "{% for m in messages %}{% set found = m['content'] %}{% for p in found %}{{ p['text'] }}{% endfor %}{% endfor %}"
FIRST = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize("source", [NAMED, FIRST])
def test_parts_are_read_in_any_way(source: str) -> None:
    for content in ("a b", [{"type": "text", "text": "a b"}]):
        assert ChatTemplate(source, SPECIAL).render(Chat(messages=[{"role": "user", "content": content}])) == "a b"


# As DeepSeek's: calls are written where there is no content, or their arguments put between other texts.
SILENT = (
    "{% for m in messages %}[{{ m.role }}]{% if m['content'] is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ' ' + c['function']['arguments'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
JOINED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}"
)
PRINTED = JOINED.replace("c.function.name + ' ' + c.function.arguments", "c.function.name }} {{ c.function.arguments")
OWN = JOINED.replace("c.function.name + ' ' + c.function.arguments", "c.function.name }} {{ c.function.arguments | tojson")
# It asks for messages without content, but fails for them: as DeepSeek R1 0528's.
FAILING = "{% for m in messages %}{{ '' if '</think>' in m.content }}{% endfor %}" + JOINED.replace(
    "{{ m.content }}", "{% if m.content is not none %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("source", [SILENT, JOINED, PRINTED, OWN, FAILING])
def test_calls_are_written_as_each_template_can(source: str, content: str | None) -> None:
    """What it gets of OpenAI's clients: no content, or an empty one, and arguments as a text of JSON."""
    given = {**CALL, "content": content, "tool_calls": [{"function": {"name": "sun", "arguments": '{"city": "Zürich"}'}}]}
    chat = Chat(messages=messages_of([QUESTION, given, FOUND]))
    expected = '[user]What <|is> e?[assistant]sun {"city": "Zürich"}[tool]21 °C'
    assert ChatTemplate(source, SPECIAL).render(chat) == expected


def test_no_content_is_no_word() -> None:
    chat = Chat(
        messages=messages_of([{"role": "system", "content": None}, {"role": "user"}, {"role": "assistant", "content": None}])
    )
    for source in TEMPLATES.values():
        with suppress(Refused):
            assert "None" not in ChatTemplate(source, SPECIAL).render(chat)


def test_calls_can_not_be_continued() -> None:
    for content in ("", None):
        chat = Chat(messages=[QUESTION, {**CALL, "content": content}], continue_final_message=True)
        with pytest.raises(Refused, match="the last message has"):
            ChatTemplate(CHATML, SPECIAL).render(chat)


def test_a_message_in_parts_is_continued_behind_its_last_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b c "}]
    chat = Chat(messages=[QUESTION, {"role": "assistant", "content": parts}], continue_final_message=True)
    assert ChatTemplate(GEMMA3, SPECIAL).render(chat).endswith("assistant\nab c")
    assert ChatTemplate(CHATML, SPECIAL).render(chat).endswith("assistant\nab c ")
    assert parts[1]["text"] == "b c "


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
def test_an_empty_message_is_an_answer_that_begins(source: str) -> None:
    expected = ChatTemplate(source, SPECIAL).render(Chat(messages=[QUESTION]))
    assert continued(source, "") == expected
    assert continued(source, " ") in (expected, expected + " ")  # the template may keep a space, or strip it; nothing else


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(Refused, match="no text that could be continued"):
        continued(CHATML, None)
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | replace('ell', 'ill') }}"):
        with pytest.raises(Refused, match="the chat template changes the last message"):
            continued(source, "Well,")


PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text | upper }};{% endfor %}{% endfor %}"


def test_content_comes_as_the_template_reads_it() -> None:
    text = [{"role": "user", "content": "ab"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert [ChatTemplate(PARTS, {}).render(Chat(messages=messages)) for messages in (text, parts)] == ["AB;", "A;B;"]
    strings = ChatTemplate("{{ messages[0].content | upper }}", {})
    assert [strings.render(Chat(messages=messages)) for messages in (text, parts)] == ["AB", "AB"]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(Refused, match=r"'image_url'.*only text"):
        strings.render(Chat(messages=picture))


def test_variables_of_a_request_do_not_replace_the_chat() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ bos_token }} {{ enable_thinking }} {{ documents[0].text }}", SPECIAL)
    chat = Chat(
        messages=[QUESTION],
        documents=[{"title": "t", "text": "doc"}],
        variables={"enable_thinking": False, "bos_token": "<b>", "messages": []},
    )
    assert template.render(chat) == "What <|is> e? <b> False doc"


def test_which_of_several_templates_is_used() -> None:
    named = {"default": "d", "tool_use": "t", "rag": "r"}
    documents = [{"text": ""}]
    assert choose(named, Chat(messages=[QUESTION])) == "d"
    assert choose(named, Chat(messages=[QUESTION], tools=[])) == "d"
    assert choose(named, Chat(messages=[QUESTION], tools=TOOLS)) == "t"
    assert choose(named, Chat(messages=[QUESTION], documents=documents)) == "r"
    assert choose(named, Chat(messages=[QUESTION], tools=TOOLS, documents=documents)) == "t"
    assert choose({"default": "d"}, Chat(messages=[QUESTION], tools=TOOLS, documents=documents)) == "d"
    assert choose({"other": "o"}, Chat(messages=[QUESTION])) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "the chat template is no template"),
        ("{{ messages | nothing }}", "the chat template is no template"),
        ("{{" + "(" * 5000, "the chat template is no template"),
        ("x" * 600_000, "has 600000 characters"),
        ("{{ raise_exception('no, <b>') }}", "refuses the messages: no, <b>"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "must not set"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "must not set"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        (
            "{% for m in messages %}{% for i in range(90000) %}{{ m.content * 200 }}{% endfor %}{% endfor %}",
            "writes more than 16000000",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_may_not_do(source: str, message: str) -> None:
    with pytest.raises(Refused, match=re.compile(message, re.IGNORECASE)):
        ChatTemplate(source, {}).render(Chat(messages=[QUESTION]))


def test_constants_are_not_computed_before_there_are_limits() -> None:
    ChatTemplate("{{ 'a' * 10 ** 12 }}{{ 10 ** 10 ** 10 }}", {})
