// First kernel of decompress(): all of the payloads but their entries is checked, before anything
// is written. And the word in which kernels collect faults.
#pragma once

#include "bucket.cuh"
#include "memory.cuh"

namespace adacomp::cuda {

struct DecompressArguments {
  DeviceLayout layout;
  const uint8_t* payloads;  // [world_size, capacity]
  int world_size;
  int64_t capacity;
  int64_t step;
  // The smallest status, as its complement so that zero means none. Faults of the first kernel have
  // a word of their own: it decides whether the second one, whose blocks run in any order, decodes.
  unsigned long long* payload_fault;
  unsigned long long* entry_fault;

  __device__ const uint8_t* payload(int64_t rank) const { return payloads + rank * capacity; }
  __device__ const uint32_t* table(int64_t rank) const {
    return reinterpret_cast<const uint32_t*>(payload(rank) + layout.offsets.table);
  }
  __device__ const float* scales(int64_t rank) const {
    return reinterpret_cast<const float*>(payload(rank) + layout.offsets.scales);
  }
};

__device__ inline void report(unsigned long long* word, int64_t rank, Field field, int64_t place) {
  atomicMax(word, ~static_cast<unsigned long long>(make_status(rank, field, place)));
}

// 0 if there is none.
__device__ inline int64_t reported_status(unsigned long long word) {
  return word == 0 ? 0 : static_cast<int64_t>(~word);
}

// ---- one word of a payload; every check holds whatever the others find ----

__device__ inline Field check_header(const DecompressArguments& a, const Header& header) {
  const DeviceLayout& layout = a.layout;
  const Header expected = make_header(layout.codec, layout.hash, a.step, layout.worst_case_bytes,
                                      layout.offsets.entries);
  return header_fault(header, expected, a.capacity);
}

__device__ inline bool check_scale(const DecompressArguments& a, int64_t rank, int64_t segment) {
  const DeviceLayout& layout = a.layout;
  const bool has_chunks = layout.first_chunk[segment] < layout.first_chunk[segment + 1];
  return valid_scale(float_bits(a.scales(rank)[segment]), layout.codec.bin_scales,
                     layout.segments[segment].is_raw(), has_chunks);
}

// Of chunk `i`, or of the end if there is no such chunk. The first place to be wrong is the least.
__device__ inline void check_table(const DecompressArguments& a, int64_t rank, int64_t i,
                                   uint64_t used_bytes) {
  const uint32_t* const table = a.table(rank);
  const int64_t chunks = a.layout.chunk_count;
  const bool start = i > 0 || table[0] == 0;
  const auto fixed = static_cast<uint64_t>(a.layout.offsets.entries);
  const bool end = i < chunks || table[chunks] == used_bytes - fixed;
  if (!start || !end) report(a.payload_fault, rank, Field::kChunkTable, 0);
  if (i == chunks) return;
  const int64_t segment = owner(a.layout.first_chunk, a.layout.segment_count, i);
  if (valid_range(table[i], table[i + 1], a.scales(rank)[segment] > 0.0f)) return;
  report(a.payload_fault, rank, Field::kChunkTable, i);
}

// The 4 bytes at `offset`, before the entries.
__device__ inline void check_word(const DecompressArguments& a, int64_t rank, int64_t offset,
                                  const Header& header) {
  const Offsets& o = a.layout.offsets;
  const int64_t scale = (offset - o.scales) / 4;
  const int64_t chunk = (offset - o.table) / 4;
  const int64_t raw = (offset - o.raw) / 4;
  if (offset < o.scales) {
    const Field field = offset == 0 ? check_header(a, header) : Field::kNone;
    if (field != Field::kNone) report(a.payload_fault, rank, field, 0);
  } else if (offset < o.table && scale < a.layout.segment_count) {
    if (!check_scale(a, rank, scale)) report(a.payload_fault, rank, Field::kScale, scale);
  } else if (offset >= o.table && offset < o.raw && chunk <= a.layout.chunk_count) {
    check_table(a, rank, chunk, header.used_bytes);
  } else if (offset < o.raw || raw >= a.layout.raw_elements) {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(a.payload(rank) + offset);
    if (bits != 0) report(a.payload_fault, rank, Field::kPadding, 0);
  }
}

// 16 bytes at `offset`, after the fixed parts: zero from `used` on.
__device__ inline bool is_zero_after(const uint8_t* payload, int64_t offset, int64_t used) {
  const auto vector = *reinterpret_cast<const Vector<uint32_t>*>(payload + offset);
  uint32_t any = 0;
  ADACOMP_UNROLL
  for (int i = 0; i < kVectorItems<uint32_t>; ++i) {
    const int64_t sent = used - (offset + 4 * i);  // bytes of this word
    any |= sent <= 0 ? vector.items[i] : sent >= 4 ? 0 : vector.items[i] >> 8 * sent;
  }
  return any == 0;
}

constexpr int kCheckThreads = 256;
constexpr int kCheckBytes = 16 * 1024;  // of a payload, per block

// Blocks per rank, each for a slice of the payload: the fixed parts by words, what follows the
// entries by vectors. Slices of entries alone end at once.
static __global__ void __launch_bounds__(kCheckThreads) check_payloads(DecompressArguments a) {
  const int64_t slices = ceil_div(a.capacity, kCheckBytes);
  const int64_t rank = blockIdx.x / slices;
  const int64_t begin = blockIdx.x % slices * kCheckBytes;
  const int64_t end = begin + kCheckBytes < a.capacity ? begin + kCheckBytes : a.capacity;
  const int64_t fixed = a.layout.offsets.entries;
  const Header header = *reinterpret_cast<const Header*>(a.payload(rank));
  for (int64_t i = begin + 4 * threadIdx.x; i < end && i < fixed; i += 4 * kCheckThreads) {
    check_word(a, rank, i, header);
  }
  // Every word of a header can be wrong: compare before anything is added to it.
  const auto capacity = static_cast<uint64_t>(a.capacity);
  const auto used =
      static_cast<int64_t>(header.used_bytes < capacity ? header.used_bytes : capacity);
  const int64_t tail = used / kVectorBytes * kVectorBytes;
  int64_t first = begin > fixed ? begin : fixed;
  first = first > tail ? first : tail;
  bool zero = true;
  for (int64_t i = first + kVectorBytes * threadIdx.x; i < end; i += kVectorBytes * kCheckThreads) {
    zero &= is_zero_after(a.payload(rank), i, used);
  }
  if (!zero) report(a.payload_fault, rank, Field::kPadding, 0);
}

inline int64_t check_blocks(int64_t world_size, int64_t capacity) {
  return world_size * ceil_div(capacity, kCheckBytes);
}

}  // namespace adacomp::cuda
