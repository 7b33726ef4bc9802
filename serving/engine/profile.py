"""What a pass costs by its number of tokens: the gate weighs drafts against it (kernels/draft/widths.py)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ...configs.engine import BLOCK, MAX_DRAFT, EngineConfig
from ...kernels.attention import GROUP
from .programs import cost_entries
from .state import SlotState, StepInput

if TYPE_CHECKING:
    from .device import Device

ROUNDS = 3
"""Times that each size is measured; the least counts, since whatever disturbs a pass makes it longer."""
PASSES = 3
"""Of a size, one after the other without waiting for results, as the engine runs them: a pass that is waited for takes
a millisecond longer, of which more drafts would seem to make the most."""
POSITION = 64
"""Where the measured slots stand: what context adds is shared by a slot's rows, and left out."""


def assumed(engine: EngineConfig, rows: int) -> np.ndarray:
    """The table before anything was measured: every token more adds a tenth of a pass of one."""
    return (1 + 0.1 * np.arange(-1, cost_entries(engine, rows) - 1)).clip(1).astype(np.float32)


def measured(device: Device) -> np.ndarray:
    """The table of this machine, in milliseconds, float32 `[cost_entries]`: measured at a few sizes, straight between
    them, and never falling: what disturbs a measurement makes it longer, so that the time of a larger pass bounds those
    of smaller ones. For an idle device; its slots are overwritten."""
    if device.context < 2 * POSITION:
        return assumed(device.engine, device.rows)
    sizes = [n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128) if n < device.rows]
    points = [(0, n) for n in (*sizes, device.rows)]
    points += [(device.engine.prefill_chunk, n) for n in (1, device.rows)]
    least = np.full(len(points), np.inf)
    for _ in range(ROUNDS):
        for i, (prompt, rows) in enumerate(points):
            least[i] = min(least[i], _seconds(device, prompt, rows))
    tokens = np.array([sum(point) for point in points])
    order = np.argsort(tokens)
    rising = np.minimum.accumulate(least[order][::-1])[::-1]
    table = np.interp(np.arange(cost_entries(device.engine, device.rows)), tokens[order], rising)
    return (1e3 * table).astype(np.float32)


def _seconds(device: Device, prompt: int, rows: int) -> float:
    inputs = device.new_input(prompt > 0)
    state = device.empty_rows(device.data * device.engine.slots)
    for shard in range(device.data):
        _fill(device, shard, inputs, state, prompt, rows)
    began = time.perf_counter()
    for _ in range(PASSES):
        device.put_slots(state)
        result, _ = device.run("prefill" if prompt else "decode", inputs)
    np.asarray(result.tokens)
    return (time.perf_counter() - began) / PASSES


def _fill(device: Device, shard: int, inputs: StepInput, state: SlotState, prompt: int, rows: int) -> None:
    """Decode rows of as few slots as possible, and a chunk of a prompt that does not end, at the last slot."""
    engine = device.engine
    first = shard * engine.slots
    slots = max(-(-rows // (1 + MAX_DRAFT)), 1)
    for slot in range(first, first + slots):
        state.active[slot], state.position[slot], state.limit[slot] = True, POSITION, device.context - 1
        inputs.decodes[slot], inputs.capacity[slot], inputs.tables[slot, 0] = (
            True,
            BLOCK,
            1 + slot % (device.blocks - 1),
        )
    drafts = rows - slots
    for slot in range(first, first + slots):
        n = min(drafts, MAX_DRAFT)
        state.n_drafts[slot], state.drafts[slot, :n], state.draft_odds[slot, :n] = n, 1, 1.0
        drafts -= n
    if prompt:
        t, g = shard * engine.prefill_chunk, shard * (len(inputs.starts) // device.data)
        inputs.slots[t : t + prompt] = engine.slots - 1
        inputs.positions[t : t + prompt] = np.arange(prompt)
        starts = np.arange(0, prompt, GROUP)
        inputs.starts[g : g + len(starts)] = starts
        inputs.counts[g : g + len(starts)] = np.minimum(GROUP, prompt - starts)
        inputs.tables[first + engine.slots - 1] = 1
        inputs.sizes[shard] = prompt, len(starts)
