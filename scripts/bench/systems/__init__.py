"""The systems that can be measured. An adapter is imported in its worker process only, so peers stay optional."""

from __future__ import annotations

DRAFTING = ("off", "lookup", "shadow", "auto", *(f"fixed-{n}" for n in range(1, 16)))
"""Ways of drafting that our own engine can be compared with: a source, or all sources with a fixed draft length."""

PEERS = {
    "llama.cpp": ("llama.cpp",),
    "llama.cpp-q4_0": ("llama.cpp-q4_0",),
    "transformers": ("transformers-float32", "transformers-bfloat16"),
    "xla": ("umbra-xla",),
    **{name: (f"umbra-{name}",) for name in DRAFTING},
}
"""Name in `--against` -> the systems measured for it. With several, the faster one stands for the peer. `xla` is our
own engine without its kernels; the names in `DRAFTING` are our own engine drafting otherwise."""

ADAPTERS = {
    "umbra": "umbra.scripts.bench.systems.ours:Ours",
    "umbra-xla": "umbra.scripts.bench.systems.ours:PlainJax",
    "llama.cpp": "umbra.scripts.bench.systems.llama_cpp:LlamaCpp",
    "llama.cpp-q4_0": "umbra.scripts.bench.systems.llama_cpp:Requantised",
    "exact/umbra": "umbra.scripts.bench.systems.exact:Exact",
    "levels/umbra": "umbra.scripts.bench.systems.levels:Levels",
    "forms/umbra": "umbra.scripts.bench.systems.forms:Forms",
    "kernels/umbra": "umbra.scripts.bench.systems.ops:Ops",
    "kernels/umbra-xla": "umbra.scripts.bench.systems.ops:PlainJaxOps",
    "tiers/umbra": "umbra.scripts.bench.systems.tiered:Tiered",
    "transformers-float32": "umbra.scripts.bench.systems.transformers:Float32",
    "transformers-bfloat16": "umbra.scripts.bench.systems.transformers:BFloat16",
}
"""System -> module and class of its adapter. Names with a slash are what one benchmark alone runs."""

MODULES = {
    "llama.cpp": ("llama_cpp",),
    "llama.cpp-q4_0": ("llama_cpp",),
    "transformers": ("transformers", "torch", "accelerate"),
    "xla": (),
    **{name: () for name in DRAFTING},
}
"""Name in `--against` -> what must be installed for it."""


def adapter(system: str) -> str:
    """Where the adapter of a system is. Any name that begins with `umbra-` and is not listed is our engine in other
    settings."""
    return ADAPTERS.get(system) or ADAPTERS["umbra" if is_ours(system) else system]


def is_ours(system: str) -> bool:
    """Whether a system runs our engine, which loads any model and not only GGUF files."""
    return system.startswith("umbra")


def drafting(system: str, draft: str) -> tuple[str, int | None]:
    """How a system drafts, and how many tokens at a time (None: as many as the gate says): what its name says, else
    `draft`. One fixed length keeps the sources of `draft`."""
    name = system.removeprefix("umbra-")
    if name.startswith("fixed-") and name in DRAFTING:
        return ("auto" if draft == "off" else draft), int(name.removeprefix("fixed-"))
    return (name if name in DRAFTING else draft), None
