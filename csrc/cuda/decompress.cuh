// Decompression of the payloads of all ranks on a GPU. Torch-free: raw pointers and a stream; no
// allocation and no synchronisation. The same gradients and status as cpu::Decompressor, bit for
// bit.
//
// 1. check_payloads   headers, scales, chunk tables, padding
// 2. decode_payloads  unless 1 found a fault: sums, checking entries as they are read
// 3. finish_bucket    if 1 or 2 found one: the whole bucket NaN, and the status word
#pragma once

#include "check.cuh"
#include "decode.cuh"

namespace adacomp::cuda {

constexpr int kFinishThreads = 256;
constexpr int64_t kFinishBlocks = 1024;    // enough to fill a GPU; in vain, except after a fault
constexpr int64_t kFinishElements = 4096;  // per block, of a small bucket

// Blocks stride over the bucket: as a rule they have nothing to do, so there are few.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_bucket(DecompressArguments a, T* grad, long long* status) {
  const int64_t first = reported_status(*a.payload_fault);
  const int64_t fault = first != 0 ? first : reported_status(*a.entry_fault);
  if (fault == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0 && *status == 0) *status = fault;
  const T nan = from_float<T>(bits_float(kNanBits));
  const int64_t stride = int64_t{gridDim.x} * kFinishThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFinishThreads + threadIdx.x; i < a.layout.elements;
       i += stride) {
    grad[i] = nan;
  }
}

// Of the memory that decompress() needs besides its arguments.
inline int64_t decompress_scratch_bytes() {
  return 2 * sizeof(unsigned long long);
}

template <typename T>
Error decompress_typed(const DecompressArguments& a, T* grad, long long* status, Stream stream) {
  Error error = set_zero(a.payload_fault, decompress_scratch_bytes(), stream);
  if (error != kSuccess) return error;
  error = launch(check_payloads, check_blocks(a.world_size, a.capacity), kCheckThreads, stream, a);
  if (error != kSuccess) return error;
  if (decode_blocks(a.layout) > 0) {
    error = launch(a.layout.codec.bin_scales ? decode_payloads<T, true> : decode_payloads<T, false>,
                   decode_blocks(a.layout), kDecodeThreads, stream, a, grad);
    if (error != kSuccess) return error;
  }
  const int64_t most = ceil_div(a.layout.elements, kFinishElements);
  const int64_t blocks = most < 1 ? 1 : most < kFinishBlocks ? most : kFinishBlocks;
  return launch(finish_bucket<T>, blocks, kFinishThreads, stream, a, grad, status);
}

// payloads: uint8 [world_size, capacity], aligned to 16. grad: the layout's elements of its codec's
// type, all written. status: one word; if a payload is malformed and it is 0, it gets the smallest
// make_status() of what is wrong. scratch: decompress_scratch_bytes(), aligned to 8.
inline Error decompress(const DeviceLayout& layout, const uint8_t* payloads, int64_t world_size,
                        int64_t capacity, int64_t step, void* grad, int64_t* status, void* scratch,
                        Stream stream) {
  auto* const faults = static_cast<unsigned long long*>(scratch);
  const DecompressArguments a{layout, payloads,  static_cast<int>(world_size), capacity, step,
                              faults, faults + 1};
  auto* const word = reinterpret_cast<long long*>(status);
  switch (layout.codec.grad_type) {
    case GradType::kFloat16:
      return decompress_typed(a, static_cast<Half*>(grad), word, stream);
    case GradType::kBFloat16:
      return decompress_typed(a, static_cast<BFloat16*>(grad), word, stream);
    default:
      return decompress_typed(a, static_cast<float*>(grad), word, stream);
  }
}

}  // namespace adacomp::cuda
