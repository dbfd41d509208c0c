// Compression of gradients of any bits and back: nothing of a gradient is lost on the way.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../../csrc/cpu/decompress.h"
#include "scene.h"

namespace fuzz {

using adacomp::bits_float;
using adacomp::float_bits;

// Bits from the input, again from its start when it ends.
class BitSource {
 public:
  explicit BitSource(Input& input) {
    while (!input.empty()) bytes_.push_back(input.byte());
    if (bytes_.empty()) bytes_.push_back(0);
  }
  uint32_t next(int64_t bytes) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < bytes; ++i) {
      bits |= static_cast<uint32_t>(bytes_[at_]) << 8 * i;
      at_ = at_ + 1 < bytes_.size() ? at_ + 1 : 0;
    }
    return bits;
  }

 private:
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
};

// What one rank holds after compressing one gradient, all in exact blocks.
struct Compressed {
  Compressed(const Scene& scene, const float* residual_before, uint8_t fill)
      : residual(4 * scene.residual_elements, 0),
        payload(scene.capacity, fill),
        counters(2 * scene.layout.segments(), 0) {
    if (residual.size() > 0) std::memcpy(residual.data(), residual_before, residual.size());
  }
  float* residuals() const { return reinterpret_cast<float*>(residual.data()); }

  HeapBlock residual;
  HeapBlock payload;
  std::vector<int64_t> counters;
};

inline bool same_bytes(const HeapBlock& a, const HeapBlock& b) {
  return std::memcmp(a.data(), b.data(), a.size()) == 0;
}

inline void decode_own(Scene scene, int64_t step, const uint8_t* payload, uint8_t* grad) {
  adacomp::cpu::Decompressor decompressor(scene.layout, scene.codec, payload, 1, scene.capacity,
                                          step, grad);
  decompressor.check_payloads();
  FUZZ_CHECK(decompressor.status() == 0, "own payload");
  decompressor.decode(0, scene.layout.chunks());
  decompressor.decode_raw(0, scene.layout.raw_elements());
  FUZZ_CHECK(decompressor.status() == 0, "own entries");
}

// The distance of the float32 numbers around x > 0.
inline double ulp(float x) {
  const float largest = adacomp::largest_finite(GradType::kFloat32);
  return x < largest ? static_cast<double>(std::nextafter(x, largest)) - x
                     : static_cast<double>(x) - std::nextafter(x, 0.0f);
}

// One compressed element: residual r0 -> r1, gradient g, decoded d; returns whether it was sent.
inline bool check_element(float r0, float r1, float g, float d, bool nan_scale) {
  const float sum = r0 + g;
  FUZZ_CHECK(std::isfinite(r1), "residual is finite");
  if (nan_scale) {
    FUZZ_CHECK(std::isnan(d), "NaN scale");
    FUZZ_CHECK(float_bits(r1) == float_bits(std::isfinite(sum) ? sum : r0), "NaN scale keeps");
    return false;
  }
  FUZZ_CHECK(std::isfinite(sum) && std::isfinite(d), "non-finite sum is reported");
  if (d == 0.0f) {
    FUZZ_CHECK(float_bits(r1) == float_bits(sum), "unsent residual is exact");
    return false;
  }
  const double error = (static_cast<double>(d) + r1) - (static_cast<double>(r0) + g);
  const double bound = ulp(std::max(std::fabs(sum), std::fabs(d)));
  FUZZ_CHECK(std::fabs(error) <= bound * (1 + 1e-6), "conservation");  // the sums round too
  FUZZ_CHECK(sum != 0.0f && (d < 0.0f) == (sum < 0.0f), "sign");
  return true;
}

inline void check_conservation(const Scene& scene, const float* before, const Compressed& after,
                               uint8_t* grad, uint8_t* decoded) {
  const GradType type = scene.codec.grad_type;
  const int64_t scales = scene.layout.offsets().scales;
  for (int64_t i = 0; i < scene.layout.segments(); ++i) {
    const Segment& s = scene.layout.segment(i);
    const uint32_t scale = get_bits(after.payload.data() + scales, GradType::kFloat32, i);
    int64_t sent = 0;
    for (int64_t j = 0; j < s.numel; ++j) {
      const float g = get_value(grad, type, s.bucket_offset + j);
      const float d = get_value(decoded, type, s.bucket_offset + j);
      if (s.is_raw()) {
        FUZZ_CHECK(g == d || (std::isnan(g) && std::isnan(d)), "raw value");
        continue;
      }
      const int64_t r = s.residual_offset + j;
      sent += check_element(before[r], after.residuals()[r], g, d, scale == adacomp::kNanBits);
    }
    FUZZ_CHECK(after.counters[2 * i] == sent, "entries counted");
  }
}

inline void check_sizes(const Scene& scene, const Compressed& sent) {
  adacomp::Header header;
  std::memcpy(&header, sent.payload.data(), sizeof header);
  int64_t dropped = 0;
  for (int64_t i = 0; i < scene.layout.segments(); ++i) dropped += sent.counters[2 * i + 1];
  const bool fits = header.needed_bytes <= static_cast<uint64_t>(scene.capacity);
  FUZZ_CHECK(fits == (dropped == 0), "dropped chunks");
  FUZZ_CHECK(fits == (header.used_bytes == header.needed_bytes), "used bytes");
}

inline void check_step(const Scene& scene, int64_t step, std::vector<float>& residual,
                       uint8_t* grad, int64_t tasks) {
  const int64_t bytes = scene.layout.elements() * element_bytes(scene.codec.grad_type);
  const Compressed sent(scene, residual.data(), 0xa5);
  auto* counters = const_cast<int64_t*>(sent.counters.data());
  compress(scene, step, grad, sent.residuals(), sent.payload.data(), counters, tasks);
  // Neither the number of tasks nor what the payload held before may show.
  const Compressed again(scene, residual.data(), 0x5a);
  compress(scene, step, grad, again.residuals(), again.payload.data(), nullptr, 1);
  FUZZ_CHECK(same_bytes(sent.payload, again.payload), "the same payload for any tasks");
  FUZZ_CHECK(same_bytes(sent.residual, again.residual), "the same residual for any tasks");
  const HeapBlock decoded(bytes, 0xff);
  decode_own(scene, step, sent.payload.data(), decoded.data());
  if (self_test == SelfTest::kResidualOff && !residual.empty()) {
    sent.residuals()[0] = sent.residuals()[0] * 1.001f + 1e-30f;
  }
  check_conservation(scene, residual.data(), sent, grad, decoded.data());
  check_sizes(scene, sent);
  residual.assign(sent.residuals(), sent.residuals() + scene.residual_elements);
}

inline void read_gradient(const Scene& scene, bool finite, BitSource& bits, uint8_t* grad) {
  const GradType type = scene.codec.grad_type;
  for (int64_t i = 0; i < scene.layout.elements(); ++i) {
    put_bits(grad, type, i, bits.next(element_bytes(type)));
    if (!finite || std::isfinite(get_value(grad, type, i))) continue;
    // Clearing the exponent's highest bit makes any value finite.
    const uint32_t exponent = type == GradType::kFloat32 ? 1u << 30 : 1u << 14;
    put_bits(grad, type, i, get_bits(grad, type, i) & ~exponent);
  }
}

// Finite; with `cancel` every third one is minus its gradient, so that the sum is 0.
inline void read_residual(const Scene& scene, bool cancel, BitSource& bits, uint8_t* grad,
                          std::vector<float>& residual) {
  for (float& r : residual) {
    r = bits_float(bits.next(4));
    if (!std::isfinite(r)) r = bits_float(float_bits(r) & ~(1u << 30));
  }
  for (const Segment& s : scene.segments) {
    for (int64_t j = 0; cancel && !s.is_raw() && j < s.numel; j += 3) {
      const float g = get_value(grad, scene.codec.grad_type, s.bucket_offset + j);
      if (std::isfinite(g)) residual[s.residual_offset + j] = -g;
    }
  }
}

inline void round_trip(const Scene& scene, Input& input) {
  const uint32_t options = input.byte();
  const bool finite = (options & 1) != 0;
  const int64_t steps = 1 + (options >> 1) % 4;
  const int64_t tasks = 1 + (options >> 3) % 4;
  BitSource bits(input);
  const HeapBlock grad(scene.layout.elements() * element_bytes(scene.codec.grad_type), 0);
  std::vector<float> residual(scene.residual_elements, 0.0f);
  read_gradient(scene, finite, bits, grad.data());
  if ((options & 32) != 0) read_residual(scene, (options & 64) != 0, bits, grad.data(), residual);
  for (int64_t step = 0; step < steps; ++step) {
    if (step > 0) read_gradient(scene, finite, bits, grad.data());
    check_step(scene, scene.step + step, residual, grad.data(), tasks);
  }
}

}  // namespace fuzz
