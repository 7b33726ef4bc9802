"""The vector types of the native kernels: the same bits with every instruction set, and the right ones."""

from __future__ import annotations

import ctypes
import shutil

import jax
import numpy as np
import pytest

from umbra.kernels import native, numerics
from umbra.kernels.native import build

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

KERNEL = """
#include "lanes.h"
#include "numerics.h"

namespace umbra::UMBRA_ISA {
namespace {
template <class Function>
void each(const float* x, float* y, int64_t n, Function&& function) {
  for (int64_t i = 0; i < n; i += 16) store(y + i, function(load(x + i)));
}
}
}

#define NAME_(isa, name) isa##_##name
#define NAME(isa, name) NAME_(isa, name)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void NAME(UMBRA_ISA, name)
#define FUNCTION(name, expression)                      \\
  EXPORT(name)(const float* in, float* out, int64_t n) { \\
    using namespace umbra::UMBRA_ISA;                   \\
    each(in, out, n, [](F x) { return expression; });   \\
  }

FUNCTION(exp, exp(x))
FUNCTION(tanh, tanh(x))
FUNCTION(plain_exp, numerics::exp(x))
FUNCTION(plain_log, numerics::log(x))
FUNCTION(plain_log1m, numerics::log1m(x))
FUNCTION(round, to_float(round(x)))
FUNCTION(trunc, to_float(trunc(x)))
FUNCTION(arithmetic, fma(x, set(1.25f), abs(x) / set(3.0f)) - sqrt(abs(x)) * neg(x))
FUNCTION(ordered, max(min(x, set(1.0f)), set(-1.0f)) + max(set(0.0f), x) + min(set(0.0f), x))
FUNCTION(selected, select((lt(x, set(0.5f)) & ge(x, zero())) | eq(x, set(2.0f)) | le(x, set(-1.0f)), x, neg(x)))
FUNCTION(integers, from_bits(rotl<7>(bits(x)) ^ (sar<3>(bits(x)) + shr<5>(bits(x)) * iota() - shl<2>(bits(x)))))
FUNCTION(pairs, paired<8>(paired<4>(paired<2>(paired<1>(x)))))
FUNCTION(sums, set(sum(x)) + set(max(x)) + to_float(iset(sum(trunc(x)))))
FUNCTION(masks, set(mask_bits(gt(x, zero()) & first(11)) + (any(gt(bits(x), iota())) ? 1 : 0)))

EXPORT(each)(const float* in, float* out) {  // [16, 16] -> [3, 16]
  using namespace umbra::UMBRA_ISA;
  F x[16];
  I y[16];
  for (int i = 0; i < 16; ++i) x[i] = load(in + 16 * i), y[i] = trunc(x[i]);
  store(out, max_each(x));
  store(out + 16, to_float(sum_each(y)));
  store(out + 32, sum_each(x));
}

EXPORT(narrow)(const uint16_t* half, const int8_t* byte, float* out, uint16_t* half_out, int8_t* byte_out) {
  using namespace umbra::UMBRA_ISA;
  store(out, load_f16(half));
  store(out + 16, load_bf16(half));
  store(out + 32, to_float(load_i8(byte)));
  store(out + 48, to_float(load_u8(reinterpret_cast<const uint8_t*>(byte))));
  store_f16(half_out, load_f16(half));
  store_i8(byte_out, load_i8(byte) + load_i8(byte));
}

EXPORT(to_half)(const float* x, uint16_t* half, int64_t n) {
  using namespace umbra::UMBRA_ISA;
  for (int64_t i = 0; i < n; i += 16) store_f16(half + i, load(x + i));
}

EXPORT(partial)(const float* x, float* y) {
  using namespace umbra::UMBRA_ISA;
  for (int n = 0; n <= 16; ++n) {
    store(y + 16 * n, load(x, n));
    store(y + 16 * n, load(x + 16), n);
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The functions above, compiled as the kernels are."""
    sources = tmp_path_factory.mktemp("src")
    for header in build.SOURCES.glob("*.h"):
        if header.name.startswith(("lanes", "numerics")):
            shutil.copy(header, sources)
    (sources / "check_kernel.h").write_text(KERNEL)
    for isa in native.ISAS:
        (sources / f"check_{isa}.cc").write_text('#include "check_kernel.h"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return ctypes.CDLL(str(build.library()))


def call(library, isa, name, *arrays, n=None):
    arguments = [ctypes.c_void_p(a.ctypes.data) for a in arrays] + ([] if n is None else [ctypes.c_int64(n)])
    getattr(library, f"{isa}_{name}")(*arguments)


def on_every_isa(library, name, x):
    """The result for float32 `x`, the same with every instruction set."""
    x = np.ascontiguousarray(np.pad(x, (0, -len(x) % 16)), np.float32)
    results = {}
    for isa in native.isas():
        results[isa] = np.empty_like(x)
        call(library, isa, name, x, results[isa], n=len(x))
        np.testing.assert_array_equal(results[isa].view(np.int32), results["portable"].view(np.int32), err_msg=isa)
    return x, results["portable"]


def spread(seed=0, n=20_000):
    """Numbers of every size, and the odd ones."""
    rng = np.random.default_rng(seed)
    odd = [
        0,
        -0.0,
        1,
        -1,
        2,
        0.5,
        -0.5,
        1.5,
        2.5,
        np.inf,
        -np.inf,
        np.nan,
        88,
        88.1,
        88.8,
        -87.3364,
        -87.3366,
        1e-30,
        3e38,
    ]
    return np.concatenate([odd, rng.normal(size=n) * 30, rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n)])


def assert_close(got, want, rtol, atol=0.0):
    """Equal where not finite, close elsewhere."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def test_exp_and_tanh(library):
    x, got = on_every_isa(library, "exp", spread())
    with np.errstate(over="ignore", under="ignore"):
        want = np.exp(np.minimum(x.astype(np.float64), 88))
    assert_close(got, np.where(x <= np.float32(-87.3365), 0, want), rtol=1e-7)
    x, got = on_every_isa(library, "tanh", spread(1))
    assert_close(got, np.tanh(x.astype(np.float64)), rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["exp", "log", "log1m"])
def test_plain_functions_have_the_bits_of_numerics(library, name):
    x = {
        "exp": np.concatenate([-np.abs(spread()), np.linspace(-90, 0, 100_000)]),
        "log": np.abs(np.concatenate([spread(), np.geomspace(1e-37, 3e38, 100_000)])),
        "log1m": np.concatenate([np.linspace(0, 1 - 2**-24, 100_000), 2.0 ** -np.arange(1, 100), [2**-33]]),
    }[name]
    x = x[np.isfinite(x.astype(np.float32)) & ((name != "log") | (x > 2e-38))]
    x, got = on_every_isa(library, f"plain_{name}", x)
    inside = x > 0 if name == "log" else np.ones(len(x), bool)
    want = np.asarray(jax.jit(getattr(numerics, name))(x))
    np.testing.assert_array_equal(got.view(np.int32)[inside], want.view(np.int32)[inside])


def test_rounding(library):
    x = spread()
    x = x[np.abs(np.nan_to_num(x, nan=1e30)) < 2**31 - 1000]
    x, got = on_every_isa(library, "round", x)
    np.testing.assert_array_equal(got, np.rint(x))
    x, got = on_every_isa(library, "trunc", x)
    np.testing.assert_array_equal(got, np.trunc(x))


@pytest.mark.parametrize("name", ["arithmetic", "ordered", "selected", "integers"])
def test_every_instruction_set_gives_the_same_bits(library, name):
    x = spread()
    on_every_isa(library, name, x[~np.isnan(x)] if name == "arithmetic" else x)


def test_pairs_are_a_hadamard_transform(library):
    x, got = on_every_isa(library, "pairs", np.random.default_rng(0).standard_normal(160).astype(np.float32))
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    np.testing.assert_allclose(got.reshape(-1, 16), x.reshape(-1, 16) @ matrix, rtol=1e-5, atol=1e-5)


def test_sums_and_masks(library):
    x = np.random.default_rng(3).normal(size=16 * 500) * 100
    x, got = on_every_isa(library, "sums", x)
    lanes = x.reshape(-1, 16)
    total = lanes
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    want = (total[:, 0] + lanes.max(1)) + np.trunc(lanes).sum(1)
    np.testing.assert_array_equal(got.reshape(-1, 16)[:, 0], want)
    _, got = on_every_isa(library, "masks", x)
    bits = ((lanes > 0)[:, :11] << np.arange(11)).sum(1) + (lanes.view(np.int32) > np.arange(16)).any(1)
    np.testing.assert_array_equal(got.reshape(-1, 16)[:, 0], bits)


def test_narrow_types(library):
    half = np.arange(65536, dtype=np.uint16).reshape(-1, 16)
    byte = np.resize(np.arange(-128, 128).astype(np.int8), half.shape)
    for isa in native.isas():
        out = np.empty((len(half), 4, 16), np.float32)
        half_out, byte_out = np.empty_like(half), np.empty_like(byte)
        for rows in zip(half, byte, out, half_out, byte_out, strict=True):
            call(library, isa, "narrow", *rows)
        np.testing.assert_array_equal(out[:, 0], half.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(out[:, 1].view(np.int32), half.astype(np.int32) << 16)
        np.testing.assert_array_equal(out[:, 2], byte)
        np.testing.assert_array_equal(out[:, 3], byte.view(np.uint8))
        np.testing.assert_array_equal(half_out.view(np.float16), half.view(np.float16))
        np.testing.assert_array_equal(byte_out, np.clip(byte.astype(int) * 2, -128, 127))


def test_rounding_to_half(library):
    ties = (np.arange(0, 4096) + 0.5) * 2.0**-24
    x = np.concatenate([spread(), ties, np.linspace(65470, 65530, 1000), np.random.default_rng(0).normal(size=100_000)])
    x = np.ascontiguousarray(np.pad(x, (0, -len(x) % 16)), np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    for isa in native.isas():
        half = np.empty(len(x), np.uint16)
        call(library, isa, "to_half", x, half, n=len(x))
        np.testing.assert_array_equal(half.view(np.float16), want)


def test_partial_loads_and_stores(library):
    x = np.arange(1, 33, dtype=np.float32)
    for isa in native.isas():
        y = np.empty((17, 16), np.float32)
        call(library, isa, "partial", x, y)
        for n in range(17):  # n lanes of the second half over n lanes of the first one over zeros
            want = np.concatenate([x[16 : 16 + n], np.zeros(16 - n)])
            np.testing.assert_array_equal(y[n], want)


def test_sixteen_at_once(library):
    x = np.random.default_rng(3).normal(size=(16, 16)).astype(np.float32) * 1000
    halves = x  # summed as `sum` does: the lower half plus the upper one, until there is one left
    while halves.shape[1] > 1:
        halves = np.add(*np.split(halves, 2, axis=1))
    want = np.stack([x.max(1), np.trunc(x).astype(np.int32).sum(1).astype(np.float32), halves[:, 0]])
    for isa in native.isas():
        got = np.empty_like(want)
        call(library, isa, "each", x, got)
        np.testing.assert_array_equal(got, want, err_msg=isa)
