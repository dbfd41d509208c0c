// The loops over elements that dominate, for the instruction set that is found at run time. All
// give the same bits: nothing is contracted, and only integer maxima and ors are re-ordered.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../adacomp.h"

namespace adacomp::cpu {

// What one pass over a bin finds.
struct BinSummary {
  uint32_t g_max_bits;     // max over abs_bits(G): not finite if any G is not
  uint32_t gradient_bits;  // 0 iff all dW are zero
};

constexpr int64_t kEntrySlack = 64;  // entries beyond the last one that a kernel may overwrite

struct Kernels {
  const char* name;

  BinSummary (*summarize)(const float* residual, const float* grad, int64_t n);

  // residual = G of a bin of n elements; writes the entries of the selected ones to `out`, in order
  // of their indices and without kLastInBin, and returns their end. `weight` is factor - 1.
  uint8_t* (*select8)(float* residual, const float* grad, int64_t n, float g_max, float weight,
                      uint8_t* out);  // n <= kMaxBinSize8Bit
  uint16_t* (*select16)(float* residual, const float* grad, int64_t n, float g_max, float weight,
                        uint16_t* out);

  // How many of the entries end a bin, or -1 if one is neither below `limit`, the entry of the
  // index behind the last, with an index above the one before it in its bin, nor `nothing` in place
  // of a bin. count > 0.
  int64_t (*count_bins8)(const uint8_t* entries, int64_t count, uint8_t limit, uint8_t nothing);
  int64_t (*count_bins16)(const uint16_t* entries, int64_t count, uint16_t limit, uint16_t nothing);

  // target = source; a NaN stays one.
  void (*load_half)(const Half* source, int64_t n, float* target);
  void (*load_bfloat16)(const BFloat16* source, int64_t n, float* target);

  // target = sums / divisor, rounded once; sums = 0, for the next use of the buffer.
  void (*store_float)(float* sums, float divisor, int64_t n, float* target);
  void (*store_half)(float* sums, float divisor, int64_t n, Half* target);
  void (*store_bfloat16)(float* sums, float divisor, int64_t n, BFloat16* target);
};

// The fastest of those that this processor can run, unless set_kernels() chose another.
const Kernels& kernels();

// Slowest first; "portable" is always there.
std::vector<std::string> available_kernels();

// For tests and benchmarks, between calls of the ops. Returns false if `name` is not available.
bool set_kernels(const std::string& name);

}  // namespace adacomp::cpu
