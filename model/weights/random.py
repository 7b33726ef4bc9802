"""Random parameters: trunks for tests, the same on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ...configs.trunk import TrunkConfig
from ..params import param_specs
from .assemble import ArraySupply, Progress, assemble
from .plan import ParamPlan

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class RandomSource:
    """Normal with variance 1 / fan-in, ones for norms, zeros for biases; the same for the same `seed`."""

    config: TrunkConfig
    seed: int = 0

    def exact_dtype(self, path: str) -> np.dtype:
        return _FLOAT32

    def own_forms(self, path: str) -> tuple[str, ...] | None:
        return None

    def types(self, path: str) -> list[str]:
        return [_FLOAT32.name]

    def read(self, path: str, dtype: np.dtype | None) -> np.ndarray:
        spec = param_specs(self.config)[path]
        if spec.init == "normal":
            rng = np.random.default_rng([self.seed, zlib.crc32(path.encode())])
            value = rng.standard_normal(spec.shape, np.float32) * np.float32(spec.fan_in**-0.5)
        else:
            value = np.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, np.float32)
        return value.astype(dtype or _FLOAT32)

    def load(
        self, plans: Mapping[str, ParamPlan], mesh: Mesh | None = None, progress: Progress | None = None
    ) -> dict[str, Any]:
        return assemble(self.config, plans, ArraySupply(self.config, self.read), mesh=mesh, progress=progress)

    def weights_id(self) -> str:
        return hashlib.sha256(f"random parameters, seed {self.seed}: {self.config!r}".encode()).hexdigest()
