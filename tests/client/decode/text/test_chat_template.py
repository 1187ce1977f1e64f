from typing import Any, Final

import pytest

from gpulease.client.decode.decode_errors import ModelRejected, RequestRejected
from gpulease.client.decode.text.chat_template import (
    MAX_PROMPT_CHARACTERS,
    MAX_TEMPLATE_CHARACTERS,
    ChatTemplate,
)

CHATML: Final = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}"""
MESSAGES: Final = [{"role": "user", "content": "Hi <&> 'you'"}]


def rendered(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, "a file").render(messages, variables)


def test_a_chat_is_a_prompt_for_the_next_turn() -> None:
    """Blocks take no line of their own, and nothing is escaped."""
    assert rendered(CHATML) == "<|im_start|>user\nHi <&> 'you'<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi <&> 'you'<|im_end|>\n"


@pytest.mark.parametrize("content", ["The answer", "The answer ", " a\n", "", "<|im_end|>"])
def test_a_prompt_may_end_with_the_last_message(content: str) -> None:
    chat = [*MESSAGES, {"role": "assistant", "content": content}]
    before = f"<|im_start|>user\nHi <&> 'you'<|im_end|>\n<|im_start|>assistant\n{content}"
    assert ChatTemplate(CHATML, {}, "a file").render(chat, continues=True) == before
    # A template that trims messages trims this one, too.
    trimming = "{% for message in messages %}{{ message.role }}:{{ message.content | trim }};{% endfor %}"
    found = ChatTemplate(trimming, {}, "a file").render(chat, continues=True)
    assert found == f"user:Hi <&> 'you';assistant:{content.strip()}"


def test_a_message_that_the_template_changes_can_t_be_continued() -> None:
    for source in ("{{ messages[-1].content | upper }}", "{{ messages[0].role }}", "{{ messages[-1].content[:3] }}"):
        with pytest.raises(RequestRejected, match="does not show the last message") as refused:
            ChatTemplate(source, {}, "a file").render(MESSAGES, continues=True)
        assert refused.value.parameter == "continue_final_message"


def test_variables_have_any_name() -> None:
    source = "{{ self_made }}{{ messages | length }}"
    assert ChatTemplate(source, {}, "a").render(MESSAGES, {"self_made": 1, "messages": [{}] * 9}) == "11"
    assert ChatTemplate("{{ source }}", {}, "a").render(MESSAGES, {"source": "s", "self": 1, "variables": 2}) == "s"


GEMMA: Final = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}"""
"""That of Gemma 3, without its images."""


def test_gemma_s_turns_alternate_and_begin_with_the_system_s() -> None:
    asked = {"role": "user", "content": " Hi  "}
    said = [{"role": "system", "content": "Be brief."}, asked, {"role": "assistant", "content": "Yes?"}]
    again = {"role": "user", "content": [{"type": "text", "text": " Go\non "}]}
    assert rendered(GEMMA, [*said, again]) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nGo\non<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(RequestRejected, match="roles must alternate"):
        rendered(GEMMA, [asked, asked])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ tools is none }}{{ documents is none }}", "<s>TrueTrue"),
        ("{{ {'b': 'ä<', 'a': [1]} | tojson }}", '{"b": "ä<", "a": [1]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ 2 * 3 }}{{ '-' * 3 }}{{ 3 * '=' }}{{ 0.5 * 2 }}", "6---===1.0"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
        ("{{ enable_thinking }}", "no"),
    ],
)
def test_what_templates_use_is_there(source: str, text: str) -> None:
    assert rendered(source, enable_thinking="no") == text


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute"),
        ("{{ messages.append(1) }}", "not safely callable|is not safe|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ 'a' * 100000000 }}", "a product longer than"),
        ("{{ 100000000 * [1] }}", "a product longer than"),
        ("{{ 9 ** 9 ** 9 }}", "powers are not computed"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_sentence(source: str, sentence: str) -> None:
    with pytest.raises(RequestRejected, match=f"chat template does not accept these messages: .*({sentence})"):
        rendered(source)


def test_a_prompt_is_bounded() -> None:
    message = {"role": "user", "content": "x" * (MAX_PROMPT_CHARACTERS // 4)}
    with pytest.raises(RequestRejected, match="a prompt of more than 16,777,216 characters"):
        rendered("{% for i in range(5) %}{{ messages[0].content }}{% endfor %}", [message])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for %}", "the chat template is invalid"),
        ("{{ a | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{% include '/etc/passwd' %}", None),
        ("x" * (MAX_TEMPLATE_CHARACTERS + 1), "a chat template must have at most .* not 1,048,577"),
    ],
)
def test_a_template_with_a_mistake_is_refused(source: str, sentence: str | None) -> None:
    if sentence is None:
        with pytest.raises(RequestRejected):
            rendered(source)
        return
    with pytest.raises(ModelRejected, match=f"a file: .*{sentence}"):
        rendered(source)
