"""Chat templates: the same text as transformers, refusals as invalid requests, bounded work."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fourfold.errors import InvalidRequestError
from fourfold.text.chat import ChatTemplate
from fourfold.text.sandbox import MAX_SECONDS, MAX_STEPS, Sandbox

from .vocabularies import bpe_metadata, make, real, small_bpe, small_spm

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string|default("26 Jul 2024") + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' ~ content }}
        {%- endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ {'name': tool_call.function.name}|tojson(indent=2) }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "gemma": GEMMA}
USER = {"role": "user", "content": "Hi <there> & 'you' é 😀 "}
ANSWER = {"role": "assistant", "content": "<think>x</think>\n\nYes. "}
SYSTEM = {"role": "system", "content": "  Be brief."}
CHATS = {
    "user": [USER],
    "turns": [USER, ANSWER, USER],
    "system": [SYSTEM, USER],
    "answered": [USER, ANSWER],
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é <b>", "parameters": {"a": [1, None, True]}},
}


def transformers_text(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    options.setdefault("add_generation_prompt", False)
    texts, _ = utils.render_jinja_template([messages], chat_template=template, **options, **SPECIAL)
    text: str = texts[0]
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_same_text_as_transformers(name: str, chat: str, generate: bool) -> None:
    if (name, chat) == ("gemma", "system"):
        pytest.skip("refused, see test_refusals")
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(CHATS[chat], add_generation_prompt=generate)
    assert ours == transformers_text(TEMPLATES[name], CHATS[chat], add_generation_prompt=generate)


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_message_as_transformers(name: str) -> None:
    # B68
    for content in ("Yes", "Yes, ", "  Yes"):
        messages = [USER, {"role": "assistant", "content": content}]
        ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        assert (
            ours.rstrip()
            == transformers_text(TEMPLATES[name], messages, continue_final_message=True).rstrip()
        )
        assert ours.endswith((content, content.lstrip()))


def test_tools_and_variables_as_transformers() -> None:
    messages = [SYSTEM, USER]
    ours = ChatTemplate(QWEN, SPECIAL).render(messages, tools=[TOOL], variables={"enable_thinking": False})
    theirs = transformers_text(
        QWEN, messages, tools=[TOOL], add_generation_prompt=True, enable_thinking=False
    )
    assert ours == theirs
    assert '"description": "é <b>"' in ours


def test_arguments_sent_as_text_are_printed_as_objects() -> None:
    def call(arguments: object) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": arguments}
        return [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        ]

    template = ChatTemplate(LLAMA3, SPECIAL)
    assert template.render(call('{"a": "é"}')) == transformers_text(
        LLAMA3, call({"a": "é"}), add_generation_prompt=True
    )
    with pytest.raises(InvalidRequestError, match="arguments of 'f' are not JSON"):
        template.render(call('{"a":'))


def test_real_template_as_transformers() -> None:
    tokenizer = real("smollm2")
    template = ChatTemplate.of(tokenizer)
    for messages in CHATS.values():
        for generate in (True, False):
            theirs = transformers_text(template.source, messages, add_generation_prompt=generate)
            assert template.render(messages, add_generation_prompt=generate) == theirs
    ids = tokenizer.encode(template.render([USER]))
    assert ids.count(tokenizer.encode("<|im_start|>")[0]) == 3


def test_template_that_prints_bos_and_tokenizer_that_adds_it() -> None:
    # B69
    tokenizer = small_spm()
    text = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", tokenizer.spec.special_tokens).render(
        [USER]
    )
    assert text.startswith("<s>")
    assert tokenizer.encode(text).count(1) == 1


@pytest.mark.parametrize(
    "messages,words",
    [
        ([SYSTEM, USER], "System role not supported"),
        ([SYSTEM], "System role not supported"),
        ([USER, USER], "Conversation roles must alternate"),
    ],
)
def test_refusals(messages: list[dict[str, Any]], words: str) -> None:
    # B67
    with pytest.raises(InvalidRequestError, match=words) as error:
        ChatTemplate(GEMMA, SPECIAL).render(messages)
    assert error.value.param == "messages"


def test_both_flags_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        ChatTemplate(CHATML).render([USER], add_generation_prompt=True, continue_final_message=True)


def test_continuing_what_the_template_drops() -> None:
    with pytest.raises(InvalidRequestError, match="does not print the last message"):
        ChatTemplate("nothing").render([USER], add_generation_prompt=False, continue_final_message=True)


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]
    gemma, chatml = ChatTemplate(GEMMA, SPECIAL), ChatTemplate(CHATML, SPECIAL)
    assert (gemma.takes_parts, chatml.takes_parts) == (True, False)
    assert gemma.render(chat) == transformers_text(GEMMA, chat, add_generation_prompt=True)
    assert "user\none\ntwo<|im_end|>" in chatml.render(chat)
    continued = [USER, {"role": "assistant", "content": parts}]
    text = gemma.render(continued, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("onetwo")


@pytest.mark.parametrize(
    "messages,words",
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role must be a string"),
        ([USER, {"role": "user", "content": 3}], r"messages\[1\].content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls must be objects"),
    ],
)
def test_malformed_messages(messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ChatTemplate(CHATML).render(messages)


def test_reserved_variables() -> None:
    with pytest.raises(InvalidRequestError, match="must not contain 'messages'"):
        ChatTemplate(CHATML).render([USER], variables={"messages": []})


def test_a_model_without_template_says_how_to_give_one() -> None:
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        ChatTemplate.of(small_bpe())
    assert ChatTemplate.of(small_bpe(), CHATML).render([USER]).endswith("assistant\n")


def test_named_template_for_tools() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.chat_template"] = "plain"
    metadata["tokenizer.chat_template.tool_use"] = "tools {{ tools|length }} {{ bos_token }}"
    template = ChatTemplate.of(make(metadata))
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "tools 1 <|im_start|>"


@pytest.mark.parametrize(
    "source,words",
    [
        ("{% for %}", "syntax error in line 1"),
        ("{{ messages[0].nothing.at.all }}", "needs something missing"),
        ("{{ 1 + 'a' }}", "failed on these messages: TypeError"),
        ("{{ 1 // 0 }}", "failed on these messages: ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% include 'x' %}", "refuses|failed"),
    ],
)
def test_broken_templates(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ChatTemplate(source).render([USER])


GREEDY = [
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 999999999999 }}",
    "{{ [1] * 999999999999 }}",
    "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "{{ 9 ** 99999999 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ 'x'.ljust(10 ** 9) }}",
    "{{ ('a' * 1000000)|replace('a', 'b' * 1000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
    "{{ ['a' * 1000000] * 1000 }}",
    "{{ (['a' * 1000000] * 100)|join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join(['a' * 1000000] * 100) }}",
    "{{ 'a'|indent(99999999) }}",
    "{{ [1]|tojson(indent=99999999) }}",
    "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
]


@pytest.mark.parametrize("source", GREEDY)
def test_a_greedy_template_is_stopped(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match="the chat template"):
        ChatTemplate(source).render([USER])
    assert time.thread_time() - start < 2 * MAX_SECONDS


def test_long_chats_fit_the_bounds() -> None:
    chat = [USER, ANSWER] * 5000
    for name, source in TEMPLATES.items():
        text = ChatTemplate(source, SPECIAL).render(chat, add_generation_prompt=False)
        assert text.count("Yes.") == 5000, name
    assert 50 * len(chat) < MAX_STEPS


def test_budget_does_not_change_what_templates_say() -> None:
    source = (
        "{% for i in [3, 1]|sort %}{{ loop.index ~ '/' ~ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{% for k, v in {'b': (1, 2), 'a': []}|dictsort %}{{ k }}={{ v }};{% else %}none{% endfor %}"
        "{{ 'a\nb\n\nc'|indent(2) }}{{ ['x', 1]|join('-') }}{{ none }}{{ 'aXb'|replace('X', '') }}"
        "{{ '%s %03d' % ('a', 7) }}{{ '{} {!r}'.format(1, 'x') }}{{ '%s'|format(2) }}"
        "{% for x in nothing %}{% else %}empty{% endfor %}{% for i in range(5) %}{% continue %}{% endfor %}"
        "{% for n in [[1, [2]]] recursive %}{{ n if n is number else loop(n) }}{% endfor %}"
        "{{ strftime_now('%Y')|length }}{{ [1, 2, 3][1:] }}{{ 'é'|tojson }}{{ undefined_name }}"
    )
    assert Sandbox(source).render({}) == transformers_text(source, [USER])
