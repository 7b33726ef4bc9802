"""Attention of one new token against the length of its context: through a block table, and over contiguous KV.

The time of all layers is reported for each length, with our kernels and in plain JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import kernels
from .harness import Say
from .plan import Plan

LENGTHS = (1024, 4096, 8192, 16384, 32768)


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and give the report."""
    content = kernels.run(dataclasses.replace(plan, ops=("walk",)), say)
    for system, entry in content["summary"].items():
        walked = [row for row in content["rows"] if row["system"] == system and row["layout"] == "pool"]
        entry |= {f"us_at_{row['context']}": row["us"] for row in walked}
        shortest, longest = walked[0], walked[-1]
        entry["time_growth_over_length_growth"] = float(
            f"{longest['us'] / shortest['us'] / (longest['context'] / shortest['context']):.6g}"
        )
    return content
