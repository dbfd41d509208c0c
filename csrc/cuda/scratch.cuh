// What the kernels of compress() leave for each other in scratch memory.
#pragma once

#include "../adacomp.h"
#include "bucket.cuh"
#include "memory.cuh"

namespace adacomp::cuda {

// What selection found in a chunk, besides the bytes of its range and the sum of g_max.
struct ChunkNote {
  int32_t entries;      // elements selected
  bool any_gradient;    // some dW != 0
  bool any_non_finite;  // some r + dW is not finite
  bool is_corrected;    // the residual is already G - sign(G) s; `kept` has the G
};

// Which chunks fit: those of [0, head_end) and of [first, tail_end). All of them do if the former
// ends at `first` and the latter at the last chunk.
struct Admission {
  int64_t first;
  int64_t head_end;
  int64_t tail_end;
};

struct CompressScratch {
  double* sums;          // per chunk: of g_max (layer scale only)
  int64_t* prefix;       // per chunk: bytes of the ranges before it; and of all
  ChunkNote* notes;      // per chunk
  Admission* admission;  // one
  uint32_t* bytes;       // per chunk: of its range, 0 if its segment sends nothing
  uint32_t* selected;    // a bit per element, see selected_words
  uint8_t* kept;         // a byte per element, see Kept (bin scales only)
  int64_t end;           // bytes of all
};

// Lays the parts out from `base`, which is aligned to 16 bytes; null to know the size.
inline CompressScratch compress_scratch(const DeviceLayout& layout, void* base) {
  const auto address = reinterpret_cast<uintptr_t>(base);
  CompressScratch scratch{};
  const auto place = [&](auto*& part, int64_t count) {
    using Item = std::remove_reference_t<decltype(*part)>;
    part = reinterpret_cast<Item*>(address + scratch.end);
    scratch.end += align_up(count * static_cast<int64_t>(sizeof(Item)));
  };
  place(scratch.sums, layout.chunk_count);
  place(scratch.prefix, layout.chunk_count + 1);
  place(scratch.notes, layout.chunk_count);
  place(scratch.admission, 1);
  place(scratch.bytes, layout.chunk_count);
  place(scratch.selected, layout.elements / 32 + 2 * layout.chunk_count);
  place(scratch.kept, layout.codec.bin_scales ? layout.elements : 0);
  return scratch;
}

// The words of a chunk's bits, one per slot of its residual: up to 3 slots come before the first
// element, so n elements take at most n / 32 + 2 words.
__device__ inline uint32_t* selected_words(const CompressScratch& scratch, const ChunkPlace& place,
                                           int64_t index) {
  return scratch.selected + place.bucket_begin / 32 + 2 * index;
}
__device__ inline int num_words(int slots) {
  return (slots + 31) / 32;
}

// With bin scales a chunk has as many bytes as elements for: the codes of its bins, and, if there
// is room, the G of what it selects. With that the residual can be corrected at once: if the chunk
// turns out not to be sent its G is put back.
struct Kept {
  uint8_t* codes;  // [bins]
  float* values;   // [room], in the order of the entries
  int room;
};

__device__ inline Kept kept_of(const CompressScratch& scratch, const ChunkPlace& place) {
  const uintptr_t codes = reinterpret_cast<uintptr_t>(scratch.kept) + place.bucket_begin;
  const uintptr_t begin = (codes + place.bins + 3) / 4 * 4;
  const uintptr_t end = codes + place.elements;
  return {reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(begin),
          begin < end ? static_cast<int>((end - begin) / sizeof(float)) : 0};
}

}  // namespace adacomp::cuda
