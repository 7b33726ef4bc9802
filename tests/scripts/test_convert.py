"""convert.py: every way round gives the same parameters, configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from umbra.model.load import Model, load_model, open_source
from umbra.scripts.convert import main

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("gemma3", "llama", "llama3", "qwen2", "qwen3")
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder_with_tokenizer(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(GOLDEN / "hf_qwen2", tmp_path / "qwen2"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:80]
    core = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def converted(source: object, destination: Path, *options: str) -> Path:
    assert main([str(source), str(destination), *options]) == 0
    return destination


def assert_same(found: Model, want: Model) -> None:
    assert found.params.keys() == want.params.keys()
    for path, value in want.params.items():
        np.testing.assert_array_equal(found.params[path], value, err_msg=path)
    assert found.eos_ids == want.eos_ids
    assert (found.tokenizer is None) == (want.tokenizer is None)
    if found.tokenizer is not None and want.tokenizer is not None:
        text = "Hello, world <|im_end|>"
        for special in (False, True):
            assert found.tokenizer.encode(text, special=special) == want.tokenizer.encode(text, special=special)
        assert found.chat_template is not None and want.chat_template is not None
        messages = [{"role": "user", "content": "Hi"}]
        assert found.chat_template.render(messages) == want.chat_template.render(messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_all_formats(tmp_path: Path, family: str) -> None:
    source = GOLDEN / f"hf_{family}"
    want = load_model(str(source))
    through_gguf = converted(source, tmp_path / "a.gguf")
    assert_same(load_model(str(through_gguf)), want)
    through_orbax = converted(through_gguf, tmp_path / "b.orbax")
    assert_same(load_model(str(through_orbax)), want)
    if family == "llama3":  # its rope scaling has become a table, which config.json cannot express
        return
    back = converted(through_orbax, tmp_path / "c")
    model = load_model(str(back))
    assert_same(model, want)
    assert {**vars(model.config), "name": ""} == {**vars(want.config), "name": ""}


def test_types_are_kept_or_changed(tmp_path: Path) -> None:
    source = GOLDEN / "hf_qwen2"  # bfloat16
    kept = converted(source, tmp_path / "kept")
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"
    assert open_source(str(kept)).weights_id() == open_source(str(source)).weights_id()
    orbax = converted(source, tmp_path / "kept.orbax")
    assert open_source(str(orbax)).weights_id() == open_source(str(source)).weights_id()
    wide = converted(source, tmp_path / "wide.gguf", "--dtype", "float32")
    reader = gguf.GGUFReader(wide)
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32"}
    rounded = converted(GOLDEN / "hf_llama", tmp_path / "rounded.orbax", "--dtype", "float16")
    assert open_source(str(rounded)).weights_id() != open_source(str(GOLDEN / "hf_llama")).weights_id()
    assert open_source(str(rounded)).exact_dtype("layers.q") == np.float16


def test_the_written_gguf_is_what_the_gguf_package_expects(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(converted(GOLDEN / "hf_gemma3", tmp_path / "gemma.gguf"))
    assert reader.fields["general.architecture"].contents() == "gemma3"
    assert reader.fields["gemma3.attention.key_length"].contents() == 16
    assert reader.fields["gemma3.attention.sliding_window_pattern"].contents() == [True, False, True, False]
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == "BF16"
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_the_tokenizer_goes_along(tmp_path: Path, folder_with_tokenizer: Path) -> None:
    want = load_model(str(folder_with_tokenizer))
    assert want.tokenizer is not None
    through_gguf = converted(folder_with_tokenizer, tmp_path / "a.gguf")
    assert_same(load_model(str(through_gguf)), want)
    through_orbax = converted(through_gguf, tmp_path / "b.orbax")
    assert_same(load_model(str(through_orbax)), want)
    back = converted(through_orbax, tmp_path / "c")
    assert_same(load_model(str(back)), want)
    assert (back / "tokenizer.json").read_bytes() == (folder_with_tokenizer / "tokenizer.json").read_bytes()


def test_a_gguf_tokenizer_goes_along(tmp_path: Path) -> None:
    plain = gguf.GGUFReader(converted(GOLDEN / "hf_qwen2", tmp_path / "plain.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "source.gguf", "qwen2")
    for name, field in plain.fields.items():
        if name.startswith("qwen2."):
            writer.add_key_value(name, field.contents(), field.types[0])
    letters = [chr(c) for c in range(ord("!"), ord("!") + 92)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġ"])
    writer.add_token_types([3, 3, 3] + [1] * 93)
    writer.add_token_merges(["H e", "l l"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for tensor in plain.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = load_model(str(tmp_path / "source.gguf"))
    assert want.eos_ids == (0, 2)
    folder = converted(tmp_path / "source.gguf", tmp_path / "folder")
    assert_same(load_model(str(folder)), want)
    back = converted(converted(folder, tmp_path / "b.orbax"), tmp_path / "back.gguf")
    assert_same(load_model(str(back)), want)
    fields = gguf.GGUFReader(back).fields
    assert fields["tokenizer.ggml.tokens"].contents(slice(0, 3)) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["SRC"], 2, "DST"),
        (["SRC", "out.gguf", "--to", "hf"], 2, "agreeing names"),
        (["SRC", "out", "--to", "gguf"], 2, "must end in .gguf"),
        (["SRC", "out", "--dtype", "int4"], 2, "int4"),
        (["tiny", "out"], 1, "random numbers"),
        (["nothing", "out"], 1, "supported: smollm2"),
        (["SRC", "SRC"], 1, "exists; pass --force"),
        (["SRC", "SRC", "--force"], 1, "one in the other"),
        (["SRC/../hf_mistral", "out.gguf"], 1, "sliding window, which GGUF files of the architecture llama"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str
) -> None:
    replaced = [argument.replace("SRC", str(GOLDEN / "hf_llama")) for argument in arguments]
    placed = [str(tmp_path / argument) if argument.startswith("out") else argument for argument in replaced]
    try:
        result = main(placed)
    except SystemExit as exit:
        result = exit.code
    assert result == code
    message = capsys.readouterr().err
    assert expected in message
    assert len(message.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_force_replaces_a_whole_folder(tmp_path: Path) -> None:
    converted(GOLDEN / "hf_llama", tmp_path / "out")
    (tmp_path / "out" / "left.txt").write_text("from before")
    converted(GOLDEN / "hf_qwen2", tmp_path / "out", "--force")
    assert not (tmp_path / "out" / "left.txt").exists()
    assert load_model(str(tmp_path / "out")).config.family == "qwen2"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["out"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "hf_llama", tmp_path / "source"))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    for name in ("out.gguf", "out", "out.orbax"):
        assert main([str(folder), str(tmp_path / name)]) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["source"]
