// Gradients of any supported dtype as float32 and back, a run of elements at a time.
#pragma once

#include <cstdint>

#include "../adacomp.h"

namespace adacomp::cpu {

// grad[offset, offset + count) as float32: where it is if it is float32, else in `buffer`.
const float* load_gradient(const void* grad, GradType type, int64_t offset, int64_t count,
                           float* buffer);

// target = grad[offset, offset + count) as float32, NaNs bit by bit.
void copy_exact(const void* grad, GradType type, int64_t offset, int64_t count, float* target);

// grad[offset, offset + count) = sums / divisor, rounded once; then sums = 0.
void store_quotient(void* grad, GradType type, int64_t offset, int64_t count, float* sums,
                    float divisor);

// The same for a float32 gradient that does not fit into the cache: written around it, which saves
// reading it first. `buffer`: count floats. To be followed by flush_stores() before others read it.
void stream_quotient(float* grad, int64_t count, float* sums, float divisor, float* buffer);
void flush_stores();

void fill_nan(void* grad, GradType type, int64_t offset, int64_t count);

}  // namespace adacomp::cpu
