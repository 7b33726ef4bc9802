// A custom call that shows how work is spread: for tests and for measuring what a call costs.
#include <atomic>

#include "handler.h"
#include "threads.h"

namespace umbra {
namespace {

std::atomic<int> threads_seen{0};

// `threads` int32 [chunks]: the number of the thread that ran each chunk (in order of first appearance in the process).
// `sums` float32 [chunks]: the sum of 1/2, 1/4, ... of `work` terms, so that chunks take as long as one likes.
ffi::Error probe(int64_t work, ffi::ResultBuffer<ffi::S32> threads, ffi::ResultBuffer<ffi::F32> sums) {
  if (threads->element_count() != sums->element_count()) return invalid("umbra_probe: results differ in size");
  int32_t* const thread_of = threads->typed_data();
  float* const sum_of = sums->typed_data();
  parallel_for(static_cast<int64_t>(threads->element_count()), [&](int64_t chunk) {
    static thread_local const int number = threads_seen.fetch_add(1);
    float sum = 0, term = 1;
    for (int64_t i = 0; i < work; ++i) sum += term *= 0.5f;
    thread_of[chunk] = number;
    sum_of[chunk] = sum;
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace umbra

UMBRA_HANDLER(umbra_probe, umbra::probe,
              xla::ffi::Ffi::Bind()
                  .Attr<int64_t>("work")
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
