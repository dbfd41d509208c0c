// Gradients of any supported dtype as float32 and back, a run of elements at a time.
#pragma once

#include <cstdint>

#include "../adacomp.h"

namespace adacomp::cpu {

// grad[offset, offset + count) as float32: where it is if it is float32, else in `buffer`.
const float* load_gradient(const void* grad, GradType type, int64_t offset, int64_t count,
                           float* buffer);

// grad[offset, offset + count) = values / divisor, rounded once.
void store_quotient(void* grad, GradType type, int64_t offset, int64_t count, const float* values,
                    float divisor);

void fill_nan(void* grad, GradType type, int64_t offset, int64_t count);

}  // namespace adacomp::cpu
