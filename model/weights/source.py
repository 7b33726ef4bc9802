"""A model found in files: checked, but with its weights still on disk."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from ...configs.trunk import TrunkConfig
from ..params import param_specs
from .assemble import Progress, StoredSupply, assemble, fill
from .gguf_groups import form_of
from .identity import weights_id
from .placement import Piece
from .plan import ParamPlan
from .stored import OpenFiles, StoredTensor


class Source(Protocol):
    """What all file formats offer."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    @property
    def config(self) -> TrunkConfig: ...

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """GGUF fields of the tokenizer and chat template; None if they are files in `text_folder`."""

    @property
    def text_folder(self) -> Path:
        """Where tokenizer and chat template are, unless they are `metadata`."""

    def exact_dtype(self, path: str) -> np.dtype:
        """The smallest float type that holds the parameter `path` unchanged."""

    def own_forms(self, path: str) -> tuple[str, ...] | None:
        """The grouped form (kernels/linear/weight.py) of each matrix of the parameter; None unless all have one."""

    def types(self, path: str) -> Sequence[str]:
        """Names of the types the parameter is stored in."""

    def read(self, path: str, dtype: np.dtype) -> np.ndarray:
        """The parameter `path` in `dtype`, on the host."""

    def load(self, plans: Mapping[str, ParamPlan], mesh: Mesh | None, progress: Progress | None) -> dict[str, Any]:
        """All parameters as planned, sharded over `mesh`."""

    def weights_id(self) -> str:
        """Hex identity of the weights (see identity.py)."""


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """A GGUF file or a folder of safetensors files at `path`."""

    path: Path
    config: TrunkConfig
    tensors: Mapping[str, StoredTensor]
    pieces: Mapping[str, Sequence[Piece]]
    metadata: Mapping[str, Any] | None = None

    @property
    def text_folder(self) -> Path:
        return self.path

    def exact_dtype(self, path: str) -> np.dtype:
        """The common type of the parameter's tensors; float32 if they differ or an offset is added to them."""
        kinds = {piece.tensor.encoding.exact for piece in self.pieces[path]}
        adds = any(piece.add for piece in self.pieces[path])
        return kinds.pop() if len(kinds) == 1 and not adds else np.dtype(np.float32)

    def read(self, path: str, dtype: np.dtype) -> np.ndarray:
        with concurrent.futures.ThreadPoolExecutor(2) as pool, OpenFiles() as files:
            return fill(param_specs(self.config)[path].shape, self.pieces[path], dtype, pool, files)

    def own_forms(self, path: str) -> tuple[str, ...] | None:
        forms = [form_of(piece.tensor) for piece in self.pieces[path]]
        return None if None in forms else tuple(form for form in forms if form is not None)

    def types(self, path: str) -> list[str]:
        return sorted({piece.tensor.encoding.name for piece in self.pieces[path]})

    def load(self, plans: Mapping[str, ParamPlan], mesh: Mesh | None, progress: Progress | None) -> dict[str, Any]:
        with OpenFiles() as files:
            supply = StoredSupply(self.config, self.pieces, files)
            return assemble(self.config, plans, supply, mesh=mesh, progress=progress)

    def weights_id(self) -> str:
        return weights_id(self.tensors)
