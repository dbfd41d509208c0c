// AVX2 with BMI2 and F16C (Haswell, Zen and later).
#if defined(__x86_64__)

#include <immintrin.h>

#define ADACOMP_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,f16c")))
#include "kernels_body.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kWidth = 8;   // floats in a vector
constexpr int64_t kBlock = 64;  // elements whose bits fill a word

ADACOMP_TARGET inline __m256i abs_bits_of(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(kAbsMask)));
}

ADACOMP_TARGET inline uint32_t max_of(__m256i x) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

// The last vector overlaps the one before it: neither maximum nor or minds.
ADACOMP_TARGET BinSummary summarize(const float* residual, const float* grad, int64_t n) {
  if (n < kWidth) return summarize_scalar(residual, grad, n);
  __m256i g_max = _mm256_setzero_si256();
  __m256i gradient = _mm256_setzero_si256();
  for (int64_t j = 0; j < n; j += kWidth) {
    const int64_t at = j + kWidth <= n ? j : n - kWidth;
    const __m256 dw = _mm256_loadu_ps(grad + at);
    g_max = _mm256_max_epu32(g_max, abs_bits_of(_mm256_add_ps(_mm256_loadu_ps(residual + at), dw)));
    gradient = _mm256_or_si256(gradient, abs_bits_of(dw));
  }
  return {max_of(g_max), !_mm256_testz_si256(gradient, gradient)};
}

struct Selection {
  uint64_t selected;  // bit j: element j is sent
  uint64_t negative;  // bit j: G(j) has its sign bit set
};

// A vector of a bin: G, and in the lowest bits of Selection what is selected.
struct Vector {
  __m256 g;
  Selection bits;
};

ADACOMP_TARGET inline Vector select_vector(const float* residual, const float* grad,
                                           __m256i below_g_max, __m256 weight) {
  const __m256 dw = _mm256_loadu_ps(grad);
  const __m256 g = _mm256_add_ps(_mm256_loadu_ps(residual), dw);
  const __m256i h = abs_bits_of(_mm256_add_ps(g, _mm256_mul_ps(weight, dw)));
  const __m256i zero = _mm256_cmpeq_epi32(abs_bits_of(g), _mm256_setzero_si256());
  const __m256i selected = _mm256_andnot_si256(zero, _mm256_cmpgt_epi32(h, below_g_max));
  return {g,
          {static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(selected))),
           static_cast<uint64_t>(_mm256_movemask_ps(g))}};
}

// Most blocks have few entries: the first slots are written without a branch on how many.
template <typename Entry>
ADACOMP_TARGET inline Entry* emit(Selection s, int64_t first_index, Entry* out) {
  constexpr int kSlots = sizeof(Entry) == 1 ? 8 : 2;
  const int64_t count = _mm_popcnt_u64(s.selected);
  for (int64_t k = 0; k < (count > kSlots ? count : kSlots); ++k) {
    const auto index = static_cast<uint32_t>(_tzcnt_u64(s.selected));
    const bool negative = (s.negative >> (index & 63) & 1) != 0;
    out[k] = static_cast<Entry>(make_entry(static_cast<uint32_t>(first_index) + index, negative));
    s.selected = _blsr_u64(s.selected);
  }
  return out + count;
}

// The last vector of a bin overlaps the one before it, so it is computed before that is written.
template <typename Entry>
ADACOMP_TARGET Entry* select(float* residual, const float* grad, int64_t n, float g_max,
                             float weight, Entry* out) {
  if (n < kWidth) return select_scalar(residual, grad, n, g_max, weight, out);
  const __m256i below_g_max = _mm256_set1_epi32(static_cast<int>(float_bits(g_max)) - 1);
  const __m256 weights = _mm256_set1_ps(weight);
  const Vector last = select_vector(residual + n - kWidth, grad + n - kWidth, below_g_max, weights);
  for (int64_t block = 0; block < n; block += kBlock) {
    const int64_t length = n - block < kBlock ? n - block : kBlock;
    const int64_t rest = length % kWidth;
    Selection s{0, 0};
    for (int64_t j = 0; j < length - rest; j += kWidth) {
      const Vector v = select_vector(residual + block + j, grad + block + j, below_g_max, weights);
      _mm256_storeu_ps(residual + block + j, v.g);
      s.selected |= v.bits.selected << j;
      s.negative |= v.bits.negative << j;
    }
    if (rest != 0) {
      s.selected |= last.bits.selected >> (kWidth - rest) << (length - rest);
      s.negative |= last.bits.negative >> (kWidth - rest) << (length - rest);
    }
    out = emit(s, block, out);
  }
  _mm256_storeu_ps(residual + n - kWidth, last.g);
  return out;
}

ADACOMP_TARGET void load_half(const Half* source, int64_t n, float* target) {
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    const auto* const eight = reinterpret_cast<const __m128i*>(source + j);
    _mm256_storeu_ps(target + j, _mm256_cvtph_ps(_mm_loadu_si128(eight)));
  }
  for (; j < n; ++j) target[j] = to_float(source[j]);
}

}  // namespace

extern const Kernels kAvx2Kernels = {
    "avx2",
    summarize,
    select<uint8_t>,
    select<uint16_t>,
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
