// For any processor: the compiler vectorises what it can with its default instruction set.
#define ADACOMP_TARGET
#include "kernels_body.h"

namespace adacomp::cpu {
namespace {

void load_half(const Half* __restrict source, int64_t n, float* __restrict target) {
  for (int64_t j = 0; j < n; ++j) target[j] = to_float(source[j]);
}

}  // namespace

extern const Kernels kPortableKernels = {
    "portable",
    summarize_scalar,
    select_scalar<uint8_t>,
    select_scalar<uint16_t>,
    count_bins<uint8_t>,
    count_bins<uint16_t>,
    load_half,
    load_bfloat16,
    store_quotient<float>,
    store_quotient<Half>,
    store_quotient<BFloat16>,
};

}  // namespace adacomp::cpu
