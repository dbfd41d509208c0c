// One rank's range of a chunk, checked and added up. Reads only range[0, bytes) and writes only the
// chunk's elements, whatever the bytes are.
#pragma once

#include <cstdint>

#include "../adacomp.h"
#include "arena.h"
#include "entries.h"

namespace adacomp::cpu {

struct Range {
  Chunk chunk;
  int64_t bin_size;
  const uint8_t* begin;
  int64_t bytes;
  float scale;  // of the segment
};

class RangeReader {
 public:
  explicit RangeReader(const Codec& codec)
      : bin_scales_(codec.bin_scales), scale_of_code_(codec.grad_type) {}

  // target[chunk's elements] += what was sent, if all of the range is well formed; else nothing,
  // and returns the first fault. A null `target`: only checks.
  Field add(const Range& range, float* target);

 private:
  template <typename Entry>
  Field add(const Range& range, float* target);
  template <typename Entry>
  bool is_valid(const Range& range, const Entry* entries, const Entry* end, const SendingBin* bins,
                int64_t sending) const;
  template <typename Entry>
  Field find_fault(const Range& range) const;

  const bool bin_scales_;
  const BinScales scale_of_code_;
  Arena<SendingBin> bins_;  // with bin scales: the chunk's
};

}  // namespace adacomp::cpu
