"""Writes `tokenizer_chat.json`: what Transformers renders from chat templates, and llama.cpp's ids of it.

    python tests/golden/make_chat_template.py

Needs the extra `[bench]`. `templates` holds the templates' texts, `cases` for each: messages, tools, further variables,
and `text` or, where the template refuses, `error` (the message it raised). `ids` are llama.cpp's of the text of the two
real models' templates, with special tokens read as such.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import llama_cpp
import transformers
from tokenizers import Tokenizer, models

from umbra.model.gguf_header import read_header
from umbra.model.turn_templates import template_for
from umbra.model.weights.fetch import fetch

HERE = Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

WRITTEN_HERE = {
    # Alternating roles, a refusal, trimmed content (the shape of Llama 2 and Mistral).
    "alternating": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system_message if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    # Tools as JSON, tool calls and results, reasoning that is dropped from older turns (the shape of Qwen 3).
    "tools": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_user and thoughts %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    # Headers, a date, options with defaults, indented JSON (the shape of Llama 3.1 and later).
    "headers": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%% literal") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none and tools_in_user_message is not defined %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    # Parts of content, macros, loop controls, filters and the block marks whose white space the flags remove.
    "language": """\
{% macro part(item) %}
    {% if item is string %}
{{ item }}
    {% elif item['type'] == 'text' %}
{{ item['text'] | trim }}
    {% else %}
[{{ item['type'] | upper }}]
    {% endif %}
{% endmacro %}
{% for message in messages %}
  {% if message['role'] == 'note' %}
    {% continue %}
  {% endif %}
  {% if message['role'] == 'end' %}{% break %}{% endif %}
  # comment-free line {{ loop.index }}/{{ loop.length }} {# gone #}
{% generation %}
{% set items = [message['content']] if message['content'] is string else message['content'] %}
{{ message['role'] | capitalize }}: {% for item in items %}
{{ part(item) }}{% endfor %}
{% endgeneration %}
{% endfor %}
{% set counts = dict(a=1, b=[1, 2.5, none, true]) %}
{{ counts | tojson }} {{ {'k': 'é<&>"'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}
{{ messages | map(attribute='role') | join(', ') }} {{ "%05d|%s" % (42, "x") }} {{ "{}-{:>4}".format(1, "a") }}
{{ missing }}{{ missing is defined }} {{ bos_token ~ eos_token ~ pad_token }}
{{ messages[-1].name | default('nobody') }}
{% if messages | selectattr('role', 'equalto', 'user') | list | length > 1 %}several{% else %}one{% endif %}

{{ range(3) | list }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ '=' * 3 }} {{ "a,b".split(",") | reverse | list }}
""",
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a city, in °C & "words" <b>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = {"city": "Zürich", "n": [1, 2]}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
USER = {"role": "user", "content": "Hello, what's 2+2?"}
SYSTEM = {"role": "system", "content": "  You are terse.\n"}
ASSISTANT = {"role": "assistant", "content": " Four. \n"}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [SYSTEM, USER]},
    {"messages": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "日本語 🙂\n\n  indented\n\t<b>&amp;</b>\n"}]},
    {"messages": [USER, ASSISTANT], "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [USER, USER]},
    {"messages": [USER], "tools": [WEATHER]},
    {
        "messages": [
            SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "content": '{"t": 21}'},
            {"role": "tool", "name": "get_weather", "content": "again"}, ASSISTANT, USER,
        ],
        "tools": [WEATHER, WEATHER],
    },
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}]},
    {"messages": [USER, {"role": "assistant", "content": "Four.", "reasoning_content": "2+2=4"}]},
    {"messages": [USER, {"role": "assistant", "content": "Four.", "reasoning": "2+2=4"}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}]},
    {"messages": [USER], "variables": {"enable_thinking": False}},
    {"messages": [USER], "variables": {"date_string": "1 Jan 2024", "tools_in_user_message": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}, {"role": "note"}]},
    {"messages": [{"role": "note", "content": "x"}, USER, {"role": "end", "content": "y"}, USER]},
]  # fmt: skip


def transformers_tokenizer(source: str, tokens: dict[str, str]) -> transformers.PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=source, **tokens)


def rendered(tokenizer: transformers.PreTrainedTokenizerFast, case: dict[str, Any]) -> dict[str, str]:
    try:
        text = tokenizer.apply_chat_template(
            case["messages"], tools=case.get("tools"), tokenize=False, **case.get("variables", {}),
            add_generation_prompt=case.get("add_generation_prompt", True),
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError) as error:
        return {"error": str(error) if isinstance(error, jinja2.TemplateError) else ""}
    return {"text": str(text)}


def cases(source: str, tokens: dict[str, str]) -> list[dict[str, Any]]:
    tokenizer = transformers_tokenizer(source, tokens)
    return [{**case, **rendered(tokenizer, case)} for case in CONVERSATIONS]


def real_template(name: str) -> dict[str, Any]:
    path = fetch(name)
    metadata = read_header(path).metadata
    words = metadata["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{role}_token": words[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    source = metadata.get("tokenizer.chat_template") or template_for(words)
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    made = cases(str(source), tokens)
    for case in made:
        if "text" in case:
            case["ids"] = llama.tokenize(case["text"].encode(), add_bos=False, special=True)
    return {"source": str(source), "tokens": tokens, "cases": made}


def main() -> None:
    value = {name: {"source": s, "tokens": TOKENS, "cases": cases(s, TOKENS)} for name, s in WRITTEN_HERE.items()}
    for name in ("smollm2", "gemma3-270m"):
        value[name] = real_template(name)
    text = json.dumps(value, ensure_ascii=True, indent=1)
    (HERE / "tokenizer_chat.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
