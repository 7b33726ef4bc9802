"""What is told of a finished request beside its answer: headers, metadata at the end of a stream, notes for the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..effort import Prepared
from ..engine.request import Emission


def timing_headers(emission: Emission) -> dict[str, str]:
    """Times of one choice, in milliseconds."""
    times, used = emission.timings, emission.usage
    if times is None or used is None:
        return {}
    headers = {
        "x-umbra-queue-ms": f"{times.queued * 1000:.1f}",
        "x-umbra-ttft-ms": f"{times.ttft * 1000:.1f}",
        "x-umbra-total-ms": f"{times.total * 1000:.1f}",
        "x-umbra-cached-tokens": str(used.cached_tokens),
        "x-umbra-tokens-per-pass": f"{used.completion_tokens / max(times.passes, 1):.2f}",
    }
    if used.cached_by_tier:
        headers["x-umbra-cached-by-tier"] = ", ".join(f"{tier}={tokens}" for tier, tokens in used.cached_by_tier)
        headers["x-umbra-cache-ms"] = f"{times.cache * 1000:.1f}"
    return headers


def effort_notes(prepared: Prepared) -> dict[str, str]:
    """For headers and the log: the level, and how much is thought if the request said something about it."""
    level, choice = prepared.params.level or "", prepared.choice
    if choice is None or not (choice.asked or choice.assessment):
        return {"level": level}
    return {"level": level, "thinking": str(choice)}


def google_headers(latency: float, tokens: int) -> dict[str, str]:
    """`latency` is seconds in the model, `tokens` what is billed. Of a stream, whose headers come first: the time to
    its first token, and the tokens of the prompt."""
    return {"x-goog-model-latency-ms": str(round(latency * 1000)), "x-goog-billing-tokens": str(tokens)}


def metadata(emissions: Sequence[Emission], fingerprint: str) -> dict[str, Any]:
    """The same as an object, for the end of a stream: headers have been sent by then."""
    first = emissions[0]
    out: dict[str, Any] = {"systemFingerprint": fingerprint}
    if first.timings is not None and first.usage is not None:
        times, used = first.timings, first.usage
        out |= {
            "queueMs": round(times.queued * 1000, 1),
            "ttftMs": round(times.ttft * 1000, 1),
            "totalMs": round(times.total * 1000, 1),
            "cachedTokens": used.cached_tokens,
            "tokensPerPass": round(used.completion_tokens / max(times.passes, 1), 2),
        }
        if used.cached_by_tier:
            out |= {"cachedByTier": dict(used.cached_by_tier), "cacheMs": round(times.cache * 1000, 1)}
    return out


def outcome(emissions: Sequence[Emission]) -> dict[str, Any]:
    """For the log line of the request."""
    first = emissions[0].timings
    out: dict[str, Any] = {
        "tokens": sum(one.usage.completion_tokens for one in emissions if one.usage is not None),
        "finish": ",".join(sorted({one.finish_reason or "?" for one in emissions})),
    }
    if first is not None:
        out |= {"queue_ms": round(first.queued * 1000, 1), "ttft_ms": round(first.ttft * 1000, 1)}
    used = emissions[0].usage
    if used is not None and used.cached_by_tier:
        out["cached"] = ",".join(f"{tier}={tokens}" for tier, tokens in used.cached_by_tier)
    return out
