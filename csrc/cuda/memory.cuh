// Access to runs of elements by vectors of up to 16 bytes, wherever they begin.
//
// A run is seen as slots: slot 0 lies at the 16-byte boundary at or before its first element, which
// is therefore in slot `misalignment`. Whole vectors of slots are then aligned. The first and the
// last may be partly outside the run: those are read and written one element at a time.
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

template <typename T, int kItems = kVectorItems<T>>
struct alignas(kItems * sizeof(T)) Vector {
  T items[kItems];
};

template <typename T>
__device__ int misalignment(const T* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kVectorBytes / sizeof(T));
}

// run[first, first + kItems), with zeros for what is outside [0, end).
template <int kItems, typename T>
__device__ Vector<T, kItems> load_vector(const T* run, int first, int end, bool is_aligned) {
  if (is_aligned && first >= 0 && first + kItems <= end) {
    return *reinterpret_cast<const Vector<T, kItems>*>(run + first);
  }
  Vector<T, kItems> vector{};
  ADACOMP_UNROLL
  for (int i = 0; i < kItems; ++i) {
    if (first + i >= 0 && first + i < end) vector.items[i] = run[first + i];
  }
  return vector;
}

// To run[first, first + kItems), which is aligned, as far as it is inside [0, end).
template <int kItems, typename T>
__device__ void store_vector(T* run, int first, int end, const Vector<T, kItems>& vector) {
  if (first >= 0 && first + kItems <= end) {
    *reinterpret_cast<Vector<T, kItems>*>(run + first) = vector;
    return;
  }
  ADACOMP_UNROLL
  for (int i = 0; i < kItems; ++i) {
    if (first + i >= 0 && first + i < end) run[first + i] = vector.items[i];
  }
}

}  // namespace adacomp::cuda
