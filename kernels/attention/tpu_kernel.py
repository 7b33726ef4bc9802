"""The TPU attention kernel (Pallas): ragged queries against paged KV, with the step's own KV written on the way.

One kernel call serves all tokens of a step in one layer. Consecutive tokens of a sequence (a *run*: a decode row, the
rows of a verify pass, a prompt chunk) are cut into *tiles*; a tile walks the blocks it can see in ascending order.

* The blocks of all tiles form one stream. A ring of VMEM buffers is filled ahead of the computation by DMA, across the
  ends of tiles; a block `[K, P, 2H]` of one layer is one contiguous piece of the pool, read once for all heads.
* New keys and values are laid over each block that holds positions of the run, after it has arrived. So tiles need not
  wait for each other, and what is attended to is what will be stored. Only the last tile of a run, which visits all of
  the run's blocks and is the last to read them, writes them back: whole slabs (the least writable rows of a block), and
  nothing that another DMA may be reading.
* Each block is one step of the online softmax. Several blocks and heads are worked on side by side, for the sake of
  the pipelines, but their sums are added in ascending order: the grouping of additions is the contract's.
* Rows of a head are its queries of `height` tokens, `row = token * group + head`. A tile is worked on at the least of
  the heights that holds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...configs.engine import BLOCK
from .tpu_sizes import LANES, SUBLANES, Sizes

NEVER = -1e30
"""A logit no key can have: finite, so that a fully masked block leaves the running maximum and sums as they are."""

TILE_FIELDS = 8
"""int32 a tile: token, count, offset of its table row, position, first position of the run, token minus position in
the run, last position of the run, end of the table entries it sees."""

LAYER, REACH, BOUNDS = 0, 1, 2
"""Places in `info`. REACH: how far back a query sees. Tiles [BOUNDS + c, BOUNDS + c + 1) belong to core c."""

FAR = 2**30
"""A reach without a window, and more than any position."""

AT_TILE, AT_ENTRY, END, TABLE_ROW, ISSUED, DONE = range(6)
"""Places in `cursor`: the next block to fetch (its tile and table entry, the end of that tile's entries, the offset of
its table row), and how many blocks have been asked for and used."""

Ref = Any


class _Tile:
    """One tile's scalars, as far as they are used."""

    def __init__(self, tiles: Ref, index: jax.Array) -> None:
        fields = [tiles[index * TILE_FIELDS + i] for i in range(TILE_FIELDS)]
        self.token, self.count, self.row, self.position, self.run_first, self.shift, self.run_last, self.end = fields

    @property
    def is_last(self) -> jax.Array:
        """Whether it ends the run, and so stores the run's keys and values."""
        return self.position + self.count > self.run_last

    def first(self, reach: jax.Array, sparse: bool) -> jax.Array:
        """First table entry it walks. Of a sparse table it walks all: what lies before the window is masked."""
        if sparse:
            return jnp.int32(0)
        oldest = jnp.maximum(self.position - reach, 0)
        oldest = jnp.where(self.is_last, jnp.minimum(oldest, self.run_first), oldest)
        return _block_of(oldest)


class Kernel:
    """The kernel's refs, and the steps of its program. Made anew for each trace."""

    def __init__(self, sizes: Sizes, sparse: bool, hot: bool, softcap: float | None, refs: tuple[Ref, ...]) -> None:
        self.s, self.sparse, self.softcap = sizes, sparse, softcap
        self.dot_type = jnp.float32 if sizes.dtype == "float32" else jnp.bfloat16
        left = list(refs)

        def take(present: bool = True) -> Ref:
            return left.pop(0) if present else None

        quantised = sizes.quantised
        self.info, self.tiles, self.tables = take(), take(), take()
        self.index, self.places = take(sparse), take(hot)
        self.q, self.fresh, self.fresh_scales = take(), take(), take(quantised)
        self.hot, self.hot_scales = take(hot), take(hot and quantised)
        take()  # the pool as an input: the same memory as the output
        take(quantised)
        self.out, self.pool, self.scales = take(), take(), take(quantised)
        self.lse, self.mass = take(sizes.lse), take(sizes.block_mass)
        self.ring, self.scale_ring = take(), take(quantised)
        self.q_tile, self.out_tile, self.q_rows = take(), take(), take()
        self.top, self.total, self.acc = take(), take(), take()
        self.lse_tile = take(sizes.lse)
        self.mass_rows, self.mass_tile = take(sizes.block_mass), take(sizes.block_mass)
        self.cursor, self.unsettled = take(), take()
        self.fetched, self.written, self.q_sem, self.out_sem = take(), take(), take(), take()
        assert not left
        self.layer, self.reach = self.info[LAYER], self.info[REACH]

    # ---- the stream of blocks

    def fetch_next(self) -> None:
        """Start the DMA of the next block of the stream into the next place of the ring, if there is one."""
        cursor = self.cursor

        @pl.when(cursor[AT_TILE] < self.end_tile)
        def _() -> None:
            entry, place = cursor[AT_ENTRY], self.place(cursor[ISSUED])
            self.settle(place)
            self.start_block(cursor[TABLE_ROW] + entry, place)
            cursor[ISSUED] += 1
            cursor[AT_ENTRY] = entry + 1
            pl.when(entry + 1 >= cursor[END])(lambda: self.open_tile(cursor[AT_TILE] + 1))

    def open_tile(self, index: jax.Array) -> None:
        """Let the stream go on with the blocks of tile `index`. Behind the last tile there is an empty one."""
        tile = _Tile(self.tiles, index)
        self.cursor[AT_TILE] = index
        self.cursor[AT_ENTRY] = tile.first(self.reach, self.sparse)
        self.cursor[END] = tile.end
        self.cursor[TABLE_ROW] = tile.row

    def place(self, number: jax.Array) -> jax.Array:
        """Where in the ring a block of the stream lies. The depth is a power of two."""
        return jnp.bitwise_and(number, self.s.depth - 1)

    def start_block(self, at: jax.Array, place: jax.Array) -> None:
        """Start the DMAs of the block in table entry `at`: from the pool, or from where it is staged on the chip."""
        block = self.tables[at]
        sources = [(self.pool, self.hot, self.ring, 0)]
        if self.s.quantised:
            sources.append((self.scales, self.hot_scales, self.scale_ring, 1))

        def start(which: int, source: Ref, ring: Ref) -> None:
            pltpu.make_async_copy(source, ring.at[place], self.fetched.at[which, place]).start()

        for pool, hot, ring, which in sources:
            stored = pool.at[block, self.layer]
            if hot is None:
                start(which, stored, ring)
                continue
            staged = self.places[at]
            on_chip = hot.at[jnp.maximum(staged, 0), self.layer]
            pl.when(staged >= 0)(functools.partial(start, which, on_chip, ring))
            pl.when(staged < 0)(functools.partial(start, which, stored, ring))

    def receive(self, tile: _Tile, entry: jax.Array, place: jax.Array) -> None:
        """Wait for a block of the tile, and lay over it what is new."""
        pltpu.make_async_copy(self.pool.at[0, 0], self.ring.at[place], self.fetched.at[0, place]).wait()
        if self.s.quantised:
            pltpu.make_async_copy(self.scales.at[0, 0], self.scale_ring.at[place], self.fetched.at[1, place]).wait()
        base = self.block_at(tile, entry) * BLOCK
        pl.when(base + BLOCK > tile.run_first)(lambda: self.overlay(tile, entry, base, place))

    def block_at(self, tile: _Tile, entry: jax.Array) -> jax.Array:
        """Which block of the sequence a table entry holds."""
        return entry if self.index is None else self.index[tile.row + entry]

    def settle(self, place: jax.Array) -> None:
        """Wait until what was written from a place of the ring has left it."""
        slabs = self.unsettled[place]

        @pl.when(slabs > 0)
        def _() -> None:
            self.unsettled[place] = 0
            _each(slabs, lambda _: self.slab_copy(place, 0, 0).wait())
            if self.s.quantised:
                self.scale_copy(place, 0).wait()

    def slab_copy(self, place: Any, block: Any, first_row: Any) -> Any:
        at = pl.ds(pl.multiple_of(first_row, self.s.slab), self.s.slab)
        source, target = self.ring.at[place, :, at, :], self.pool.at[block, self.layer, :, at, :]
        return pltpu.make_async_copy(source, target, self.written.at[0, place])

    def scale_copy(self, place: Any, block: Any) -> Any:
        target = self.scales.at[block, self.layer]
        return pltpu.make_async_copy(self.scale_ring.at[place], target, self.written.at[1, place])

    # ---- new keys and values

    def overlay(self, tile: _Tile, entry: jax.Array, base: jax.Array, place: jax.Array) -> None:
        """Put the run's keys and values over a block that starts at position `base`, clear what lies behind them, and,
        for the last tile of the run, write them back."""
        low = jnp.maximum(tile.run_first - base, 0)
        high = jnp.minimum(tile.run_last - base + 1, BLOCK)
        slab, shift = self.s.slab, tile.shift + base
        first, end = lax.div(low, slab), lax.div(high + slab - 1, slab)

        def clear(i: jax.Array) -> None:
            at = pl.ds(pl.multiple_of((end + i) * slab, slab), slab)
            self.ring[place, :, at, :] = jnp.zeros((self.s.n_kv_heads, slab, 2 * self.s.head_dim), self.ring.dtype)

        _each(end - first, lambda i: self.put_slab(place, (first + i) * slab, shift, low, high))
        _each(BLOCK // slab - end, clear)
        if self.s.quantised:
            self.put_scales(place, shift, low, high)

        @pl.when(tile.is_last)
        def _() -> None:
            block = self.tables[tile.row + entry]
            _each(end - first, lambda i: self.slab_copy(place, block, (first + i) * slab).start())
            self.unsettled[place] = end - first
            if self.s.quantised:
                self.scale_copy(place, block).start()

    def put_slab(self, place: jax.Array, row: jax.Array, shift: jax.Array, low: jax.Array, high: jax.Array) -> None:
        """Merge one slab, from row `row` of the block on. Row r holds token `shift + r`; new are rows low to high."""
        slab = self.s.slab
        source = shift + row + slab  # `fresh` starts with one slab of padding
        aligned = pl.multiple_of(lax.div(source, slab) * slab, slab)
        turn = lax.rem(2 * slab - (source - aligned), 2 * slab)
        at = pl.ds(pl.multiple_of(row, slab), slab)
        rows = row + lax.broadcasted_iota(jnp.int32, (self.s.n_kv_heads, slab, 2 * self.s.head_dim), 1)
        new = pltpu.roll(self.fresh[:, pl.ds(aligned, 2 * slab), :], turn, 1)[:, :slab]
        old = self.ring[place, :, at, :].astype(jnp.float32)
        merged = jnp.where(rows < high, jnp.where(rows >= low, new, old), 0.0)
        self.ring[place, :, at, :] = _stored(merged, self.ring.dtype)

    def put_scales(self, place: jax.Array, shift: jax.Array, low: jax.Array, high: jax.Array) -> None:
        """The same for the scales: lane r holds token `shift + r`."""
        source = shift + LANES  # `fresh_scales` starts with one chunk of padding
        chunk = lax.div(source, LANES)
        offset = source - chunk * LANES
        turn = lax.rem(LANES - offset, LANES)
        lanes = lax.broadcasted_iota(jnp.int32, (self.s.n_kv_heads, 2, LANES), 2)
        left = pltpu.roll(self.fresh_scales[chunk], turn, 2)
        right = pltpu.roll(self.fresh_scales[chunk + 1], turn, 2)
        new = jnp.where(lanes < LANES - offset, left, right)
        old = self.scale_ring[place]
        self.scale_ring[place] = jnp.where(lanes < high, jnp.where(lanes >= low, new, old), 0.0)

    # ---- queries and results of a tile

    def q_copy(self, token: Any, i: Any, buffer: Any) -> Any:
        return pltpu.make_async_copy(self.q.at[token + i], self.q_tile.at[buffer, i], self.q_sem.at[buffer])

    def start_queries(self, index: jax.Array) -> None:
        tile = _Tile(self.tiles, index)
        buffer = lax.rem(index, 2)
        _each(tile.count, lambda i: self.q_copy(tile.token, i, buffer).start())

    def take_queries(self, tile: _Tile, buffer: jax.Array, height: int) -> None:
        """Wait for the tile's queries and sort them into rows of heads."""
        s, g = self.s, self.s.group
        _each(tile.count, lambda i: self.q_copy(tile.token, i, buffer).wait())

        def take(first: Any, tokens: int) -> None:
            for k in range(s.n_kv_heads):
                piece = self.q_tile[buffer, pl.ds(first, tokens), k * g : (k + 1) * g, :].reshape(tokens * g, s.lanes)
                missing = s.rows(tokens) - tokens * g
                if missing:
                    piece = jnp.concatenate([piece, jnp.zeros((missing, s.lanes), piece.dtype)])
                self.q_rows[k, pl.ds(_aligned(first * g), s.rows(tokens)), :] = piece

        _pieces(height, take)

    def out_copies(self, tile: _Tile, buffer: Any, i: Any) -> list[Any]:
        token = tile.token + i
        copies = [pltpu.make_async_copy(self.out_tile.at[buffer, i], self.out.at[token], self.out_sem.at[0, buffer])]
        if self.s.lse:
            copies.append(
                pltpu.make_async_copy(self.lse_tile.at[buffer, i], self.lse.at[token], self.out_sem.at[1, buffer])
            )
        return copies

    def wait_results(self, index: jax.Array) -> None:
        """Wait until the results of an earlier tile have left their buffer."""
        tile = _Tile(self.tiles, index)

        def wait(i: jax.Array) -> None:
            for copy in self.out_copies(tile, lax.rem(index, 2), i):
                copy.wait()

        _each(tile.count, wait)

    def give_results(self, tile: _Tile, buffer: jax.Array, height: int) -> None:
        s = self.s
        rows = slice(0, s.rows(height))
        total = self.total[:, rows]
        divisor = jnp.where(total > 0, total, 1.0)
        self.acc[:, rows] = self.acc[:, rows] / _across(divisor, s.lanes)
        if s.lse:
            self.total[:, rows] = jnp.where(total > 0, self.top[:, rows] + jnp.log(divisor), -jnp.inf)
        for k in range(s.n_kv_heads):
            self.sort_back(self.out_tile.at[buffer], self.acc.at[k], k, height)
            if s.lse:
                self.sort_back(self.lse_tile.at[buffer], self.total.at[k], k, height)

        def start(i: jax.Array) -> None:
            for copy in self.out_copies(tile, buffer, i):
                copy.start()

        _each(tile.count, start)
        if s.block_mass:
            self.give_mass(tile, height)

    def sort_back(self, target: Ref, rows: Ref, k: int, height: int) -> None:
        """Rows of head `k` `[R, lanes]` to their tokens `[tile, N, lanes]`."""
        g = self.s.group

        def put(first: Any, tokens: int) -> None:
            piece = rows[pl.ds(_aligned(first * g), self.s.rows(tokens)), :][: tokens * g]
            target[pl.ds(first, tokens), k * g : (k + 1) * g, :] = piece.reshape(tokens, g, rows.shape[-1])

        _pieces(height, put)

    def give_mass(self, tile: _Tile, height: int) -> None:
        """Store the log-sum-exp of every entry, 128 at a time. Asked for now and then: nothing overlaps here."""

        def chunk(c: jax.Array, carry: jax.Array) -> jax.Array:
            for k in range(self.s.n_kv_heads):
                self.sort_back(self.mass_tile, self.mass_rows.at[c, k], k, height)

            def store(i: jax.Array) -> None:
                copy = pltpu.make_async_copy(
                    self.mass_tile.at[i], self.mass.at[tile.token + i, c], self.out_sem.at[2, 0]
                )
                copy.start()
                copy.wait()

            _each(tile.count, store)
            return carry

        lax.fori_loop(0, self.s.mass_chunks, chunk, 0)

    # ---- the computation

    def run(self) -> None:
        """The whole program of one core."""
        core = pl.program_id(0)
        self.first_tile, self.end_tile = self.info[BOUNDS + core], self.info[BOUNDS + core + 1]

        @pl.when(self.first_tile < self.end_tile)
        def _() -> None:
            self.open_tile(self.first_tile)
            self.cursor[ISSUED] = 0
            self.cursor[DONE] = 0
            for place in range(self.s.depth):
                self.unsettled[place] = 0
            self.start_queries(self.first_tile)
            _each(self.s.depth - self.s.spans, lambda _: self.fetch_next())

            def tile(index: jax.Array, carry: jax.Array) -> jax.Array:
                self.tile(index)
                return carry

            lax.fori_loop(self.first_tile, self.end_tile, tile, 0)
            _each(self.s.depth, self.settle)
            for back in (2, 1):
                index = self.end_tile - back
                pl.when(index >= self.first_tile)(functools.partial(self.wait_results, index))

    def tile(self, index: jax.Array) -> None:
        pl.when(index + 1 < self.end_tile)(lambda: self.start_queries(index + 1))
        pl.when(index - 2 >= self.first_tile)(lambda: self.wait_results(index - 2))
        tile = _Tile(self.tiles, index)
        lowest = 0
        for height in self.s.heights:
            fits = (tile.count > lowest) & (tile.count <= height)
            pl.when(fits)(functools.partial(self.tile_at_height, tile, lax.rem(index, 2), height))
            lowest = height

    def tile_at_height(self, tile: _Tile, buffer: jax.Array, height: int) -> None:
        s = self.s
        rows = slice(0, s.rows(height))
        self.take_queries(tile, buffer, height)
        state = (s.n_kv_heads, s.rows(height), LANES)
        self.top[:, rows] = jnp.full(state, NEVER)
        self.total[:, rows] = jnp.zeros(state)
        self.acc[:, rows] = jnp.zeros((*state[:2], s.lanes))
        if s.block_mass:
            self.mass_rows[:, :, rows] = jnp.full((s.mass_chunks, *state), NEVER)
        first = tile.first(self.reach, self.sparse)
        spans = s.spans if s.rows(height) <= 4 * SUBLANES else 1
        whole = lax.div(tile.end - first, spans)

        def step(entry: jax.Array, n: int) -> None:
            _each(n, lambda _: self.fetch_next())
            done = self.cursor[DONE]
            self.cursor[DONE] = done + n
            _each(n, lambda i: self.receive(tile, entry + i, self.place(done + i)))
            blocks = [(self.place(done + i), self.block_at(tile, entry + i), entry + i) for i in range(n)]
            self.attend(tile, blocks, height)

        def several(i: jax.Array, carry: jax.Array) -> jax.Array:
            step(first + i * spans, spans)
            return carry

        def single(entry: jax.Array, carry: jax.Array) -> jax.Array:
            step(entry, 1)
            return carry

        lax.fori_loop(0, whole, several, 0)
        if spans > 1:
            lax.fori_loop(first + whole * spans, tile.end, single, 0)
        self.give_results(tile, buffer, height)

    def attend(self, tile: _Tile, blocks: list[tuple[jax.Array, jax.Array, jax.Array]], height: int) -> None:
        """One step of the online softmax for each of the blocks (place in the ring, block of the sequence, entry)."""
        s = self.s
        shape = (s.rows(height), BLOCK)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        position = tile.position + lax.div(row, s.group)
        oldest = position - self.reach
        seen = []
        for _, at, _ in blocks:
            keys = at * BLOCK + lax.broadcasted_iota(jnp.int32, shape, 1)
            seen.append((keys <= position) & (keys >= oldest))
        heads = s.heads if s.rows(height) <= 4 * SUBLANES else math.gcd(s.heads, 2)
        if heads == s.n_kv_heads:
            self.attend_heads(range(heads), blocks, seen, s.rows(height))
            return

        def chunk(c: jax.Array, carry: jax.Array) -> jax.Array:
            self.attend_heads([c * heads + i for i in range(heads)], blocks, seen, s.rows(height))
            return carry

        lax.fori_loop(0, s.n_kv_heads // heads, chunk, 0)

    def attend_heads(self, heads: Any, blocks: list[Any], seen: list[jax.Array], rows: int) -> None:
        s, H = self.s, self.s.head_dim
        kept = slice(0, rows)
        logits, values, scales = {}, {}, {}
        for h, k in enumerate(heads):
            q = self.q_rows[k, kept].astype(self.dot_type)
            for b, (place, _, _) in enumerate(blocks):
                kv = self.ring[place, k]
                if s.quantised:
                    kv = kv.astype(jnp.float32).astype(self.dot_type)
                    scales[h, b] = self.scale_ring[place, k]
                keys, values[h, b] = (kv, kv) if s.joint else (kv[:, :H], kv[:, H:])
                logits[h, b] = _dot(q, keys, 1)
        for h, k in enumerate(heads):
            top, total, acc = self.top[k, kept], self.total[k, kept], self.acc[k, kept]
            for b, (_, _, entry) in enumerate(blocks):
                x = logits[h, b]
                if s.quantised:
                    x = x * scales[h, b][:1]
                if self.softcap is not None:
                    x = self.softcap * jnp.tanh(x / self.softcap)
                x = jnp.where(seen[b], x, NEVER)
                new_top = jnp.maximum(top, x.max(axis=1, keepdims=True))
                weights = jnp.where(seen[b], jnp.exp(x - new_top), 0.0)
                shrink = jnp.exp(top - new_top)
                here = weights.sum(axis=1, keepdims=True)
                total = total * shrink + here
                if s.block_mass:
                    self.note_mass(k, kept, entry, here, new_top)
                if s.quantised:
                    weights = weights * scales[h, b][1:]
                acc = acc * _across(shrink, s.lanes) + _dot(weights.astype(self.dot_type), values[h, b], 0)
                top = new_top
            self.top[k, kept], self.total[k, kept], self.acc[k, kept] = top, total, acc

    def note_mass(self, k: Any, rows: slice, entry: jax.Array, here: jax.Array, top: jax.Array) -> None:
        """Keep the block's own log-sum-exp in lane `entry % 128`."""
        chunk, lane = lax.div(entry, LANES), lax.rem(entry, LANES)
        own = jnp.where(here > 0, top + jnp.log(jnp.where(here > 0, here, 1.0)), NEVER)
        lanes = lax.broadcasted_iota(jnp.int32, own.shape, 1)
        self.mass_rows[chunk, k, rows] = jnp.where(lanes == lane, own, self.mass_rows[chunk, k, rows])


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Sums over the last axis of `a` and one axis of `b`, in float32; float32 factors are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _across(x: jax.Array, lanes: int) -> jax.Array:
    """`x` `[..., 128]`, alike in all lanes, on another number of lanes."""
    if lanes <= LANES:
        return x[..., :lanes]
    return jnp.concatenate([x] * -(-lanes // LANES), axis=-1)[..., :lanes]


def _block_of(position: jax.Array) -> jax.Array:
    return jnp.right_shift(position, BLOCK.bit_length() - 1)


def _stored(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 in the type of the pool; integers are whole already."""
    return x.astype(jnp.int32).astype(dtype) if dtype == np.int8 else x.astype(dtype)


def _pieces(height: int, do: Callable[[Any, int], None]) -> None:
    """`do(first, tokens)` for a tile's tokens, in pieces whose rows are whole sublanes."""
    if height < SUBLANES:
        do(0, height)
    else:
        _each(height // SUBLANES, lambda i: do(i * SUBLANES, SUBLANES))


def _aligned(row: Any) -> Any:
    """A row that starts a piece."""
    return pl.multiple_of(row, SUBLANES) if isinstance(row, jax.Array) else row


def _each(n: Any, do: Callable[[jax.Array], None]) -> None:
    """`do(i)` for i below `n`, in a loop on the device."""

    def body(i: jax.Array, carry: jax.Array) -> jax.Array:
        do(i)
        return carry

    lax.fori_loop(0, n, body, 0)
