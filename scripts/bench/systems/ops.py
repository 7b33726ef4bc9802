"""The adapter for single operations of our engine (see timed.py, which imports JAX)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...model_options import prepare
from .base import Setup
from .ours import PACKAGES, instructions

if TYPE_CHECKING:
    from ....model.load import Model
    from .timed import Case, Timed


class Ops:
    """Operations of one model. One case at a time is ready to be timed."""

    kernels: str | None = None
    """As in `Ours`."""
    model: Model
    timed: Timed | None = None

    def load(self, setup: Setup) -> dict[str, Any]:
        kernels = self.kernels or setup.kernels
        prepare(setup.threads, None, kernels)
        import jax

        from ....configs.engine import EngineConfig
        from ....kernels.backend import choose
        from ....model.load import load_model
        from ....serving.engine.programs import kv_format

        platform = jax.default_backend()
        self.chosen = choose(platform, kernels).kernels
        self.model = load_model(setup.model, quant=setup.quant, kernels=self.chosen, embedding=setup.embedding)
        engine = EngineConfig(kv=setup.kv)  # type: ignore[arg-type]
        self.kv = kv_format(engine, self.chosen, platform)
        return {
            "versions": {name: version(name) for name in PACKAGES},
            "settings": {
                "weights": self.model.quant,
                "kernels": self.chosen._asdict(),
                "instructions": instructions(self.chosen),
                "kv": self.kv.name,
                "threads": setup.threads,
            },
        }

    def cases(self, ops: Sequence[str], rows: Sequence[int], contexts: Sequence[int]) -> list[Case]:
        from .timed import cases

        return cases(ops, rows, contexts)

    def begin(self, case: Case) -> dict[str, Any]:
        """Make `case` ready, and forget the one before."""
        from .timed import make

        self.timed = None
        self.timed = make(case, self.model, self.chosen, self.kv)
        self.timed.prepare()
        return {"bytes": self.timed.bytes, "ops": self.timed.ops, "arithmetic": self.timed.arithmetic}

    def seconds(self) -> float:
        assert self.timed is not None
        return self.timed.seconds()


class PlainJaxOps(Ops):
    """The same without kernels of our own."""

    kernels = "xla"
