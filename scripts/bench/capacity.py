"""One conversation too long for any memory: its KV goes to the disk block by block, the process is killed, and the next
one lists the conversation, finds its blocks and reads all of them back.

Blocks are of the model's own size and hold noise that depends on their place, so that every byte that comes back is
known; what would compute them, and the device that would take them, are not part of this. `ready_s` is from the loaded
model to the engine that serves; `*_peak_bytes` is what a process has held at most beyond what it held before, for which
`allowed_bytes` are configured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ...configs.cache import GIB
from .harness import Say, our_setup
from .machine import machine
from .plan import Plan
from .processes import Worker
from .report import Row, report
from .systems.tiered import drop_pages

CACHE = {"disk_quota": 64 * GIB, "disk_reserve": 0, "queue_bytes": GIB // 4, "load_bytes": GIB // 8}


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    before = machine()
    with tempfile.TemporaryDirectory(prefix="umbra-capacity-", dir=plan.folder) as folder:
        say(f"storing {plan.prompt_tokens} tokens")
        writer = Worker("tiers/umbra")
        try:
            with writer.turn():
                writer.load(our_setup(plan))
                writer.settings |= writer.call("start", folder, CACHE, 256, 2.0, 1)
                stored = writer.call("store_conversation", plan.prompt_tokens)
        finally:
            writer.close()  # by SIGKILL
        drop_pages(Path(folder))
        say("starting again")
        reader = Worker("tiers/umbra")
        try:
            with reader.turn():
                reader.load(our_setup(plan))
                started = reader.call("start", folder, CACHE, 256, 2.0, 1)
                say("reading it back")
                found = reader.call("recall_conversation", plan.prompt_tokens)
                reader.call("check")
        finally:
            reader.close()
    allowed = CACHE["queue_bytes"] + CACHE["load_bytes"]
    summary = {
        "tokens": plan.prompt_tokens,
        "ready_s": started["ready_s"],
        "allowed_bytes": allowed,
        **{f"store_{name}": value for name, value in stored.items()},
        **{f"recall_{name}": value for name, value in found.items()},
    }
    rows: list[Row] = [
        {"system": "umbra", "id": name, "category": name, "tok_s": made["tokens"] / made["seconds"], "ttft_ms": None,
         "tokens_per_pass": None, **made}
        for name, made in (("store", stored), ("recall", found))
    ]  # fmt: skip
    settings = {"umbra": writer.settings}
    return report(plan, before, writer.versions, settings, rows, {"umbra": summary}) | {
        "differences": None if found["same"] else "blocks or ids came back that are not those that were stored"
    }
