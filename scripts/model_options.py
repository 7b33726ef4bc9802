"""The options of every script that runs a model, and how they become an engine."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configs.cache import GIB, CacheConfig
from ..configs.embedding import EmbeddingForm, parse_embedding
from ..kernels.backend import ASKED, choose
from ..serving.platform import parse_mesh, setup

if TYPE_CHECKING:
    from ..model.load import Model
    from ..serving.engine import Engine
    from ..serving.metrics import EngineMetrics

log = logging.getLogger(__name__)

DRAFT_SOURCES = ("auto", "off", "lookup", "shadow")

HOST_MEMORY = 8 * GIB
"""Of the host, for KV blocks of an accelerator, unless told otherwise."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclasses.dataclass(frozen=True)
class State:
    """A folder that outlives the process, and the tiers of KV in it and beside it."""

    folder: Path
    cache: CacheConfig = CacheConfig()
    own_memory: bool = True
    """Whether the platform decides about host memory."""
    optional: bool = False
    """Whether to do without it, with a warning, where the folder cannot be used."""

    def on(self, platform: str) -> CacheConfig:
        """The tiers on this platform."""
        default = 0 if platform == "cpu" else HOST_MEMORY
        return dataclasses.replace(self.cache, memory=default) if self.own_memory else self.cache


def positive(text: str) -> int:
    """A command line argument that must be a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def mesh_sizes(text: str) -> tuple[int, int]:
    """`data=2,model=4` as (2, 4), for argparse."""
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def embedding(text: str) -> EmbeddingForm:
    """The form of the table of tokens, for argparse."""
    try:
        return parse_embedding(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def only(*supported: str) -> Callable[[str], str]:
    """A command line argument that must be one of `supported`; anything else is refused by name."""

    def check(text: str) -> str:
        if text not in supported:
            raise argparse.ArgumentTypeError(f"{text!r} is not supported; supported: {', '.join(supported)}")
        return text

    check.supported = supported  # type: ignore[attr-defined]
    return check


class _Help(argparse.RawDescriptionHelpFormatter):
    """Options that take a value say of which kind it is, and all that have a default say it in the same words."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if supported := getattr(action.type, "supported", None):
            return f"{{{','.join(supported)}}}"
        kinds: dict[Any, str] = {positive: "N", int: "N", float: "X", Path: "FILE"}
        return kinds.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, value = action.help or "", action.default
        said = "(default: " in text or not action.option_strings or action.nargs == 0
        if said or value is None or value is argparse.SUPPRESS or value in ((), [], ""):
            return text
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return f"{text} (default: {shown.replace('%', '%%')})"


class OneLineParser(argparse.ArgumentParser):
    """Wrong usage ends with status 2 and a single line on stderr."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}\n")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL",
        help="smollm2, gemma3-270m, hf:ORG/NAME, a .gguf file, a Hugging Face or Orbax folder, or tiny",
    )  # fmt: skip
    parser.add_argument(
        "--quant", default="auto", type=only("auto", "none", "int8", "int4"),
        help="weights: auto (as the file has them, with native kernels; else as none), none (float32 on a CPU, "
        "bfloat16 on a TPU), int8 or int4 (requantised)",
    )  # fmt: skip
    parser.add_argument(
        "--kv", default="auto", type=only("auto", "float32", "bfloat16", "int8"),
        help="keys and values: auto (int8 with native kernels), float32, bfloat16 or int8",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", default="auto", type=only(*ASKED),
        help="who computes: auto (this platform's own kernels), cpu, tpu, or xla (plain JAX)",
    )  # fmt: skip
    parser.add_argument(
        "--embedding", default="file", type=embedding, metavar="FORM",
        help="precision of the table of tokens: file (as the file has it), or e.g. int8, or 4096:int8,int4: "
        "the most frequent tokens' rows in the first, the others in the second",
    )  # fmt: skip
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all this process may use)")
    parser.add_argument("--mesh", type=mesh_sizes, metavar="data=D,model=M", help="devices to spread the model over")


def add_draft_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft", default="auto", type=only(*DRAFT_SOURCES),
        help="where drafted tokens come from: auto (wherever they can), off, lookup (earlier text) or shadow. "
        "Answers are the same with all of them",
    )  # fmt: skip
    parser.add_argument(
        "--shadow", default="auto", metavar="FILE",
        help="the shadow network: auto (the one that ships for the model, if any), off, or a file of "
        "train_shadow.py",
    )  # fmt: skip


def state_folder(text: str) -> Path | None:
    """A folder, or None for `off`, for argparse."""
    return None if text == "off" else Path(text).expanduser()


def gibibytes(text: str) -> int:
    """GiB as bytes, for argparse."""
    try:
        size = round(float(text) * GIB)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"must be a number of GiB of at least 0, got {text!r}")
    return size


def add_state_options(parser: argparse.ArgumentParser, default: Path | None) -> None:
    """`default`: the folder used when none is named; None: off."""
    group = parser.add_argument_group("context cache")
    group.add_argument(
        "--state", type=state_folder, default=default, metavar="DIR",
        help="where KV and conversations are kept across restarts, or off: nothing is kept "
        f"({default or 'off'})",
    )  # fmt: skip
    group.add_argument(
        "--cache-disk", type=gibibytes, default=CacheConfig.disk_quota, metavar="GIB",
        help=f"most that KV takes on the disk; 0: none (default: {CacheConfig.disk_quota / GIB:g})",
    )  # fmt: skip
    group.add_argument(
        "--cache-memory", type=gibibytes, metavar="GIB",
        help="host memory for KV; 0: none (default: 0 on a CPU, whose pool is host memory already, else "
        f"{HOST_MEMORY / GIB:g})",
    )  # fmt: skip
    group.add_argument(
        "--cache-objects", default="", metavar="URL",
        help="a pool of KV shared by machines: gs://bucket/path, s3://bucket/path or file:///path",
    )  # fmt: skip
    group.add_argument(
        "--cache-log", type=Path, metavar="FILE", help="a file that gets a line for every request, for replays"
    )


def state(args: argparse.Namespace, default: Path | None) -> State | None:
    """What `add_state_options` chose; the default folder is one that can be done without. Raises `ValueError`."""
    if args.state is not None:
        config = CacheConfig(
            disk_quota=args.cache_disk, memory=args.cache_memory or 0, object_store=args.cache_objects,
            access_log=args.cache_log,
        )  # fmt: skip
        return State(args.state, config, own_memory=args.cache_memory is None, optional=args.state == default)
    if args.cache_memory or args.cache_objects or args.cache_log:
        raise ValueError("--cache-memory, --cache-objects and --cache-log need a folder, but --state is off")
    return None


def prepare(threads: int | None, mesh: tuple[int, int] | None, kernels: str = "auto") -> None:
    """Settings of the process. Must run before anything imports JAX."""
    setup(threads, mesh[0] * mesh[1] if mesh else None, kernels)


def open_engine(
    model: str,
    quant: str,
    mesh: tuple[int, int] | None,
    *,
    kernels: str = "auto",
    embedding: str | EmbeddingForm = "file",
    draft: str = "auto",
    shadow: str = "auto",
    progress: Progress | None = None,
    metrics: EngineMetrics | None = None,
    warm: bool = True,
    state: State | None = None,
    **sizes: Any,
) -> tuple[Model, Engine]:
    """Load a model and start an engine for it; `sizes` are fields of `EngineConfig`. Call `prepare` first.

    With `draft` "off" nothing can be drafted, with "lookup" there is no shadow. Without a `state` nothing outlives
    the engine. `warm=False` compiles every program
    when it is first needed.
    """
    import jax

    from ..configs.engine import EngineConfig
    from ..configs.models import NAMED, served_name
    from ..model.load import load_model, open_source
    from ..serving.engine import Engine, make_mesh
    from ..serving.storage import open_store

    devices, over = jax.devices(), None
    if mesh is not None or len(devices) > 1:
        config = NAMED[model] if model in NAMED else open_source(model, progress).config
        wanted = mesh[0] * mesh[1] if mesh is not None else len(devices)
        if wanted > len(devices):
            raise ValueError(f"a mesh of {wanted} devices was asked for; there are {len(devices)}")
        over = make_mesh(devices[:wanted], config, *(mesh or (None, None)))
    chosen = choose(devices[0].platform, kernels)
    log.log(logging.WARNING if chosen.fallback else logging.INFO, "kernels: %s", chosen.why)
    if draft == "off":
        sizes["draft_rows"] = 0
    loaded = load_model(
        model, quant=quant, kernels=chosen.kernels, embedding=embedding, mesh=over, progress=progress,
        shadow="off" if draft in ("off", "lookup") else shadow,
    )  # fmt: skip
    if draft == "shadow" and loaded.shadow is None:
        raise ValueError(f"there is no shadow network for {model}; train one with scripts/train_shadow.py")
    engine_config, store = EngineConfig(**sizes), None
    if state is not None:
        try:
            cache, name = state.on(devices[0].platform), served_name(model)
            store = open_store(state.folder, loaded, engine_config, cache, mesh=over, name=name)
        except (OSError, ValueError) as error:
            if not state.optional:
                raise
            log.warning("nothing outlives this process: %s", error)
    engine = Engine(loaded, engine_config, mesh=over, metrics=metrics, store=store)
    engine.start(warm=warm, progress=progress)
    return loaded, engine
