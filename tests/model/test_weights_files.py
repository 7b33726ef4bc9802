"""Orbax folders, identities of weights, memory while loading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from umbra.configs.models import named
from umbra.model.load import ModelError, load_model, random_params
from umbra.model.params import abstract_params, param_specs
from umbra.model.weights import identity
from umbra.model.weights.huggingface import open_folder
from umbra.model.weights.orbax import config_from_json, open_orbax, save
from umbra.model.weights.plan import floats

GOLDEN = Path(__file__).parents[1] / "golden"
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "umbra"


@pytest.fixture(scope="module")
def orbax_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "model.orbax"
    source = open_folder(GOLDEN / "hf_gemma3")
    dtypes = {path: source.exact_dtype(path) for path in source.pieces}
    save(folder, source.config, dtypes, source.read, "0123")
    return folder


def test_orbax_restores_the_same_parameters(orbax_folder: Path) -> None:
    model, source = load_model(str(orbax_folder)), open_folder(GOLDEN / "hf_gemma3")
    assert model.config == source.config
    assert model.weights_id == "0123"
    for path, value in source.load(floats(source.config, FLOAT32), None, None).items():
        assert model.params[path].dtype == np.float32
        np.testing.assert_array_equal(model.params[path], value, err_msg=path)


def test_orbax_restores_with_the_target_sharding_and_type(orbax_folder: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    source = open_orbax(orbax_folder)
    dtype = np.dtype(ml_dtypes.bfloat16)
    params = source.load(floats(source.config, dtype), mesh, None)
    for path, want in abstract_params(source.config, dtype, mesh).items():
        assert (params[path].shape, params[path].dtype, params[path].sharding) == (want.shape, dtype, want.sharding)


def test_damaged_orbax_folders_are_refused(orbax_folder: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(orbax_folder, tmp_path / "model.orbax"))
    description = json.loads((folder / "umbra.json").read_text())
    for change in ({"format": 2}, {"config": {}}, {"dtypes": {}}, {"weights_id": 3}):
        (folder / "umbra.json").write_text(json.dumps({**description, **change}))
        with pytest.raises(ModelError, match="umbra.json"):
            load_model(str(folder))
    wider = {**description, "config": {**description["config"], "d_ff": 64}}
    (folder / "umbra.json").write_text(json.dumps(wider))
    with pytest.raises(ModelError, match=r"parameter 'layers.gate' .* has shape \[4, 48, 32\], not \[4, 64, 32\]"):
        load_model(str(folder))
    shutil.rmtree(folder / "params")
    with pytest.raises(ModelError, match="is no Orbax checkpoint"):
        load_model(str(folder))


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="without config.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma", "llama-3.1-8b"])
def test_configurations_survive_json(name: str) -> None:
    import dataclasses

    config = named(name)
    assert config_from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_random_parameters_depend_on_the_seed_alone() -> None:
    config = named("tiny")
    first, again, other = random_params(config), random_params(config), random_params(config, seed=1)
    for path, spec in param_specs(config).items():
        np.testing.assert_array_equal(first[path], again[path])
        if spec.init == "normal":
            assert not np.array_equal(first[path], other[path])
            assert np.std(first[path]) == pytest.approx(spec.fan_in**-0.5, rel=0.1)
    assert load_model("tiny").weights_id != load_model("tiny-gemma").weights_id


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    """Another file name, another order and other shards are the same weights; another bit is not."""
    tensors: dict[str, np.ndarray] = {}
    for file in (GOLDEN / "hf_qwen3").glob("*.safetensors"):
        tensors |= load_file(file)
    (tmp_path / "config.json").write_bytes((GOLDEN / "hf_qwen3" / "config.json").read_bytes())
    save_file(dict(reversed(tensors.items())), tmp_path / "model.safetensors")
    sharded = open_folder(GOLDEN / "hf_qwen3").weights_id()
    assert open_folder(tmp_path).weights_id() == sharded
    tensors["model.norm.weight"] = np.nextafter(tensors["model.norm.weight"], np.float32(9))
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_folder(tmp_path).weights_id() != sharded


def test_identity_is_computed_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_folder(GOLDEN / "hf_llama")
    first = source.weights_id()
    assert list(json.loads((own_cache / "state" / "weights_ids.json").read_text()).values()) == [first]
    monkeypatch.setattr(identity.StoredTensor, "digest", None)
    assert source.weights_id() == first


@pytest.mark.parametrize("content", ["", "[]", "{", "\0"])
def test_a_damaged_store_of_identities_is_ignored(own_cache: Path, content: str) -> None:
    (own_cache / "state").mkdir(parents=True)
    (own_cache / "state" / "weights_ids.json").write_text(content)
    assert len(open_folder(GOLDEN / "hf_llama").weights_id()) == 64


_MEASURE = """
import resource, sys
import jax, numpy as np
from pathlib import Path
from umbra.model.load import open_source
from umbra.model.weights import assemble, gguf, orbax
from umbra.model.weights.plan import floats

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

jax.block_until_ready(jax.device_put(np.ones(1 << 20, np.float32)))
source = open_source(sys.argv[1])
before = peak()
params = source.load(floats(source.config, np.dtype(sys.argv[2])), None, None)
print(peak() - before, sum(p.nbytes for p in params.values()), max(p.nbytes for p in params.values()))
"""


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "float32"), ("F32", "float32"), ("F16", "bfloat16")])
def test_peak_memory_while_loading(tmp_path: Path, kind: str, dtype: str) -> None:
    """At most 1.3 times the finished parameters plus the largest tensor, in a process of its own."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    L, D, F, V = 12, 512, 2048, 16384
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in dict(
        block_count=L, context_length=64, embedding_length=D, feed_forward_length=F, **{"attention.head_count": 8}
    ).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    matrices = {"token_embd.weight": (V, D)}
    for i in range(L):
        matrices |= {f"blk.{i}.attn_{n}.weight": (D, D) for n in ("q", "k", "v", "output")}
        matrices |= {f"blk.{i}.ffn_gate.weight": (F, D), f"blk.{i}.ffn_up.weight": (F, D)}
        matrices |= {f"blk.{i}.ffn_down.weight": (D, F)}
    block, size = gguf.GGML_QUANT_SIZES[number]
    for name, (rows, cols) in matrices.items():
        writer.add_tensor(name, np.zeros((rows, cols // block * size), np.uint8), raw_dtype=number)
    for name in ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(L) for n in ("attn", "ffn"))]:
        writer.add_tensor(name, np.ones(D, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "model.gguf"), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used, finished, largest = map(int, output.split())
    assert finished > 100e6
    assert used < 1.3 * finished + largest / 12  # `largest` is stacked over the 12 layers
