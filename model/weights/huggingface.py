"""Hugging Face folders: `config.json` and safetensors files, from disk or from the hub (`hf:ORG/NAME`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...configs.files import cache_dir
from .errors import ModelError
from .hf_config import trunk_config
from .jsonfile import read_json
from .placement import Naming, place
from .safetensors import read_tensors
from .source import TensorSource
from .stored import StoredTensor
from .text import read_gguf_fields

_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_OUTSIDE_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def names(family: str, prefix: str = "model.") -> dict[str, str]:
    """Tensor names of `family`; `prefix` stands before everything but the head."""
    layer = prefix + "layers.{i}."
    gemma = family == "gemma3"
    return {
        "embed": prefix + "embed_tokens.weight",
        "layers.attn_norm": layer + "input_layernorm.weight",
        "layers.q": layer + "self_attn.q_proj.weight",
        "layers.k": layer + "self_attn.k_proj.weight",
        "layers.v": layer + "self_attn.v_proj.weight",
        "layers.o": layer + "self_attn.o_proj.weight",
        "layers.mlp_norm": layer + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm") + ".weight",
        "layers.gate": layer + "mlp.gate_proj.weight",
        "layers.up": layer + "mlp.up_proj.weight",
        "layers.down": layer + "mlp.down_proj.weight",
        "final_norm": prefix + "norm.weight",
        "layers.q_bias": layer + "self_attn.q_proj.bias",
        "layers.k_bias": layer + "self_attn.k_proj.bias",
        "layers.v_bias": layer + "self_attn.v_proj.bias",
        "layers.q_norm": layer + "self_attn.q_norm.weight",
        "layers.k_norm": layer + "self_attn.k_norm.weight",
        "layers.post_attn_norm": layer + "post_attention_layernorm.weight",
        "layers.post_mlp_norm": layer + "post_feedforward_layernorm.weight",
        "head": "lm_head.weight",
    }


def norm_offset(family: str) -> float:
    """What is added to a stored norm weight: Gemma's are stored around zero."""
    return 1.0 if family == "gemma3" else 0.0


def open_folder(folder: Path) -> TensorSource:
    """Reads `config.json` and the safetensors headers, and checks every tensor; no weights are read yet."""
    config = trunk_config(read_json(folder / "config.json"), folder.name)
    tensors = _all_tensors(folder)
    prefix = _prefix(tensors)
    head = "lm_head.weight"
    if head not in tensors and f"{prefix.removesuffix('model.')}{head}" in tensors:
        head = f"{prefix.removesuffix('model.')}{head}"

    def ignored(name: str) -> bool:
        tied = config.tied_embeddings and name == head
        return tied or name.endswith("rotary_emb.inv_freq") or name.startswith(_OUTSIDE_TEXT)

    table = names(config.family, prefix) | {"head": head}
    naming = Naming(table, norm_offset=norm_offset(config.family), ignored=ignored)
    return TensorSource(folder, config, tensors, place(config, tensors, naming), read_gguf_fields(folder))


def _all_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _sharded(folder, index)
    single = folder / "model.safetensors"
    if not single.is_file():
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        raise ModelError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json"
            + (f" but {', '.join(found[:3])}; supported: safetensors" if found else "")
        )
    return read_tensors(single)


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{index} has no 'weight_map' from tensor names to file names")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if Path(shard).name != shard:
            raise ModelError(f"{index} points outside its folder: {shard!r}")
        if shard not in shards:
            shards[shard] = read_tensors(folder / shard)
        if name not in shards[shard]:
            raise ModelError(f"{folder / shard} has no tensor {name!r}, though {index.name} says so")
        tensors[name] = shards[shard][name]
    return tensors


def _prefix(tensors: Mapping[str, StoredTensor]) -> str:
    """What stands before `embed_tokens.weight`: `model.`, or more in models with an image part."""
    for name in tensors:
        if name.endswith("embed_tokens.weight") and not name.startswith(_OUTSIDE_TEXT):
            return name.removesuffix("embed_tokens.weight")
    return "model."


def download(repository: str) -> Path:
    """The local folder of `ORG/NAME` from the hub, fetched if needed into `cache_dir()/models/hub`."""
    import huggingface_hub
    import huggingface_hub.errors as errors

    try:
        folder = huggingface_hub.snapshot_download(
            repository, allow_patterns=_FILES, cache_dir=cache_dir() / "models" / "hub"
        )
    except errors.HFValidationError as error:
        raise ModelError(f"'hf:{repository}' is no hub model name; supported: hf:ORG/NAME") from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"'hf:{repository}' is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {repository!r} that this machine may see") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ModelError(
            f"the hub cannot be reached and 'hf:{repository}' is not in {cache_dir() / 'models' / 'hub'}; fetch it "
            "where there is a network, or pass a local folder or .gguf file"
        ) from error
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise ModelError(f"'hf:{repository}' could not be fetched: {type(error).__name__}: {error}") from error
    return Path(folder)
