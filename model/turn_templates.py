"""Chat templates for files that have none but whose vocabulary has the markers of turns.

They write the published turn formats of the two families; a system message of Gemma opens the first user turn.
"""

from __future__ import annotations

from collections.abc import Collection

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

_GEMMA = """\
{{- bos_token -}}
{%- set state = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set state.system = state.system + message['content'] | trim + '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + state.system + message['content'] | trim + '<end_of_turn>\\n' }}
{%- set state.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

_BY_MARKERS = ((("<start_of_turn>", "<end_of_turn>"), _GEMMA), (("<|im_start|>", "<|im_end|>"), _CHATML))


def template_for(special_tokens: Collection[str]) -> str | None:
    """The template whose turn markers are among `special_tokens`, or None."""
    for markers, source in _BY_MARKERS:
        if all(marker in special_tokens for marker in markers):
            return source
    return None
