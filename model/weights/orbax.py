"""Orbax folders: parameters as this project keeps them, ready to be restored shard by shard.

FOLDER/params/          the Orbax checkpoint: parameters by their dotted paths
FOLDER/umbra.json       configuration, types, identity of the weights
FOLDER/tokenizer/       tokenizer.json and the files beside it, or tokenizer.gguf.json
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from ...configs.trunk import RopeScaling, TrunkConfig
from ..params import param_specs
from .assemble import ArraySupply, Progress, assemble
from .errors import ModelError
from .jsonfile import read_json
from .plan import ParamPlan
from .stored import BF16, F16, F32
from .text import read_gguf_fields

DESCRIPTION = "umbra.json"
_FORMAT = 1
_DTYPES = {encoding.exact.name: encoding.exact for encoding in (F32, F16, BF16)}


@dataclasses.dataclass(frozen=True)
class OrbaxSource:
    """A folder written by `save`."""

    path: Path
    config: TrunkConfig
    dtypes: Mapping[str, np.dtype]
    identity: str
    metadata: Mapping[str, Any] | None

    @property
    def text_folder(self) -> Path:
        return self.path / "tokenizer"

    def exact_dtype(self, path: str) -> np.dtype:
        return self.dtypes[path]

    def read(self, path: str, dtype: np.dtype) -> np.ndarray:
        return np.asarray(_restore(self, [path], dtype, None)[path])

    def own_forms(self, path: str) -> tuple[str, ...] | None:
        return None

    def types(self, path: str) -> list[str]:
        return [self.dtypes[path].name]

    def load(self, plans: Mapping[str, ParamPlan], mesh: Mesh | None, progress: Progress | None) -> dict[str, Any]:
        """One parameter at a time: Orbax holds about one more copy of what it restores at once."""

        def read(path: str, dtype: np.dtype | None) -> Any:
            if dtype is None:  # to be quantised on the host
                return self.read(path, self.dtypes[path])
            return _restore(self, [path], dtype, mesh)[path]

        return assemble(self.config, plans, ArraySupply(self.config, read), mesh=mesh, progress=progress)

    def weights_id(self) -> str:
        return self.identity


def open_orbax(folder: Path) -> OrbaxSource:
    """Reads the description of the Orbax folder; no weights are read yet."""
    described = read_json(folder / DESCRIPTION)
    if described.get("format") != _FORMAT:
        raise ModelError(f"{folder / DESCRIPTION} has format {described.get('format')!r}; supported: {_FORMAT}")
    try:
        config = config_from_json(described["config"])
        dtypes = {path: _DTYPES[described["dtypes"][path]] for path in param_specs(config)}
        identity = described["weights_id"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / DESCRIPTION} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(identity, str):
        raise ModelError(f"{folder / DESCRIPTION} is damaged: 'weights_id' is {identity!r}")
    return OrbaxSource(folder, config, dtypes, identity, read_gguf_fields(folder / "tokenizer"))


def save(
    folder: Path,
    config: TrunkConfig,
    dtypes: Mapping[str, np.dtype],
    read: Callable[[str, np.dtype], np.ndarray],
    weights_id: str,
) -> None:
    """Writes the parameters that `read(path, dtype)` gives, and their description, to the new folder `folder`."""
    ocp = _orbax()
    folder.mkdir(parents=True, exist_ok=True)
    params = {path: read(path, dtypes[path]) for path in param_specs(config)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((folder / "params").absolute(), args=ocp.args.PyTreeSave(params))
    described = dict(
        format=_FORMAT,
        weights_id=weights_id,
        config=dataclasses.asdict(config),
        dtypes={path: dtype.name for path, dtype in dtypes.items()},
    )
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=1), encoding="utf-8")


def config_from_json(values: Mapping[str, Any]) -> TrunkConfig:
    """The configuration `dataclasses.asdict` was applied to, after JSON turned its tuples into lists."""
    values = dict(values, layer_pattern=tuple(values["layer_pattern"]))
    if (scaling := values["rope_scaling"]) is not None:
        values["rope_scaling"] = RopeScaling(**dict(scaling, factors=tuple(scaling["factors"])))
    return TrunkConfig(**values)


def _restore(source: OrbaxSource, paths: list[str], dtype: np.dtype, mesh: Mesh | None) -> dict[str, jax.Array]:
    ocp = _orbax()
    specs = param_specs(source.config)
    restored: dict[str, jax.Array] = {}
    where = (source.path / "params").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        _check_shapes(where, checkpointer, specs)
        for path in paths:
            spec = specs[path]
            place = spec.sharding(mesh) if mesh is not None else SingleDeviceSharding(jax.devices()[0])
            wanted = {path: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=place)}
            how = {path: ocp.ArrayRestoreArgs(sharding=place, dtype=dtype, global_shape=spec.shape)}
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
            try:
                restored |= checkpointer.restore(where, args=args)
                jax.block_until_ready(restored[path])
            except Exception as error:  # Orbax and TensorStore raise errors of many kinds for damaged files
                raise ModelError(
                    f"parameter {path!r} in {where} is missing or damaged: {_first_line(error)}"
                ) from error
    return restored


def _check_shapes(where: Path, checkpointer: Any, specs: Mapping[str, Any]) -> None:
    """Orbax pads or cuts arrays of other shapes silently."""
    try:
        found = checkpointer.metadata(where)
        found = found.item_metadata.tree if hasattr(found, "item_metadata") else found
    except Exception as error:
        raise ModelError(f"{where} is no Orbax checkpoint: {_first_line(error)}") from error
    for path, spec in specs.items():
        if path not in found:
            raise ModelError(f"{where} has no parameter {path!r}")
        if tuple(found[path].shape) != spec.shape:
            raise ModelError(
                f"parameter {path!r} in {where} has shape {list(found[path].shape)}, not {list(spec.shape)}"
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _orbax() -> Any:
    """The package, imported when needed: that takes seconds."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step it takes
    return ocp
