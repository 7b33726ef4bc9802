"""What `/metrics` shows of the context cache: its own counts, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cache.stats import BUCKETS, CacheStats, Histogram, TierStats

MOST_TENANTS = 50
"""Tenants that are shown one by one, the largest first; the others are one."""

_CHECKSUMS = ("checksum", "header", "truncated")


class CacheCollector(Collector):
    """`stats` gives the cache's counts; `device_blocks` how many blocks the device's pool holds, `l1_mode` where steps
    read recent KV from, None while that is not known."""

    def __init__(
        self, stats: Callable[[], CacheStats], device_blocks: Callable[[], int], l1_mode: Callable[[], str | None]
    ) -> None:
        self._stats, self._device_blocks, self._l1_mode = stats, device_blocks, l1_mode

    def describe(self) -> Iterable[Metric]:
        """Nothing: the cache is not asked before somebody asks for its numbers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        tiers = list(stats.tiers.values())
        yield from self._room(tiers)
        yield from _hits(stats, tiers)
        yield from _writes(stats, tiers)
        yield from _losses(stats, tiers)
        yield _gauge("ctx_l1_mode", "Where steps read recent KV from.", "mode", {self._l1_mode() or "unknown": 1.0})

    def _room(self, tiers: list[TierStats]) -> Iterator[Metric]:
        held = GaugeMetricFamily("ctx_tier_bytes", "Bytes of KV blocks.", labels=["tier", "tenant"])
        for tier in tiers:
            for tenant, nbytes in _by_tenant(tier):
                held.add_metric([tier.name, tenant], nbytes)
        yield held
        blocks = {"device": float(self._device_blocks())} | {tier.name: float(tier.blocks) for tier in tiers}
        yield _gauge("ctx_tier_blocks", "KV blocks that are held.", "tier", blocks)
        used = {tier.name: float(tier.used_bytes) for tier in tiers}
        yield _gauge("ctx_tier_used_bytes", "What a tier takes where it lies, other owners included.", "tier", used)
        capacity = {tier.name: float(tier.capacity_bytes) for tier in tiers}
        yield _gauge("ctx_tier_capacity_bytes", "Most that a tier may take.", "tier", capacity)


def _by_tenant(tier: TierStats) -> Iterator[tuple[str, int]]:
    largest = sorted(tier.bytes_by_space.items(), key=lambda item: -item[1])
    for space, nbytes in largest[:MOST_TENANTS]:
        yield space.hex()[:8], nbytes
    if len(largest) > MOST_TENANTS:
        yield "others", sum(nbytes for _, nbytes in largest[MOST_TENANTS:])


def _hits(stats: CacheStats, tiers: list[TierStats]) -> Iterator[Metric]:
    hits = {"device": stats.device_hit_tokens} | {tier.name: tier.hit_tokens for tier in tiers}
    yield _counter("ctx_hit_tokens", "Prompt tokens whose KV was found.", "tier", hits)
    missed = stats.looked_up_tokens - stats.hit_tokens
    yield CounterMetricFamily("ctx_miss_tokens", "Prompt tokens whose KV was not found.", missed)
    yield GaugeMetricFamily("ctx_prefix_hit_ratio", "Share of prompt tokens that were found.", stats.prefix_hit_ratio)
    load = HistogramMetricFamily(
        "ctx_load_seconds", "From the decision to load to a tier's last block.", labels=["tier"]
    )
    for tier in tiers:
        load.add_metric([tier.name], _buckets(tier.load_seconds), tier.load_seconds.total)
    yield load
    recomputed = stats.recomputed_tokens
    yield _counter("ctx_recompute_tokens", "Prompt tokens found, but computed again.", "reason", recomputed)
    yield GaugeMetricFamily("ctx_leases", "Requests that hold what they have found.", stats.leases)
    yield CounterMetricFamily("ctx_lease_expired", "Leases that ended at their deadline.", stats.leases_expired)
    yield GaugeMetricFamily("ctx_pinned_bytes", "Bytes of blocks that are never evicted.", stats.pinned_bytes)


def _writes(stats: CacheStats, tiers: list[TierStats]) -> Iterator[Metric]:
    written = {tier.name: tier.written_bytes for tier in tiers}
    yield _counter("ctx_write_bytes", "Bytes of blocks that were written.", "tier", written)
    yield _counter("ctx_writes", "Blocks that were offered to tiers.", "outcome", stats.write_outcomes)
    yield CounterMetricFamily("ctx_write_seconds", "Time spent on writing blocks.", stats.write_seconds)
    yield GaugeMetricFamily("ctx_write_pending_bytes", "Bytes of blocks that wait to be written.", stats.pending_bytes)
    if stats.write_amplification is not None:
        about = "Bytes written to the disk over bytes of blocks."
        yield GaugeMetricFamily("ctx_write_amp", about, stats.write_amplification)
    if stats.seal_lag_p95 is not None:
        about = "From the copy of a sealed block to its being written, 95th percentile."
        yield GaugeMetricFamily("ctx_seal_lag_seconds", about, stats.seal_lag_p95)
    if stats.disk_free_bytes is not None:
        yield GaugeMetricFamily("ctx_disk_free_bytes", "Free on the file system of the cache.", stats.disk_free_bytes)
    disk = stats.tiers.get("disk")
    if disk is not None:
        about = "Whether the disk takes no blocks now."
        yield GaugeMetricFamily("ctx_l3_readonly", about, float(disk.read_only is not None))


def _losses(stats: CacheStats, tiers: list[TierStats]) -> Iterator[Metric]:
    evicted = CounterMetricFamily("ctx_evictions", "Blocks that went.", labels=["tier", "reason"])
    for tier in tiers:
        for reason, count in tier.evictions.items():
            evicted.add_metric([tier.name, reason], count)
    yield evicted

    def lost(*reasons: str) -> int:
        return sum(tier.lost.get(reason, 0) for tier in tiers for reason in reasons)

    yield CounterMetricFamily("ctx_crc_fail", "Blocks with a wrong checksum or length.", lost(*_CHECKSUMS))
    yield CounterMetricFamily("ctx_fp_mismatch", "Blocks of another model where ours should be.", lost("model"))
    yield CounterMetricFamily("ctx_token_mismatch", "Blocks of other tokens than their key says.", lost("tokens"))
    yield CounterMetricFamily("ctx_stale_epoch", "Loads stopped by new weights.", stats.stale_loads)
    every = sum(sum(tier.lost.values()) for tier in tiers)
    yield CounterMetricFamily("ctx_quarantined", "Blocks that failed verification, for any reason.", every)


def _gauge(name: str, about: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _counter(name: str, about: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    total, out = 0, []
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), histogram.counts, strict=True):
        total += count
        out.append((bound, float(total)))
    return out
