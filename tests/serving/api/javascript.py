"""Programs of Google's and OpenAI's JavaScript clients, where there is Node.

The clients are those in `$NODE_PATH`, or in a `node_modules` folder beside the tests or above them; else npm fetches
them once, the newest that this Node can run.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from umbra.configs.files import cache_dir

SCRIPTS = Path(__file__).parent / "js"
GOOGLE = "@google/genai/dist/node/index.mjs"
OPENAI = "openai/index.mjs"


def run(script: str, client: str, url: str) -> Any:
    """What the script of `SCRIPTS` prints, driving the server at `url` with the client whose entry is `client`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    module = _found(client) or _fetched(node) / client
    done = subprocess.run([node, SCRIPTS / script, module, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _found(client: str) -> Path | None:
    folders = [Path(part) for part in os.environ.get("NODE_PATH", "").split(os.pathsep) if part]
    folders += [folder / "node_modules" for folder in Path(__file__).resolve().parents]
    return next((folder / client for folder in folders if (folder / client).is_file()), None)


@functools.cache
def _fetched(node: str) -> Path:
    """The `node_modules` folder with both clients."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs @google/genai and openai in a folder that NODE_PATH names, or npm")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    folder = cache_dir() / "tests" / f"node-{version}"
    if not (folder / "node_modules").is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            command = [npm, "install", "--prefix", fresh, "--no-audit", "--no-fund", "@google/genai", "openai"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                pytest.skip(f"npm cannot fetch the clients: {(done.stderr.splitlines() or [''])[-1]}")
            if not folder.exists():  # another process may have been faster
                Path(fresh).rename(folder)
                Path(fresh).mkdir()
    return folder / "node_modules"
