// Fourth kernel of compress(): entries and codes into the payload, sign(G) s off the residual of
// what is sent, G back into the residual of what was corrected but is not sent; and the raw values
// and the zeros at the end.
#pragma once

#include "bits.cuh"
#include "bucket.cuh"
#include "memory.cuh"
#include "place.cuh"
#include "scratch.cuh"

namespace adacomp::cuda {

constexpr int kCommitThreads = 128;
constexpr int kCommitWords = (kMaxBinSize + 3 + kWordBits - 1) / kWordBits;  // of a chunk, at most
constexpr int kRawPerBlock = 4096;                                           // values
constexpr int kTailPerBlock = 16 * 1024;                                     // bytes

// A chunk that is to be committed.
struct Committed {
  ChunkPlace place;
  ChunkNote note;
  Kept kept;
  float* residual;
  int shift;  // slot of its first element
  float scale;
  Codec codec;

  __device__ int bin_begin(int b) const { return b * place.bin_size; }
  __device__ int bin_end(int b) const {
    const int end = (b + 1) * place.bin_size;
    return end < place.elements ? end : place.elements;
  }
};

// The elements that have an entry: those selected and, with the layer scale, the first of each bin
// of which none is, for the marker. Contains barriers.
__device__ inline void mark_entries(const Committed& c, const BitSet& selected,
                                    const BitSet& entries) {
  for (int i = static_cast<int>(threadIdx.x); i < selected.count; i += kCommitThreads) {
    uint32_t word = selected.words[i];
    const int from = i * kWordBits - c.shift;  // first element of the word
    int b = from <= 0 ? 0 : (from + c.place.bin_size - 1) / c.place.bin_size;
    for (; b < c.place.bins && c.bin_begin(b) < from + kWordBits; ++b) {
      const int sent =
          selected.rank(c.bin_end(b) + c.shift) - selected.rank(c.bin_begin(b) + c.shift);
      word |= static_cast<uint32_t>(sent == 0) << (c.bin_begin(b) - from);
    }
    entries.words[i] = word;
  }
  __syncthreads();
  if (warp_id() == 0) entries.rank_words();
  __syncthreads();
}

// Writes the range's entries and corrects the residual, unless it is already.
template <typename Entry>
__device__ void write_entries(const Committed& c, const BitSet& selected, const BitSet& entries,
                              Entry* out) {
  const BinOf bin_of(c.place.bin_size);
  entries.for_each([&](int slot, int rank) {
    const int e = slot - c.shift;
    const int b = bin_of(e);
    if ((selected.words[slot / kWordBits] >> slot % kWordBits & 1) == 0) {
      out[rank] = static_cast<Entry>(nothing_entry(sizeof(Entry)));
      return;
    }
    const float g = c.note.is_corrected ? c.kept.values[rank] : c.residual[e];
    const bool negative = float_bits(g) >> 31;
    const bool last = rank + 1 == entries.rank(c.bin_end(b) + c.shift);
    out[rank] =
        static_cast<Entry>(make_entry(e - c.bin_begin(b), negative) | (last ? kLastInBin : 0));
    if (c.note.is_corrected) return;
    const float scale =
        c.codec.bin_scales ? bin_scale(c.kept.codes[b], c.codec.grad_type) : c.scale;
    c.residual[e] = corrected(g, scale, negative);
  });
  const bool padded = sizeof(Entry) == 1 && entries.size() % 2 != 0;
  if (padded && threadIdx.x == 0) out[entries.size()] = 0;
}

// Returns the place of the first entry.
__device__ inline uint8_t* write_codes(const Committed& c, uint8_t* range) {
  const int bytes = static_cast<int>(codes_bytes(c.place.bins, c.codec.bin_scales));
  for (int b = static_cast<int>(threadIdx.x); b < bytes; b += kCommitThreads) {
    range[b] = b < c.place.bins ? c.kept.codes[b] : 0;
  }
  return range + bytes;
}

struct CommitArguments {
  DeviceLayout layout;
  CompressScratch scratch;
  float* residual;
  uint8_t* payload;
  int64_t capacity;
  unsigned long long* counters;
};

// Table and counters, by one thread.
__device__ inline void record_chunk(const CommitArguments& a, int64_t index, int64_t segment,
                                    bool is_sent, int64_t begin, int entries) {
  reinterpret_cast<uint32_t*>(a.payload + a.layout.offsets.table)[index] =
      static_cast<uint32_t>(begin);
  if (a.counters == nullptr) return;
  if (is_sent) {
    atomicAdd(a.counters + 2 * segment, static_cast<unsigned long long>(entries));
  } else if (a.scratch.bytes[index] > 0) {
    atomicAdd(a.counters + 2 * segment + 1, 1ull);
  }
}

__device__ inline void commit_chunk(const CommitArguments& a, int64_t index) {
  ADACOMP_SHARED(uint32_t, selected_bits, kCommitWords);
  ADACOMP_SHARED(int, selected_before, kCommitWords + 1);
  ADACOMP_SHARED(uint32_t, entry_bits, kCommitWords);
  ADACOMP_SHARED(int, entries_before, kCommitWords + 1);
  ADACOMP_SHARED(ChunkBegin, chunk_begin, 1);
  ADACOMP_SHARED(ChunkSize, chunk_size, 1);
  const Admission admission = *a.scratch.admission;
  const ChunkNote note = a.scratch.notes[index];
  const ChunkPlace place = ChunkFinder{chunk_begin, chunk_size}.find(a.layout, index);
  const bool is_sent = a.scratch.bytes[index] > 0 && is_admitted(admission, index);
  const int64_t begin = range_begin(admission, a.scratch.prefix, index);
  if (threadIdx.x == 0) record_chunk(a, index, place.segment, is_sent, begin, note.entries);
  if (!is_sent && !note.is_corrected) return;

  float* const residual = a.residual + place.residual_begin;
  const auto* const scales = reinterpret_cast<const float*>(a.payload + a.layout.offsets.scales);
  const int shift = misalignment(residual);
  const Committed c{place,         note,  kept_of(a.scratch, place),
                    residual,      shift, scales[place.segment],
                    a.layout.codec};
  const int words = num_words(place.elements + shift);
  const BitSet selected{selected_bits, selected_before, words};
  const uint32_t* const bits = selected_words(a.scratch, place, index);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kCommitThreads) {
    selected.words[i] = bits[i];
  }
  __syncthreads();
  if (warp_id() == 0) selected.rank_words();
  __syncthreads();
  if (!is_sent) {
    selected.for_each([&](int slot, int rank) { residual[slot - shift] = c.kept.values[rank]; });
    return;
  }
  BitSet entries = selected;
  if (!c.codec.bin_scales) {
    entries = BitSet{entry_bits, entries_before, words};
    mark_entries(c, selected, entries);
  }
  uint8_t* const range = write_codes(c, a.payload + a.layout.offsets.entries + begin);
  if (entry_bytes(place.bin_size) == 1) {
    write_entries(c, selected, entries, range);
  } else {
    write_entries(c, selected, entries, reinterpret_cast<uint16_t*>(range));
  }
}

template <typename T>
__device__ void copy_raw(const CommitArguments& a, const T* grad, int64_t begin) {
  auto* const raw = reinterpret_cast<float*>(a.payload + a.layout.offsets.raw);
  const int64_t count = a.layout.raw_elements;
  for (int64_t i = begin + threadIdx.x; i < begin + kRawPerBlock && i < count;
       i += kCommitThreads) {
    raw[i] = to_float(grad[locate_raw(a.layout, i)]);
  }
}

// Zeros from `used` on, in payload[begin, begin + kTailPerBlock).
__device__ inline void zero_tail(const CommitArguments& a, int64_t begin) {
  const auto used = static_cast<int64_t>(reinterpret_cast<const Header*>(a.payload)->used_bytes);
  const int64_t end = begin + kTailPerBlock < a.capacity ? begin + kTailPerBlock : a.capacity;
  const int64_t first = used > begin ? used : begin;
  const int64_t aligned = align_up(first);
  if (first + threadIdx.x < aligned && first + threadIdx.x < end)
    a.payload[first + threadIdx.x] = 0;
  for (int64_t i = aligned + kVectorBytes * int64_t{threadIdx.x}; i < end;
       i += kVectorBytes * kCommitThreads) {
    *reinterpret_cast<Vector<uint8_t>*>(a.payload + i) = Vector<uint8_t>{};
  }
}

// Blocks for the chunks, then for slices of the raw values, then for slices of all that may be
// tail. 128 threads, a word of bits each, are just enough for a chunk of 4,096 elements.
template <typename T>
__global__ void __launch_bounds__(kCommitThreads) commit_payload(CommitArguments a, const T* grad) {
  int64_t block = blockIdx.x;
  if (block < a.layout.chunk_count) return commit_chunk(a, block);
  block -= a.layout.chunk_count;
  const int64_t raw_blocks = ceil_div(a.layout.raw_elements, kRawPerBlock);
  if (block < raw_blocks) return copy_raw(a, grad, block * kRawPerBlock);
  zero_tail(a, a.layout.offsets.entries + (block - raw_blocks) * kTailPerBlock);
}

inline int64_t commit_blocks(const DeviceLayout& layout, int64_t capacity) {
  return layout.chunk_count + ceil_div(layout.raw_elements, kRawPerBlock) +
         ceil_div(capacity - layout.offsets.entries, kTailPerBlock);
}

}  // namespace adacomp::cuda
