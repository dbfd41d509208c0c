// Second kernel of decompress(): sums what all ranks sent, one block per chunk, ranks in order.
//
// The entries of a range follow each other without a sign where a bin begins. A strip of them is
// read at a time, and a sum over the strip's last_in_bin bits gives each its bin. An element is hit
// at most once per rank, as long as indices within a bin increase: the block agrees on that for a
// strip before it adds anything. All that is found wrong is noted, and the first in the order of
// the stream is reported, the same as Decompressor::add_range finds on the CPU.
#pragma once

#include "bits.cuh"
#include "check.cuh"
#include "memory.cuh"
#include "warp.cuh"

namespace adacomp::cuda {

constexpr int kDecodeThreads = 128;
constexpr int kDecodeWarps = kDecodeThreads / kWarpSize;
constexpr int kStripPerThread = 4;
constexpr int kStrip = kDecodeThreads * kStripPerThread;  // entries; most ranges have fewer
constexpr int kSums = 4096;                               // elements that are summed at a time
constexpr int kRanksAtOnce = 64;  // whose ranges are looked up at the same time
constexpr int kMaxBins = 4096;    // of a chunk
static_assert(kMaxBins == kChunkElements);

// Where the sum of a slot is kept. Lanes that each take a vector of 4 or 8 slots meet 32 different
// banks, and so do lanes at neighbouring slots.
__device__ inline int swizzle(int slot) {
  return slot ^ (slot >> 5 & 7);
}
constexpr int kSwizzleGroup = 8;  // slots are permuted within these

// The first fault that a thread knows of: least rank, then least place in the stream.
class FirstFault {
 public:
  // `position`: of the entry, -1 for what comes before all.
  __device__ void note(int64_t rank, Field field, int64_t position) {
    const auto key = static_cast<unsigned long long>(rank) << 40 |
                     static_cast<unsigned long long>(position + 1) << 8 |
                     static_cast<unsigned long long>(field);
    key_ = key < key_ ? key : key_;
  }

  // Of the block; by all threads. Contains a barrier.
  __device__ void report_first(shared_array<unsigned long long> keys, unsigned long long* word,
                               int64_t chunk) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const auto low = __shfl_xor_sync(kAllLanes, static_cast<unsigned>(key_), distance);
      const auto high = __shfl_xor_sync(kAllLanes, static_cast<unsigned>(key_ >> 32), distance);
      const unsigned long long other = static_cast<unsigned long long>(high) << 32 | low;
      key_ = other < key_ ? other : key_;
    }
    if (lane_id() == 0) keys[warp_id()] = key_;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < kDecodeWarps; ++w) {
      const unsigned long long other = keys[w];
      key_ = other < key_ ? other : key_;
    }
    if (key_ != kNone) {
      report(word, static_cast<int64_t>(key_ >> 40), static_cast<Field>(key_ & 0xff), chunk);
    }
  }

 private:
  static constexpr unsigned long long kNone = ~0ull;
  unsigned long long key_ = kNone;
};

// What one rank sent of the chunk.
struct RankRange {
  uint32_t begin;  // from the start of the entries
  uint32_t bytes;
  float scale;
};

// A block's chunk, and its shared memory.
template <typename T, bool kBinScales>
struct DecodeBlock {
  static constexpr GradType grad_type = kGradType<T>;
  static constexpr bool bin_scales = kBinScales;

  ChunkSize size;
  int tile_begin;  // elements of the chunk that are summed now
  int tile_end;
  int shift;                         // slot of the first of them
  shared_array<float> sums;          // by slot, swizzled
  BitSet sending;                    // with bin scales: bins that have a code
  shared_array<uint16_t> sent_bins;  // likewise: their numbers
  shared_array<uint32_t> totals;     // of each warp, for two strips in turn
  int turn;
};

// ---- entries ----

// The bins of a range that have entries: all, or with bin scales those that have a code. Returns
// their number. Contains barriers.
template <typename Block>
__device__ int find_sending_bins(const Block& block, const uint8_t* codes) {
  const int bins = block.size.bins;
  if (!Block::bin_scales) return bins;
  const BitSet& sending = block.sending;
  for (int first = 0; first < bins; first += kDecodeThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const uint32_t word = __ballot_sync(kAllLanes, b < bins && codes[b] != 0);
    if (lane_id() == 0 && b < bins) sending.words[b / kWordBits] = word;
  }
  __syncthreads();
  if (warp_id() == 0) sending.rank_words();
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < bins; b += kDecodeThreads) {
    if (codes[b] != 0) block.sent_bins[sending.rank(b)] = static_cast<uint16_t>(b);
  }
  __syncthreads();
  return sending.size();
}

// Consecutive entries that a thread reads.
struct OwnEntries {
  uint32_t before;  // the entry before the first
  uint32_t entries[kStripPerThread];
  int position;  // of the first
  int count;
  int ends;       // bins that end here
  bool is_wrong;  // some index does not increase or is beyond any bin
};

// "This bin sends nothing"?
template <typename Entry, typename Block>
__device__ bool is_nothing(uint32_t previous, uint32_t entry) {
  return !Block::bin_scales && entry_last(previous) && entry == nothing_entry(sizeof(Entry));
}
__device__ inline bool increases(uint32_t previous, uint32_t entry) {
  return entry_last(previous) || entry_index(entry) > entry_index(previous);
}

template <typename Entry, typename Block>
__device__ OwnEntries load_entries(const Block& block, const Entry* stream, uint32_t total,
                                   int first) {
  OwnEntries own{};
  own.position = first + static_cast<int>(threadIdx.x) * kStripPerThread;
  const int64_t rest = int64_t{total} - own.position;
  own.count = static_cast<int>(rest < 0 ? 0 : rest < kStripPerThread ? rest : kStripPerThread);
  own.before = own.position > 0 && own.count > 0 ? stream[own.position - 1] : kLastInBin;
  uint32_t previous = own.before;
  ADACOMP_UNROLL
  for (int i = 0; i < kStripPerThread; ++i) {
    if (i >= own.count) break;
    const uint32_t entry = stream[own.position + i];
    const bool beyond = static_cast<int>(entry_index(entry)) >= block.size.bin_size;
    own.is_wrong |=
        !increases(previous, entry) || (beyond && !is_nothing<Entry, Block>(previous, entry));
    own.ends += entry_last(entry);
    own.entries[i] = previous = entry;
  }
  return own;
}

// A range as it is read.
template <typename Entry>
struct EntryStream {
  const uint8_t* codes;
  const Entry* entries;
  uint32_t total;  // entries; those that are read have an int for a position
  int sending;     // bins that have some
  float scale;     // of all bins, with the layer scale
};

// What is wrong with an entry, or else what it adds to which element; -1 if nothing to none.
struct Reading {
  Field field;
  int element = -1;
  float value = 0.0f;
};

// Reads the entry at `position` of the stream, which belongs to bin `ordinal` of those that send,
// and looks for faults in the order of Decompressor::add_range.
template <typename Entry, typename Block>
__device__ Reading read_entry(const Block& block, const EntryStream<Entry>& stream, int position,
                              int ordinal, uint32_t previous, uint32_t entry) {
  if (ordinal >= stream.sending) {
    // 8-bit entries may leave one byte of padding, and nothing else follows the last bin.
    if (sizeof(Entry) > 1 || position % 2 == 0) return {Field::kBinCount};
    if (entry != 0) return {Field::kPadding};
    return {position + uint32_t{1} == stream.total ? Field::kNone : Field::kBinCount};
  }
  int bin = ordinal;
  float scale = stream.scale;
  if (Block::bin_scales) {
    bin = block.sent_bins[ordinal];
    scale = bin_scale(stream.codes[bin], Block::grad_type);
    if (scale == 0.0f) return {Field::kBinCode};
  }
  if (is_nothing<Entry, Block>(previous, entry)) return {Field::kNone};
  const int begin = bin * block.size.bin_size;
  const int k = static_cast<int>(entry_index(entry));
  const bool inside = k < block.size.bin_size && begin + k < block.size.elements;
  if (!increases(previous, entry) || !inside) return {Field::kEntryIndex};
  return {Field::kNone, begin + k, signed_scale(scale, entry_negative(entry))};
}

// Adds the entries of a strip to the sums. Returns false if none may follow. Contains a barrier.
template <typename Entry, typename Block>
__device__ bool add_strip(Block& block, const EntryStream<Entry>& stream, int first, int rank,
                          int& ended, FirstFault& fault) {
  constexpr uint32_t kWrong = 1u << 31;
  const OwnEntries own = load_entries(block, stream.entries, stream.total, first);
  const int ends = inclusive_sum(own.ends);
  const bool is_wrong = any_lane(own.is_wrong);
  const shared_array<uint32_t> totals = block.totals + block.turn * kDecodeWarps;
  block.turn ^= 1;
  if (lane_id() == kWarpSize - 1) totals[warp_id()] = ends | (is_wrong ? kWrong : 0);
  __syncthreads();
  const bool is_over = ended >= stream.sending;
  bool adds = true;
  int ordinal = ended + ends - own.ends;
  for (int w = 0; w < kDecodeWarps; ++w) {
    const uint32_t total = totals[w];
    const int ends_of_warp = static_cast<int>(total & ~kWrong);
    adds &= (total & kWrong) == 0;
    ended += ends_of_warp;
    ordinal += w < warp_id() ? ends_of_warp : 0;
  }
  uint32_t previous = own.before;
  ADACOMP_UNROLL
  for (int i = 0; i < kStripPerThread; ++i) {
    if (i >= own.count) break;
    const Reading reading =
        read_entry(block, stream, own.position + i, ordinal, previous, own.entries[i]);
    if (reading.field != Field::kNone) fault.note(rank, reading.field, own.position + i);
    if (adds && reading.element >= block.tile_begin && reading.element < block.tile_end) {
      block.sums[swizzle(reading.element - block.tile_begin + block.shift)] += reading.value;
    }
    previous = own.entries[i];
    ordinal += entry_last(previous);
  }
  return adds && !is_over;
}

// Adds what a rank sent of the chunk, and notes what is wrong with it.
template <typename Entry, typename Block>
__device__ void add_range(Block& block, const uint8_t* range, int64_t bytes, float scale, int rank,
                          FirstFault& fault) {
  const int64_t codes = codes_bytes(block.size.bins, Block::bin_scales);
  if (bytes < codes) return fault.note(rank, Field::kBinCount, -1);
  for (int64_t i = block.size.bins; i < codes; ++i) {
    if (range[i] != 0) return fault.note(rank, Field::kPadding, -1);
  }
  const int sending = find_sending_bins(block, range);
  const EntryStream<Entry> stream{range, reinterpret_cast<const Entry*>(range + codes),
                                  static_cast<uint32_t>((bytes - codes) / int64_t{sizeof(Entry)}),
                                  sending, scale};
  int ended = 0;  // bins before the strip
  for (int first = 0; static_cast<uint32_t>(first) < stream.total; first += kStrip) {
    if (!add_strip(block, stream, first, rank, ended, fault)) return;
  }
  if (ended >= sending) return;
  // The entries ran out; the code of the bin that should have had more is looked at before.
  const bool has_scale =
      !Block::bin_scales || bin_scale(range[block.sent_bins[ended]], Block::grad_type) != 0.0f;
  fault.note(rank, has_scale ? Field::kBinCount : Field::kBinCode, stream.total);
}

// ---- chunks ----

// Sums the tile of all ranks. Returns whether some rank's scale is NaN. Contains barriers.
template <typename Block>
__device__ bool sum_tile(const DecompressArguments& a, Block& block, int64_t chunk,
                         shared_array<RankRange> ranges, FirstFault& fault) {
  bool non_finite = false;
  for (int first = 0; first < a.world_size; first += kRanksAtOnce) {
    const int rest = a.world_size - first;
    const int count = rest < kRanksAtOnce ? rest : kRanksAtOnce;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kDecodeThreads) {
      const uint32_t* const offset = a.table(first + i) + chunk;
      ranges[i] = {offset[0], offset[1] - offset[0], a.scales(first + i)[block.size.segment]};
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const RankRange own = ranges[i];
      non_finite |= float_bits(own.scale) == kNanBits;
      if (own.bytes == 0) continue;
      const uint8_t* const range = a.payload(first + i) + a.layout.offsets.entries + own.begin;
      if (entry_bytes(block.size.bin_size) == 1) {
        add_range<uint8_t>(block, range, own.bytes, own.scale, first + i, fault);
      } else {
        add_range<uint16_t>(block, range, own.bytes, own.scale, first + i, fault);
      }
    }
  }
  __syncthreads();
  return non_finite;
}

// Divides by the number of ranks. A power of two has an exact reciprocal, and then the product is
// the quotient, however it is rounded.
class Average {
 public:
  explicit __device__ Average(int world_size)
      : divisor_(static_cast<float>(world_size)),
        reciprocal_((world_size & (world_size - 1)) == 0 ? 1.0f / divisor_ : 0.0f) {}

  __device__ float operator()(float sum) const {
    return reciprocal_ != 0.0f ? sum * reciprocal_ : sum / divisor_;
  }

 private:
  float divisor_;
  float reciprocal_;
};

// target: of the tile's first element.
template <typename T, typename Block>
__device__ void store_tile(const Block& block, const Average& average, bool non_finite, T* target) {
  constexpr int kItems = kVectorItems<T>;
  const int count = block.tile_end - block.tile_begin;
  for (int slot = kItems * static_cast<int>(threadIdx.x); slot < count + block.shift;
       slot += kItems * kDecodeThreads) {
    Vector<T> vector;
    ADACOMP_UNROLL
    for (int i = 0; i < kItems; ++i) {
      const float sum = block.sums[swizzle(slot + i)];
      vector.items[i] = from_float<T>(non_finite ? bits_float(kNanBits) : average(sum));
    }
    store_vector(target, slot - block.shift, count, vector);
  }
}

template <typename T, bool kBinScales>
__device__ void decode_chunk(const DecompressArguments& a, T* grad, int64_t chunk) {
  ADACOMP_SHARED(float, sums, kSums + kSwizzleGroup);
  ADACOMP_SHARED(uint32_t, words, kBinScales ? kMaxBins / kWordBits : 1);
  ADACOMP_SHARED(int, before, kBinScales ? kMaxBins / kWordBits + 1 : 1);
  ADACOMP_SHARED(uint16_t, sent_bins, kBinScales ? kMaxBins : 1);
  ADACOMP_SHARED(uint32_t, totals, 2 * kDecodeWarps);
  ADACOMP_SHARED(RankRange, ranges, kRanksAtOnce);
  ADACOMP_SHARED(unsigned long long, keys, kDecodeWarps);
  ADACOMP_SHARED(ChunkBegin, chunk_begin, 1);
  ADACOMP_SHARED(ChunkSize, chunk_size, 1);
  const ChunkPlace place = ChunkFinder{chunk_begin, chunk_size}.find(a.layout, chunk);
  T* const target = grad + place.bucket_begin;
  const int shift = misalignment(target);  // of every tile
  const BitSet sending{words, before, (place.bins + kWordBits - 1) / kWordBits};
  FirstFault fault;
  DecodeBlock<T, kBinScales> block{place, 0, 0, shift, sums, sending, sent_bins, totals, 0};
  for (int begin = 0; begin < place.elements; begin += kSums) {
    const int rest = place.elements - begin;
    block.tile_begin = begin;
    block.tile_end = begin + (rest < kSums ? rest : kSums);
    const int slots = static_cast<int>(align_up(block.tile_end - begin + shift, kSwizzleGroup));
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < slots; i += kDecodeThreads) sums[i] = 0.0f;
    const bool non_finite = sum_tile(a, block, chunk, ranges, fault);
    store_tile(block, Average(a.world_size), non_finite, target + begin);
  }
  fault.report_first(keys, a.entry_fault, chunk);
}

constexpr int kRawSums = 1024;  // raw values per block

template <typename T>
__device__ void decode_raw(const DecompressArguments& a, T* grad, int64_t begin) {
  const int64_t count = a.layout.raw_elements;
  for (int64_t i = begin + threadIdx.x; i < begin + kRawSums && i < count; i += kDecodeThreads) {
    float sum = 0.0f;
    for (int rank = 0; rank < a.world_size; ++rank) {
      sum += reinterpret_cast<const float*>(a.payload(rank) + a.layout.offsets.raw)[i];
    }
    grad[locate_raw(a.layout, i)] = from_float<T>(Average(a.world_size)(sum));
  }
}

// Blocks for the chunks, then for slices of the raw values. 128 threads: a strip of 512 entries
// holds what a chunk usually has, so that few are idle, and other blocks use the time it waits for
// them.
template <typename T, bool kBinScales>
__global__ void __launch_bounds__(kDecodeThreads) decode_payloads(DecompressArguments a, T* grad) {
  if (*a.payload_fault != 0) return;
  const int64_t chunks = a.layout.chunk_count;
  const int64_t block = blockIdx.x;
  if (block < chunks) return decode_chunk<T, kBinScales>(a, grad, block);
  decode_raw(a, grad, (block - chunks) * kRawSums);
}

inline int64_t decode_blocks(const DeviceLayout& layout) {
  return layout.chunk_count + ceil_div(layout.raw_elements, kRawSums);
}

}  // namespace adacomp::cuda
