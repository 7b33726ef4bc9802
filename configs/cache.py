"""Where the context cache keeps blocks beyond the device, and how much room it takes. Sizes: bytes, times: seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The tiers behind the device's pool."""

    folder: Path | None = None
    """Where the cold tier keeps its segments; None: there is none."""
    disk_quota: int = 8 * GIB
    """Most that the folder takes on the disk, all servers that use it together; 0: there is no cold tier."""
    disk_reserve: int | None = None
    """What stays free on the file system; None: 2 GiB, or 5 % of it if that is more."""
    disk_watermarks: tuple[float, float] = (0.90, 0.75)
    """Above the first share of the quota blocks are given up, in the background, down to the second."""
    segment_bytes: int | None = None
    """Size of a segment file; None: 256 MiB, less for small quotas."""
    tenant_share: float = 1.0
    """Most of the quota that one namespace takes."""
    memory: int = 0
    """Host memory for blocks; 0 where the device is the host, since copying memory to memory gains nothing."""
    object_store: str = ""
    """A pool shared by machines: `gs://bucket/path`, `s3://bucket/path` or `file:///path`; empty: none."""
    object_quota: int = 1024 * GIB
    """The object store takes no more blocks beyond this; removing old ones is its own life cycle's work."""
    readers: int = 4
    """Threads that read and verify blocks."""
    load_bytes: int = 32 * MIB
    """Blocks that are read ahead of the engine, of one request."""
    hot_tokens: int = 2048
    """Of what a request has found, the last ones, which are brought up before the others."""
    queue_bytes: int = 256 * MIB
    """Blocks that wait to be written; beyond that they are not kept."""
    sync_interval: float = 0.05
    """Blocks are made durable this often,"""
    sync_bytes: int = 8 * MIB
    """and whenever there are so many bytes of them."""
    lease: float = 30.0
    """What a request has found is held for it this long; then it is evicted like any other."""
    load_margin: float = 1.3
    """Blocks are loaded if that takes less than recomputing them, by this factor."""
    pin_share: float = 0.5
    """Most of a tier that pinned blocks may take."""
    retry: float = 60.0
    """A tier that failed takes blocks again after this long."""
    access_log: Path | None = None
    """A file of JSON lines, one per request, for the simulator; None: not written."""

    def __post_init__(self) -> None:
        for field in ("object_quota", "readers", "load_bytes", "queue_bytes", "sync_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in ("sync_interval", "lease", "load_margin", "retry"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        for field in ("tenant_share", "pin_share"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field} must be above 0 and at most 1, got {getattr(self, field)}")
        high, low = self.disk_watermarks
        if not 0 < low <= high <= 1:
            raise ValueError(f"disk_watermarks must be two shares, the larger first, got {self.disk_watermarks}")
        for field in ("disk_quota", "disk_reserve", "memory", "hot_tokens"):
            if (getattr(self, field) or 0) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")
