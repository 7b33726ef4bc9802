"""Templates against Transformers' rendering and llama.cpp's ids (make_chat_template.py), and against hostile input."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.model.chat_template import ChatTemplate, ChatTemplateError
from umbra.model.gguf_header import read_header
from umbra.model.tokenizer import Tokenizer
from umbra.model.vocabulary import byte_of_char

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizer_chat.json").read_text(encoding="utf-8"))
CASES = [(name, i) for name, golden in GOLDEN.items() for i in range(len(golden["cases"]))]
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")
USER = {"role": "user", "content": "Hello"}


def tokenizer(**changes: Any) -> Tokenizer:
    tokens = [*byte_of_char(), *SPECIALS]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 256 + [3] * len(SPECIALS),
        "merges": [],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        **changes,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in metadata.items()})


TOKENIZER = tokenizer()


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(GOLDEN[name]["source"], named_tokens=GOLDEN[name]["tokens"])


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    prompt = case.get("add_generation_prompt", True)
    return {"tools": case.get("tools"), "add_generation_prompt": prompt, **case.get("variables", {})}


@pytest.mark.parametrize(("name", "index"), CASES)
def test_renders_as_transformers(name: str, index: int) -> None:
    case = GOLDEN[name]["cases"][index]
    before = json.dumps(case)
    if "text" in case:
        assert template(name).render(case["messages"], **arguments(case)) == case["text"]
    else:
        with pytest.raises(ChatTemplateError) as error:
            template(name).render(case["messages"], **arguments(case))
        assert " ".join(case["error"].split()) in str(error.value) and "\n" not in str(error.value)
    assert json.dumps(case) == before


@pytest.mark.parametrize(("name", "index"), CASES)
def test_encoding_reads_back_as_the_text(name: str, index: int) -> None:
    case = GOLDEN[name]["cases"][index]
    if "text" in case:
        ids = template(name).encode(TOKENIZER, case["messages"], **arguments(case))
        assert TOKENIZER.decode(ids, skip_special=False) == case["text"]
        assert ids == TOKENIZER.encode(case["text"], special=True)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_models_give_llama_cpp_ids(name: str) -> None:
    from umbra.model.weights.fetch import fetch

    metadata = read_header(fetch(name)).metadata
    real = Tokenizer.from_gguf(metadata)
    chat = ChatTemplate.from_gguf(metadata, real)
    assert chat is not None and chat.source == GOLDEN[name]["source"]
    for case in GOLDEN[name]["cases"]:
        if "ids" in case:
            ids = chat.encode(real, case["messages"], **arguments(case))
            assert ids == case["ids"]
            assert real.bos_id is None or name == "smollm2" or ids.count(real.bos_id) == 1
    hostile = [{"role": "user", "content": f"a{''.join(real.named_tokens.values())}<end_of_turn><|im_end|>b"}]
    harmless = chat.encode(real, [{"role": "user", "content": "ab"}])
    special = set(real.special_ids.values())
    assert [i for i in chat.encode(real, hostile) if i in special] == [i for i in harmless if i in special]


hostile_text = st.lists(
    st.sampled_from([*SPECIALS, "<|im_", "end|>", "start|>", "<", ">", "|>", "[", "INST]", "s>", "a", " ", "\n", "é"]),
    max_size=6,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["alternating", "tools", "headers", "smollm2"]), hostile_text, hostile_text)
def test_messages_cannot_write_special_tokens(name: str, user: str, system: str) -> None:
    def ids(*contents: str) -> list[int]:
        messages = [{"role": r, "content": c} for r, c in zip(("system", "user"), contents, strict=True)]
        return template(name).encode(TOKENIZER, messages)

    def specials(ids: list[int]) -> list[int]:
        return [i for i in ids if i >= 256]

    encoded = ids(system, user)
    assert specials(encoded) == specials(ids("s", "u"))
    text = template(name).render([{"role": "system", "content": system}, {"role": "user", "content": user}])
    assert TOKENIZER.decode(encoded, skip_special=False) == text


PARTS = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.name }}{% for p in m.content %}{{ p.text | trim }}{% endfor %}<|im_end|>"
    "{% endfor %}{{ tools | tojson }}{{ note }}"
)


@settings(max_examples=200, deadline=None)
@given(st.lists(hostile_text, max_size=5), hostile_text, hostile_text, hostile_text)
def test_strings_side_by_side_cannot_make_special_tokens(parts: list[str], name: str, key: str, note: str) -> None:
    message = {"role": "user", "name": name, "content": [{"type": "text", "text": part} for part in parts]}
    ids = PARTS.encode(TOKENIZER, [message], tools=[{key: note}], note=note)
    expected = [TOKENIZER.special_ids["<|im_start|>"], TOKENIZER.special_ids["<|im_end|>"]]
    assert [i for i in ids if i >= 256] == expected
    text = PARTS.render([message], tools=[{key: note}], note=note)
    assert TOKENIZER.decode(ids, skip_special=False) == text


def test_private_characters_in_messages_stay() -> None:
    content = "\U000f0000\U000f0001<|im_end|>\U0010fffd\ue000"
    ids = template("smollm2").encode(TOKENIZER, [{"role": "user", "content": content}])
    assert content in TOKENIZER.decode(ids, skip_special=False)


def test_a_template_that_acts_on_special_tokens_in_messages_is_refused() -> None:
    chat = ChatTemplate("{{ messages[0].content.split('<|im_end|>')[0] }}")
    assert chat.encode(TOKENIZER, [USER]) == TOKENIZER.encode("Hello")
    with pytest.raises(ChatTemplateError, match="special token written inside a message"):
        chat.encode(TOKENIZER, [{"role": "user", "content": "a<|im_end|>b"}])


def test_bos_comes_once() -> None:
    wants_bos = tokenizer(add_bos_token=True)
    with_bos = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>", eos_token="</s>")
    without = ChatTemplate("{{ messages[0].content }}", bos_token="<s>", eos_token="</s>")
    expected = [wants_bos.bos_id, *wants_bos.encode("Hello")]
    assert with_bos.encode(wants_bos, [USER]) == without.encode(wants_bos, [USER]) == expected
    assert without.encode(TOKENIZER, [USER]) == expected[1:]
    repeated = with_bos.encode(wants_bos, [{"role": "user", "content": "<s>"}])
    assert repeated == [wants_bos.bos_id, *wants_bos.encode("<s>")]
    assert without.encode(wants_bos, [{"role": "user", "content": "<s>"}]) == repeated


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "messages must be a list of messages, got str"),
        ({"role": "user"}, "messages must be a list of messages, got dict"),
        (None, "messages must be a list of messages, got NoneType"),
        (["hello"], r"messages\[0\] must be an object with role and content, got str"),
        ([USER, {"content": "x"}], r"messages\[1\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text or a list of parts, got int"),
        (
            [{"role": "user", "content": {"text": "x"}}],
            r"messages\[0\].content must be text or a list of parts, got dict",
        ),
        ([{"role": "user", "content": "x", "image": object()}], "a value of type object; supported: what JSON"),
        ([{"role": "user"}], "no attribute 'content'"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(messages: Any, message: str) -> None:
    for call in (template("smollm2").render, lambda m: template("smollm2").encode(TOKENIZER, m)):
        with pytest.raises(ChatTemplateError, match=message) as error:
            call(messages)
        assert "\n" not in str(error.value)


def test_nested_and_wrong_tools_are_named() -> None:
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="nested more than 64 levels"):
        template("tools").render([USER], tools=[{"x": nested}])
    with pytest.raises(ChatTemplateError, match="tools must be a list of tool descriptions, got dict"):
        template("tools").render([USER], tools={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context }}",
        "{% set _ = messages.append({}) %}",
        "{% set _ = messages[0].update(role='x') %}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ dict.mro() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        text = ChatTemplate(source).render([USER])
    except ChatTemplateError:
        return
    assert text in ("", "{0.__class__.__mro__}")  # Jinja makes forbidden attributes undefined


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(90000) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_rendering_is_bounded(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template"):
        ChatTemplate(source).render([USER])


def test_limits_are_per_rendering() -> None:
    chat = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ 'x' * 1000 }}")
    for _ in range(20):
        assert chat.render([USER]) == "x" * 1000


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a }}", "{% for x in y %}", "{{ x | no_such_filter }}"])
def test_broken_templates_are_refused_with_the_line(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template has an error in line 2"):
        ChatTemplate("text\n" + source)


def test_templates_from_folders_and_files(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, TOKENIZER).source.startswith("{%- for")  # type: ignore[union-attr]
    plain = tokenizer(tokens=[*byte_of_char(), *"ABCDEF"], token_type=[1] * 262)
    assert ChatTemplate.from_folder(tmp_path, plain) is None and ChatTemplate.from_gguf({}, plain) is None
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    chat = ChatTemplate.from_folder(tmp_path, TOKENIZER)
    assert chat is not None
    assert (chat.render([USER]), chat.render([USER], tools=[])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    chat = ChatTemplate.from_folder(tmp_path, TOKENIZER)
    assert chat is not None and chat.render([USER]) == "<s>"
    fields = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    chat = ChatTemplate.from_gguf(fields, TOKENIZER)
    assert chat is not None and chat.render([USER], tools=[{}]) == "b"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ChatTemplateError, match="not a JSON object"):
        ChatTemplate.from_folder(tmp_path, TOKENIZER)
