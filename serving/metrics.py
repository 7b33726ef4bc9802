"""What `/metrics` shows. Each instance has its own registry, so that engines and tests do not share counters.

`EngineMetrics` is called on the engine's thread, `HttpMetrics` on the event loop; `prometheus_client` locks per metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..cache.stats import CacheStats
from .cache_metrics import CacheCollector
from .engine.request import SOURCES

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # a second series for every counter, which says only when the process started


def _geometric(first: float, last: float, per_decade: int = 8) -> tuple[float, ...]:
    """Bucket bounds from `first` to at least `last`, evenly spaced on a log scale: p50, p90 and p99 can be read
    within about 15 % (8 per decade)."""
    bounds: list[float] = []
    i = 0
    while not bounds or bounds[-1] < last:
        bounds.append(float(f"{first * 10 ** (i / per_decade):.3g}"))
        i += 1
    return tuple(bounds)


class EngineMetrics:
    """Counters of one engine. Prompt and generated tokens are added when a request ends, so that they agree with the
    usage its client was told; `umbra_step_tokens_total` moves with every step."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        reg = self.registry
        self._ttft = Histogram(
            "umbra_time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=_geometric(0.002, 120.0),
            registry=reg,
        )
        self._per_token = Histogram(
            "umbra_time_per_output_token_seconds",
            "Time between output tokens, first token excluded.",
            buckets=_geometric(0.0002, 5.0),
            registry=reg,
        )
        self._step_seconds = Histogram(
            "umbra_step_seconds", "Wall time of one engine step.", buckets=_geometric(0.0005, 10.0), registry=reg
        )
        self._running = Gauge("umbra_requests_running", "Requests that hold a slot.", registry=reg)
        self._waiting = Gauge("umbra_requests_waiting", "Requests that wait for a slot.", registry=reg)
        self._blocks_used = Gauge("umbra_kv_blocks_used", "KV blocks held by requests.", registry=reg)
        self._blocks_total = Gauge("umbra_kv_blocks_total", "KV blocks of the pool.", registry=reg)
        step_tokens = Counter("umbra_step_tokens", "Tokens that went through the trunk.", ["kind"], registry=reg)
        self._prefill = step_tokens.labels("prefill")
        self._decode = step_tokens.labels("decode")
        self._prompt = Counter(
            "umbra_prompt_tokens", "Prompt tokens of ended requests, cached ones included.", registry=reg
        )
        self._generated = Counter("umbra_generated_tokens", "Output tokens of ended requests.", registry=reg)
        self._cached = Counter("umbra_cached_prompt_tokens", "Prompt tokens whose KV was found.", registry=reg)
        self._finished = Counter("umbra_requests_finished", "Ended requests.", ["reason"], registry=reg)
        self._refused = Counter("umbra_requests_refused", "Requests never admitted.", ["reason"], registry=reg)
        self._preemptions = Counter("umbra_preemptions", "Requests put aside for want of KV blocks.", registry=reg)
        self._passes = Counter(
            "umbra_passes", "Trunk passes, counted for each request that took a token from them.", registry=reg
        )
        self._drafted = Counter("umbra_drafted_tokens", "Drafted tokens that went into passes.", registry=reg)
        self._accepted = Counter("umbra_accepted_tokens", "Drafted tokens that stood.", ["source"], registry=reg)
        self._compilations = Counter(
            "umbra_compilations_after_ready", "Compilations after the engine was ready; should stay 0.", registry=reg
        )

        self._resumed = Histogram(
            "ctx_resume_ttft_seconds",
            "From submission to the first token, where some of the prompt's KV came from a tier behind the device.",
            buckets=_geometric(0.002, 120.0),
            registry=reg,
        )
        self._brought_up = Histogram(
            "ctx_arrange_seconds",
            "From a request's arrival until all KV that the tiers had of it was on the device.",
            buckets=_geometric(0.001, 60.0, per_decade=4),
            registry=reg,
        )
        self._hot_window = Histogram(
            "ctx_hot_window_seconds",
            "From a request's arrival until its hot window was on the device.",
            buckets=_geometric(0.001, 60.0, per_decade=4),
            registry=reg,
        )
        self._hot_bytes = Counter("ctx_hot_window_bytes", "Bytes of hot windows brought up.", registry=reg)

    def step(
        self,
        *,
        seconds: float,
        running: int,
        waiting: int,
        prefill_tokens: int,
        decode_tokens: int,
        used_blocks: int,
        total_blocks: int,
    ) -> None:
        """State after one step; also called when the engine becomes idle, with zero seconds and tokens."""
        if seconds > 0:
            self._step_seconds.observe(seconds)
        self._running.set(running)
        self._waiting.set(waiting)
        self._blocks_used.set(used_blocks)
        self._blocks_total.set(total_blocks)
        if prefill_tokens:
            self._prefill.inc(prefill_tokens)
        if decode_tokens:
            self._decode.inc(decode_tokens)

    def first_token(self, seconds: float, *, resumed: bool = False) -> None:
        """`resumed`: some of the prompt's KV came from a tier behind the device."""
        self._ttft.observe(seconds)
        if resumed:
            self._resumed.observe(seconds)

    def brought_up(self, seconds: float, hot_seconds: float, hot_bytes: int) -> None:
        """What a request has found in the tiers is in the pool, so long after it arrived; its hot window came first."""
        self._brought_up.observe(seconds)
        self._hot_window.observe(hot_seconds)
        self._hot_bytes.inc(hot_bytes)

    def watch(
        self, stats: Callable[[], CacheStats], device_blocks: Callable[[], int], l1_mode: Callable[[], str | None]
    ) -> None:
        """Show the numbers of a context cache too."""
        self.registry.register(CacheCollector(stats, device_blocks, l1_mode))

    def tokens(self, n: int, seconds_per_token: float) -> None:
        """`n` tokens that arrived together, each counted with the time one of them took."""
        for _ in range(n):
            self._per_token.observe(seconds_per_token)

    def drafts(self, tried: int, sources: Sequence[int]) -> None:
        """One pass of one request: how many drafted tokens it tried, and who drafted each token that came out."""
        self._passes.inc()
        if tried:
            self._drafted.inc(tried)
        for source in sources:
            if source:
                self._accepted.labels(SOURCES[source]).inc()

    def finished(self, reason: str, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        self._finished.labels(reason).inc()
        self._prompt.inc(prompt_tokens)
        self._generated.inc(completion_tokens)
        self._cached.inc(cached_tokens)

    def preempted(self) -> None:
        self._preemptions.inc()

    def refused(self, why: str) -> None:
        self._refused.labels(why).inc()

    def compiled(self) -> None:
        self._compilations.inc()


class HttpMetrics:
    """Counters of the HTTP side. Routes are templates (`/v1/models/{model_id}`), so that labels stay few."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "umbra_http_requests",
            "HTTP requests answered; status 499: the client left first.",
            ["route", "method", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "umbra_http_request_seconds",
            "From the request line to the last byte.",
            ["route"],
            buckets=_geometric(0.001, 300.0, per_decade=4),
            registry=registry,
        )
        self._inflight = Gauge("umbra_http_requests_inflight", "HTTP requests in progress.", registry=registry)

    def started(self) -> None:
        self._inflight.inc()

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        self._inflight.dec()
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format, with content type `CONTENT_TYPE`."""
    return generate_latest(registry)
