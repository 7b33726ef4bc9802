"""Google's JavaScript client, where Node and the client are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from umbra.serving.engine import Emission

SCRIPT = Path(__file__).parent / "js" / "gemini.mjs"


def client_module() -> Path | None:
    """The client in `$NODE_PATH`, or in a `node_modules` folder beside the tests or above them."""
    folders = [Path(part) for part in os.environ.get("NODE_PATH", "").split(os.pathsep) if part]
    folders += [folder / "node_modules" for folder in Path(__file__).resolve().parents]
    found = (folder / "@google" / "genai" / "dist" / "node" / "index.mjs" for folder in folders)
    return next((file for file in found if file.is_file()), None)


def test_the_javascript_client(api, make_answer):
    node, module = shutil.which("node"), client_module()
    if node is None or module is None:
        pytest.skip("needs node, and npm install @google/genai in a folder that NODE_PATH names")

    def plan(prompt, params):
        line = bytes(prompt).decode().splitlines()[-1]
        if line == "user: fail":
            return [Emission("a", (97,)), Emission("", finish_reason="error", error="secret")]
        return make_answer(f"re {line} 🎉")

    api.engine.plan = plan
    done = subprocess.run([node, SCRIPT, module, api.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)

    text, prompt = "re user: Hi 🎉", len("user: Hi\n")
    for version in ("v1", "v1beta", "v1alpha"):
        got = out[version]
        assert got["text"] == got["streamed"] == text and got["finish"] == "STOP"
        assert got["usage"] == got["streamedUsage"]
        assert got["usage"]["promptTokenCount"] == got["count"] == prompt
        assert got["usage"]["totalTokenCount"] == prompt + len(text.encode())
        assert got["names"] == ["models/fake"] and got["model"] == "models/fake"

    assert out["chat"] == [f"re user: {word} 🎉" for word in ("one", "two", "three", "four")]
    assert out["history"] >= 8
    last = next(one for one in api.engine.submitted if bytes(one.prompt).decode().endswith("user: four\n"))
    assert (
        bytes(last.prompt).decode()
        == "".join(f"user: {word}\nassistant: re user: {word} 🎉\n" for word in ("one", "two", "three"))
        + "user: four\n"
    )

    assert out["full"] == {"candidates": 2, "tokens": "re user: all 🎉"}
    assert out["badOption"]["status"] == 400 and "temperature" in out["badOption"]["message"]
    assert out["badModel"]["status"] == 404 and "no-such" in out["badModel"]["message"]
    assert out["badStream"]["status"] == 500 and "secret" not in out["badStream"]["message"]
    assert all(out[name]["api"] for name in ("badOption", "badModel", "badStream"))
