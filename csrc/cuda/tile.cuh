// The tiles that selection works on: a part of a chunk's gradient and residual, G and H in
// registers of the thread that loaded them, |G| in shared memory for all.
#pragma once

#include "bits.cuh"
#include "bucket.cuh"
#include "memory.cuh"

namespace adacomp::cuda {

// 11 warps x 3 vectors of 4 slots: the fewest idle ones that hold a chunk of 4,096 elements at any
// alignment, and few enough registers for four blocks on a multiprocessor.
constexpr int kSelectThreads = 352;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kOwnVectors = 3;
constexpr int kOwnItems = kVectorItems<float>;
constexpr int kTileWords = 129;
constexpr int kTileSlots = kTileWords * kWordBits;
static_assert(kChunkElements + kOwnItems - 1 <= kTileSlots && kTileSlots % kSwizzleGroup == 0);
static_assert(kTileSlots <= kSelectThreads * kOwnVectors * kOwnItems);

constexpr uint32_t kHasGradient = 1u << 31;  // beside |G|: dW != 0

template <typename T>
struct Run {
  const T* grad;
  float* residual;
  int elements;
  int bins;
  int bin_size;
  int shift;  // slot of element 0
  Codec codec;
};

// |G| | kHasGradient of a run's elements, by slot. Slots without an element are not written.
struct Tile {
  shared_array<uint32_t> words;  // [kTileSlots]

  __device__ auto operator[](int slot) const -> decltype(words[0]) { return words[swizzle(slot)]; }
};

// What a thread holds of a run, and what it has seen of it.
struct Own {
  float g[kOwnVectors][kOwnItems];
  float h[kOwnVectors][kOwnItems];
  uint32_t g_max_bits;
  uint32_t gradient_bits;
};

__device__ inline int own_slot(int k) {
  return kOwnItems * (static_cast<int>(threadIdx.x) + k * kSelectThreads);
}

// The gradient has an alignment of its own: it passes through shared memory to the threads that
// hold the residual.
template <typename T>
__device__ void load_gradient(const Run<T>& run, const Tile& tile) {
  constexpr int kItems = kVectorItems<T>;
  constexpr int kVectors = (static_cast<int>(kChunkElements) + 2 * kItems - 2) / kItems;
  constexpr int kLoads = (kVectors + kSelectThreads - 1) / kSelectThreads;
  const int first = kItems * static_cast<int>(threadIdx.x) - misalignment(run.grad);
  Vector<T> vectors[kLoads];
  ADACOMP_UNROLL
  for (int k = 0; k < kLoads; ++k) {
    vectors[k] = load_vector(run.grad, first + kItems * kSelectThreads * k, run.elements);
  }
  ADACOMP_UNROLL
  for (int k = 0; k < kLoads; ++k) {
    ADACOMP_UNROLL
    for (int i = 0; i < kItems; ++i) {
      const int e = first + kItems * kSelectThreads * k + i;
      if (e < 0 || e >= run.elements) continue;
      tile[e + run.shift] = float_bits(to_float(vectors[k].items[i]));
    }
  }
}

// Fills `own` and `tile`. Slots without an element get G = 0, which is never selected.
template <typename T>
__device__ void load_tile(const Run<T>& run, const Tile& tile, Own& own) {
  const float weight = run.codec.threshold_factor - 1.0f;
  Vector<float> residual[kOwnVectors];
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    residual[k] = load_vector(run.residual, own_slot(k) - run.shift, run.elements);
  }
  load_gradient(run, tile);
  __syncthreads();
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    ADACOMP_UNROLL
    for (int i = 0; i < kOwnItems; ++i) {
      const int slot = own_slot(k) + i;
      own.g[k][i] = own.h[k][i] = 0.0f;
      if (slot < run.shift || slot - run.shift >= run.elements) continue;
      const uint32_t bits = tile[slot];
      const float grad = bits_float(bits);
      const float g = sum_gradient(residual[k].items[i], grad);
      own.g[k][i] = g;
      own.h[k][i] = probe(g, grad, weight);
      own.g_max_bits = abs_bits(g) > own.g_max_bits ? abs_bits(g) : own.g_max_bits;
      own.gradient_bits |= abs_bits(grad);
      tile[slot] = abs_bits(g) | (abs_bits(grad) != 0 ? kHasGradient : 0);
    }
  }
}

// An element that is not finite keeps its old residual.
template <typename T>
__device__ void store_residual(const Run<T>& run, const Own& own) {
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    Vector<float> vector;
    uint32_t skip = 0;
    ADACOMP_UNROLL
    for (int i = 0; i < kOwnItems; ++i) {
      vector.items[i] = own.g[k][i];
      skip |= static_cast<uint32_t>(!finite_bits(abs_bits(own.g[k][i]))) << i;
    }
    store_vector(run.residual, own_slot(k) - run.shift, run.elements, vector, skip);
  }
}

}  // namespace adacomp::cuda
