"""Continuing a message that a client has begun: where the prompt ends, compared with transformers."""

import pytest

from penstock.router.request import Refused
from penstock.router.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QUESTION = {"role": "user", "content": "What <|is> e?"}
BEGUN = ["Well,", "Well, ", " Well,\n", "<", "e", "|", "assistant", "\n\nSo:\n", "What <|is> e?"]


def continued(source: str, content: str | None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [QUESTION, {"role": "assistant", "content": content}]
    return template.render(messages, None, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
@pytest.mark.parametrize("content", BEGUN)
def test_it_ends_where_transformers_ends_it(source: str, content: str) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [QUESTION, {"role": "assistant", "content": content}]
    [expected], _ = reference.render_jinja_template([messages], chat_template=source, continue_final_message=True, bos_token="<s>")
    assert continued(source, content) == expected


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
def test_an_empty_message_is_an_answer_that_begins(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    expected = template.render([QUESTION], None, add_generation_prompt=True, continue_final_message=False)
    assert continued(source, "") == expected
    assert continued(source, " ") in (expected, expected + " ")  # the template may keep a space, or strip it; nothing else


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(Refused, match="no text that could be continued"):
        continued(CHATML, None)
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | replace('ell', 'ill') }}"):
        with pytest.raises(Refused, match="the chat template changes the last message"):
            continued(source, "Well,")
