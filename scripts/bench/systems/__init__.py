"""The systems that can be measured. An adapter is imported in its worker process only, so peers stay optional."""

from __future__ import annotations

PEERS = {"llama.cpp": ("llama.cpp",), "transformers": ("transformers-float32", "transformers-bfloat16")}
"""Name in `--against` -> the systems measured for it. With several, the faster one stands for the peer."""

ADAPTERS = {
    "umbra": "umbra.scripts.bench.systems.ours:Ours",
    "llama.cpp": "umbra.scripts.bench.systems.llama_cpp:LlamaCpp",
    "transformers-float32": "umbra.scripts.bench.systems.transformers:Float32",
    "transformers-bfloat16": "umbra.scripts.bench.systems.transformers:BFloat16",
}
"""System -> module and class of its adapter."""

MODULES = {"llama.cpp": ("llama_cpp",), "transformers": ("transformers", "torch", "accelerate")}
"""Name in `--against` -> what must be installed for it."""
