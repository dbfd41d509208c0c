// All that kernels use of CUDA, so that the same files run on a GPU and in tests/cuda_emulator.
//
// Built-ins, and no others:
//   __global__ __device__ __forceinline__ __launch_bounds__ __restrict__
//   threadIdx.x blockIdx.x blockDim.x gridDim.x        block sizes are multiples of 32, up to 1024
//   __syncthreads() __syncwarp(mask) __ballot_sync(mask, predicate)   mask is always kAllLanes
//   __shfl_sync __shfl_up_sync __shfl_down_sync __shfl_xor_sync       width 32; int, unsigned,
//                                                                     float, double
//   __popc(unsigned) __ffs(int) __clz(int)
//   atomicAdd atomicMin atomicMax atomicOr             global memory; unsigned, unsigned long long
// and, from here:
//   ADACOMP_SHARED(T, name, count);   shared memory, as a shared_array<T>
//   launch(kernel, blocks, threads, stream, args...), set_zero(pointer, bytes, stream)
//
// shared_array<T> supports [index] and + offset, may be passed by value and is a pointer under
// nvcc. The emulator checks every access, for which `array[index]` is a proxy there: read it into a
// variable of its type, `const float x = array[i]`; `auto x = array[i]` does not compile.
// An array is named at the top level of a kernel, or of a __device__ function it calls once.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(ADACOMP_CUDA_EMULATOR)

#include "emulator.h"

#define ADACOMP_SHARED(T, name, count)                                                         \
  static char name##_place; /* its address tells apart declarations, and template arguments */ \
  const ::adacomp::cuda::shared_array<T> name(                                                 \
      ::emulator::declare_shared(&name##_place, #name, count, sizeof(T)))

#else

#include <cuda_runtime.h>

#define ADACOMP_SHARED(T, name, count) \
  __shared__ T name##_storage[count];  \
  const ::adacomp::cuda::shared_array<T> name = name##_storage

namespace adacomp::cuda {

using Stream = cudaStream_t;
using Error = cudaError_t;
constexpr Error kSuccess = cudaSuccess;

template <typename T>
using shared_array = T*;

// The only way to start a kernel. blocks: 1 to 2^31 - 1. threads: a multiple of 32, up to 1024.
// Arguments convert to the kernel's parameters: decay_t keeps them out of the deduction.
template <typename... Params>
Error launch(void (*kernel)(Params...), int64_t blocks, int threads, Stream stream,
             std::decay_t<Params>... args) {
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  void* pointers[] = {&args..., nullptr};  // never of size 0
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                          pointers, 0, stream);
}

inline Error set_zero(void* pointer, int64_t bytes, Stream stream) {
  return cudaMemsetAsync(pointer, 0, static_cast<size_t>(bytes), stream);
}

}  // namespace adacomp::cuda

#endif

namespace adacomp::cuda {

constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kWarpSize = 32;

}  // namespace adacomp::cuda
