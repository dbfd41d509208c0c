// Argument checks of the ops, the same for every device. Each throws one sentence: name, expected,
// actual. All run before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "layout.h"

namespace adacomp {

// What an op works with once its arguments are right.
struct Checked {
  Layout layout;
  Codec codec;
};

// The rows of `layout` (int64 [segments, 4], contiguous, CPU), which tile their bucket.
Layout checked_layout(const at::Tensor& layout);

// dtype: of the gradients, float32, float16 or bfloat16; `name` is what an error is about.
Codec checked_codec(const char* name, at::ScalarType dtype, int64_t step, bool bin_scales,
                    double threshold_factor);

// grad: 1-D, contiguous, covered by the layout. residual: float32, 1-D, contiguous; segments'
// ranges lie in it, disjoint. payload(s): uint8, contiguous; the last size is an allowed capacity.
// All on one device, and what is written shares no memory with anything else.
Checked check_compress(const at::Tensor& grad, const at::Tensor& residual, const at::Tensor& layout,
                       const at::Tensor& payload, const std::optional<at::Tensor>& counters,
                       int64_t step, bool bin_scales, double threshold_factor);

Checked check_decompress(const at::Tensor& payloads, const at::Tensor& grad,
                         const at::Tensor& layout, const at::Tensor& status, int64_t step,
                         bool bin_scales, double threshold_factor);

Checked check_restore(const at::Tensor& payload, const at::Tensor& residual,
                      const at::Tensor& layout, const at::Tensor& condition, at::ScalarType dtype,
                      int64_t step, bool bin_scales, double threshold_factor);

}  // namespace adacomp
