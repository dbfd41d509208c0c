// The wire format once more, as docs/wire-format.md puts it and one bin after the other: what the
// decoder must refuse, and what it must write otherwise.
#pragma once

#include <cstring>
#include <vector>

#include "scene.h"

namespace fuzz {

// Bytes of one payload; reading past its capacity is a malformed payload, not a crash.
class NaiveReader {
 public:
  NaiveReader(const uint8_t* bytes, int64_t size) : bytes_(bytes), size_(size) {}

  uint64_t number(int64_t offset, int width) {
    uint64_t value = 0;
    if (offset < 0 || offset + width > size_) {
      valid = false;
      return 0;
    }
    for (int i = 0; i < width; ++i) value |= static_cast<uint64_t>(bytes_[offset + i]) << 8 * i;
    return value;
  }
  void expect(bool condition) { valid &= condition; }
  void expect_zeros(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && valid; ++i) expect(number(i, 1) == 0);
  }

  bool valid = true;

 private:
  const uint8_t* bytes_;
  int64_t size_;
};

// Adds one bin's entries, which begin at `at`, to `sums`; returns where the next bin's begin.
inline int64_t naive_bin(NaiveReader& payload, int64_t at, int width, int64_t elements, float scale,
                         bool nothing_allowed, float* sums) {
  const uint64_t ones = width == 1 ? 0x3f : 0x3fff;
  int64_t previous = -1;
  for (bool last = false; !last && payload.valid; at += width) {
    const uint64_t entry = payload.number(at, width);
    const auto index = static_cast<int64_t>(entry >> 2);
    last = (entry & 1) != 0;
    if (nothing_allowed && previous < 0 && entry == (ones << 2 | 1)) continue;
    payload.expect(index > previous && index < elements);
    if (payload.valid) sums[index] += (entry & 2) != 0 ? -scale : scale;
    previous = index;
  }
  return at;
}

// The range [at, end) of one chunk.
inline void naive_range(const Scene& scene, NaiveReader& payload, const adacomp::Chunk& chunk,
                        float scale, int64_t at, int64_t end, float* sums) {
  const int64_t bin_size = scene.layout.segment(chunk.segment).bin_size;
  const int width = bin_size <= 63 ? 1 : 2;
  const int64_t codes = at;
  if (scene.codec.bin_scales) {
    at += chunk.bins + chunk.bins % 2;
    payload.expect(at <= end);
    payload.expect_zeros(codes + chunk.bins, at);
  }
  for (int64_t b = 0; b < chunk.bins && payload.valid; ++b) {
    const int64_t first = b * bin_size;
    if (scene.codec.bin_scales) {
      const uint64_t code = payload.number(codes + b, 1);
      if (code == 0) continue;
      scale = adacomp::bin_scale(static_cast<uint32_t>(code), scene.codec.grad_type);
      payload.expect(scale > 0.0f);
    }
    at = naive_bin(payload, at, width, std::min(bin_size, chunk.elements - first), scale,
                   !scene.codec.bin_scales, sums + first);
  }
  payload.expect(at == end || (width == 1 && at + 1 == end && (at - codes) % 2 != 0));
  payload.expect_zeros(at, end);
}

inline bool naive_header(const Scene& scene, NaiveReader& payload, uint64_t used) {
  const auto fixed = static_cast<uint64_t>(scene.layout.fixed_bytes());
  const auto worst = static_cast<uint64_t>(scene.layout.worst_case_bytes(scene.codec.bin_scales));
  const uint64_t needed = payload.number(16, 8);
  payload.expect(payload.number(0, 4) == 0x31434441 && payload.number(4, 2) == 1);
  payload.expect(payload.number(6, 2) == (scene.codec.bin_scales ? 1 : 0));
  payload.expect(payload.number(8, 4) == scene.layout.hash(scene.codec));
  payload.expect(payload.number(12, 4) == static_cast<uint32_t>(scene.step));
  payload.expect(fixed <= used && used <= needed && needed <= worst);
  payload.expect(used <= static_cast<uint64_t>(scene.capacity));
  return payload.valid;
}

inline void naive_padding(const Scene& scene, NaiveReader& payload, uint64_t used) {
  const Layout& layout = scene.layout;
  const adacomp::Offsets parts = layout.offsets();
  payload.expect_zeros(parts.scales + 4 * layout.segments(), parts.table);
  payload.expect_zeros(parts.table + 4 * (layout.chunks() + 1), parts.raw);
  payload.expect_zeros(parts.raw + 4 * layout.raw_elements(), parts.entries);
  payload.expect_zeros(static_cast<int64_t>(used), scene.capacity);
}

// Adds segment i of one payload to `sums`; `nan` says whether its scale is NaN.
inline void naive_segment(const Scene& scene, NaiveReader& payload, int64_t i, float* sums,
                          bool& nan) {
  const Layout& layout = scene.layout;
  const adacomp::Offsets parts = layout.offsets();
  const Segment& s = layout.segment(i);
  const auto bits = static_cast<uint32_t>(payload.number(parts.scales + 4 * i, 4));
  const float scale = adacomp::bits_float(bits);
  const bool none = bits == 0 || bits == adacomp::kNanBits;
  const bool positive =
      scene.codec.bin_scales ? scale == 1.0f : scale > 0.0f && scale <= 0x1.fffffep127f;
  payload.expect(s.is_raw() ? bits == 0 : none || (positive && s.numel > 0));
  nan |= bits == adacomp::kNanBits;
  for (int64_t c = layout.first_chunk(i); c < layout.first_chunk(i + 1) && payload.valid; ++c) {
    const auto begin = static_cast<int64_t>(payload.number(parts.table + 4 * c, 4));
    const auto end = static_cast<int64_t>(payload.number(parts.table + 4 * c + 4, 4));
    payload.expect(end % 2 == 0 && (none ? begin == end : begin <= end));
    if (begin == end || !payload.valid) continue;
    const adacomp::Chunk chunk = layout.chunk(c);
    naive_range(scene, payload, chunk, scale, parts.entries + begin, parts.entries + end,
                sums + chunk.first_element);
  }
}

inline void naive_raw(const Scene& scene, NaiveReader& payload, int64_t i, int64_t first,
                      float* sums) {
  const Segment& s = scene.layout.segment(i);
  if (!s.is_raw()) return;
  const int64_t begin = scene.layout.offsets().raw + 4 * first;
  for (int64_t j = 0; j < s.numel; ++j) {
    sums[j] += adacomp::bits_float(static_cast<uint32_t>(payload.number(begin + 4 * j, 4)));
  }
}

// Fills `grad`, or returns false if a payload is malformed.
inline bool naive_decode(const Scene& scene, const uint8_t* payloads, uint8_t* grad) {
  const Layout& layout = scene.layout;
  std::vector<float> sums(layout.elements(), 0.0f);
  std::vector<bool> nan(layout.segments(), false);
  for (int64_t rank = 0; rank < scene.world_size; ++rank) {
    NaiveReader payload(payloads + rank * scene.capacity, scene.capacity);
    const uint64_t used = payload.number(24, 8);
    if (!naive_header(scene, payload, used)) return false;
    naive_padding(scene, payload, used);
    const int64_t table = layout.offsets().table;
    payload.expect(payload.number(table, 4) == 0);
    payload.expect(payload.number(table + 4 * layout.chunks(), 4) + layout.fixed_bytes() == used);
    int64_t raw = 0;
    for (int64_t i = 0; i < layout.segments() && payload.valid; ++i) {
      bool is_nan = nan[i];
      float* const target = sums.data() + layout.segment(i).bucket_offset;
      naive_segment(scene, payload, i, target, is_nan);
      naive_raw(scene, payload, i, raw, target);
      nan[i] = is_nan;
      raw += layout.segment(i).is_raw() ? layout.segment(i).numel : 0;
    }
    if (!payload.valid) return false;
  }
  for (int64_t i = 0; i < layout.segments(); ++i) {
    const Segment& s = layout.segment(i);
    for (int64_t j = s.bucket_offset; j < s.bucket_offset + s.numel; ++j) {
      const float mean = sums[j] / static_cast<float>(scene.world_size);
      put_value(grad, scene.codec.grad_type, j,
                nan[i] ? adacomp::bits_float(adacomp::kNanBits) : mean);
    }
  }
  return true;
}

}  // namespace fuzz
