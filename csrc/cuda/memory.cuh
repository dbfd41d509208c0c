// Access to runs of elements by 16 bytes at a time, wherever they begin, and to tiles of them in
// shared memory.
//
// A run is seen as slots: slot 0 lies at the 16-byte boundary at or before its first element,
// which is therefore in slot `misalignment`. Whole vectors of slots are then aligned; the first
// and the last may be partly outside the run, and are read and written one element at a time.
#pragma once

#include "../adacomp.h"
#include "device.cuh"

// Before a loop over registers: an array indexed at run time would live in memory.
#if defined(__CUDACC__)
#define ADACOMP_UNROLL _Pragma("unroll")
#else
#define ADACOMP_UNROLL
#endif

namespace adacomp::cuda {

constexpr int kVectorBytes = 16;  // the widest load and store

template <typename T>
constexpr int kVectorItems = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(kVectorBytes) Vector {
  T items[kVectorItems<T>];
};

template <typename T>
__device__ int misalignment(const T* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kVectorBytes / sizeof(T));
}

// run[first, first + kVectorItems), which is aligned, with zeros for what is outside [0, end).
template <typename T>
__device__ Vector<T> load_vector(const T* run, int first, int end) {
  if (first >= 0 && first + kVectorItems<T> <= end) {
    return *reinterpret_cast<const Vector<T>*>(run + first);
  }
  Vector<T> vector{};
  ADACOMP_UNROLL
  for (int i = 0; i < kVectorItems<T>; ++i) {
    if (first + i >= 0 && first + i < end) vector.items[i] = run[first + i];
  }
  return vector;
}

// Its counterpart. Elements for which `skip` has a bit are not written.
template <typename T>
__device__ void store_vector(T* run, int first, int end, const Vector<T>& vector,
                             uint32_t skip = 0) {
  if (first >= 0 && first + kVectorItems<T> <= end && skip == 0) {
    *reinterpret_cast<Vector<T>*>(run + first) = vector;
    return;
  }
  ADACOMP_UNROLL
  for (int i = 0; i < kVectorItems<T>; ++i) {
    const bool inside = first + i >= 0 && first + i < end;
    if (inside && (skip >> i & 1) == 0) run[first + i] = vector.items[i];
  }
}

// Where a slot of a tile is kept in shared memory. Lanes that each access one slot out of 4 or 8,
// as they do with vectors, then meet 32 different banks, and so do lanes at consecutive slots.
__device__ inline int swizzle(int slot) {
  return slot ^ (slot >> 5 & 7);
}
constexpr int kSwizzleGroup = 8;  // slots are permuted within these

}  // namespace adacomp::cuda
