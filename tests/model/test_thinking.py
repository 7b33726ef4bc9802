"""How models are made to think: prompts, and the ends of thoughts in token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbra.configs.levels import MAX_CLOSE, MAX_CLOSE_TOKENS, MAX_CONCLUDE_TOKENS
from umbra.model.chat_template import ChatTemplate, ChatTemplateError
from umbra.model.gguf_header import read_header
from umbra.model.thinking import Thinker
from umbra.model.tokenizer import Tokenizer
from umbra.model.vocabulary import byte_of_char
from umbra.serving.engine.thoughts import Thinking, ThoughtEnd

GOLDEN = Path(__file__).parents[1] / "golden"
WITH_MARKERS = Tokenizer.from_file(GOLDEN / "tokenizer_hf_byte_level")
SENTENCE_PIECE = Tokenizer.from_file(GOLDEN / "tokenizer_hf_sentence_piece")

TURNS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
"""
PLAIN = TURNS + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
SWITCHED = (
    TURNS + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{%- endif -%}"
)
ALWAYS = (
    TURNS + "{%- if '</think>' in messages[-1].content -%}{{ raise_exception('a marker') }}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2 + 3?"},
]


def byte_tokenizer(*more: str) -> Tokenizer:
    """Every byte is a token, and so are `more`."""
    tokens = [*byte_of_char(), *more]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 256 + [3] * len(more),
        "merges": [],
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in metadata.items()})


def text(tokenizer: Tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("source", [SWITCHED, ALWAYS])
def test_native_markers_are_single_tokens(source):
    thinker = Thinker(WITH_MARKERS, ChatTemplate(source))
    end = WITH_MARKERS.encode("</think>", special=True)
    assert thinker.kind == "native" and thinker.close == (tuple(end),) and len(end) == 1
    assert all(ids[-1] == end[0] for ids in thinker.conclusions)


@pytest.mark.parametrize("source", [SWITCHED, ALWAYS])
def test_native_prompts(source):
    thinker = Thinker(WITH_MARKERS, ChatTemplate(source))
    turns = text(WITH_MARKERS, ChatTemplate(TURNS).encode(WITH_MARKERS, CONVERSATION))
    on, off = (text(WITH_MARKERS, thinker.encode(CONVERSATION, thinking=one)) for one in (True, False))
    assert on == turns + "<|im_start|>assistant\n<think>\n"
    assert off.removeprefix(turns + "<|im_start|>assistant\n<think>\n").strip() == "</think>" and off.endswith("\n\n")


def test_a_variable_of_the_request_beats_the_switch():
    thinker = Thinker(WITH_MARKERS, ChatTemplate(SWITCHED))
    ids = thinker.encode(CONVERSATION, thinking=False, enable_thinking=True)
    assert text(WITH_MARKERS, ids).endswith("<|im_start|>assistant\n")


def test_a_switch_without_markers_in_the_template_is_native():
    source = PLAIN + "{%- if enable_thinking -%}{%- endif -%}"
    assert Thinker(WITH_MARKERS, ChatTemplate(source)).kind == "native"
    assert Thinker(WITH_MARKERS, ChatTemplate(PLAIN + "{{- thinking -}}")).kind == "generic"


def test_generic_prompts_ask_in_the_last_user_message():
    thinker = Thinker(WITH_MARKERS, ChatTemplate(PLAIN))
    assert thinker.kind == "generic"
    before = [dict(message) for message in CONVERSATION]
    on = text(WITH_MARKERS, thinker.encode(CONVERSATION, thinking=True))
    plain = text(WITH_MARKERS, ChatTemplate(PLAIN).encode(WITH_MARKERS, CONVERSATION))
    head, _, tail = on.partition("2 + 3?\n\nThink step by step first.")
    assert plain.startswith(head) and f'"{thinker.close_text}"' in tail
    assert on.endswith(f"<|im_end|>\n<|im_start|>assistant\n{thinker.open_text}\n")
    assert before == CONVERSATION, "the caller's messages stay"
    assert text(WITH_MARKERS, thinker.encode(CONVERSATION, thinking=False)) == plain


def test_generic_prompts_without_a_user_message_and_with_parts():
    thinker = Thinker(WITH_MARKERS, ChatTemplate(PLAIN))
    on = text(WITH_MARKERS, thinker.encode([{"role": "system", "content": "Be kind."}], thinking=True))
    assert on.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nThink step by step first.")
    source = "{%- for part in messages[0].content -%}{{ part.text }}|{%- endfor -%}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    thinker = Thinker(WITH_MARKERS, ChatTemplate(source))
    on = text(WITH_MARKERS, thinker.encode(parts, thinking=True))
    assert on.startswith("Hi|\n\nThink step by step") and on.endswith(f"|{thinker.open_text}\n")


def test_a_written_out_opening_marker_is_the_models_token_only_at_the_end():
    tokenizer = byte_tokenizer("<think>", "</think>", "<|im_start|>", "<|im_end|>")
    thinker = Thinker(tokenizer, ChatTemplate(SWITCHED))
    ids = thinker.encode([{"role": "user", "content": "say <think>"}], thinking=True)
    assert ids.count(256) == 1 and ids[-2:] == [256, *tokenizer.encode("\n")]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), SENTENCE_PIECE], ids=["bytes", "sentence piece"])
def test_every_conclusion_can_be_forced(tokenizer):
    thinker = Thinker(tokenizer, ChatTemplate(PLAIN))
    if not thinker.close:
        pytest.skip("this vocabulary cannot write the marker in so few tokens")
    assert 1 <= len(thinker.close) <= MAX_CLOSE and all(len(close) <= MAX_CLOSE_TOKENS for close in thinker.close)
    for conclusion in thinker.conclusions:
        assert len(conclusion) <= MAX_CONCLUDE_TOKENS
        Thinking(1, thinker.close, conclusion)
        assert tokenizer.decode(conclusion).endswith(thinker.close_text)


@pytest.mark.parametrize("source", [PLAIN, SWITCHED])
def test_a_budget_holds_thoughts_and_their_conclusion(source):
    thinker = Thinker(WITH_MARKERS, ChatTemplate(source))
    lengths = [len(ids) for ids in thinker.conclusions]
    assert lengths == sorted(lengths, reverse=True)
    for budget in range(2 * lengths[0] + 2):
        conclusion = thinker.conclusion(budget)
        assert len(conclusion) < max(1, budget) and bool(conclusion) == (budget > lengths[-1])
        assert 2 * len(conclusion) <= budget or conclusion in ((), thinker.conclusions[-1])
    assert thinker.conclusion(2 * lengths[0]) == thinker.conclusions[0]


def test_a_vocabulary_of_bytes_gets_the_short_markers_and_the_short_conclusion():
    tokenizer = byte_tokenizer()
    for source in (PLAIN, SWITCHED):
        thinker = Thinker(tokenizer, ChatTemplate(source))
        assert (thinker.open_text, thinker.close_text) == ("<think>", "</think>")
        assert tokenizer.decode(thinker.conclusions[0]).strip() == "</think>"


class Long:
    """A vocabulary that needs two tokens for each byte."""

    def encode(self, text, *, special=False, add_bos=False):
        return [token for byte in text.encode() for token in (256 + byte // 16, 272 + byte % 16)]

    def token_bytes(self, token):
        return b"?"


def test_a_vocabulary_that_cannot_think():
    source = ChatTemplate(PLAIN)
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    thinker = Thinker(tokenizer, source)
    thinker.close = ()
    with pytest.raises(ValueError, match="more than 8 tokens for '</think>'.*supported for this model: no thinking"):
        thinker.encode(CONVERSATION, thinking=True)
    assert thinker.encode(CONVERSATION, thinking=False) == source.encode(tokenizer, CONVERSATION)
    assert Thinker(Long(), source).close == () and Thinker(Long(), source).conclusions == ()
    assert Thinker(Long(), source).conclusion(100) == ()


def test_a_template_that_refuses_everything_can_still_be_held():
    thinker = Thinker(WITH_MARKERS, ChatTemplate("{{ raise_exception('no') }}"))
    with pytest.raises(ChatTemplateError, match="no"):
        thinker.encode(CONVERSATION, thinking=True)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_models_end_their_thoughts_however_they_write_the_marker(name):
    tokenizer, thinker = real(name)
    assert (thinker.kind, thinker.close_text) == ("generic", "Final answer:")
    for before in ("", "a.", "a\n", "a.\n\n", "a ", "b. ", "(b) "):
        for after in ("", "\n", "\n\n", " a", "\n1.", "\n\n**a**", " **a**", " $x$"):
            ends = ThoughtEnd(thinker.close)
            ids = tokenizer.encode(before + thinker.close_text + after)
            found = [i for i, token in enumerate(ids) if ends.push(token)]
            assert len(found) == 1, (before, after)
            assert tokenizer.decode(ids[: found[0] + 1]).rstrip().endswith(thinker.close_text)


REAL: dict[str, tuple[Tokenizer, Thinker]] = {}


def real(name: str) -> tuple[Tokenizer, Thinker]:
    from umbra.model.weights.fetch import fetch

    if name not in REAL:
        metadata = read_header(fetch(name)).metadata
        tokenizer = Tokenizer.from_gguf(metadata)
        template = ChatTemplate.from_gguf(metadata, tokenizer)
        assert template is not None
        REAL[name] = tokenizer, Thinker(tokenizer, template)
    return REAL[name]
