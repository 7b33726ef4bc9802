"""What the context cache tells about itself: plain numbers, made into metrics by whoever serves them."""

from __future__ import annotations

from dataclasses import dataclass, field

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of histograms, seconds."""


@dataclass
class Histogram:
    """Counts of durations by bucket, the last one for everything longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[next((i for i, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))] += 1
        self.total += seconds


@dataclass(frozen=True)
class TierStats:
    """One tier now, and its counts since the start."""

    name: str
    blocks: int
    used_bytes: int
    capacity_bytes: int
    bytes_by_space: dict[bytes, int]
    evictions: dict[str, int]
    lost: dict[str, int]
    """Blocks that failed verification, by reason: checksum, header, place, model, tokens, key, codec, truncated, ..."""
    hit_tokens: int
    written_bytes: int
    load_seconds: Histogram
    """Per request: from the decision to load to the last block of this tier."""
    read_bytes_per_second: float | None
    read_only: str | None
    """Why it takes no blocks now."""


@dataclass(frozen=True)
class CacheStats:
    """The whole cache now, and its counts since the start."""

    tiers: dict[str, TierStats]
    looked_up_tokens: int
    hit_tokens: int
    """Found in a tier here or on the device."""
    device_hit_tokens: int
    recomputed_tokens: dict[str, int]
    """Of those that were found, by reason: slower, or what failed while loading."""
    leases: int
    leases_expired: int
    loads: int
    """Requests that are being loaded now."""
    stale_loads: int
    write_outcomes: dict[str, int]
    pending_bytes: int
    write_amplification: float | None
    """Bytes appended to the disk over bytes of blocks that were offered."""
    write_seconds: float
    seal_lag_p95: float | None
    """Seconds from a block's offer to its being written."""
    disk_free_bytes: int | None
    torn_bytes: int
    """Cut off at the start: writes that were interrupted."""
    pinned_bytes: int
    prefill_tokens_per_second: float | None

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of the tokens looked up that were found."""
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0
