"""A server in a process of its own over a scripted engine and a real store, to be killed.

    python stored_server.py FOLDER TEXT MILLISECONDS

Every answer is TEXT, a character about every MILLISECONDS.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from umbra.cache.layout import BlockLayout, Part
from umbra.cache.store import Store
from umbra.configs.cache import CacheConfig
from umbra.configs.server import ServerConfig
from umbra.serving.api import Service
from umbra.serving.api.server import listen, run, url
from umbra.serving.engine import Emission

LAYOUT = BlockLayout("test", (Part(np.dtype(np.int8), (2, 1, 128, 16), 2),))


def scripted():
    """The module with the scripted engine."""
    spec = importlib.util.spec_from_file_location("scripted", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["scripted"] = module
    spec.loader.exec_module(module)
    return module


def main(folder: str, text: str, milliseconds: str) -> int:
    fake = scripted()
    store = Store(
        Path(folder), LAYOUT, model="fake", fingerprint=b"f" * 32,
        config=CacheConfig(disk_quota=1 << 20, disk_reserve=0),
    )  # fmt: skip

    class Engine(fake.FakeEngine):
        def close(self) -> None:
            super().close()
            self.store.close()

    def plan(prompt, params):
        idle = max(0, round(float(milliseconds) / (1000 * fake.STEP)) - 1)
        for character in text:
            yield Emission(character, tuple(character.encode()))
            yield from itertools.repeat(None, idle)
        yield Emission("", finish_reason="stop_token")

    engine = Engine()
    engine.store, engine.plan = store, plan
    model = SimpleNamespace(
        name="fake", config=SimpleNamespace(vocab_size=fake.VOCAB), tokenizer=fake.FakeTokenizer(),
        chat_template=fake.FakeTemplate(),
    )  # fmt: skip
    sock = listen("127.0.0.1", 0)
    config = ServerConfig(shutdown_grace=0.5)
    return run(
        Service(config), sock, lambda service: (engine, model), lambda: print(url("127.0.0.1", sock), flush=True)
    )


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
