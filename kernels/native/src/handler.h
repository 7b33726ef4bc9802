// What every file with XLA custom calls needs. Including it costs about two seconds of compilation: only the files that
// define handlers do, not those with the kernels of one instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace umbra {
namespace ffi = xla::ffi;

inline ffi::Error invalid(std::string message) { return ffi::Error::InvalidArgument(std::move(message)); }

// Whether a buffer (or `*result`) has exactly this shape.
template <class Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto found = buffer.dimensions();
  return found.size() == shape.size() && std::equal(shape.begin(), shape.end(), found.begin());
}

}  // namespace umbra

// Defines the custom call `name`, seen from Python as `native.handler("name")`.
#define UMBRA_HANDLER(name, function, binding)                                                            \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)
