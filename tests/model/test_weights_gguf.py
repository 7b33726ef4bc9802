"""GGUF files made here with `gguf.GGUFWriter`, independently of the project's own writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from umbra.configs.models import named
from umbra.configs.trunk import GLOBAL, LOCAL, RopeScaling, TrunkConfig
from umbra.model.load import ModelError, load_model, random_params
from umbra.model.weights.gguf import open_gguf, supported_types
from umbra.model.weights.plan import floats
from umbra.model.weights.text import load_text

FLOAT32 = np.dtype(np.float32)
_SIZES = dict(vocab_size=40, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=64, context_length=128)
LLAMA = TrunkConfig(name="model", family="llama", head_dim=8, **_SIZES)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True, norm_eps=1e-6)
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", head_dim=16, qk_norm=True, rope_theta=1e6)
GEMMA3 = TrunkConfig(
    name="model", family="gemma3", head_dim=16, activation="gelu_tanh", tied_embeddings=True, qk_norm=True,
    sandwich_norms=True, embed_scale=32**0.5, attention_scale=16**-0.5, rope_theta=1e6, rope_theta_local=1e4,
    sliding_window=16, layer_pattern=(LOCAL,) * 5 + (GLOBAL,), **_SIZES,
)  # fmt: skip
CONFIGS = {config.family: config for config in (LLAMA, QWEN2, QWEN3, GEMMA3)}

NAMES = {
    "embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight",
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight",
    "o": "attn_output.weight", "mlp_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight",
    "down": "ffn_down.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight", "post_mlp_norm": "post_ffw_norm.weight",
}  # fmt: skip


def params_of(config: TrunkConfig) -> dict[str, np.ndarray]:
    """Random parameters; norms and biases too, so that none can be mistaken for another."""
    rng = np.random.default_rng(1)
    shapes = {path: value.shape for path, value in random_params(config).items()}
    return {path: rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}


def llama_permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the conversion to GGUF does to query and key projections of the llama architecture."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(config: TrunkConfig, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the file, by name, in the layout model files have."""
    tensors = {}
    for path, value in params.items():
        short = path.removeprefix("layers.")
        for layer in range(config.n_layers) if short != path else (None,):
            part = value if layer is None else value[layer]
            if short == "o":
                part = part.reshape(config.d_model, -1)
            elif part.ndim == 3:
                part = part.reshape(-1, part.shape[-1])
            elif short.endswith("bias"):
                part = part.reshape(-1)
            if config.family == "llama" and short[:2] in ("q", "k", "q_", "k_") and "norm" not in short:
                part = llama_permuted(part, config.n_heads if short[0] == "q" else config.n_kv_heads)
            tensors[NAMES[short] if layer is None else f"blk.{layer}.{NAMES[short]}"] = part
    return tensors


def fields_of(config: TrunkConfig) -> dict[str, Any]:
    fields = {
        "block_count": config.n_layers, "context_length": config.context_length, "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff, "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads, "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "rope.freq_base": config.rope_theta,
    }  # fmt: skip
    if config.family == "gemma3":
        fields["attention.sliding_window"] = config.sliding_window
    return fields


def tokenizer_fields() -> dict[str, Any]:
    """A byte-level BPE tokenizer of 40 tokens."""
    letters = [chr(c) for c in range(ord("a"), ord("a") + 26)]
    special, unused = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [f"<u{i}>" for i in range(7)]
    tokens = [*special, *letters, "Ġ", "Ċ", "ab", "Ġa", *unused]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 30 + [5] * 7,
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def write(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Matrices are stored as `kind`, vectors as F32; tensors in `raw` are bytes of the type given there."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**{f"{architecture}.{k}": v for k, v in fields.items()}, **(tokenizer or {})}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in tensors.items():
        if raw and name in raw:
            writer.add_tensor(name, value, raw_dtype=raw[name])
        elif value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, config: TrunkConfig, **options: Any) -> dict[str, np.ndarray]:
    params = params_of(config)
    write(path, config.family, fields_of(config), tensors_of(config, params), **options)
    return params


def assert_params(found: Mapping[str, jax.Array], want: Mapping[str, np.ndarray]) -> None:
    assert list(found) == list(want)
    for path, value in want.items():
        assert found[path].dtype == value.dtype, path
        np.testing.assert_array_equal(np.asarray(found[path]), value, err_msg=path)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_loads_to_the_parameters_that_were_written(tmp_path: Path, family: str) -> None:
    params = write_model(tmp_path / "model.gguf", CONFIGS[family])
    source = open_gguf(tmp_path / "model.gguf")
    assert source.config == CONFIGS[family]
    assert_params(source.load(floats(source.config, FLOAT32), None, None), params)


def test_llama_with_biases_is_permuted_too(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, qkv_bias=True)
    params = write_model(tmp_path / "model.gguf", config)
    source = open_gguf(tmp_path / "model.gguf")
    assert source.config == config
    assert_params(source.load(floats(source.config, FLOAT32), None, None), params)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_bfloat16_parameters_are_the_stored_values_rounded(tmp_path: Path, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    params = write_model(tmp_path / "model.gguf", LLAMA, kind=number)
    found = open_gguf(tmp_path / "model.gguf").load(floats(LLAMA, np.dtype(ml_dtypes.bfloat16)), None, None)
    stored = gguf.quants.quantize(params["layers.up"], number)
    want = gguf.quants.dequantize(stored, number).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(found["layers.up"]), want)


@pytest.mark.parametrize("kind", supported_types())
def test_every_type_is_read_as_the_gguf_package_reads_it(tmp_path: Path, kind: str) -> None:
    """Rows of random bytes: not every type can be written by the package, but any bytes are a valid tensor."""
    number = gguf.GGMLQuantizationType[kind]
    config = dataclasses.replace(LLAMA, d_model=256, d_ff=512, head_dim=64, n_layers=1)
    block, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(2)
    tensors = tensors_of(config, params_of(config))
    chosen = ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.0.attn_q.weight", "token_embd.weight")
    want = {}
    for name in chosen:
        rows, cols = tensors[name].shape
        tensors[name] = rng.integers(0, 120, (rows, cols // block * size), np.uint8)
        with np.errstate(all="ignore"):
            want[name] = gguf.quants.dequantize(tensors[name], number)
    write(tmp_path / "m.gguf", "llama", fields_of(config), tensors, raw=dict.fromkeys(chosen, number))
    found = open_gguf(tmp_path / "m.gguf").load(floats(config, FLOAT32), None, None)
    np.testing.assert_array_equal(found["layers.up"][0], want["blk.0.ffn_up.weight"])
    np.testing.assert_array_equal(found["layers.down"][0], want["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(found["embed"], want["token_embd.weight"])
    rows_of_q = np.asarray(found["layers.q"][0]).reshape(256, 256)
    np.testing.assert_array_equal(llama_permuted(rows_of_q, config.n_heads), want["blk.0.attn_q.weight"])


def test_the_types_the_package_knows_are_all_supported() -> None:
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "TQ1_0"} <= set(
        supported_types()
    )


def test_parameters_are_sharded_over_the_mesh(tmp_path: Path) -> None:
    params = write_model(tmp_path / "model.gguf", LLAMA)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    found = open_gguf(tmp_path / "model.gguf").load(floats(LLAMA, FLOAT32), mesh, None)
    assert_params(found, params)
    assert found["layers.q"].sharding.shard_shape(found["layers.q"].shape) == (3, 2, 8, 32)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", LLAMA)
    calls: list[tuple[str, int, int]] = []
    load_model(str(tmp_path / "model.gguf"), progress=lambda *call: calls.append(call))
    assert calls[-1][1] == calls[-1][2] > 0
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)


Change = Callable[[dict[str, Any]], Any]


def config_with(tmp_path: Path, config: TrunkConfig, change: Change, **more: Any) -> TrunkConfig:
    """The configuration read from a file whose fields went through `change`; `more` are further tensors."""
    fields = fields_of(config)
    change(fields)
    tensors = {**tensors_of(config, params_of(config)), **more}
    return open_gguf(write(tmp_path / "model.gguf", config.family, fields, tensors)).config


def test_rope_frequencies_become_divisors(tmp_path: Path) -> None:
    factors = np.array([1, 1, 4, 8], np.float32)
    config = config_with(tmp_path, LLAMA, lambda fields: None, **{"rope_freqs.weight": factors})
    assert config.rope_scaling == RopeScaling("factors", factors=(1.0, 1.0, 4.0, 8.0))


def test_linear_rope_scaling(tmp_path: Path) -> None:
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert config_with(tmp_path, GEMMA3, lambda f: f.update(scaled)).rope_scaling == RopeScaling("linear", factor=8.0)


def test_head_size_defaults_to_an_even_share_of_the_width(tmp_path: Path) -> None:
    assert config_with(tmp_path, LLAMA, lambda f: f.pop("attention.key_length")) == LLAMA


def test_one_value_for_all_layers_may_be_an_array(tmp_path: Path) -> None:
    assert config_with(tmp_path, LLAMA, lambda f: f.update({"attention.head_count_kv": [2, 2, 2]})) == LLAMA


def test_gemma_window_pattern_as_flags(tmp_path: Path) -> None:
    flags = {"attention.sliding_window_pattern": [True, False, True]}
    assert config_with(tmp_path, GEMMA3, lambda f: f.update(flags)).layer_types == (LOCAL, GLOBAL, LOCAL)


def test_gemma_27b_scales_queries_by_width_over_heads(tmp_path: Path) -> None:
    config = dataclasses.replace(GEMMA3, n_layers=62)
    assert config_with(tmp_path, config, lambda f: None).attention_scale == pytest.approx((32 / 4) ** -0.5)


def test_text_comes_with_the_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", LLAMA, tokenizer=tokenizer_fields())
    model = load_model(str(tmp_path / "model.gguf"))
    assert model.tokenizer is not None and model.chat_template is not None
    assert model.tokenizer.encode("ab a") == [31, 32]
    assert model.eos_ids == (0, 2)
    assert model.quant == "float32"


REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
    "missing tensor": (lambda f, t: t.pop("blk.1.attn_k.weight"), "no tensor 'blk.1.attn_k.weight'"),
    "missing embedding": (lambda f, t: t.pop("token_embd.weight"), "no tensor 'token_embd.weight'"),
    "wrong shape": (lambda f, t: t.update({"output.weight": np.zeros((9, 32), np.float32)}), "shape [9, 32], the"),
    "unknown tensor": (lambda f, t: t.update({"blk.0.attn_o.bias": np.zeros(32, np.float32)}), "blk.0.attn_o.bias"),
    "unknown type": (lambda f, t: t.update({"output_norm.weight": np.zeros(32, np.int32)}), "unknown type I32"),
    "missing field": (lambda f, t: f.pop("feed_forward_length"), "'llama.feed_forward_length' is missing"),
    "wrong field": (lambda f, t: f.update({"embedding_length": "wide"}), "'llama.embedding_length' must be"),
    "experts": (lambda f, t: f.update({"expert_count": 8}), "'llama.expert_count' is 8"),
    "yarn": (lambda f, t: f.update({"rope.scaling.type": "yarn"}), "'yarn'; supported: none, linear"),
    "partial rotary": (lambda f, t: f.update({"rope.dimension_count": 4}), "'llama.rope.dimension_count' is 4"),
    "layers differ": (lambda f, t: f.update({"attention.head_count_kv": [2, 2, 4]}), "differs between layers"),
    "heads do not fit": (lambda f, t: f.update({"attention.head_count_kv": 3}), "not a multiple"),
    "too many layers": (lambda f, t: f.update({"block_count": 2**31 - 1}), "no tensor 'blk.3.attn_norm.weight'"),
    "more layers than said": (lambda f, t: f.update({"block_count": 2}), "blk.2."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_model_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    change, expected = REFUSED[case]
    fields, tensors = fields_of(LLAMA), tensors_of(LLAMA, params_of(LLAMA))
    change(fields, tensors)
    write(tmp_path / "model.gguf", "llama", fields, tensors)
    with pytest.raises(ModelError) as error:
        open_gguf(tmp_path / "model.gguf")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "mamba", {}, {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ModelError, match="'mamba'; supported: gemma3, llama, qwen2, qwen3"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" * 100, b"GGUF" + b"\xff" * 200])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError):
        open_gguf(tmp_path / "model.gguf")


def test_unknown_specs_name_what_is_supported() -> None:
    with pytest.raises(ModelError, match=r"no model is called 'nothing'; supported: smollm2, gemma3-270m"):
        load_model("nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model("/nowhere/model.gguf")


def test_unsupported_quants_are_refused() -> None:
    with pytest.raises(ModelError, match="'float8' is not supported; supported: auto, none, int8, int4"):
        load_model("tiny", quant="float8")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    config = dataclasses.replace(LLAMA, n_layers=1)
    write_model(path, config, tokenizer=tokenizer_fields(), kind=gguf.GGMLQuantizationType.Q8_0)
    return path.read_bytes()


def try_to_load(path: Path, content: bytes) -> bool:
    """Whether the content loads; anything but success and `ModelError` escapes."""
    path.write_bytes(content)
    try:
        source = open_gguf(path)
        held = sum(tensor.nbytes for tensor in source.tensors.values())
        assert held <= len(content) * source.config.n_layers * 64
        load_text(source)
        source.load(floats(source.config, FLOAT32), None, None)
    except ModelError as error:
        assert "\n" not in str(error)
        return False
    return True


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_files_are_refused(tmp_path: Path, small_file: bytes, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(small_file) - 64))
    assert not try_to_load(tmp_path / "cut.gguf", small_file[:size])


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(tmp_path: Path, small_file: bytes, data: st.DataObject) -> None:
    header = small_file.index(b"output_norm.weight") + 64
    damaged = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        damaged[at] = data.draw(st.integers(0, 255))
    try_to_load(tmp_path / "damaged.gguf", bytes(damaged))


@pytest.mark.real
@pytest.mark.parametrize(("name", "config"), [("smollm2", "smollm2-135m"), ("gemma3-270m", "gemma3-270m")])
def test_the_packaged_models_are_the_named_configurations(name: str, config: str) -> None:
    from umbra.model.load import open_source

    assert open_source(name).config == named(config)
