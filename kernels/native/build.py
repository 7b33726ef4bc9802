"""Builds the native kernels with the system's C++ compiler, once per source text, into the user's cache folder.

`<cache>/native/<key>/libumbra.so` is written to a temporary name, checked by a digest beside it, and renamed; the key
covers the sources, the flags, jaxlib and `CXX`. Objects are cached too, so that a changed file rebuilds itself alone.
The name of a source says what it is compiled for: `x_avx2.cc`, `x_avx512.cc` and `x_amx.cc` (x86-64 only) use those
instructions and run only where `src/cpu.h` says so, all others run on any processor of the architecture. Nothing is
compiled for the machine at hand, so a cache folder may be shared by machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...configs.files import cache_dir, replacing
from ...configs.machine import cores

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread")
NUMERICS = ("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math")
"""A product and a sum are contracted only where the source says so: the bits must not depend on the compiler."""
X86 = platform.machine() in ("x86_64", "AMD64")
AVX2 = ("-O3", "-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
AMX = ("-mamx-tile", "-mamx-int8")
"""Compilers before 2021 do not know them; what they cannot compile is built without, and then is not used."""
INSTRUCTIONS = {
    "": ("-O2",),  # calls what belongs to an instruction set
    "portable": ("-O1",) if X86 else ("-O3",),  # every x86-64 processor of the last ten years has AVX2: built quickly
    "avx2": AVX2,
    "avx512": AVX512,
    "amx": (*AVX512, *AMX),
}
COMPILERS = ("c++", "g++", "clang++")
KEPT_DAYS = 30
"""Libraries and objects that nothing has used for so long are removed when something new is built."""


class BuildError(RuntimeError):
    """Why there is no library: one line, and in `output` what the compiler printed."""

    output: str = ""


def library() -> Path:
    """The library of these sources, built if it is not there or damaged. Raises `BuildError`."""
    try:
        return _library()
    except OSError as error:  # a full disk, a folder that may not be written
        raise BuildError(f"the native kernels could not be built: {error}") from error


def rebuild() -> Path:
    """Builds the library again although it looks intact: it could not be loaded. Raises `BuildError`."""
    with contextlib.suppress(OSError):
        _digest_file(_path()).unlink(missing_ok=True)
    return library()


def _library() -> Path:
    path = _path()
    while not _intact(path):
        command = _compiler()
        with _lock(path.parent.parent):
            if not _intact(path):  # another process may have built it meanwhile
                _build(command, path)
                _tidy(path.parent.parent)
        path = _path()
    return path


def key() -> str:
    """What the library depends on, as a short name."""
    return _digest(
        *(f"{p.name}\0{p.read_text()}" for p in sorted(SOURCES.iterdir()) if p.suffix in (".cc", ".h")),
        repr((FLAGS, NUMERICS, INSTRUCTIONS)), _jaxlib(), platform.system(), platform.machine(),
        os.environ.get("CXX", ""),
    )  # fmt: skip


def _path() -> Path:
    return cache_dir() / "native" / key() / "libumbra.so"


def _jaxlib() -> str:
    """The version of jaxlib, whose headers define how calls are made."""
    return importlib.metadata.version("jaxlib")


def _headers() -> Path:
    """jaxlib's headers (`jax.ffi.include_dir()`, without importing jax)."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("jaxlib is not installed")
    return Path(spec.submodule_search_locations[0]) / "include"


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=12).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".digest")


def _content_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _intact(path: Path) -> bool:
    """Whether the library is there and as it was written: the system may crash on half a library, not refuse it."""
    try:
        return _digest_file(path).read_text() == _content_digest(path)
    except (OSError, UnicodeDecodeError):
        return False


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or COMPILERS:
        found = shutil.which(name)
        if found:
            return [found, *asked[1:]]
    wanted = f"CXX={asked[0]} was not found" if asked else f"none of {', '.join(COMPILERS)} was found"
    raise BuildError(f"there is no C++ compiler: {wanted}")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process builds at a time; the others wait and find what it has built."""
    try:
        import fcntl
    except ImportError as error:
        raise BuildError(f"native kernels are not supported on {platform.system()}") from error
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


def _instruction_set(source: Path) -> str:
    """What a source is compiled for, by its name; "" for one that belongs to no instruction set."""
    last = source.stem.rpartition("_")[2]
    return last if last in INSTRUCTIONS else ""


def sources() -> list[Path]:
    """What is compiled on this architecture.

    Files for newer processors come last: of an inline function that several files contain the linker keeps the first,
    which then runs everywhere.
    """
    order = list(INSTRUCTIONS) if X86 else ["", "portable"]
    found = [p for p in SOURCES.glob("*.cc") if _instruction_set(p) in order]
    return sorted(found, key=lambda p: (order.index(_instruction_set(p)), p.name))


def flags(source: Path) -> list[str]:
    """The compiler's arguments for one source. Its instruction set's name is the macro `UMBRA_ISA`."""
    isa = _instruction_set(source)
    define = [f"-DUMBRA_ISA={isa}"] if isa else []
    return [*FLAGS, *NUMERICS, *INSTRUCTIONS[isa], *define, "-isystem", str(_headers())]


def _build(command: list[str], path: Path) -> None:
    version = _run([*command, "--version"])
    objects = path.parent.parent / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        digest = _digest(version, _jaxlib(), repr([*command, *flags(source)]), *_texts(source))
        target = objects / f"{source.stem}-{digest}.o"
        if not _intact(target):
            with replacing(target) as temporary:
                _compile(command, source, temporary)
            _record_digest(target)
        return target

    # The longest first: on few cores the last one decides.
    todo = sorted(sources(), key=lambda p: -p.stat().st_size)
    with ThreadPoolExecutor(cores()) as pool:
        done = dict(zip(todo, pool.map(compiled, todo), strict=True))
    _digest_file(path).unlink(missing_ok=True)
    with replacing(path) as temporary:
        _run([*command, *FLAGS, "-shared", *(str(done[p]) for p in sources()), "-o", str(temporary)])
    if _path() == path:  # nobody has edited a source meanwhile
        _record_digest(path)


def _compile(command: list[str], source: Path, target: Path) -> None:
    arguments = [*command, *flags(source), "-c", str(source), "-o", str(target)]
    try:
        _run(arguments)
    except BuildError:
        without = [argument for argument in arguments if argument not in AMX]
        if without == arguments:
            raise
        _run(without)


def _record_digest(path: Path) -> None:
    with replacing(_digest_file(path)) as temporary:
        temporary.write_text(_content_digest(path))


def _texts(source: Path) -> list[str]:
    """The source and every header of ours that it includes, directly or not."""
    seen: dict[Path, str] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path not in seen and path.exists():
            seen[path] = path.read_text()
            todo += [SOURCES / name for name in re.findall(r'^#include "([^"]+)"', seen[path], re.MULTILINE)]
    return [f"{path.name}\0{seen[path]}" for path in sorted(seen)]


def _run(command: list[str]) -> str:
    """What the command printed; `BuildError` with its first complaint if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "error:" in line), lines[0] if lines else "no message")
        error = BuildError(f"{Path(command[0]).name} failed (status {done.returncode}): {reason}")
        error.output = done.stderr
        raise error
    return done.stdout


def _tidy(folder: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for path in [*folder.glob("objects/*"), *folder.glob("*/libumbra.*")]:
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime, path.stat().st_atime) < oldest:
                path.unlink()
                path.parent.rmdir()  # fails while anything is left in it
