"""How fast things are, as measured, and what follows for loading against recomputing."""

from __future__ import annotations

import threading

SHARE_OF_NEW = 0.2


class Rate:
    """Units per second, a moving average over observations, each weighed by its size. Thread-safe."""

    def __init__(self, first: float | None = None) -> None:
        """`first`: what to believe before anything was measured."""
        self._seconds_per_unit = None if first is None else 1.0 / first
        self._lock = threading.Lock()

    def observe(self, units: int, seconds: float) -> None:
        """`units` took `seconds`."""
        if units <= 0 or seconds <= 0:
            return
        with self._lock:
            old = self._seconds_per_unit
            new = seconds / units
            self._seconds_per_unit = new if old is None else old + SHARE_OF_NEW * (new - old)

    def hope(self) -> None:
        """Believe in a little more speed: what is never tried because it was slow once is tried again some time."""
        with self._lock:
            if self._seconds_per_unit is not None:
                self._seconds_per_unit *= 0.9

    @property
    def per_second(self) -> float | None:
        """None: nothing was measured yet."""
        seconds = self._seconds_per_unit
        return None if seconds is None else 1.0 / seconds

    def seconds(self, units: int) -> float | None:
        """How long `units` take."""
        return None if self._seconds_per_unit is None else units * self._seconds_per_unit


def worth_loading(load_seconds: list[float], tokens: list[int], prefill: Rate, margin: float) -> int:
    """How many blocks of a chain, from its beginning, to load; the others are recomputed.

    `load_seconds` and `tokens` are per block. Loading must be faster by the factor `margin`; while nothing is known
    about recomputing, everything is loaded. The first of several equally good numbers is the largest.
    """
    best, best_gain, gain = 0, 0.0, 0.0
    for n, (seconds, count) in enumerate(zip(load_seconds, tokens, strict=True), 1):
        recompute = prefill.seconds(count)
        if recompute is None:
            return len(tokens)
        gain += recompute - margin * seconds
        if gain >= best_gain:
            best, best_gain = n, gain
    return best
