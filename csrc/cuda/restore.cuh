// Putting back what compress() took off the residual for a payload, on a GPU, if a condition on the
// device holds. The payload is checked as in decompress(); if it is malformed nothing is added.
#pragma once

#include "decompress.cuh"

namespace adacomp::cuda {

// One block per chunk, as for decoding. `adds`: else entries are only checked, which must come
// first for all chunks.
template <typename T, bool kBinScales>
__global__ void __launch_bounds__(kDecodeThreads)
    restore_chunks(DecompressArguments a, float* residual, const bool* condition, bool adds) {
  ADACOMP_SHARED(float, sums, kSums + kSwizzleGroup);
  ADACOMP_SHARED(uint32_t, words, kBinScales ? kMaxBins / kWordBits : 1);
  ADACOMP_SHARED(int, before, kBinScales ? kMaxBins / kWordBits + 1 : 1);
  ADACOMP_SHARED(uint16_t, sent_bins, kBinScales ? kMaxBins : 1);
  ADACOMP_SHARED(uint32_t, totals, 2 * kDecodeWarps);
  ADACOMP_SHARED(RankRange, ranges, kRanksAtOnce);
  ADACOMP_SHARED(unsigned long long, keys, kDecodeWarps);
  ADACOMP_SHARED(ChunkBegin, chunk_begin, 1);
  ADACOMP_SHARED(ChunkSize, chunk_size, 1);
  if (!*condition || *a.payload_fault != 0 || (adds && *a.entry_fault != 0)) return;
  const ChunkPlace place = ChunkFinder{chunk_begin, chunk_size}.find(a.layout, blockIdx.x);
  float* const target = residual + place.residual_begin;
  const BitSet sending{words, before, (place.bins + kWordBits - 1) / kWordBits};
  FirstFault fault;
  DecodeBlock<T, kBinScales> block{place, 0, 0, 0, sums, sending, sent_bins, totals, 0};
  for (int begin = 0; begin < place.elements; begin += kSums) {
    const int rest = place.elements - begin;
    block.tile_begin = begin;
    block.tile_end = begin + (rest < kSums ? rest : kSums);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kSums + kSwizzleGroup; i += kDecodeThreads) {
      sums[i] = 0.0f;
    }
    sum_tile(a, block, blockIdx.x, ranges, fault);
    for (int i = static_cast<int>(threadIdx.x); adds && begin + i < block.tile_end;
         i += kDecodeThreads) {
      const float sum = sums[swizzle(i)];
      if (sum != 0.0f) target[begin + i] += sum;  // -0.0 stays
    }
  }
  if (!adds) fault.report_first(keys, a.entry_fault, blockIdx.x);
}

template <typename T>
Error restore_typed(const DecompressArguments& a, float* residual, const bool* condition,
                    Stream stream) {
  Error error = set_zero(a.payload_fault, decompress_scratch_bytes(), stream);
  if (error != kSuccess) return error;
  error = launch(check_payloads, check_blocks(1, a.capacity), kCheckThreads, stream, a);
  for (const bool adds : {false, true}) {
    if (error != kSuccess || a.layout.chunk_count == 0) return error;
    error = launch(a.layout.codec.bin_scales ? restore_chunks<T, true> : restore_chunks<T, false>,
                   a.layout.chunk_count, kDecodeThreads, stream, a, residual, condition, adds);
  }
  return error;
}

// payload: uint8 [capacity], aligned to 16. residual: float32, updated. condition: one bool.
// scratch: decompress_scratch_bytes(), aligned to 8.
inline Error restore(const DeviceLayout& layout, const uint8_t* payload, int64_t capacity,
                     int64_t step, float* residual, const bool* condition, void* scratch,
                     Stream stream) {
  auto* const faults = static_cast<unsigned long long*>(scratch);
  const DecompressArguments a{layout, payload, 1, capacity, step, faults, faults + 1};
  switch (layout.codec.grad_type) {
    case GradType::kFloat16:
      return restore_typed<Half>(a, residual, condition, stream);
    case GradType::kBFloat16:
      return restore_typed<BFloat16>(a, residual, condition, stream);
    default:
      return restore_typed<float>(a, residual, condition, stream);
  }
}

}  // namespace adacomp::cuda
