"""Building and loading the native library, and its threads."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from umbra.kernels import backend, native
from umbra.kernels.native import build
from umbra.kernels.native import library as loading

needs_library = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
needs_compiler = pytest.mark.skipif(native.unavailable() is not None, reason="nothing compiles here")

COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), "c++")
SOURCES = {
    "one.h": "inline int one() { return 1; }\n",
    "use.cc": """
#include "one.h"
extern "C" __attribute__((visibility("default"))) int umbra_two() { return 2 * one(); }
""",
    "other.cc": "int other() { return 3; }\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small set of sources, an empty cache folder, and a compiler that writes down what it is asked to compile."""
    sources = tmp_path / "src"
    sources.mkdir()
    for name, text in SOURCES.items():
        (sources / name).write_text(text)
    log = tmp_path / "log"
    log.touch()
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    for name, value in {"_library": None, "_reason": None, "_registered": set()}.items():
        monkeypatch.setattr(loading, name, value)

    class Project:
        path = sources

        @staticmethod
        def compiled() -> list[str]:
            """Names of the sources compiled since the last question."""
            found = re.findall(r"/(\w+\.cc) ", log.read_text())
            log.write_text("")
            return sorted(found)

    return Project


def two(path) -> int:
    return ctypes.CDLL(str(path)).umbra_two()


# --- the cache ---


@needs_compiler
def test_only_what_changed_is_compiled(project):
    first = build.library()
    assert two(first) == 2
    assert project.compiled() == ["other.cc", "use.cc"]
    assert build.library() == first
    assert project.compiled() == []

    (project.path / "one.h").write_text("inline int one() { return 5; }\n")
    second = build.library()
    assert second != first
    assert two(second) == 10
    assert project.compiled() == ["use.cc"]

    (project.path / "one.h").write_text(SOURCES["one.h"])
    assert build.library() == first
    assert project.compiled() == []


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "changed", "gone", "no digest", "digest is no text"])
def test_a_damaged_library_is_rebuilt(project, damage):
    path = build.library()
    content = path.read_bytes()
    digest = path.with_suffix(".digest")
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "changed":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "gone":
            path.unlink()
        case "no digest":
            digest.unlink()
        case _:
            digest.write_bytes(b"\xff\xfe\x00")
    for damaged in path.parent.parent.glob("objects/use*.o"):
        damaged.write_bytes(b"")
    project.compiled()
    assert two(build.library()) == 2
    assert project.compiled() == ["use.cc"]  # the other object is as it was
    assert set(path.parent.iterdir()) == {path, digest}


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_rebuilt(project):
    path = build.library()
    path.write_bytes(b"built elsewhere")
    path.with_suffix(".digest").write_text(build._content_digest(path))
    library = loading._open()
    assert library.umbra_two() == 2


@needs_compiler
def test_processes_at_once_build_it_once(project):
    program = (
        "from umbra.kernels.native import build; from pathlib import Path\n"
        f"build.SOURCES = Path({str(project.path)!r}); print(build.library())"
    )
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate()[0] for process in running}
    assert len(printed) == 1
    assert two(printed.pop().strip()) == 2
    assert project.compiled() == ["other.cc", "use.cc"]


@needs_compiler
def test_what_nothing_used_for_long_is_removed(project):
    old = build.library()
    (project.path / "other.cc").write_text("int other() { return 4; }\n")
    for path in old.parent.parent.rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))
    new = build.library()
    assert not old.parent.exists()
    assert two(new) == 2


def test_what_is_compiled_for_which_processor(project, monkeypatch):
    for name in ("x.cc", "x_portable.cc", "x_avx2.cc", "x_avx512.cc", "x_amx.cc"):
        (project.path / name).write_text("")
    flags = {p.name: build.flags(p) for p in project.path.glob("x*.cc")}
    assert "-mavx2" in flags["x_avx2.cc"] and "-mavx512vnni" in flags["x_avx512.cc"]
    assert "-mamx-int8" in flags["x_amx.cc"] and "-mavx512vnni" in flags["x_amx.cc"]
    assert not [flag for name in ("x.cc", "x_portable.cc") for flag in flags[name] if flag.startswith("-m")]
    assert not [flag for each in flags.values() for flag in each if "march" in flag or flag == "-ffast-math"]
    monkeypatch.setattr(build, "X86", True)
    # The linker keeps the first of equal inline functions: it must be one that runs everywhere.
    assert [p.name for p in build.sources()][-4:] == ["x_portable.cc", "x_avx2.cc", "x_avx512.cc", "x_amx.cc"]
    monkeypatch.setattr(build, "X86", False)
    assert not [p.name for p in build.sources() if "avx" in p.name]


# --- when it cannot be built ---


def unavailable_because(reason: str) -> None:
    found = native.unavailable()
    assert found and reason in found and "\n" not in found
    assert native.unavailable() == found  # not tried again
    with pytest.raises(native.NativeError, match=re.escape(found)):
        native.handler("umbra_probe")
    chosen = backend.choose("cpu")
    assert chosen.kernels == backend.Kernels("xla", "xla", "xla")
    assert found in chosen.why
    with pytest.raises(ValueError, match="cannot be used"):
        backend.choose("cpu", "cpu")


def test_no_compiler(project, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    unavailable_because("no C++ compiler: none of c++, g++, clang++ was found")


def test_a_compiler_that_does_not_exist(project, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    unavailable_because("no C++ compiler: CXX=no-such-compiler was not found")


@needs_compiler
def test_a_compiler_that_fails(project):
    (project.path / "other.cc").write_text("#error on purpose\n")
    unavailable_because("error: #error on purpose")


@needs_compiler
def test_a_compiler_that_does_not_know_amx(project, tmp_path):
    old = tmp_path / "c++"
    old.write_text(
        old.read_text().replace("exec", 'case "$*" in *-mamx*) echo "error: unknown" >&2; exit 1;; esac\nexec')
    )
    (project.path / "some_amx.cc").write_text("#if defined(__AMX_INT8__)\n#error built with it\n#endif\n")
    assert two(build.library()) == 2


def test_a_cache_folder_that_cannot_be_written(project, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    unavailable_because("could not be built: [Errno 20] Not a directory")


@needs_compiler
def test_a_full_disk(project, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(build, "replacing", full)
    unavailable_because("No space left on device")


# --- what the environment presets ---


def in_a_process(program: str, **environment: str) -> str:
    """What a new process prints. It does not import JAX: a program may ask what runs here before it sets JAX up."""
    program = f"import sys\nfrom umbra.kernels import native\n{program}\nassert 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@needs_library
def test_the_instruction_set_can_be_chosen():
    assert native.isas()[0] == "portable"
    assert native.isa() == native.isas()[-1]
    assert in_a_process("print(native.isa())", UMBRA_ISA="portable") == "portable"
    refused = in_a_process("native.unavailable()", UMBRA_ISA="mmx")
    assert refused == f"ValueError: UMBRA_ISA: this processor cannot run 'mmx'; supported: {', '.join(native.isas())}"
    with pytest.raises(ValueError, match="supported: portable"):
        native.set_isa("sse9")
    assert native.isa() == native.isas()[-1]


@needs_library
def test_the_number_of_threads_can_be_chosen():
    assert in_a_process("print(native.threads())", UMBRA_THREADS="3") == "3"
    for wrong in ("0", "-1", "many"):
        refused = in_a_process("native.unavailable()", UMBRA_THREADS=wrong)
        assert refused == f"ValueError: UMBRA_THREADS must be a number of at least 1, got {wrong!r}"
    with pytest.raises(ValueError, match="at least 1, got 0"):
        native.set_threads(0)


@needs_library
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_threads_follow_the_affinity_mask():
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(native.threads())"
    assert in_a_process(one) == "1"


# --- threads ---


def probe(chunks: int, work: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Thread numbers and smallest numbers of the chunks of one call, without JAX."""
    threads, smallest = np.full(chunks, -1, np.int32), np.zeros(chunks, np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (threads, smallest)]
    native.load().umbra_probe_chunks(ctypes.c_int64(chunks), ctypes.c_int64(work), *pointers)
    return threads, smallest


@pytest.fixture
def set_threads():
    yield native.set_threads
    native.set_threads(None)


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [0, 1, 2, 7, 100])
def test_every_chunk_runs_on_one_of_the_threads(set_threads, threads, chunks):
    set_threads(threads)
    assert native.threads() == threads
    for _ in range(20):
        ran_on, _ = probe(chunks)
        assert (ran_on >= 0).all()
        assert len(set(ran_on)) <= threads


@needs_library
def test_work_is_shared(set_threads):
    set_threads(2)
    assert any(len(set(probe(50, 20_000)[0])) == 2 for _ in range(50))


@needs_library
def test_denormals_are_zero_on_every_thread(set_threads):
    """As in XLA's own code, so that results do not depend on the thread."""
    set_threads(4)
    for _ in range(50):
        _, smallest = probe(20)
        assert (smallest == np.float32(2.0**-126)).all()
    assert np.float32(2.0**-126) * np.float32(0.5) != 0  # and this thread is as it was


@needs_library
def test_several_callers_at_once(set_threads):
    """From JAX programs and from plain threads, while the number of threads changes."""
    results = (jax.ShapeDtypeStruct((30,), jnp.int32), jax.ShapeDtypeStruct((30,), jnp.float32))
    program = jax.jit(lambda: jax.ffi.ffi_call(native.handler("umbra_probe"), results)(work=300))
    program()
    wrong = []

    def call(number: int) -> None:
        for i in range(100):
            ran_on, smallest = program() if number % 2 else probe(30)
            if not ((np.asarray(ran_on) >= 0).all() and (np.asarray(smallest) > 0).all()):
                wrong.append(number)
            if number == 0:
                native.set_threads(1 + i % 4)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


PROBE = """
import ctypes, os, threading
native.set_threads(3)
def probe(chunks, work):
    threads, smallest = (ctypes.c_int32 * chunks)(*[-1] * chunks), (ctypes.c_float * chunks)()
    native.load().umbra_probe_chunks(ctypes.c_int64(chunks), ctypes.c_int64(work), threads, smallest)
    return min(threads) >= 0
assert probe(50, 1000)
"""


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    program = "child = os.fork()\nif not child: os._exit(0 if all(probe(50, 1000) for _ in range(20)) else 1)\n"
    assert in_a_process(f"{PROBE}{program}print(os.waitpid(child, 0)[1], probe(50, 1000))") == "0 True"


@needs_library
def test_the_process_may_end_while_threads_work():
    program = "threading.Thread(target=lambda: [probe(50, 1000) for _ in range(10**6)], daemon=True).start()\n"
    for _ in range(3):
        assert in_a_process(f"{PROBE}{program}assert probe(50, 1000)\nprint('ended')") == "ended"


@needs_library
def test_every_handler_of_the_sources_can_be_registered():
    names = [n for p in build.SOURCES.glob("*.cc") for n in re.findall(r"^UMBRA_HANDLER\((\w+)", p.read_text(), re.M)]
    assert {"umbra_probe", "umbra_sample"} <= set(names)
    for name in names:
        assert native.handler(name) == name
    with pytest.raises(AttributeError):
        native.handler("umbra_no_such_call")
