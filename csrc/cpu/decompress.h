// Decompression of the payloads of all ranks for one bucket on the CPU. Torch-free too.
//
// 1. check_payloads()  once: headers, scales, chunk tables, padding of every payload
// 2. decode()          per range of chunks, in parallel: entries are checked as they are read
// 3. fill_nan()        if status() is not 0 after that
// A fault found in 2 leaves nothing decoded either, because 3 overwrites the whole bucket.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "../adacomp.h"
#include "../layout.h"
#include "range.h"

namespace adacomp::cpu {

class Decompressor {
 public:
  // payloads: uint8 [world_size, capacity]. grad: as Compressor's, all written.
  Decompressor(const Layout& layout, const Codec& codec, const uint8_t* payloads,
               int64_t world_size, int64_t capacity, int64_t step, void* grad);

  void check_payloads();
  void decode(int64_t first_chunk, int64_t last_chunk);  // only if status() is 0
  void decode_raw(int64_t begin, int64_t end);           // a range of the layout's raw elements
  void fill_nan();

  // Takes back what compress() took off `residual` for the only payload, a range of chunks; null
  // only checks the entries. Adds nothing of chunks from a malformed one on.
  void restore(int64_t first_chunk, int64_t last_chunk, float* residual);

  int64_t status() const;  // 0 or make_status() of the first fault
  std::string describe_fault() const;

 private:
  const uint8_t* payload(int64_t rank) const { return payloads_ + rank * capacity_; }
  const float* scales(int64_t rank) const;
  const uint32_t* table(int64_t rank) const;
  void report(int64_t rank, Field field, int64_t place);
  bool check_header(int64_t rank);
  bool check_table(int64_t rank);
  bool check_scales(int64_t rank);
  bool check_padding(int64_t rank);
  bool add_chunk(const Chunk& chunk, int64_t index, int64_t rank, RangeReader& reader, float* sums);

  const Layout& layout_;
  const Codec codec_;
  const uint8_t* payloads_;
  const int64_t world_size_;
  const int64_t capacity_;
  const int64_t step_;
  void* grad_;
  const Offsets offsets_;
  const uint32_t layout_hash_;
  std::atomic<int64_t> fault_;  // kNoFault, or the smallest status reported
};

}  // namespace adacomp::cpu
