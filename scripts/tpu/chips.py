"""TPU chips and topologies: peak rates, and a topology's devices without having any."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from typing import Any

from .environment import prepare


@dataclasses.dataclass(frozen=True)
class Chip:
    """Capacity and peak rates of what JAX calls one device.

    Source: the table in `jax/_src/pallas/mosaic/tpu_info.py` (JAX 0.10.2), per chip; a 7x chip is two devices.
    """

    name: str
    hbm_bytes: float
    bytes_per_second: float
    flops_per_second: float
    """In bfloat16, on the matrix units."""


CHIPS = {
    "v5e": Chip("v5e", 17.2e9, 820e9, 197e12),
    "v5p": Chip("v5p", 103e9, 2460e9, 459e12),
    "v6e": Chip("v6e", 34.4e9, 1640e9, 920e12),
    "tpu7x": Chip("tpu7x", 206e9 / 2, 7400e9 / 2, 2310e12 / 2),
}


class TopologyError(ValueError):
    """A topology that cannot be had, in one sentence."""


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v5e:2x2`."""
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise TopologyError(
            f"topology {topology!r} is not known; write CHIP:AxB or CHIP:AxBxC with one of {', '.join(CHIPS)}, "
            "for example v5e:2x2"
        )
    return CHIPS[name]


def devices(topology: str) -> list[Any]:
    """The devices of `topology`, to compile for. libtpu makes them up: no TPU is needed or touched."""
    chip_of(topology)
    prepare()
    from jax.experimental import topologies

    sizes = [int(n) for n in topology.partition(":")[2].split("x")]
    # Fewer chips than a whole host has: say so, as libtpu assumes 2x2.
    partial = {"chips_per_host_bounds": (*sizes, 1, 1)[:3]} if math.prod(sizes) < 4 else {}
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError("compiling for a TPU needs libtpu, which is not installed: pip install -e '.[test]'")
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **partial).devices)
    except Exception as error:  # JAX raises several types
        raise TopologyError(f"topology {topology} is refused: {str(error).strip().splitlines()[0]}") from None
