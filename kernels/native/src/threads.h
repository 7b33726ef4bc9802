// Worker threads of the native kernels.
//
// Work is cut into chunks that threads claim one by one; the calling thread claims too. A worker that has claimed
// nothing is never waited for, so a busy neighbour on another core delays a call by at most the chunk it interrupts.
// Workers spin for a moment after each job, because the next operation of a step follows within microseconds, and then
// sleep. Chunks worth claiming take some microseconds (1e4 to 1e5 multiply-adds).
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace umbra {

// Threads that may work on one call, the caller included: the number that was set, else one for each core that the
// process may use.
int thread_count();

// Which of them the calling thread is: 0 unless it is a worker.
int thread_index();

// Sets that number; 0 or less follows the cores again. Takes effect with the next call.
void set_thread_count(int count);

// Whether floating-point results and operands too small for a normal number count as zero, as XLA has it on CPUs, with
// rounding to nearest. In force inside `parallel_for` and, while one of these exists, in the thread that made it.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  uint64_t before_;
};

namespace internal {
void run(int64_t chunks, void (*call)(void* body, int64_t chunk), void* body);
}

// Calls `body(chunk)` once for every chunk in [0, chunks), on several threads and in no particular order, and returns
// when all have returned. `body` must not throw. Calls from inside a body, and calls while another thread's job is in
// progress, run on the calling thread alone. Fewer than 2^31 chunks.
template <class Body>
void parallel_for(int64_t chunks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  internal::run(
      chunks, [](void* f, int64_t chunk) { (*static_cast<Plain*>(f))(chunk); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// The same, but every thread begins with a share of its own: in calls that follow one another with equal chunks it reads
// what its cache still holds.
template <class Body>
void parallel_for_near(int64_t chunks, Body&& body) {
  if (chunks < 2 || chunks > 64) return parallel_for(chunks, body);
  const int64_t threads = thread_count();
  std::atomic<uint64_t> taken{0};
  parallel_for(chunks, [&](int64_t) {  // as often as there are chunks: each time one that nobody has taken
    int64_t chunk = thread_index() % threads * chunks / threads;
    for (;; chunk = (chunk + 1) % chunks) {
      const uint64_t bit = uint64_t{1} << chunk;
      if (!(taken.load(std::memory_order_relaxed) & bit) && !(taken.fetch_or(bit, std::memory_order_relaxed) & bit)) break;
    }
    body(chunk);
  });
}

}  // namespace umbra
