"""Answers that follow a grammar, on the engine's thread: what a step is told of them, and what they learn from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from ...configs.engine import MAX_DRAFT
from ...kernels.draft import Drafts
from .grammars import Chain, Guides
from .scheduler import Plan, Shard
from .sequence import Sequence
from .state import Guided


def guided_of(plan: Plan) -> list[Sequence]:
    """The sequences whose next token a step of `plan` must choose under a mask."""
    finishing = [seq for seq, first, count in plan.chunks if first + count == len(seq.prompt)]
    return [seq for seq in [*plan.decode, *finishing] if seq.guide is not None and not seq.thinking]


def fill(guided: Guided, shard: Shard, sequences: Seq[Sequence], rows: int) -> None:
    """Write what guides `sequences`, which are the shard's, into its part of `guided`: at most `rows` masks, one for
    each sequence at least."""
    row, spare = shard.index * rows, rows - len(sequences)
    for seq in sequences:
        assert seq.guide is not None and seq.guide.steering is not None
        steering, slot = seq.guide.steering, shard.index * shard.slots + seq.slot
        n = min(len(steering.drafts), spare)
        spare -= n
        guided.first[slot], guided.length[slot] = row, n
        guided.masks[row : row + 1 + n] = steering.masks[: 1 + n]
        guided.drafts[slot, :n] = steering.drafts[:n]
        guided.sources[slot, :n] = steering.sources[:n]
        guided.odds[slot, :n] = steering.odds[:n]
        row += 1 + n


def advance(
    guides: Guides, seq: Sequence, tokens: Seq[int], drafts: Drafts, column: int, *, alone: bool = False
) -> None:
    """Have the next pass of `seq` found, whose answer has just grown by `tokens`. `drafts` (of all slots, on the host)
    were made behind them. `alone`: nobody else's step has to wait if it is found at once."""
    guide = seq.guide
    assert guide is not None
    length = int(drafts.length[column])
    chain = Chain(
        tuple(drafts.tokens[column, :length].tolist()),
        tuple(drafts.source[column, :length].tolist()),
        tuple(np.asarray(drafts.probability[column, :length], np.float64).tolist()),
    )
    room = seq.limit - seq.position
    most = max(0, min(MAX_DRAFT, room - 1)) if seq.sources else 0
    guide.steering = None
    guides.run(lambda: guide.advance(tokens, chain, most, room), here=alone)
