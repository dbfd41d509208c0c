// Walks over the entries of a chunk's range, of which the caller knows that they are valid.
//
// The loops run over entries and not over bins: how many entries a bin has is hard to predict.
#pragma once

#include <cstdint>

#include "../adacomp.h"

namespace adacomp::cpu {

// A bin that sends something: its first element in the chunk, and its scale. With bin scales.
struct SendingBin {
  int32_t first;
  float scale;
};

// bin_scale() of every code; 0 of code 0, which says that the bin sends nothing.
class BinScales {
 public:
  explicit BinScales(GradType type) {
    for (uint32_t code = 1; code < 256; ++code) scales_[code] = bin_scale(code, type);
  }
  float operator[](uint32_t code) const { return scales_[code]; }

 private:
  float scales_[256] = {};
};

// Calls f(entry) with the Entry type of a bin size: f(uint8_t{}) or f(uint16_t{}).
template <typename F>
auto with_entry_type(int64_t bin_size, F&& f) {
  return entry_bytes(bin_size) == 1 ? f(uint8_t{}) : f(uint16_t{});
}

// Calls f(position in the chunk, entry) for each entry, with the layer scale.
template <typename Entry, typename F>
void for_each_sent(const Entry* entry, const Entry* end, int64_t bin_size, F&& f) {
  const int64_t advance[2] = {0, bin_size};
  int64_t first = 0;
  for (; entry != end; ++entry) {
    const uint32_t e = *entry;
    if (e != nothing_entry(sizeof(Entry))) f(first + entry_index(e), e);
    first += advance[entry_last(e)];
  }
}

// Calls f(position in the chunk, negative, scale) for each entry, with bin scales.
template <typename Entry, typename F>
void for_each_sent(const Entry* entry, const Entry* end, const SendingBin* bin, F&& f) {
  for (; entry != end; ++entry) {
    const uint32_t e = *entry;
    f(bin->first + entry_index(e), entry_negative(e), bin->scale);
    bin += entry_last(e);
  }
}

// Writes the bins of a chunk whose code is not 0; returns their end. Room for one more is needed.
inline SendingBin* list_sending_bins(const uint8_t* codes, int64_t bins, int64_t bin_size,
                                     const BinScales& scale_of_code, SendingBin* out) {
  for (int64_t b = 0; b < bins; ++b) {
    *out = {static_cast<int32_t>(b * bin_size), scale_of_code[codes[b]]};
    out += codes[b] != 0;
  }
  return out;
}

// target += sign * scale, with the layer scale; a scale below zero takes off what was sent.
template <typename Entry>
void add(const Entry* entry, const Entry* end, int64_t bin_size, float scale, float* target) {
  const float values[4] = {scale, scale, -scale, -scale};  // of an entry's two lowest bits
  for_each_sent(entry, end, bin_size,
                [&](int64_t position, uint32_t e) { target[position] += values[e & 3]; });
}

template <typename Entry>
void add(const Entry* entry, const Entry* end, const SendingBin* bins, float* target) {
  for_each_sent(entry, end, bins, [&](int64_t position, bool negative, float scale) {
    target[position] += signed_scale(scale, negative);
  });
}

}  // namespace adacomp::cpu
