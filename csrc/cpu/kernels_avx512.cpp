// AVX-512 with VBMI2 (Ice Lake, Zen 4 and later): entries are packed by one compressing move.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 about its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#define ADACOMP_TARGET                                                             \
  __attribute__((                                                                  \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2," \
             "popcnt,f16c")))
#include "kernels_body.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kWidth = 16;   // floats in a vector
constexpr int64_t kBlock = 64;   // elements whose bits fill a word
constexpr int64_t kAhead = 512;  // elements: while a bin is selected, the ones after it arrive

// One bit for each of the first n of `width` elements.
ADACOMP_TARGET inline uint64_t first_bits(int64_t n) {
  return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

ADACOMP_TARGET inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>(_bzhi_u32(0xffff, n < kWidth ? static_cast<uint32_t>(n) : kWidth));
}

ADACOMP_TARGET BinSummary summarize(const float* residual, const float* grad, int64_t n) {
  const __m512i abs_mask = _mm512_set1_epi32(static_cast<int>(kAbsMask));
  __m512i g_max = _mm512_setzero_si512();
  __m512i gradient = _mm512_setzero_si512();
  for (int64_t j = 0; j < n; j += kWidth) {
    const __mmask16 lanes = first_lanes(n - j);
    const __m512 dw = _mm512_maskz_loadu_ps(lanes, grad + j);
    const __m512 g = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, residual + j), dw);
    g_max = _mm512_max_epu32(g_max, _mm512_and_si512(_mm512_castps_si512(g), abs_mask));
    gradient = _mm512_or_si512(gradient, _mm512_castps_si512(dw));
  }
  return {_mm512_reduce_max_epu32(g_max), _mm512_test_epi32_mask(gradient, abs_mask)};
}

struct Selection {
  uint64_t selected;  // bit j: element j is sent
  uint64_t negative;  // bit j: G(j) has its sign bit set
};

// residual = G of at most kBlock elements.
ADACOMP_TARGET inline Selection select_block(float* residual, const float* grad, int64_t n,
                                             __m512i g_max, __m512 weight) {
  const __m512i abs_mask = _mm512_set1_epi32(static_cast<int>(kAbsMask));
  Selection selection{0, 0};
#pragma GCC unroll 4
  for (int64_t j = 0; j < kBlock; j += kWidth) {
    if (j >= n) break;
    const __mmask16 lanes = first_lanes(n - j);
    const __m512 dw = _mm512_maskz_loadu_ps(lanes, grad + j);
    const __m512 g = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, residual + j), dw);
    _mm512_mask_storeu_ps(residual + j, lanes, g);
    __builtin_prefetch(residual + j + kAhead);
    __builtin_prefetch(grad + j + kAhead);
    const __m512i h = _mm512_castps_si512(_mm512_add_ps(g, _mm512_mul_ps(weight, dw)));
    const __m512i bits = _mm512_castps_si512(g);
    const __mmask16 nonzero = _mm512_test_epi32_mask(bits, abs_mask);
    const uint64_t selected =
        _mm512_mask_cmpge_epu32_mask(nonzero, _mm512_and_si512(h, abs_mask), g_max);
    selection.selected |= selected << j;
    selection.negative |= uint64_t{_mm512_movepi32_mask(bits)} << j;
  }
  return selection;
}

ADACOMP_TARGET uint8_t* select8(float* residual, const float* grad, int64_t n, float g_max,
                                float weight, uint8_t* out) {
  alignas(64) static constexpr uint8_t kEntries[kBlock] = {
      0,   4,   8,   12,  16,  20,  24,  28,  32,  36,  40,  44,  48,  52,  56,  60,
      64,  68,  72,  76,  80,  84,  88,  92,  96,  100, 104, 108, 112, 116, 120, 124,
      128, 132, 136, 140, 144, 148, 152, 156, 160, 164, 168, 172, 176, 180, 184, 188,
      192, 196, 200, 204, 208, 212, 216, 220, 224, 228, 232, 236, 240, 244, 248, 252};
  const Selection s =
      select_block(residual, grad, n, _mm512_set1_epi32(static_cast<int>(float_bits(g_max))),
                   _mm512_set1_ps(weight));
  const __m512i positive = _mm512_load_si512(kEntries);
  const __m512i entries = _mm512_mask_add_epi8(positive, s.negative, positive, _mm512_set1_epi8(2));
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(s.selected, entries));
  return out + _mm_popcnt_u64(s.selected);
}

ADACOMP_TARGET uint16_t* select16(float* residual, const float* grad, int64_t n, float g_max,
                                  float weight, uint16_t* out) {
  alignas(64) static constexpr uint16_t kEntries[32] = {
      0,  4,  8,  12, 16, 20, 24, 28, 32, 36,  40,  44,  48,  52,  56,  60,
      64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
  const __m512i g_max_bits = _mm512_set1_epi32(static_cast<int>(float_bits(g_max)));
  const __m512 weights = _mm512_set1_ps(weight);
  const __m512i half_block = _mm512_set1_epi16(32 << 2);
  const __m512i two = _mm512_set1_epi16(2);
  __m512i positive = _mm512_load_si512(kEntries);
  for (int64_t j = 0; j < n; j += kBlock) {
    const Selection s = select_block(residual + j, grad + j, n - j, g_max_bits, weights);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto selected = static_cast<__mmask32>(s.selected >> (32 * half));
      const auto negative = static_cast<__mmask32>(s.negative >> (32 * half));
      const __m512i entries = _mm512_mask_add_epi16(positive, negative, positive, two);
      _mm512_storeu_si512(out, _mm512_maskz_compress_epi16(selected, entries));
      out += _mm_popcnt_u32(selected);
      positive = _mm512_add_epi16(positive, half_block);
    }
  }
  return out;
}

ADACOMP_TARGET void load_half(const Half* source, int64_t n, float* target) {
  for (int64_t j = 0; j < n; j += kWidth) {
    const __mmask16 lanes = first_lanes(n - j);
    _mm512_mask_storeu_ps(target + j, lanes,
                          _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, source + j)));
  }
}

}  // namespace

extern const Kernels kAvx512Kernels = {
    "avx512",
    summarize,
    select8,
    select16,
    count_bins<uint8_t>,
    count_bins<uint16_t>,
    load_half,
    load_bfloat16,
    store_quotient<float>,
    store_quotient<Half>,
    store_quotient<BFloat16>,
};

}  // namespace adacomp::cpu

#endif
