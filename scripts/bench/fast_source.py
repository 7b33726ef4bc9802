"""Our server over a source of tokens instead of an engine: what it can send when nothing has to be computed.

    python -m umbra.scripts.bench.fast_source RATE

Every request gets one token at a time, RATE a second, until its `max_tokens`. Prints `ready URL` like serve.py.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...serving.engine import SamplingParams, Sink

VOCAB = 1000


@dataclasses.dataclass
class _Request:
    sink: Sink
    prompt: int
    wanted: int
    began: float
    made: int = 0


class Source:
    """The engine's interface."""

    system_fingerprint = "fp_source"
    context_length = 1 << 20
    ready = True
    failed: str | None = None
    store = None

    def __init__(self, rate: float) -> None:
        from ...configs.engine import EngineConfig

        self.config = EngineConfig(max_queue=4096)
        self._rate = rate
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="source", daemon=True).start()

    def choice_params(self, params: SamplingParams, n: int) -> list[SamplingParams]:
        return [params] * n

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, sink: Sink, request_id: str | None = None, **_: Any
    ) -> str:
        name = request_id or uuid.uuid4().hex
        with self._lock:
            self._requests[name] = _Request(sink, len(prompt_ids), params.max_tokens or 1, time.perf_counter())
        return name

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._requests.pop(request_id, None)

    def close(self) -> None:
        self.ready = False

    def _run(self) -> None:
        while self.ready:
            time.sleep(0.5 / self._rate)
            now = time.perf_counter()
            with self._lock:
                due = [(name, one) for name, one in self._requests.items() if self._due(one, now) > one.made]
            for name, one in due:
                while one.made < self._due(one, now):
                    one.made += 1
                    one.sink([(name, self._emission(one, now))])
                if one.made == one.wanted:
                    self.cancel(name)

    def _due(self, one: _Request, now: float) -> int:
        return min(one.wanted, int((now - one.began) * self._rate))

    def _emission(self, one: _Request, now: float) -> Any:
        from ...serving.engine import Emission, Timings, Usage

        if one.made < one.wanted:
            return Emission(" word", (7,))
        spent = now - one.began
        usage = Usage(one.prompt, one.wanted)
        timings = Timings(queued=0.0, ttft=1 / self._rate, total=spent, decode=spent, passes=one.wanted)
        return Emission(" word", (7,), finish_reason="max_tokens", usage=usage, timings=timings)


def main(argv: Sequence[str]) -> int:
    from ...configs.server import ServerConfig
    from ...serving.api import Service
    from ...serving.api.server import listen, run, url

    source = Source(float(argv[0]))
    model = SimpleNamespace(name="source", config=SimpleNamespace(vocab_size=VOCAB), tokenizer=None, chat_template=None)
    sock = listen("127.0.0.1", 0)
    address = url("127.0.0.1", sock)
    service = Service(ServerConfig(max_inflight=4096))
    loaded: Any = (source, model)
    return run(service, sock, lambda _: loaded, lambda: print(f"ready {address}", flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
