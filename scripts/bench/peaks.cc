// What this machine can do at most, for peaks.py: reading memory, and products in registers. Functions for several
// instruction sets live in one file; the caller picks what the CPU has.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int kChains = 12;  // independent sums: more than latency times products per cycle

// Runs `work(thread)` on `threads` threads that begin together; seconds until the last has ended.
template <class Work>
double Together(int threads, Work work) {
  std::atomic<int> there{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      ++there;
      while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
      work(t);
    });
  }
  while (there.load() < threads) std::this_thread::yield();
  const auto began = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  for (auto& thread : all) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

volatile uint64_t sink;

// One core keeps more lines in flight when it reads several places at once.
void Read(const char* data, int64_t bytes, int streams) {
  const int64_t part = bytes / streams / 64 * 64;
  uint64_t total = 0;
  for (int64_t at = 0; at < part; at += 64) {
    for (int s = 0; s < streams; ++s) {
      const char* line = data + s * part + at;
      __builtin_prefetch(line + 1024);
      total += *reinterpret_cast<const uint64_t*>(line);
    }
  }
  sink = total;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void Int8Avx2(int64_t rounds) {
  __m256i sum[kChains], a = _mm256_set1_epi8(1), b = a, ones = _mm256_set1_epi16(1);
  for (auto& s : sum) s = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto& s : sum) {
      asm volatile("" : "+x"(a));  // else the product is taken out of the loop
      s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  }
  for (auto& s : sum) asm volatile("" : : "x"(s));
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) void Int8Vnni(int64_t rounds) {
  __m512i sum[kChains], a = _mm512_set1_epi8(1), b = a;
  for (auto& s : sum) s = _mm512_setzero_si512();
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto& s : sum) {
      asm volatile("" : "+v"(a));
      s = _mm512_dpbusd_epi32(s, a, b);
    }
  }
  for (auto& s : sum) asm volatile("" : : "v"(s));
}

__attribute__((target("avx2,fma"))) void FloatFma(int64_t rounds) {
  __m256 sum[kChains], a = _mm256_set1_ps(1e-30f), b = a;
  for (auto& s : sum) s = _mm256_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto& s : sum) {
      asm volatile("" : "+x"(a));
      s = _mm256_fmadd_ps(a, b, s);
    }
  }
  for (auto& s : sum) asm volatile("" : : "x"(s));
}

__attribute__((target("avx512f"))) void FloatAvx512(int64_t rounds) {
  __m512 sum[kChains], a = _mm512_set1_ps(1e-30f), b = a;
  for (auto& s : sum) s = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto& s : sum) {
      asm volatile("" : "+v"(a));
      s = _mm512_fmadd_ps(a, b, s);
    }
  }
  for (auto& s : sum) asm volatile("" : : "v"(s));
}

#endif

double OpsPerSecond(int threads, void (*work)(int64_t), int ops_per_product) {
  const int64_t rounds = 4 << 20;
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const double seconds = Together(threads, [&](int) { work(rounds); });
    const double speed = double(rounds) * kChains * ops_per_product * threads / seconds;
    if (speed > best) best = speed;
  }
  return best;
}

}  // namespace

extern "C" {

// Bytes per second of `threads` threads that each read `streams` places of their own part of `bytes` of memory; the
// best of several sweeps. Negative: no memory.
double umbra_read_bytes_s(int threads, int streams, int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  bytes = bytes / kHuge * kHuge;
  char* data = static_cast<char*>(std::aligned_alloc(kHuge, bytes));
  if (data == nullptr) return -1;
#if defined(__linux__)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  const int64_t part = bytes / threads / 64 * 64;
  Together(threads, [&](int t) {
    for (int64_t at = t * part; at < (t + 1) * part; ++at) data[at] = char(at);  // pages are made by who reads them
  });
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const double seconds = Together(threads, [&](int t) { Read(data + t * part, part, streams); });
    if (part * threads / seconds > best) best = part * threads / seconds;
  }
  std::free(data);
  return best;
}

// Operations (a multiplication and an addition are two) per second on `threads` threads. 0: this CPU has none of the
// instructions that this file knows.
double umbra_int8_ops_s(int threads) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vnni")) return OpsPerSecond(threads, Int8Vnni, 128);
  if (__builtin_cpu_supports("avx2")) return OpsPerSecond(threads, Int8Avx2, 64);
#endif
  return 0;
}

double umbra_float32_ops_s(int threads) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return OpsPerSecond(threads, FloatAvx512, 32);
  if (__builtin_cpu_supports("fma")) return OpsPerSecond(threads, FloatFma, 16);
#endif
  return 0;
}
}
