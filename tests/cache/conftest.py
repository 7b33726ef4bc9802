"""Fixtures of the cache's tests."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own helpers


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, mounted in memory. Skipped where that is not allowed."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["mount", "-o", "remount,rw", path], capture_output=True)
        subprocess.run(["umount", "-l", path], check=True)
