"""Quantised parameters: a file's own groups bit for bit, what `--quant` and `--embedding` make, and meshes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.configs.embedding import FILE, EmbeddingForm, parse_embedding
from umbra.configs.models import named
from umbra.configs.trunk import TrunkConfig
from umbra.kernels.backend import Kernels
from umbra.kernels.linear import Mixed, Quantised, Split, packing, reference
from umbra.model.frequency import frequent_tokens
from umbra.model.load import ModelError, load_model, open_source
from umbra.model.params import WeightFormat, abstract_params, param_specs, partitions, split_obstacle
from umbra.model.weights.gguf import open_gguf
from umbra.model.weights.gguf_groups import UNPACK
from umbra.model.weights.plan import abstract_planned, floats, plan

PLAIN, NATIVE, TPU = Kernels(), Kernels("cpu", "cpu", "cpu"), Kernels("tpu", "tpu", "xla")
FLOAT32 = np.dtype(np.float32)
CONFIG = TrunkConfig(
    name="model", family="llama", vocab_size=48, d_model=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64,
    d_ff=512, context_length=128,
)  # fmt: skip
SHORT = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip
Kinds = dict[str, str]
"""GGUF types by tensor name or by what it ends in."""


def blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes of a type, with finite scales of ordinary and of very small size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, cols // block, size)).astype(np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for at in halves:
        half = (rng.standard_normal((rows, cols // block, 1)) * 10.0 ** rng.uniform(-7, 0, (rows, 1, 1))).astype(
            np.float16
        )
        raw[..., at : at + 2] = half.view(np.uint8)
    return raw.reshape(rows, -1)


def write(path: Path, kinds: Kinds, config: TrunkConfig = CONFIG, default: str = "Q4_1") -> Path:
    """A GGUF file of random blocks. `kinds` overrides the type of tensors whose name contains a key."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": config.n_layers, "context_length": config.context_length, "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff, "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads, "attention.key_length": config.head_dim,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_eps)
    rng = np.random.default_rng(3)
    specs = param_specs(config)

    def add(name: str, path: str) -> None:
        spec = specs[path]
        if not spec.matrix:
            writer.add_tensor(name, rng.uniform(0.5, 2, spec.shape[-1]).astype(np.float32))
            return
        kind = next((kinds[key] for key in kinds if key in name), default)
        shape = (spec.out_features, spec.inputs)
        if kind in ("F32", "F16"):
            writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32 if kind == "F32" else np.float16))
        elif kind == "BF16":
            values = rng.standard_normal(shape).astype(np.float32)
            writer.add_tensor(name, gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)  # fmt: skip
        else:
            writer.add_tensor(name, blocks(kind, *shape, rng), raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", "embed")
    add("output_norm.weight", "final_norm")
    add("output.weight", "head")
    for layer in range(config.n_layers):
        for short in ("attn_norm", "mlp_norm"):
            add(f"blk.{layer}.{short.replace('mlp', 'ffn')}.weight", f"layers.{short}")
        for short, stored in SHORT.items():
            add(f"blk.{layer}.{stored}.weight", f"layers.{short}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(weight: Any) -> np.ndarray:
    """float32 values of a parameter in any form and layout, in its logical shape."""
    if isinstance(weight, Mixed):
        stacks = [values(stack) for stack in weight.stacks]
        return np.stack([stacks[kind][row] for kind, row in zip(weight.which, weight.rows, strict=True)])
    if isinstance(weight, Split):
        return np.concatenate([values(weight.frequent), values(weight.rest)])[np.asarray(weight.place)]
    if not isinstance(weight, Quantised):
        return np.asarray(weight, np.float32)
    if weight.layout != "cpu":
        return np.asarray(reference.dequantised(weight))
    lead = weight.shape[: weight.stacked]
    matrices = []
    for at in np.ndindex(*lead):
        parts = {name: np.asarray(part)[at] for name, part in weight.parts.items()}
        matrices.append(packing.unpack(parts, weight.form, weight.out_features, weight.in_features).values())
    return np.stack(matrices).reshape(weight.shape)


def assert_equal(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    for path, value in want.items():
        assert found[path].shape == value.shape, path
        np.testing.assert_array_equal(values(found[path]), values(value), err_msg=path)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(sorted(UNPACK)), seed=st.integers(0, 2**32 - 1))
def test_blocks_keep_every_bit(kind: str, seed: int) -> None:
    raw = blocks(kind, 5, 512, np.random.default_rng(seed))
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    form, unpack = UNPACK[kind]
    groups = unpack(raw.reshape(5, -1, size))
    assert groups.form == form and (groups.out, groups.inputs) == (5, 512)
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(groups.values(), want)
    np.testing.assert_array_equal(groups.rows(np.array([3, 1])).values(), want[[3, 1]])


@pytest.mark.parametrize("kind", sorted(UNPACK))
def test_native_kernels_get_the_groups_of_the_file(tmp_path: Path, kind: str) -> None:
    """Rotary rows in their places, and every value exactly that of the float parameters."""
    source = open_gguf(write(tmp_path / "model.gguf", {}, default=kind))
    planned = plan(source, "auto", "cpu", "cpu")
    assert planned.words == f"the file's own groups ({kind})"
    found = source.load(planned.plans, None, None)
    assert found["layers.q"].form == UNPACK[kind][0] and found["layers.q"].layout == "cpu"
    assert found["layers.attn_norm"].dtype == np.float32
    assert_equal(found, source.load(floats(CONFIG, FLOAT32), None, None))
    abstract = abstract_planned(CONFIG, planned.plans)
    assert jax.tree.structure(abstract) == jax.tree.structure(found)
    assert all(a.shape == b.shape and a.dtype == b.dtype
               for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(found), strict=True))  # fmt: skip


MIXED: Kinds = {
    "token_embd": "Q8_0", "output": "Q6_K", "1.attn_v": "Q8_0", "attn_v": "Q5_0", "1.ffn_down": "Q6_K",
    "ffn_down": "Q4_K", "0.ffn_up": "Q5_1", "1.ffn_up": "Q4_0", "ffn_gate": "BF16", "attn_k": "IQ4_XS", "attn_q": "F16",
}  # fmt: skip


def test_a_file_of_many_types(tmp_path: Path) -> None:
    """Layers of a stack in different forms; types without a form of integers become floats."""
    source = open_gguf(write(tmp_path / "model.gguf", MIXED))
    planned = plan(source, "auto", "cpu", "cpu")
    assert planned.words == (
        "the file's own groups (Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q6_K, Q8_0) and bfloat16 and float32"
    )
    found = source.load(planned.plans, None, None)
    assert found["layers.v"].form == "w8"  # Q8_0 and Q5_0 are one form
    assert found["layers.down"].which == (0, 1, 0)
    assert [stack.form for stack in found["layers.down"].stacks] == ["w4k", "w6k"]
    assert [stack.form for stack in found["layers.up"].stacks] == ["w8m", "w4"]
    assert found["layers.gate"].dtype == "bfloat16" and found["layers.k"].dtype == found["layers.q"].dtype == FLOAT32
    assert_equal(found, source.load(floats(CONFIG, FLOAT32), None, None))


@pytest.mark.parametrize("kernels", [PLAIN, NATIVE, TPU], ids=lambda kernels: kernels.linear)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_random_weights(kernels: Kernels, quant: str) -> None:
    for name in ("tiny", "tiny-gemma"):
        model, exact = load_model(name, quant=quant, kernels=kernels), load_model(name, quant="none")
        assert model.kernels == kernels and model.weights_id == exact.weights_id
        for path, spec in param_specs(model.config).items():
            found, want = values(model.params[path]), values(exact.params[path])
            if not spec.matrix:
                np.testing.assert_array_equal(found, want)
                continue
            assert isinstance(model.params[path], Quantised)
            error = np.linalg.norm(found - want) / np.linalg.norm(want)
            assert error < (0.09 if quant == "int4" else 0.008)
    want = {"int8": "int8 for each output channel"} if kernels == TPU else {}
    assert model.quant == want.get(quant, f"{quant} in groups of 32")


def test_a_seed_gives_other_random_weights() -> None:
    first, same, other = (load_model("tiny", seed=seed) for seed in (0, 0, 1))
    assert_equal(first.params, same.params)
    assert not np.array_equal(first.params["embed"], other.params["embed"])
    assert first.weights_id == same.weights_id != other.weights_id


def test_what_is_stored_in_the_form_asked_for_is_not_rounded_again(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model.gguf", {"ffn": "Q8_0"}))
    exact = load_model(path, quant="none")
    for quant, kept in (("int8", "layers.down"), ("int4", "layers.o")):
        found = load_model(path, quant=quant, kernels=NATIVE)
        np.testing.assert_array_equal(values(found.params[kept]), values(exact.params[kept]))
        assert found.params[kept].form == {"int8": "w8", "int4": "w4"}[quant]


@pytest.mark.parametrize("kernels", [PLAIN, TPU], ids=lambda kernels: kernels.linear)
def test_without_native_kernels_auto_is_float(tmp_path: Path, kernels: Kernels) -> None:
    model = load_model(str(write(tmp_path / "model.gguf", {})), kernels=kernels)
    assert model.quant == "float32" and model.params["layers.q"].dtype == FLOAT32
    assert plan(open_source(model.name), "auto", kernels.linear, "tpu").words == "bfloat16"


def test_an_orbax_folder_is_quantised_as_its_source_is(tmp_path: Path) -> None:
    from umbra.scripts.convert import main

    source = Path(__file__).parents[1] / "golden" / "hf_llama"
    assert main([str(source), str(tmp_path / "m.orbax")]) == 0
    config = open_source(str(source)).config
    if config.d_model % 32 or config.d_ff % 32:
        with pytest.raises(ModelError, match="no whole number of groups of 32; supported: --quant none"):
            load_model(str(tmp_path / "m.orbax"), quant="int4")
        return
    want = load_model(str(source), quant="int4")
    assert_equal(load_model(str(tmp_path / "m.orbax"), quant="int4").params, want.params)


def mesh(data: int, model: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


@pytest.mark.parametrize("kernels", [PLAIN, NATIVE, TPU], ids=lambda kernels: kernels.linear)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_parts_are_split_over_a_mesh(kernels: Kernels, quant: str) -> None:
    """Queries, gates and the table by output channels, `o` and `down` by groups of inputs."""
    over = mesh(2, 2)
    found = load_model("tiny", quant=quant, kernels=kernels, mesh=over)
    assert_equal(found.params, load_model("tiny", quant=quant, kernels=kernels).params)
    layout = found.params["layers.q"].layout
    abstract = abstract_params(found.config, WeightFormat(quant, "float32", layout), over)
    assert jax.tree.structure(abstract) == jax.tree.structure(found.params)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(found.params), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    held = {
        "layers.q": (32, 64), "layers.up": (64, 64), "embed": (256, 64), "layers.o": (64, 32), "layers.down": (64, 64),
    }  # fmt: skip
    for path, features in held.items():
        weight = found.params[path]
        local = jax.tree.map(lambda part: part.addressable_shards[0].data, weight)
        assert (local.out_features, local.in_features) == features, path
    specs = partitions(found.config, found.params)
    assert jax.tree.structure(specs) == jax.tree.structure(found.params)


def test_groups_are_not_cut() -> None:
    narrow = dataclasses.replace(named("tiny"), n_heads=2, n_kv_heads=2, head_dim=16)
    params = abstract_params(narrow, WeightFormat("int8"))
    assert split_obstacle(narrow, params, 1) is None
    why = "'layers.o' of tiny cannot be split over model=2: 16 inputs a device are no whole number of groups of 32"
    assert split_obstacle(narrow, params, 2) == why
    with pytest.raises(ModelError, match="'embed' in two precisions cannot be split over model=2"):
        load_model("tiny", embedding="100:int8,int4", mesh=mesh(1, 2))
    packed = abstract_params(
        dataclasses.replace(narrow, head_dim=32, vocab_size=24), WeightFormat("int8", layout="cpu")
    )
    assert "'embed' of tiny cannot be split over model=2: 12 output channels a device" in str(
        split_obstacle(dataclasses.replace(narrow, head_dim=32, vocab_size=24), packed, 2)
    )


@pytest.mark.parametrize("kernels", [PLAIN, NATIVE], ids=lambda kernels: kernels.linear)
def test_a_split_embedding(kernels: Kernels) -> None:
    model = load_model("tiny", embedding="100:int8,int4", kernels=kernels)
    table, exact = model.params["embed"], values(load_model("tiny").params["embed"])
    assert isinstance(table, Split) and model.quant.endswith("; embedding 100:int8,int4")
    assert (table.frequent.form, table.rest.form) == ("w8", "w4") and table.frequent.shape == (100, 64)
    error = np.linalg.norm(values(table) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error[:100].max() < 0.01 < error[100:].min()  # without a tokenizer, low ids are the frequent ones
    assert values(table).shape == exact.shape
    whole = load_model("tiny", embedding="int4", kernels=kernels)
    assert whole.params["embed"].form == "w4" and not isinstance(whole.params["layers.q"], Quantised)
    assert table.nbytes < values(table).nbytes


@pytest.mark.parametrize("text", ["file", "int8", "int4", "4096:int8,int4", "1:int4,int8"])
def test_embedding_options_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_embedding(text)) == text


@pytest.mark.parametrize(
    "text", ["", "int2", "int8,int4", "4096", "0:int8,int4", "-1:int8,int4", "9:int8", "x:int8,int4"]
)
def test_other_embedding_options_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="supported: file, int8, int4, or N:int8,int4"):
        parse_embedding(text)
    with pytest.raises(ModelError, match="supported: file, int8, int4, or N:int8,int4"):
        load_model("tiny", embedding=text)


def test_embeddings_that_cannot_be() -> None:
    assert parse_embedding("file") == FILE
    with pytest.raises(ValueError, match="takes 2 precisions"):
        EmbeddingForm(10, ("int8",))
    with pytest.raises(ModelError, match="keeps 512 rows apart; tiny has 512"):
        load_model("tiny", embedding="512:int8,int4")
    with pytest.raises(ModelError, match="not supported on a TPU; supported there: file, int8"):
        load_model("tiny", embedding="int4", kernels=TPU)


def test_frequent_tokens_are_those_of_the_prompts_then_low_ids() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [min(ord(c), 199) for c in text]

    tokens = frequent_tokens(40, 200, Letters())  # type: ignore[arg-type]
    assert list(tokens) == sorted(set(tokens.tolist()))
    assert {ord("e"), ord(" "), ord("t")} <= set(tokens.tolist()) and ord("^") not in tokens
    assert list(frequent_tokens(5, 200, None)) == [0, 1, 2, 3, 4]


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", {"0.ffn_up": "Q4_0"})
    raw = bytearray(path.read_bytes())
    tensor = open_gguf(path).tensors["blk.0.ffn_up.weight"]
    raw[tensor.offset : tensor.offset + 2] = np.float16(30000).tobytes()
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="'blk.0.ffn_up.weight' in .* has scales beyond .*supported: --quant none"):
        load_model(str(path), kernels=NATIVE)
    assert load_model(str(path), quant="none").quant == "float32"


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_packaged_models_keep_every_bit(name: str) -> None:
    source = open_source(name)
    planned = plan(source, "auto", "cpu", "cpu")
    found = source.load(planned.plans, None, None)
    for path, want in source.load(floats(source.config, FLOAT32), None, None).items():
        np.testing.assert_array_equal(values(found[path]), values(want), err_msg=path)
