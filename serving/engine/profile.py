"""What a pass costs by its number of rows: the gate weighs drafts against it (kernels/draft/widths.py)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from ...configs.engine import BLOCK, MAX_DRAFT
from .programs import cost_entries
from .state import SlotState, StepInput

if TYPE_CHECKING:
    from .device import Device

ROUNDS = 4
"""Times that each size is measured; the least counts, since whatever disturbs a pass makes it longer."""
ROWS = 24
"""Rows of a measurement in all, in passes"""
PASSES = 8
"""at most, one after the other without waiting for results, as the engine runs them: a pass that is waited for takes a
millisecond longer, of which more drafts would seem to make the most."""
KNOTS = (1, 2, 5, 8, 12, 16, 20, 24, 32, 48, 64, 128)
"""Rows between which the table is straight. Measurements are off by a few percent, and a row more costs ten: one by
one, they would make some numbers of drafts seem free. Products change their way of working at 16 rows."""
POSITION = 64
"""Where the measured slots stand: what context adds is shared by a slot's rows, and left out."""


def assumed(rows: int) -> np.ndarray:
    """The table before anything was measured: every row more adds a tenth of a pass of one."""
    return (1 + 0.1 * np.arange(-1, cost_entries(rows) - 1)).clip(1).astype(np.float32)


def measured(device: Device) -> np.ndarray:
    """The table of this machine, in milliseconds, float32 `[cost_entries]`, as `fitted` to measurements of a few sizes.
    For an idle device; its slots are overwritten."""
    if device.context < 2 * POSITION:
        return assumed(device.rows)
    sizes = [n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128) if n < device.rows]
    sizes.append(device.rows)
    least = np.full(len(sizes), np.inf)
    for _ in range(ROUNDS):
        least = np.minimum(least, [_seconds(device, rows) for rows in sizes])
    return (1e3 * fitted(np.array(sizes), least, cost_entries(device.rows))).astype(np.float32)


def fitted(sizes: np.ndarray, times: np.ndarray, entries: int) -> np.ndarray:
    """The line through `KNOTS` that is nearest to `times` of passes over `sizes` rows (rising, the first is 1), by the
    squares of relative errors, read at 0, 1, ... `entries` - 1 rows; constant behind the last size. It never falls:
    what disturbs a measurement makes it longer, so the time of a larger pass bounds those of smaller ones."""
    knots = np.array([*(n for n in KNOTS if n < sizes[-1]), sizes[-1]])
    shares = np.stack([np.interp(sizes, knots, one) for one in np.eye(len(knots))], axis=1)
    values = np.linalg.lstsq(shares / times[:, None], np.ones(len(times)), rcond=None)[0]
    rising = np.minimum.accumulate(values[::-1])[::-1]
    return np.interp(np.arange(entries), knots, rising)


def _seconds(device: Device, rows: int) -> float:
    inputs = device.new_input(False)
    state = device.empty_rows(device.data * device.engine.slots)
    for shard in range(device.data):
        _fill(device, shard, inputs, state, rows)
    # Drafts are used up by a pass: there is a copy for each, made before the clock runs.
    passes = min(max(ROWS // rows, 1), PASSES)
    copies = [device.placed(state) for _ in range(1 + passes)]
    began = 0.0
    for i, copy in enumerate(copies):
        device.take_slots(copy)
        result, _ = device.run("decode", inputs)
        if i == 0:  # of another size than the pass before it, and slower than those that follow
            np.asarray(result.tokens)
            began = time.perf_counter()
    np.asarray(result.tokens)
    return (time.perf_counter() - began) / passes


def _fill(device: Device, shard: int, inputs: StepInput, state: SlotState, rows: int) -> None:
    """Rows of as few slots as possible."""
    first = shard * device.engine.slots
    slots = max(-(-rows // (1 + MAX_DRAFT)), 1)
    drafts = rows - slots
    for slot in range(first, first + slots):
        state.active[slot], state.position[slot], state.limit[slot] = True, POSITION, device.context - 1
        state.repetition[slot] = 1.0  # the most likely token as the model has it: no logits in memory
        inputs.decodes[slot], inputs.capacity[slot] = True, BLOCK
        inputs.tables[slot, 0] = 1 + slot % (device.blocks - 1)
        n = min(drafts, MAX_DRAFT)
        state.n_drafts[slot], state.drafts[slot, :n], state.draft_odds[slot, :n] = n, 1, 1.0
        drafts -= n
