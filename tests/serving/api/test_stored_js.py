"""What is stored and what has a session, with the JavaScript clients, where Node and they are installed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from umbra.serving.engine import Emission

SCRIPTS = Path(__file__).parent / "js"


def run(script, api, *entries):
    """The script's answer; `entries`: where the client's module may be in a `node_modules` folder."""
    folders = [Path(part) for part in os.environ.get("NODE_PATH", "").split(os.pathsep) if part]
    folders += [folder / "node_modules" for folder in Path(__file__).resolve().parents]
    module = next((folder / entry for folder in folders for entry in entries if (folder / entry).is_file()), None)
    node = shutil.which("node")
    if node is None or module is None:
        pytest.skip("needs node, and npm install @google/genai openai in a folder that NODE_PATH names")

    def plan(prompt, params):
        line = bytes(prompt).decode().splitlines()[-1]
        if line.endswith("slow"):
            return (Emission("word ", (97,)) for _ in itertools.count())
        return [*(Emission(c, tuple(c.encode())) for c in f"re {line}"), Emission("", finish_reason="stop_token")]

    api.engine.plan = plan
    done = subprocess.run([node, SCRIPTS / script, module, api.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_google(api):
    out = run("stored.mjs", api, "@google/genai/dist/node/index.mjs")
    prompt = len("user: one\nre user: one\nuser: two\n")
    assert out["whole"] == ["re user: one", "re user: two", "completed", prompt + len("re user: two")]
    assert out["streamed"]["text"] == "re user: three" and out["streamed"]["kinds"][0] == "interaction.created"
    assert out["streamed"]["kinds"][-1] == "interaction.completed"
    assert out["replayed"] == ["re user: three", True]
    assert (out["background"], out["cancelled"]) == ("in_progress", "cancelled")
    assert out["gone"]["status"] == 404 and out["bad"]["status"] == 400
    tokens = len("user: a document ")
    assert out["cache"] == {
        "listed": True, "later": True, "tokens": [tokens, tokens], "text": "re user: a document What?"
    }  # fmt: skip
    live = out["live"]
    assert live["texts"] == ["re user: one", "re user: two", ""] and live["handle"]
    assert live["usage"]["responseTokenCount"] == len("re user: two") and live["usage"]["promptTokenCount"] == prompt
    assert out["badLive"] == 1008


def test_openai(api):
    out = run("responses.mjs", api, "openai/index.mjs")
    assert out["texts"] == ["re user: one", "re user: two"] and out["text"] == "re user: three"
    assert out["numbers"] and out["last"] == "response.completed"
    assert out["cancelled"] == ["in_progress", "cancelled"] and out["gone"] == 404
