// Argument checks of the ops, the same for every device. Each throws one sentence: name, expected,
// actual. All run before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "layout.h"

namespace adacomp {

// The rows of `layout` (int64 [segments, 4], contiguous, CPU), which tile their bucket.
Layout checked_layout(const at::Tensor& layout);

// grad: 1-D, contiguous, float32, float16 or bfloat16, all of it covered by the layout.
Codec checked_codec(const at::Tensor& grad, const Layout& layout, int64_t step, bool bin_scales,
                    double threshold_factor);

// residual: float32, 1-D, contiguous, on grad's device; segments' ranges lie in it, disjoint.
void check_residual(const at::Tensor& residual, const at::Tensor& grad, const Layout& layout);

// payloads: uint8, contiguous, `dims`-D, on grad's device; the last size is an allowed capacity.
void check_payloads(const char* name, const at::Tensor& payloads, int64_t dims,
                    const at::Tensor& grad, const Layout& layout);

struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;  // null: not given
};

// Contiguous tensors of which some are written share no memory. By address, so that views of
// foreign memory are compared too.
void check_distinct(std::initializer_list<NamedTensor> tensors);

// counters or status: int64, contiguous, on grad's device, of the given sizes.
void check_int64(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
                 const at::Tensor& grad);

}  // namespace adacomp
