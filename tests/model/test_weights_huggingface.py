"""Hugging Face folders: configurations old and new, files whole, sharded and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from umbra.configs.trunk import GLOBAL, LOCAL, RopeScaling
from umbra.model.load import ModelError, load_model
from umbra.model.weights import huggingface, safetensors
from umbra.model.weights.hf_config import to_hf, trunk_config
from umbra.model.weights.huggingface import open_folder
from umbra.model.weights.plan import floats

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("gemma3", "llama", "llama3", "mistral", "qwen2", "qwen3")
FLOAT32 = np.dtype(np.float32)


def config_json(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"hf_{name}" / "config.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny llama, to be damaged."""
    return Path(shutil.copytree(GOLDEN / "hf_llama", tmp_path / "model"))


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_the_stored_tensors(name: str) -> None:
    source = open_folder(GOLDEN / f"hf_{name}")
    params = source.load(floats(source.config, FLOAT32), None, None)
    stored: dict[str, np.ndarray] = {}
    for file in (GOLDEN / f"hf_{name}").glob("*.safetensors"):
        stored |= load_file(file)
    prefix = "model.layers.1."
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"].astype(np.float32))
    q = stored[prefix + "self_attn.q_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layers.q"][1].reshape(q.shape), q)
    o = stored[prefix + "self_attn.o_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layers.o"][1].reshape(o.shape), o)
    norm = stored[prefix + "input_layernorm.weight"].astype(np.float32) + (1.0 if name == "gemma3" else 0.0)
    np.testing.assert_array_equal(params["layers.attn_norm"][1], norm)
    assert ("head" in params) == (name in ("llama", "mistral", "qwen3"))


def test_end_ids_come_from_the_configuration() -> None:
    model = load_model(str(GOLDEN / "hf_llama"))
    assert model.tokenizer is None
    assert model.eos_ids == (2,)


def test_bfloat16_is_kept_as_it_is() -> None:
    source = open_folder(GOLDEN / "hf_qwen2")
    assert source.exact_dtype("layers.q") == ml_dtypes.bfloat16
    stored = load_file(GOLDEN / "hf_qwen2" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(source.read("final_norm", np.dtype(ml_dtypes.bfloat16)), stored)


@pytest.mark.parametrize("name", FAMILIES)
def test_configuration_survives_being_written(name: str) -> None:
    config = trunk_config(config_json(name), "model")
    assert trunk_config(json.loads(json.dumps(to_hf(config, "float32", (2,), 1))), "model") == config


def test_gemma_configuration_as_before_transformers_5() -> None:
    old = dict(
        model_type="gemma3_text", vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6,
        sliding_window=512, query_pre_attn_scalar=256, rope_theta=1000000.0, rope_local_base_freq=10000.0,
        sliding_window_pattern=6, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    config = trunk_config(old, "gemma3-270m")
    from umbra.configs.models import named

    assert config == named("gemma3-270m")


def test_gemma_image_models_give_their_text_part() -> None:
    text = dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, sliding_window=1024,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    config = trunk_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "gemma-3-4b")
    assert (config.vocab_size, config.head_dim, config.context_length) == (262208, 256, 131072)
    assert config.rope_scaling == RopeScaling("linear", factor=8.0)
    assert config.layer_pattern == (LOCAL,) * 5 + (GLOBAL,)


def test_llama3_scaling_in_both_forms() -> None:
    new = config_json("llama3")
    scaling = {key: value for key, value in new["rope_parameters"].items() if key != "rope_theta"}
    old = {**new, "rope_parameters": None, "rope_scaling": scaling, "rope_theta": 10000.0}
    assert trunk_config(old, "m") == trunk_config(new, "m")
    assert trunk_config(new, "m").rope_scaling == RopeScaling("llama3", factor=8.0, original_context=32)


def test_qwen_windows_begin_at_a_layer() -> None:
    config = {**config_json("qwen3"), "layer_types": None, "use_sliding_window": True, "sliding_window": 9}
    assert trunk_config({**config, "max_window_layers": 2}, "m").layer_types == (GLOBAL, GLOBAL, LOCAL)
    assert trunk_config({**config, "use_sliding_window": False}, "m").sliding_window is None


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_image_models_are_read_without_their_image_part(tmp_path: Path, prefix: str) -> None:
    stored = load_file(GOLDEN / "hf_gemma3" / "model.safetensors")
    tensors = {prefix + name.removeprefix("model."): value for name, value in stored.items()}
    tensors["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "gemma3", "text_config": config_json("gemma3")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, plain = open_folder(tmp_path), open_folder(GOLDEN / "hf_gemma3")
    for path in plain.pieces:
        np.testing.assert_array_equal(found.read(path, FLOAT32), plain.read(path, FLOAT32))


CONFIGS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "mamba"}, "'mamba'; supported: gemma3, gemma3_text, llama"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config'"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "'yarn'; supported: default, linear"),
    "activation": ({"hidden_act": "relu"}, "'hidden_act' is 'relu'; supported: silu"),
    "width": ({"hidden_size": -4}, "'hidden_size' must be a positive whole number, got -4"),
    "layers": ({"num_hidden_layers": "3"}, "'num_hidden_layers' must be"),
    "heads": ({"num_key_value_heads": 3}, "not a multiple"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    "rope": ({"rope_parameters": 3}, "'rope_parameters' must be an object"),
    "head": ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
    "shrinking rope": ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
}


@pytest.mark.parametrize("case", CONFIGS_REFUSED)
def test_a_configuration_that_is_not_supported_is_refused(folder: Path, case: str) -> None:
    changes, expected = CONFIGS_REFUSED[case]
    edit(folder, **changes)
    with pytest.raises(ModelError) as error:
        open_folder(folder)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def damage(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FILES_REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (damage(lambda t: t.pop("model.layers.2.mlp.up_proj.weight")), "model.layers.2.mlp.up_proj.weight"),
    "head": (damage(lambda t: t.pop("lm_head.weight")), "no tensor 'lm_head.weight'"),
    "shape": (damage(lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)})), "'model.norm.weight' has"),
    "type": (damage(lambda t: t.update({"model.norm.weight": np.zeros(32, np.int8)})), "has type I8; supported: F32"),
    "bias": (
        damage(lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(32, np.float32)})),
        "'model.layers.0.self_attn.o_proj.bias' is not part",
    ),
    "truncated": (truncate, "is truncated or damaged: tensor"),
    "pickle": (pickled, "pytorch_model.bin; supported: safetensors"),
    "json": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object, got list"),
    "tokenizer": (lambda f: (f / "tokenizer.model").write_text("x"), "no tokenizer.json; supported"),
}


@pytest.mark.parametrize("case", FILES_REFUSED)
def test_damaged_folders_are_refused(folder: Path, case: str) -> None:
    change, expected = FILES_REFUSED[case]
    change(folder)
    with pytest.raises(ModelError) as error:
        load_model(str(folder))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_shard_that_is_missing_or_outside_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "hf_qwen3", tmp_path / "model"))
    (folder / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00005.safetensors cannot be read"):
        open_folder(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../model-00002"))
    with pytest.raises(ModelError, match="points outside its folder"):
        open_folder(folder)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        "\xff",
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
    ],
)
def test_damaged_safetensors_headers_are_refused(tmp_path: Path, header: str) -> None:
    raw = header.encode("latin-1")
    (tmp_path / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0\0\0\0")
    with pytest.raises(ModelError):
        safetensors.read_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("cut", [0, 4, 8, 30])
def test_truncated_safetensors_headers_are_refused(tmp_path: Path, cut: int) -> None:
    content = (GOLDEN / "hf_llama" / "model.safetensors").read_bytes()[:cut]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="truncated or no safetensors file"):
        safetensors.read_tensors(tmp_path / "a.safetensors")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match="the hub cannot be reached and 'hf:org/name' is not in") as error:
        load_model("hf:org/name")
    assert "\n" not in str(error.value)


def test_what_the_hub_gives_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "download", lambda name: GOLDEN / f"hf_{name.rpartition('/')[2]}")
    assert load_model("hf:org/qwen2").config.family == "qwen2"
