// What kernels know of a bucket: the tables of its layout on the device, and where a chunk lies.
#pragma once

#include "../adacomp.h"
#include "../payload.h"
#include "device.cuh"

namespace adacomp::cuda {

// Tables as adacomp::Layout has them, for one codec. The arrays are device memory that the caller
// keeps until the kernels have run.
struct DeviceLayout {
  const Segment* segments;     // [segment_count]
  const int64_t* first_chunk;  // [segment_count + 1]
  const int64_t* first_raw;    // [segment_count + 1], in raw elements
  int64_t segment_count;
  int64_t chunk_count;
  int64_t elements;
  int64_t raw_elements;
  int64_t worst_case_bytes;
  Offsets offsets;
  Codec codec;
  uint32_t hash;
};

// The type of a gradient that is known when a kernel is compiled.
template <typename T>
constexpr GradType kGradType = sizeof(T) == 4            ? GradType::kFloat32
                               : std::is_same_v<T, Half> ? GradType::kFloat16
                                                         : GradType::kBFloat16;

// The segment whose run of a prefix table holds `index`; empty runs own nothing.
__device__ inline int64_t owner(const int64_t* prefix, int64_t segments, int64_t index) {
  int64_t low = 0;  // prefix[low] <= index < prefix[high]
  int64_t high = segments;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (prefix[middle] <= index ? low : high) = middle;
  }
  return low;
}

// Where a chunk lies and how large it is.
struct ChunkBegin {
  int64_t bucket_begin;    // of its first element
  int64_t residual_begin;  // likewise
};
struct ChunkSize {
  int segment;
  int elements;  // up to 16,383
  int bins;
  int bin_size;
};
struct ChunkPlace : ChunkBegin, ChunkSize {};

// Finds a chunk for a block: one thread searches and divides, all others would do the same.
struct ChunkFinder {
  shared_array<ChunkBegin> begin;  // [1]
  shared_array<ChunkSize> size;    // [1]

  // Contains a barrier.
  __device__ ChunkPlace find(const DeviceLayout& layout, int64_t index) const {
    if (threadIdx.x == 0) {
      const int64_t i = owner(layout.first_chunk, layout.segment_count, index);
      const Segment s = layout.segments[i];
      const Chunk chunk = make_chunk(s, i, index - layout.first_chunk[i]);
      begin[0] = {s.bucket_offset + chunk.first_element, s.residual_offset + chunk.first_element};
      size[0] = {static_cast<int>(i), static_cast<int>(chunk.elements),
                 static_cast<int>(chunk.bins), static_cast<int>(s.bin_size)};
    }
    __syncthreads();
    return found();
  }

  // Again, from shared memory: what is needed late need not be kept in registers.
  __device__ ChunkPlace found() const { return {begin[0], size[0]}; }
};

// Where raw value `index` of the payload lies in the bucket.
__device__ inline int64_t locate_raw(const DeviceLayout& layout, int64_t index) {
  const int64_t i = owner(layout.first_raw, layout.segment_count, index);
  return layout.segments[i].bucket_offset + index - layout.first_raw[i];
}

// element / bin_size by a multiplication with 2^28 / bin_size, rounded up by less than 1: the
// product is too large by less than element / 2^28, which is less than 1 / bin_size and changes no
// quotient.
class BinOf {
 public:
  explicit __device__ BinOf(int bin_size)
      : multiplier_(((1u << 28) + static_cast<uint32_t>(bin_size) - 1) /
                    static_cast<uint32_t>(bin_size)) {}

  __device__ int operator()(int element) const {
    return static_cast<int>(uint64_t{multiplier_} * static_cast<uint32_t>(element) >> 28);
  }

 private:
  static_assert(kMaxBinSize < 1 << 14, "elements of a chunk and bin sizes have 14 bits");
  uint32_t multiplier_;
};

}  // namespace adacomp::cuda
