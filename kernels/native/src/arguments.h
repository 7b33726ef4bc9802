// Buffers of custom calls that have too many of them to list each in the signature of a function.
#pragma once

#include <cstddef>
#include <string>

#include "handler.h"

namespace umbra {

// Arguments one after the other, each of the type and shape it must have.
class Arguments {
 public:
  explicit Arguments(ffi::RemainingArgs args) : args_(args) {}

  // The first argument that is not as it must be; empty if all are.
  const std::string& wrong() const { return wrong_; }

  // An axis of any argument; 0 if there is none.
  int64_t size(size_t argument, size_t axis) const {
    if (argument >= args_.size()) return 0;
    const auto buffer = args_.get<ffi::AnyBuffer>(argument);
    if (!buffer.has_value() || buffer->dimensions().size() <= axis) return 0;
    return buffer->dimensions()[axis];
  }

  template <ffi::DataType type>
  const ffi::NativeType<type>* take(const char* name, std::initializer_list<int64_t> shape) {
    if (next_ < args_.size()) {
      const auto buffer = args_.get<ffi::Buffer<type>>(next_++);
      if (buffer.has_value() && has_shape(*buffer, shape)) return buffer->typed_data();
    }
    if (wrong_.empty()) wrong_ = name;
    return nullptr;
  }

 private:
  ffi::RemainingArgs args_;
  size_t next_ = 0;
  std::string wrong_;
};

// Results one after the other.
class Outputs {
 public:
  explicit Outputs(ffi::RemainingRets results) : results_(results) {}

  const std::string& wrong() const { return wrong_; }

  int64_t size(size_t result, size_t axis) const {
    if (result >= results_.size()) return 0;
    auto buffer = results_.get<ffi::AnyBuffer>(result);
    if (!buffer.has_value() || (*buffer)->dimensions().size() <= axis) return 0;
    return (*buffer)->dimensions()[axis];
  }

  template <ffi::DataType type>
  ffi::NativeType<type>* take(const char* name, std::initializer_list<int64_t> shape) {
    if (next_ < results_.size()) {
      auto buffer = results_.get<ffi::Buffer<type>>(next_++);
      if (buffer.has_value() && has_shape(**buffer, shape)) return (*buffer)->typed_data();
    }
    if (wrong_.empty()) wrong_ = name;
    return nullptr;
  }

 private:
  ffi::RemainingRets results_;
  size_t next_ = 0;
  std::string wrong_;
};

}  // namespace umbra
