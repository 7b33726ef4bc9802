// Shows how work is spread over threads and how floats behave there: for tests and for measuring what a call costs.
#include <atomic>

#include "handler.h"
#include "threads.h"

namespace umbra {
namespace {

std::atomic<int> threads_seen{0};

// For every chunk: the number of the thread that ran it (in order of first appearance in the process), and the last
// value but zero when 1 is halved `work` times.
void probe(int64_t chunks, int64_t work, int32_t* threads, float* smallest) {
  parallel_for(chunks, [&](int64_t chunk) {
    static thread_local const int number = threads_seen.fetch_add(1);
    volatile float value = 1, last = 1;
    for (int64_t i = 0; i < work; ++i) {
      value = value * 0.5f;
      if (value != 0) last = value;
    }
    threads[chunk] = number;
    smallest[chunk] = last;
  });
}

ffi::Error probe_call(int64_t work, ffi::ResultBuffer<ffi::S32> threads, ffi::ResultBuffer<ffi::F32> smallest) {
  const int64_t chunks = static_cast<int64_t>(threads->element_count());
  if (static_cast<int64_t>(smallest->element_count()) != chunks) return invalid("umbra_probe: results differ in size");
  probe(chunks, work, threads->typed_data(), smallest->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace umbra

// The same without JAX.
extern "C" {
__attribute__((visibility("default"))) void umbra_probe_chunks(int64_t chunks, int64_t work, int32_t* threads,
                                                               float* smallest) {
  umbra::probe(chunks, work, threads, smallest);
}
}

UMBRA_HANDLER(umbra_probe, umbra::probe_call,
              xla::ffi::Ffi::Bind()
                  .Attr<int64_t>("work")
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
