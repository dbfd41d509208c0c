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

// Without a branch, so that it is vectorised.
template <typename Entry>
ADACOMP_TARGET int64_t count_bins(const Entry* entries, int64_t count, Entry limit, Entry nothing) {
  Entry bad = entries[0] >= limit && entries[0] != nothing;
  int64_t bins = entries[0] & kLastInBin;
  constexpr int64_t kRun = 128;  // so many bins can be counted in 8 bits
  for (int64_t begin = 1; begin < count; begin += kRun) {
    const int64_t end = begin + kRun < count ? begin + kRun : count;
    Entry in_run = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Entry entry = entries[i];
      const Entry before = entries[i - 1];
      const auto starts = static_cast<Entry>(before & kLastInBin);
      // Indices from 1: the one before counts as 0 if it ended its bin.
      const auto index = static_cast<Entry>((entry >> 2) + 1);
      const auto least = static_cast<Entry>(((before >> 2) + 1) & (starts - 1));
      const Entry below_limit = entry < limit;
      const Entry silent = entry == nothing;
      const Entry increases = index > least;
      bad |= static_cast<Entry>(((below_limit | (silent & starts)) & increases) ^ 1);
      in_run += entry & kLastInBin;
    }
    bins += in_run;
  }
  return bad == 0 ? bins : -1;
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
