// Compression of one bucket on a GPU. Torch-free: raw pointers and a stream; no allocation and no
// synchronisation. The same bytes, residuals and counters as cpu::Compressor, bit for bit.
//
// 1. select_chunks   per chunk: residual = G; bits of what is selected; no scale yet
// 2. scale_segments  per segment: its scale; a segment that sends nothing has no ranges
// 3. place_ranges    once: admission and the places of the ranges; header
// 4. commit_payload  per chunk: entries into the payload, sign(G) s off the residual; the rest
//
// With bin scales 1 corrects the residual itself and 4 puts back what is not sent.
#pragma once

#include "commit.cuh"
#include "place.cuh"
#include "select.cuh"

namespace adacomp::cuda {

// Of the memory that compress() needs besides its arguments: an eighth of a byte per element, with
// bin scales one byte more, and some 40 bytes per chunk.
inline int64_t compress_scratch_bytes(const DeviceLayout& layout) {
  return compress_scratch(layout, nullptr).end;
}

template <typename T>
Error compress_typed(const CommitArguments& a, const T* grad, int64_t step, Stream stream) {
  const DeviceLayout& layout = a.layout;
  if (layout.chunk_count > 0) {
    const Error error =
        launch(layout.codec.bin_scales ? select_chunks<T, true> : select_chunks<T, false>,
               layout.chunk_count, kSelectThreads, stream, layout, a.scratch, grad, a.residual);
    if (error != kSuccess) return error;
  }
  if (layout.segment_count > 0) {
    const Error error = launch(scale_segments, layout.segment_count, kScaleThreads, stream, layout,
                               a.scratch, a.payload);
    if (error != kSuccess) return error;
  }
  const Error error = launch(place_ranges, 1, kPlaceThreads, stream, layout, a.scratch, a.payload,
                             a.capacity, step);
  const int64_t blocks = commit_blocks(layout, a.capacity);
  if (error != kSuccess || blocks == 0) return error;
  return launch(commit_payload<T>, blocks, kCommitThreads, stream, a, grad);
}

// grad: the layout's elements of its codec's type. residual: float32, updated. payload: `capacity`
// bytes, aligned to 16, all written. counters: null, or int64 [segments, 2] to which entries sent
// and chunks dropped are added. scratch: compress_scratch_bytes(), aligned to 16.
inline Error compress(const DeviceLayout& layout, const void* grad, float* residual,
                      uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters,
                      void* scratch, Stream stream) {
  const CommitArguments a{layout,   compress_scratch(layout, scratch),
                          residual, payload,
                          capacity, reinterpret_cast<unsigned long long*>(counters)};
  switch (layout.codec.grad_type) {
    case GradType::kFloat16:
      return compress_typed(a, static_cast<const Half*>(grad), step, stream);
    case GradType::kBFloat16:
      return compress_typed(a, static_cast<const BFloat16*>(grad), step, stream);
    default:
      return compress_typed(a, static_cast<const float*>(grad), step, stream);
  }
}

}  // namespace adacomp::cuda
