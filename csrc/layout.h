// Derived tables of a layout: where each chunk and each raw value lies. Host only, O(segments).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "adacomp.h"

namespace adacomp {

class Layout {
 public:
  Layout(const Segment* segments, int64_t count)
      : segments_(segments, segments + count),
        first_chunk_(count + 1, 0),
        first_raw_(count + 1, 0) {
    for (int64_t i = 0; i < count; ++i) {
      const Segment& s = segments[i];
      first_chunk_[i + 1] = first_chunk_[i] + num_chunks(s);
      first_raw_[i + 1] = first_raw_[i] + (s.is_raw() ? s.numel : 0);
    }
  }

  int64_t segments() const { return static_cast<int64_t>(first_chunk_.size()) - 1; }
  int64_t chunks() const { return first_chunk_.back(); }
  int64_t elements() const {
    return segments() == 0
               ? 0
               : segments_[segments() - 1].bucket_offset + segments_[segments() - 1].numel;
  }
  int64_t raw_elements() const { return first_raw_.back(); }
  const Segment& segment(int64_t i) const { return segments_[i]; }
  int64_t first_chunk(int64_t segment) const { return first_chunk_[segment]; }
  int64_t first_raw(int64_t segment) const { return first_raw_[segment]; }
  Offsets offsets() const { return payload_offsets(segments(), chunks(), raw_elements()); }
  int64_t fixed_bytes() const { return offsets().entries; }

  Chunk chunk(int64_t index) const {
    const int64_t i = owner(first_chunk_, index);
    return make_chunk(segments_[i], i, index - first_chunk_[i]);
  }

  // Elements of the largest of chunks begin to end.
  int64_t largest_chunk(int64_t begin, int64_t end) const {
    int64_t most = 0;
    while (begin < end) {
      const Chunk first = chunk(begin);  // no other of its segment is larger
      most = std::max(most, first.elements);
      begin = first_chunk_[first.segment + 1];
    }
    return most;
  }

  // Calls f(bucket_offset, raw_offset, length) for each run of raw values begin to end.
  template <typename F>
  void for_each_raw_run(int64_t begin, int64_t end, F&& f) const {
    while (begin < end) {
      const int64_t i = owner(first_raw_, begin);
      const int64_t length = std::min(end, first_raw_[i + 1]) - begin;
      f(segments_[i].bucket_offset + begin - first_raw_[i], begin, length);
      begin += length;
    }
  }

  int64_t worst_case_bytes(bool bin_scales) const {
    int64_t bytes = fixed_bytes();
    for (int64_t i = 0; i < segments(); ++i) bytes += worst_segment_bytes(segments_[i], bin_scales);
    return align_up(bytes);
  }

  uint32_t hash(const Codec& codec) const {
    LayoutHash hash;
    hash.add(segments());
    for (int64_t i = 0; i < segments(); ++i) {
      hash.add(segments_[i].numel);
      hash.add(segments_[i].bin_size);
    }
    hash.add(static_cast<int64_t>(codec.grad_type));
    hash.add(codec.bin_scales);
    hash.add(float_bits(codec.threshold_factor));
    return hash.value();
  }

 private:
  // The segment whose run of a prefix table holds `index`; empty runs own nothing.
  static int64_t owner(const std::vector<int64_t>& prefix, int64_t index) {
    return std::upper_bound(prefix.begin(), prefix.end(), index) - prefix.begin() - 1;
  }

  // All chunks but the last of a segment have the same size.
  static int64_t worst_segment_bytes(const Segment& s, bool bin_scales) {
    const int64_t chunks = num_chunks(s);
    if (chunks == 0) return 0;
    const int64_t bins = bins_per_chunk(s.bin_size);
    const int64_t last_elements = s.numel - (chunks - 1) * bins * s.bin_size;
    const int64_t last_bins = num_bins(s) - (chunks - 1) * bins;
    return (chunks - 1) * worst_range_bytes(bins * s.bin_size, bins, s.bin_size, bin_scales) +
           worst_range_bytes(last_elements, last_bins, s.bin_size, bin_scales);
  }

  std::vector<Segment> segments_;  // a copy: nothing written later can change it
  std::vector<int64_t> first_chunk_;
  std::vector<int64_t> first_raw_;
};

}  // namespace adacomp
