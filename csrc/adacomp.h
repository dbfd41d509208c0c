// The rules of AdaComp per element, bin and segment, for host and device (arXiv 1712.02679).
//
//   G = residual + dW                   accumulated gradient           sum_gradient
//   H = G + (factor - 1) dW             soft-threshold probe           probe
//   g_max = max |G| over a bin                                         abs_bits
//   send iff g_max > 0, |H| >= g_max, G != 0                           selects
//   s = mean of g_max over the bins, or one byte per bin               segment_scale, bin_code
//   residual = G - sign(G) s if sent, else G                           corrected
//
// The same input must give the same bits everywhere, so nothing here may be contracted to an FMA
// (-ffp-contract=off, nvcc -fmad=false) or re-associated.
#pragma once

#include <cstdint>
#include <cstring>

#include "payload.h"

namespace adacomp {

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kAbsMask = 0x7fffffff;

ADACOMP_HD inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ADACOMP_HD inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// |x| as an integer: ordered like the value for finite x, and above every finite x for inf and NaN.
ADACOMP_HD inline uint32_t abs_bits(float x) {
  return float_bits(x) & kAbsMask;
}
ADACOMP_HD inline bool finite_bits(uint32_t abs_bits) {
  return abs_bits < kInfinityBits;
}

// ---- gradient dtypes: storage type <-> float32, to nearest even ----

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

ADACOMP_HD inline float to_float(float x) {
  return x;
}

ADACOMP_HD inline float to_float(BFloat16 x) {
  return bits_float(uint32_t{x.bits} << 16);
}

// Subnormals are converted from integers, so that flush-to-zero modes do not change the result.
ADACOMP_HD inline float to_float(Half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t rebias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t bits = magnitude < 0x0400u ? float_bits(subnormal) : (magnitude << 13) + rebias;
  return bits_float(sign | bits);
}

// Conversions of decoded values. A NaN becomes the dtype's canonical NaN, so that every rank and
// device writes the same bits.
template <typename T>
ADACOMP_HD inline T from_float(float x);

template <>
ADACOMP_HD inline float from_float<float>(float x) {
  return finite_bits(abs_bits(x)) || abs_bits(x) == kInfinityBits ? x : bits_float(kNanBits);
}

template <>
ADACOMP_HD inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(abs_bits(x) > kInfinityBits ? kNanBits >> 16 : rounded)};
}

template <>
ADACOMP_HD inline Half from_float<Half>(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u;
  const uint32_t magnitude = abs_bits(x);
  // Adding 0.5 leaves the 10 mantissa bits of a subnormal half at the bottom, rounded to even.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  uint32_t bits = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  bits = magnitude >= 0x477ff000u ? 0x7c00u : bits;              // 65520 and above round to inf
  bits = magnitude > kInfinityBits ? 0x7e00u : sign | bits;
  return {static_cast<uint16_t>(bits)};
}

ADACOMP_HD inline float largest_finite(GradType type) {
  return bits_float(type == GradType::kFloat32   ? 0x7f7fffffu
                    : type == GradType::kFloat16 ? 0x477fe000u
                                                 : 0x7f7f0000u);
}

// Clamps a scale to the finite range of the gradient's dtype and rounds it to that dtype: what is
// subtracted from the residual is then what every rank decodes, and no rank's share is infinite.
ADACOMP_HD inline float representable(float scale, GradType type) {
  const float largest = largest_finite(type);
  const float clamped = scale < largest ? scale : largest;
  switch (type) {
    case GradType::kFloat16:
      return to_float(from_float<Half>(clamped));
    case GradType::kBFloat16:
      return to_float(from_float<BFloat16>(clamped));
    default:
      return clamped;
  }
}

// ---- selection ----

ADACOMP_HD inline float sum_gradient(float residual, float grad) {
  return residual + grad;
}

// `weight` is factor - 1.
ADACOMP_HD inline float probe(float g, float grad, float weight) {
  return g + weight * grad;
}

// `g_max` > 0. sign(0) = 0, so an element whose residual cancelled its gradient is not sent.
ADACOMP_HD inline bool selects(float g, float h, float g_max) {
  return (abs_bits(h) >= float_bits(g_max)) & (abs_bits(g) != 0);
}

// sign * scale, without a branch on the sign: it is a coin toss.
ADACOMP_HD inline float signed_scale(float scale, bool negative) {
  return bits_float(float_bits(scale) ^ static_cast<uint32_t>(negative) << 31);
}

ADACOMP_HD inline float corrected(float g, float scale, bool negative) {
  return g - signed_scale(scale, negative);
}

// ---- scales ----

// One byte per bin: two steps per octave, 2^-100 to 2^28; the residual keeps the rounding error.
ADACOMP_HD inline uint32_t bin_code(float g_max) {
  const int32_t code = static_cast<int32_t>(float_bits(g_max) >> 22) - 54;
  return static_cast<uint32_t>(code < 1 ? 1 : code > 255 ? 255 : code);
}

ADACOMP_HD inline float bin_scale(uint32_t code, GradType type) {
  return representable(bits_float((code + 54) << 22 | 1u << 21), type);
}

// Mean of g_max over a segment's bins, given their sum in the fixed order of LaneSum.
ADACOMP_HD inline float segment_scale(double sum_of_g_max, int64_t bins, GradType type) {
  return representable(static_cast<float>(sum_of_g_max / static_cast<double>(bins)), type);
}

// Of a segment in a payload: NaN, 0, or positive and finite; with bin scales only 1 is positive.
// `has_chunks`: false for raw and empty segments, which send nothing.
ADACOMP_HD inline bool valid_scale(uint32_t bits, bool bin_scales, bool is_raw, bool has_chunks) {
  const bool positive = bin_scales ? bits == float_bits(1.0f) : finite_bits(bits);
  return bits == 0 || (bits == kNanBits && !is_raw) || (positive && has_chunks);
}

// The only sum of the method, in one order for all thread counts, vector widths and devices: lane l
// of 32 adds the terms l, l + 32, ..., then lanes are added pairwise at distance 16, 8, 4, 2, 1.
// Used for the bins of a chunk and again for the chunks of a segment.
class LaneSum {
 public:
  static constexpr int kLanes = 32;

  ADACOMP_HD void add(double term) {
    lanes_[next_] += term;
    next_ = (next_ + 1) % kLanes;
  }

  ADACOMP_HD double total() const {
    double lanes[kLanes];
    for (int l = 0; l < kLanes; ++l) lanes[l] = lanes_[l];
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      for (int l = 0; l < distance; ++l) lanes[l] += lanes[l + distance];
    }
    return lanes[0];
  }

 private:
  double lanes_[kLanes] = {};
  int next_ = 0;
};

}  // namespace adacomp
