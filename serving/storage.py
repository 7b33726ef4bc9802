"""Opening what outlives requests and processes: the tiers of the context cache, and stored conversations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from ..cache.layout import BlockLayout
from ..cache.store import Store
from ..configs.cache import CacheConfig
from ..configs.engine import EngineConfig
from .engine.identity import kv_fingerprint, numerics_class
from .engine.programs import kv_format, make_mesh

if TYPE_CHECKING:
    from ..model.load import Model


def open_store(
    folder: Path,
    model: Model,
    config: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
    cache: CacheConfig = CacheConfig(),  # noqa: B008 (frozen)
    *,
    mesh: Mesh | None = None,
    name: str | None = None,
) -> Store:
    """The store in `folder` for an engine of this model, configuration and mesh, which is to be given it.

    `name` is what conversations know the model by; None: the model's own. Raises `OSError` or `ValueError` when the
    folder can be neither read nor made; any part of it that cannot be used is left out with a warning.
    """
    mesh = mesh if mesh is not None else make_mesh(jax.devices()[:1], model.config)
    trunk = model.config
    kv = kv_format(config, model.kernels, mesh.devices.flat[0].platform)
    return Store(
        folder,
        BlockLayout.of(kv, trunk.n_layers, trunk.n_kv_heads, trunk.head_dim),
        model=name or model.name,
        fingerprint=kv_fingerprint(model, numerics_class(mesh, model.kernels, model.quant, kv), kv),
        config=cache,
    )
