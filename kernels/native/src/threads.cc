#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#define UMBRA_POSIX 1
#include <pthread.h>
#include <signal.h>
#endif

namespace umbra {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(60);

std::atomic<int> asked_threads{0};
thread_local int index_of_thread = 0;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Spins until `done()` or the time is up. Measured with a busy neighbour on one of two cores: idle workers must give way
// in between (they would take the core from the caller whose job is about to come), a caller must not (it would hand
// its core to the neighbour for milliseconds).
template <class Done>
bool spin(bool give_way, Done&& done) {
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
    if (give_way) std::this_thread::yield();
  } while (Clock::now() < end);
  return done();
}

// Cores that the calling thread may run on.
int usable_cores() {
#if defined(__linux__)
  // Machines with more than CPU_SETSIZE (1024) cores need a larger set; there the call fails.
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > 0 ? cores : 1;
}

// The threads and the one job they may be working on. Made on first use and never destroyed: workers may be running
// while the process ends.
class Pool {
 public:
  int threads() {
    const int asked = asked_threads.load(std::memory_order_relaxed);
    if (asked > 0) return std::min(asked, kMaxThreads);
    return std::min(cores_.load(std::memory_order_relaxed), kMaxThreads);
  }

  // The affinity mask may change while the process runs.
  void look_at_cores() { cores_.store(usable_cores(), std::memory_order_relaxed); }

  // Whether the caller now has the workers to itself. If it does it calls `run` and then `release`.
  bool acquire() { return !busy_.load(std::memory_order_relaxed) && !busy_.exchange(true, std::memory_order_acquire); }
  void release() { busy_.store(false, std::memory_order_release); }

  void run(int64_t chunks, void (*call)(void*, int64_t), void* body) {
    call_.store(call, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    total_.store(chunks, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    // The order of this store and the look at `awake_` matters, here and (reversed) in `sleep`.
    state_.store(job << 32 | static_cast<uint64_t>(chunks), std::memory_order_seq_cst);
    const int helpers = static_cast<int>(std::min<int64_t>(chunks, threads())) - 1;
    if (awake_.load(std::memory_order_seq_cst) < helpers) wake(helpers);

    const int64_t others = chunks - work();
    const auto finished = [&] { return done_.load(std::memory_order_seq_cst) == others; };
    if (finished() || spin(false, finished)) return;
    // A worker holds a chunk but does not get a core: leave it this one.
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.store(true, std::memory_order_seq_cst);
    finished_.wait(lock, finished);
    waiting_.store(false, std::memory_order_relaxed);
  }

 private:
  // Claims chunks and runs them until none is left; how many.
  //
  // `state_` holds the job's number (high half) and the chunks nobody has claimed (low half). A claim that succeeds
  // proves that what was read before it belongs to this job: the caller changes it only when every chunk has returned.
  int64_t work() {
    int64_t claimed = 0;
    uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(state) != 0) {
      const auto call = call_.load(std::memory_order_relaxed);
      void* const body = body_.load(std::memory_order_relaxed);
      const int64_t total = total_.load(std::memory_order_relaxed);
      if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      call(body, total - static_cast<uint32_t>(state));
      ++claimed;
      state = state_.load(std::memory_order_acquire);
    }
    return claimed;
  }

  bool has_work() { return static_cast<uint32_t>(state_.load(std::memory_order_seq_cst)) != 0; }

  // More workers awake than wanted: one of them goes to sleep.
  bool crowded() { return awake_.load(std::memory_order_relaxed) >= threads(); }

  void worker(int index) {
    index_of_thread = index;
    FloatMode mode;
    for (;;) {
      const bool found = spin(true, [&] { return has_work(); });
      if (!found || crowded()) {
        sleep();
      } else if (const int64_t claimed = work()) {
        report(claimed);
      }
    }
  }

  void report(int64_t claimed) {
    done_.fetch_add(claimed, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool too_many = crowded();
    // Work posted before `awake_` is lowered is seen here; who posts work after it sees `awake_` and wakes us.
    awake_.fetch_sub(1, std::memory_order_seq_cst);
    if (has_work() && !too_many) {
      awake_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    ++asleep_;
    work_to_do_.wait(lock, [&] { return wake_ups_ > 0; });
    --wake_ups_;
  }

  // The slow path of a job: workers that it could use are asleep, or do not exist yet.
  void wake(int helpers) {
    look_at_cores();
    int called = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const int missing = std::min(helpers, threads() - 1) - awake_.load(std::memory_order_relaxed);
      for (int i = 0; i < missing; ++i) {
        if (asleep_ > 0) {
          --asleep_;
          ++wake_ups_;
          ++called;
        } else if (!start()) {
          break;  // no more threads to be had here
        }
        awake_.fetch_add(1, std::memory_order_relaxed);
      }
    }
    for (; called > 0; --called) work_to_do_.notify_one();
  }

  bool start() {
#if UMBRA_POSIX
    // Signals are for the threads of the host program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    bool started = true;
    try {
      std::thread([this, index = ++started_] { worker(index); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
#if UMBRA_POSIX
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    return started;
  }

  alignas(64) std::atomic<uint64_t> state_{0};
  std::atomic<void (*)(void*, int64_t)> call_{nullptr};
  std::atomic<void*> body_{nullptr};
  std::atomic<int64_t> total_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<bool> waiting_{false};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int> awake_{0};  // workers that run, spin or are about to; changed under the mutex
  std::atomic<int> cores_{usable_cores()};
  std::mutex mutex_;
  int asleep_ = 0;    // under the mutex: workers nobody has called
  int started_ = 0;   // under the mutex
  int wake_ups_ = 0;  // under the mutex: calls that no worker has answered yet
  std::condition_variable work_to_do_, finished_;
};

std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
#if UMBRA_POSIX
  // A forked child has none of the workers, and perhaps a locked mutex: it gets a pool of its own.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
  (void)registered;
#endif
  Pool* made = new Pool;
  if (current_pool.compare_exchange_strong(existing, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *existing;
}

#if defined(__x86_64__)
constexpr uint64_t kModeBits = 0xE040;   // flush to zero, rounding, denormals are zero
constexpr uint64_t kModeValue = 0x8040;  // both on, to nearest
uint64_t get_mode() { return _mm_getcsr(); }
void set_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr uint64_t kModeBits = 0x1C00000;
constexpr uint64_t kModeValue = 0x1000000;
uint64_t get_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
constexpr uint64_t kModeBits = 0, kModeValue = 0;
uint64_t get_mode() { return 0; }
void set_mode(uint64_t) {}
#endif

}  // namespace

FloatMode::FloatMode() : before_(get_mode()) {
  const uint64_t wanted = (before_ & ~kModeBits) | kModeValue;
  if (wanted != before_) set_mode(wanted);
}

FloatMode::~FloatMode() {
  if ((before_ & kModeBits) != kModeValue) set_mode(before_);
}

int thread_count() { return pool().threads(); }

int thread_index() { return index_of_thread; }

void set_thread_count(int count) { asked_threads.store(count > 0 ? count : 0, std::memory_order_relaxed); }

namespace internal {

void run(int64_t chunks, void (*call)(void*, int64_t), void* body) {
  FloatMode mode;
  Pool* workers = nullptr;
  if (chunks > 1) {
    Pool& candidate = pool();
    static std::atomic<unsigned> calls{0};
    if (calls.fetch_add(1, std::memory_order_relaxed) % 4096 == 0) candidate.look_at_cores();
    if (candidate.threads() > 1 && candidate.acquire()) workers = &candidate;
  }
  if (!workers) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) call(body, chunk);
    return;
  }
  workers->run(chunks, call, body);
  workers->release();
}

}  // namespace internal
}  // namespace umbra

extern "C" {
__attribute__((visibility("default"))) int umbra_thread_count() { return umbra::thread_count(); }
__attribute__((visibility("default"))) void umbra_set_thread_count(int count) { umbra::set_thread_count(count); }
}
