// What the kernels of all instruction sets share. ADACOMP_TARGET, which the file that includes this
// defines, must stand before every function, so that it is compiled for the set in question.
#pragma once

#include "kernels.h"

namespace adacomp::cpu {
namespace {

[[maybe_unused]] ADACOMP_TARGET BinSummary summarize_scalar(const float* residual,
                                                            const float* grad, int64_t n) {
  uint32_t g_max = 0;
  uint32_t gradient = 0;
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t g = abs_bits(sum_gradient(residual[j], grad[j]));
    g_max = g > g_max ? g : g_max;
    gradient |= abs_bits(grad[j]);
  }
  return {g_max, gradient};
}

template <typename Entry>
ADACOMP_TARGET Entry* select_scalar(float* residual, const float* grad, int64_t n, float g_max,
                                    float weight, Entry* out) {
  for (int64_t j = 0; j < n; ++j) {
    const float g = sum_gradient(residual[j], grad[j]);
    residual[j] = g;
    *out = static_cast<Entry>(make_entry(static_cast<uint32_t>(j), float_bits(g) >> 31 != 0));
    out += selects(g, probe(g, grad[j], weight), g_max);
  }
  return out;
}

ADACOMP_TARGET void load_bfloat16(const BFloat16* __restrict source, int64_t n,
                                  float* __restrict target) {
  for (int64_t j = 0; j < n; ++j) target[j] = to_float(source[j]);
}

// x / 2^k and x * 2^-k are the same bits, and a product is several times faster.
ADACOMP_TARGET bool reciprocal_is_exact(float divisor) {
  return (float_bits(divisor) & 0x007fffffu) == 0;
}

template <typename T>
ADACOMP_TARGET void store_quotient(float* __restrict sums, float divisor, int64_t n,
                                   T* __restrict target) {
  if (reciprocal_is_exact(divisor)) {
    const float factor = 1.0f / divisor;
    for (int64_t j = 0; j < n; ++j) target[j] = from_float<T>(sums[j] * factor);
  } else {
    for (int64_t j = 0; j < n; ++j) target[j] = from_float<T>(sums[j] / divisor);
  }
  for (int64_t j = 0; j < n; ++j) sums[j] = 0.0f;
}

}  // namespace
}  // namespace adacomp::cpu
