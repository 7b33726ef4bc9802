// The custom calls of kernels/linear/cpu.py: they check what XLA passes and hand it on to linear_run.cc.
#include <algorithm>
#include <optional>
#include <string>

#include "handler.h"
#include "linear_run.h"

namespace umbra {
namespace {

using ffi::AnyBuffer;
using ffi::Buffer;
using ffi::DataType;
using ffi::Error;
using ffi::ResultBuffer;

// Which optional operands there are; they come in this order.
enum Optional : int32_t { kUp = 1, kNorm = 2, kPostNorm = 4, kResidual = 8, kSelf = 16 };  // kSelf: x is the residual

// Takes operands one by one and remembers the first thing that is wrong.
class Operands {
 public:
  Operands(const char* call, ffi::RemainingArgs args, int64_t layer) : call_(call), args_(args), layer_(layer) {}

  bool failed() const { return !message_.empty(); }
  Error error() const { return invalid(std::string(call_) + ": " + message_); }
  void fail(const std::string& message) {
    if (message_.empty()) message_ = message;
  }

  // float32 [first, second].
  const float* matrix(const char* name, int64_t first, int64_t second) {
    const auto buffer = next(name);
    if (!buffer) return nullptr;
    const auto dims = buffer->dimensions();
    if (buffer->element_type() != DataType::F32 || dims.size() != 2 || dims[0] != first || dims[1] != second)
      fail(std::string(name) + " must be float32 [" + std::to_string(first) + ", " + std::to_string(second) + "]");
    return static_cast<const float*>(buffer->untyped_data());
  }

  // float32 [size], or the layer's row of [L, size].
  const float* vector(const char* name, int64_t size) {
    const auto buffer = next(name);
    if (!buffer) return nullptr;
    const auto dims = buffer->dimensions();
    const bool stacked = dims.size() == 2;
    if (buffer->element_type() != DataType::F32 || dims.size() < 1 || dims.size() > 2 || dims.back() != size)
      fail(std::string(name) + " must be float32 [" + std::to_string(size) + "] or a stack of them");
    const auto* const data = static_cast<const float*>(buffer->untyped_data());
    return data + (stacked ? at(name, dims[0]) * size : 0);
  }

  // A matrix of the layer, with `in` inputs and `out` outputs.
  Matrix weights(int32_t form, int64_t in, int64_t out) {
    Matrix m{static_cast<Form>(form), in, out, nullptr, nullptr};
    if (form < 0 || form > static_cast<int32_t>(Form::bfloat16)) fail("unknown form " + std::to_string(form));
    if (failed()) return m;
    if (!is_quantised(m.form)) {
      const DataType type = m.form == Form::bfloat16 ? DataType::BF16 : DataType::F32;
      m.data = part("weight", type, out, in, 0, m.form == Form::bfloat16 ? 2 : 4);
      return m;
    }
    if (in % kGroup) fail("inputs must be a multiple of 32, got " + std::to_string(in));
    m.data = part("blocks", DataType::U8, m.blocks(), m.groups(), group_bytes(m.form), 1);
    if (super_bytes(m.form)) {
      if (m.groups() % kSuper) fail("inputs must be a multiple of 256, got " + std::to_string(in));
      m.supers = part("supers", DataType::U8, m.blocks(), m.groups() / kSuper, super_bytes(m.form), 1);
    }
    return m;
  }

  size_t left() const { return args_.size() - taken_; }

 private:
  std::optional<AnyBuffer> next(const char* name) {
    if (taken_ < args_.size()) {
      auto buffer = args_.get<AnyBuffer>(taken_++);
      if (buffer.has_value()) return *buffer;
    }
    fail(std::string("there is no operand ") + name);
    return std::nullopt;
  }

  int64_t at(const char* name, int64_t layers) {
    if (layer_ < 0 || layer_ >= layers) {
      const std::string all = std::string(name) + " of " + std::to_string(layers);
      fail("there is no layer " + std::to_string(layer_) + " in " + all);
      return 0;
    }
    return layer_;
  }

  // [rows, columns] or, with bytes, [rows, columns, bytes]; or the layer's part of a stack of them.
  const uint8_t* part(const char* name, DataType type, int64_t rows, int64_t columns, int64_t bytes, int64_t item) {
    const auto buffer = next(name);
    if (!buffer) return nullptr;
    const auto dims = buffer->dimensions();
    const size_t rank = bytes ? 3 : 2, lead = dims.size() - rank;
    bool fits = buffer->element_type() == type && (dims.size() == rank || dims.size() == rank + 1);
    fits = fits && dims[lead] == rows && dims[lead + 1] == columns && (!bytes || dims[lead + 2] == bytes);
    if (!fits) {
      fail(std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) +
           (bytes ? ", " + std::to_string(bytes) : "") + "] or a stack of them, in the form's type");
      return nullptr;
    }
    const auto* const data = static_cast<const uint8_t*>(buffer->untyped_data());
    return data + (lead ? at(name, dims[0]) * rows * columns * (bytes ? bytes : 1) * item : 0);
  }

  const char* call_;
  ffi::RemainingArgs args_;
  int64_t layer_;
  size_t taken_ = 0;
  std::string message_;
};

int64_t valid_rows(const Buffer<ffi::S32>& n_rows, int64_t rows) {
  return std::min<int64_t>(rows, std::max<int64_t>(0, n_rows.typed_data()[0]));
}

// Operands after the fixed ones: up, norm, post_norm, residual, a bias for each bit of `biases`, and the weights.
Error linear(Buffer<ffi::F32> x, Buffer<ffi::S32> layer, Buffer<ffi::S32> n_rows, ffi::RemainingArgs args,
             ffi::RemainingRets results, int32_t optional, int32_t biases, int32_t activation, float epsilon,
             float post_epsilon, ffi::Span<const int32_t> forms) {
  Operands operands("umbra_linear", args, layer.typed_data()[0]);
  const auto dims = x.dimensions();
  if (dims.size() != 2) return invalid("umbra_linear: x must be [R, in]");
  const int64_t rows = dims[0], in = dims[1];
  if (forms.size() == 0 || forms.size() > kMaxMatrices || results.size() != forms.size())
    return invalid("umbra_linear: there must be 1 to 8 weights, each with a result");
  if (static_cast<bool>(activation) != static_cast<bool>(optional & kUp) || activation < 0 || activation > 2)
    return invalid("umbra_linear: activation must be 1 (SiLU) or 2 (GELU) with up, or 0 without");
  if ((optional & (kPostNorm | kResidual)) && forms.size() != 1)
    return invalid("umbra_linear: a norm or sum after the product needs one weight");

  LinearCall call{};
  call.n_rows = valid_rows(n_rows, rows);
  call.n_targets = static_cast<int>(forms.size());
  call.post_epsilon = post_epsilon;
  for (int i = 0; i < call.n_targets; ++i) {
    auto y = results.get<Buffer<ffi::F32>>(i);
    if (!y.has_value() || (*y)->dimensions().size() != 2 || (*y)->dimensions()[0] != rows)
      return invalid("umbra_linear: results must be float32 [R, out]");
    call.targets[i].y = (*y)->typed_data();
    call.targets[i].matrix.out = (*y)->dimensions()[1];
  }
  const int64_t out = call.targets[0].matrix.out;
  Preparation& p = call.preparation;
  p.x = x.typed_data();
  p.in = in;
  p.activation = activation;
  p.epsilon = epsilon;
  if (optional & kUp) p.up = operands.matrix("up", rows, in);
  if (optional & kNorm) p.norm = operands.vector("norm", in);
  if (optional & kPostNorm) call.post_norm = operands.vector("post_norm", out);
  if (optional & kResidual) call.residual = operands.matrix("residual", rows, out);
  for (int i = 0; i < call.n_targets; ++i)
    if (biases >> i & 1) call.targets[i].bias = operands.vector("bias", call.targets[i].matrix.out);
  for (int i = 0; i < call.n_targets; ++i) {
    Matrix& m = call.targets[i].matrix;
    m = operands.weights(forms[i], in, m.out);
    (is_quantised(m.form) ? p.integers : p.floats) = true;
  }
  if (!operands.failed() && operands.left()) operands.fail("there are more operands than announced");
  if (operands.failed()) return operands.error();
  run_linear(call);
  return Error::Success();
}

// Operands after the fixed ones: norm, post_norm, residual, and the weights of gate, up and down; `inner` is the gate's
// number of outputs.
Error gated(Buffer<ffi::F32> x, Buffer<ffi::S32> layer, Buffer<ffi::S32> n_rows, ffi::RemainingArgs args,
            ResultBuffer<ffi::F32> result, int32_t optional, int32_t activation, float epsilon, float post_epsilon,
            int32_t inner, ffi::Span<const int32_t> forms) {
  Operands operands("umbra_gated", args, layer.typed_data()[0]);
  const auto dims = x.dimensions(), out_dims = result->dimensions();
  if (dims.size() != 2 || out_dims.size() != 2 || dims[0] != out_dims[0])
    return invalid("umbra_gated: x must be [R, in] and the result [R, out]");
  if (forms.size() != 3 || inner < 1 || activation < 1 || activation > 2)
    return invalid("umbra_gated: there must be three weights, something between them, and activation 1 (SiLU) or 2 (GELU)");
  const int64_t rows = dims[0], in = dims[1], out = out_dims[1];
  if ((optional & kSelf) && out != in) return invalid("umbra_gated: x is not as wide as the result it is added to");

  GatedCall call{};
  call.n_rows = valid_rows(n_rows, rows);
  call.activation = activation;
  Preparation& p = call.preparation;
  p.x = x.typed_data();
  p.in = in;
  p.epsilon = epsilon;
  LinearCall& down = call.down;
  down.n_targets = 1;
  down.post_epsilon = post_epsilon;
  down.targets[0].y = result->typed_data();
  if (optional & kNorm) p.norm = operands.vector("norm", in);
  if (optional & kPostNorm) down.post_norm = operands.vector("post_norm", out);
  if (optional & kResidual) down.residual = operands.matrix("residual", rows, out);
  if (optional & kSelf) down.residual = p.x;
  call.gate = operands.weights(forms[0], in, inner);
  call.up = operands.weights(forms[1], in, inner);
  down.targets[0].matrix = operands.weights(forms[2], inner, out);
  for (const Form form : {call.gate.form, call.up.form}) (is_quantised(form) ? p.integers : p.floats) = true;
  if (!operands.failed() && operands.left()) operands.fail("there are more operands than announced");
  if (operands.failed()) return operands.error();
  run_gated(call);
  return Error::Success();
}

// Operands after the fixed ones: the norm, if there is one, and the table.
Error greedy_head(Buffer<ffi::F32> x, Buffer<ffi::S32> n_rows, ffi::RemainingArgs args, ResultBuffer<ffi::S32> token,
                  ResultBuffer<ffi::F32> highest, ResultBuffer<ffi::F32> log_sum, int32_t norm, float epsilon,
                  int32_t form, int32_t out) {
  Operands operands("umbra_greedy_head", args, 0);
  const auto dims = x.dimensions();
  if (dims.size() != 2) return invalid("umbra_greedy_head: x must be [R, in]");
  const auto rows = static_cast<size_t>(dims[0]);
  if (token->element_count() != rows || highest->element_count() != rows || log_sum->element_count() != rows)
    return invalid("umbra_greedy_head: results must be [R]");
  if (out < 1) return invalid("umbra_greedy_head: there must be at least one token");
  HeadCall call{};
  call.n_rows = valid_rows(n_rows, dims[0]);
  call.preparation.x = x.typed_data();
  call.preparation.in = dims[1];
  call.preparation.epsilon = epsilon;
  if (norm) call.preparation.norm = operands.vector("norm", dims[1]);
  call.matrix = operands.weights(form, dims[1], out);
  (is_quantised(call.matrix.form) ? call.preparation.integers : call.preparation.floats) = true;
  call.token = token->typed_data();
  call.highest = highest->typed_data();
  call.log_sum = log_sum->typed_data();
  if (!operands.failed() && operands.left()) operands.fail("there are more operands than announced");
  if (operands.failed()) return operands.error();
  run_head(call);
  return Error::Success();
}

Error embed(Buffer<ffi::S32> ids, Buffer<ffi::S32> n_rows, ffi::RemainingArgs args, ResultBuffer<ffi::F32> values,
            int32_t form, int32_t out) {
  Operands operands("umbra_embed", args, 0);
  const auto dims = values->dimensions();
  const auto rows = static_cast<int64_t>(ids.element_count());
  if (dims.size() != 2 || dims[0] != rows) return invalid("umbra_embed: the result must be [T, in]");
  if (form >= static_cast<int32_t>(Form::float32)) return invalid("umbra_embed: the table must be quantised");
  if (out < 1) return invalid("umbra_embed: there must be at least one token");
  const Matrix table = operands.weights(form, dims[1], out);
  if (operands.failed()) return operands.error();
  run_embed(table, ids.typed_data(), valid_rows(n_rows, rows), values->typed_data());
  return Error::Success();
}

}  // namespace
}  // namespace umbra

UMBRA_HANDLER(umbra_linear, umbra::linear,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<int32_t>("optional")
                  .Attr<int32_t>("biases")
                  .Attr<int32_t>("activation")
                  .Attr<float>("epsilon")
                  .Attr<float>("post_epsilon")
                  .Attr<xla::ffi::Span<const int32_t>>("forms"));

UMBRA_HANDLER(umbra_gated, umbra::gated,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .RemainingArgs()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int32_t>("optional")
                  .Attr<int32_t>("activation")
                  .Attr<float>("epsilon")
                  .Attr<float>("post_epsilon")
                  .Attr<int32_t>("inner")
                  .Attr<xla::ffi::Span<const int32_t>>("forms"));

UMBRA_HANDLER(umbra_greedy_head, umbra::greedy_head,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .RemainingArgs()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int32_t>("norm")
                  .Attr<float>("epsilon")
                  .Attr<int32_t>("form")
                  .Attr<int32_t>("out"));

UMBRA_HANDLER(umbra_embed, umbra::embed,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .RemainingArgs()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int32_t>("form")
                  .Attr<int32_t>("out"));
