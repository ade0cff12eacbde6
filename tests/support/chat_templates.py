"""Chat templates in the shapes that published models have, written for the tests.

Owns: the texts, the special tokens that they write, and a chat with tools to fill them with.
Nothing of kqview.
"""

from __future__ import annotations

from textwrap import dedent
from typing import Any

# ChatML with tools, as Qwen's: whitespace control, a default system message, the words before
# "</think>" cut from earlier answers, tool calls and answers inside of messages.
QWEN = dedent(
    """\
    {%- if tools %}
        {{- '<|im_start|>system\\n' }}
        {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
        {{- '# Tools\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
        {{- '\\n</tools><|im_end|>\\n' }}
    {%- elif messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {%- for message in messages %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
            {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
        {%- elif message.role == 'assistant' %}
            {%- if '</think>' in content %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- for call in message.tool_calls or [] %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {{- call.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>\\n' }}
        {%- elif message.role == 'tool' %}
            {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endfor %}
    {%- if add_generation_prompt %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if enable_thinking is defined and not enable_thinking %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
    {%- endif %}"""
)

# Headers, a trimmed content, the date, text outside of expressions.
LLAMA3 = dedent(
    """\
    {{- bos_token }}
    {%- for message in messages %}
    <|start_header_id|>{{ message['role'] }}<|end_header_id|>

    {{ message['content'] | trim }}<|eot_id|>
    {%- endfor %}
    {%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {%- endif %}"""
)

# No system role, other role names, parts allowed, refusals.
GEMMA = dedent(
    """\
    {{ bos_token }}
    {%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
    {%- for message in messages %}
        {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{- raise_exception('roles must alternate user/assistant') }}
        {%- endif %}
        {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
        {{- '<start_of_turn>' + role + '\\n' }}
        {%- if message['content'] is string %}
            {{- message['content'] | trim }}
        {%- else %}
            {%- for part in message['content'] %}
                {%- if part.type == 'text' %}{{- part.text | trim }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<end_of_turn>\\n' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
)

# Brackets, macros, namespaces, list operations; arguments as JSON.
MISTRAL = dedent(
    """\
    {%- macro inst(text) %}{{ '[INST]' ~ text ~ '[/INST]' }}{%- endmacro %}
    {%- set ns = namespace(system='') %}
    {{- bos_token }}
    {%- for message in messages %}
        {%- if message.role == 'system' %}
            {%- set ns.system = message.content ~ '\\n\\n' %}
            {%- continue %}
        {%- elif message.role == 'user' %}
            {{- inst((ns.system if loop.last else '') ~ message.content) }}
        {%- elif message.tool_calls %}
            {{- '[TOOL_CALLS]' ~ (message.tool_calls | map(attribute='function') | list | tojson) }}
            {{- eos_token }}
        {%- elif message.role == 'assistant' %}
            {%- generation %}
            {{- ' ' ~ message.content ~ eos_token }}
            {%- endgeneration %}
        {%- endif %}
    {%- endfor %}"""
)

# Special tokens that are put together from the role.
PHI = dedent(
    """\
    {% for message in messages %}
    {{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n' }}
    {%- endfor %}
    {% if add_generation_prompt %}{{ '<|assistant|>' + '\\n' }}{% endif %}"""
)

# Knows only lists of parts.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: "
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}<|im_end|>{% endfor %}"
)

# Writes arguments as the text that they are for some models.
DEEPSEEK = (
    "{% for m in messages %}<|im_start|>{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c['function']['name'] + ' ' + c['function']['arguments'] }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)

SPECIALS = (
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)

# The frame of gpt-oss's messages; which calls it writes is for a test to add.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)

# A chat to fill them with, and two tools to choose from.
HELLO = [{"role": "user", "content": "Who?"}]
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 5}},
            "required": ["word"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [LOOK_UP, STOP]

# Programs that would never end, or take all memory; each in few bytes, most in one call of C.
_DOUBLED = (
    "{% set n = namespace(a=[], b=[], t='a') %}{% for i in range(40) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% set n.t = n.t ~ n.t %}{% endfor %}"
)
_NESTED = _DOUBLED.replace("{% set n.t = n.t ~ n.t %}", "")
HOSTILE = {
    "comparison": _NESTED + "{{ n.a == n.b }}",
    "sort": _NESTED + "{{ [n.a, n.b] | sort | length }}",
    "groupby": _NESTED + "{{ [{'x': n.a}, {'x': n.b}] | groupby('x') | length }}",
    "tojson": _NESTED + "{{ n.a | tojson | length }}",
    "string": _NESTED + "{{ n.a | string | length }}",
    "urlize": "{{ (')' * 10 ** 6 ~ 'a)') | urlize | length }}",
    "power": "{{ 9 ** (9 ** 9) > 0 }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": (
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n + 1) if n < 99 }}{% endfor %}{% endmacro %}"
        "{{ m(0) }}"
    ),
    "doubled text": _DOUBLED + "{{ n.t | length }}",
    "kept texts": (
        "{% set n = namespace(a=[]) %}{% for i in range(9999) %}"
        "{% set n.a = n.a + ['a' * (9999999 + i)] %}{% endfor %}{{ n.a | length }}"
    ),
    "long text": "{{ 'a' * 10 ** 9 }}",
    "long list": "{{ [0] * 10 ** 9 }}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "join": "{{ range(99999) | join('a' * 100000) }}",
    "long output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
}
