// What a block of selection holds of its chunk: G and H in registers of the thread that loaded
// them, and in shared memory the largest |G| of each part. A part is a bin, cut where vectors
// begin.
#pragma once

#include "bits.cuh"
#include "bucket.cuh"
#include "memory.cuh"

namespace adacomp::cuda {

// 11 warps x 3 vectors of 4 slots: the fewest idle ones that hold a chunk of 4,096 elements at any
// alignment, with few enough registers for several blocks on a multiprocessor.
constexpr int kSelectThreads = 352;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kOwnVectors = 3;
constexpr int kOwnItems = kVectorItems<float>;
constexpr int kTileWords = 129;
constexpr int kTileSlots = kTileWords * kWordBits;
static_assert(kChunkElements + kOwnItems - 1 <= kTileSlots);
static_assert(kTileSlots <= kSelectThreads * kOwnVectors * kOwnItems);

constexpr uint32_t kSelectsNothing = 0xffffffff;  // above every |H|

// A chunk. Its dtype and scale mode are known when a kernel is compiled: they decide how many
// registers it needs.
template <typename T, bool kBinScales>
struct ChunkRun {
  static constexpr GradType grad_type = kGradType<T>;
  static constexpr bool bin_scales = kBinScales;

  const T* grad;
  float* residual;
  int elements;
  int bins;
  int bin_size;
  int shift;     // slot of element 0
  float weight;  // of dW in H

  // The least |H| that a bin sends, given its largest |G| and whether it has any gradient.
  __device__ static uint32_t threshold_bits(uint32_t g_max_bits, bool any_gradient) {
    if (g_max_bits == 0 || !finite_bits(g_max_bits)) return kSelectsNothing;
    if (!bin_scales) return g_max_bits;
    const bool sends =
        any_gradient && bin_scale(bin_code(bits_float(g_max_bits)), grad_type) != 0.0f;
    return sends ? g_max_bits : kSelectsNothing;
  }

  // Own vectors, see below.
  struct Loaded {
    Vector<float> residual[kOwnVectors];
    Vector<T, kOwnItems> grad[kOwnVectors];
  };

  __device__ int slots() const { return elements + shift; }
  __device__ int bin_begin(int b) const { return b * bin_size; }
  __device__ int bin_end(int b) const {
    const int end = (b + 1) * bin_size;
    return end < elements ? end : elements;
  }
};

// A word per part, under its first slot. Those at which vectors begin are neighbours, so that they
// are in different banks.
struct Tile {
  static constexpr int kStride = kTileSlots / kOwnItems;
  shared_array<uint32_t> words;  // [kTileSlots]

  __device__ auto operator[](unsigned slot) const -> decltype(words[0]) {
    return words[slot % kOwnItems * kStride + slot / kOwnItems];
  }
};

constexpr uint32_t kHasGradient = 1u << 31;  // beside |G|: some dW != 0

// What a thread holds of a run, and what it has seen of it. Slots without an element have G = 0.
struct Own {
  float g[kOwnVectors][kOwnItems];
  float h[kOwnVectors][kOwnItems];
  uint32_t g_max_bits;
  uint32_t gradient_bits;
};

__device__ inline int own_slot(int k) {
  return kOwnItems * (static_cast<int>(threadIdx.x) + k * kSelectThreads);
}

// The gradient has an alignment of its own: if it is another than the residual's, its elements are
// loaded one by one.
template <typename Run>
__device__ typename Run::Loaded load_own(const Run& run) {
  const uintptr_t grad_begin =
      reinterpret_cast<uintptr_t>(run.grad) - run.shift * sizeof(*run.grad);
  const bool is_aligned = grad_begin % (kOwnItems * sizeof(*run.grad)) == 0;
  typename Run::Loaded loaded;
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    const int first = own_slot(k) - run.shift;
    loaded.residual[k] = load_vector<kOwnItems>(run.residual, first, run.elements, true);
    loaded.grad[k] = load_vector<kOwnItems>(run.grad, first, run.elements, is_aligned);
  }
  return loaded;
}

// G and H, and the parts of the tile. From the last slot of a vector to its first, because the
// first slot of a part ends it.
template <typename Run>
__device__ Own make_own(const Run& run, const typename Run::Loaded& loaded, const BinOf& bin_of,
                        const Tile& tile) {
  Own own{};
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    int bin_begin = bin_of(own_slot(k) + kOwnItems - 1 - run.shift) * run.bin_size;
    uint32_t g_max_bits = 0;
    uint32_t gradient_bits = 0;
    ADACOMP_UNROLL
    for (int i = kOwnItems - 1; i >= 0; --i) {
      const int slot = own_slot(k) + i;
      const float grad = to_float(loaded.grad[k].items[i]);
      const float g = sum_gradient(loaded.residual[k].items[i], grad);
      own.g[k][i] = g;
      own.h[k][i] = probe(g, grad, run.weight);
      g_max_bits = abs_bits(g) > g_max_bits ? abs_bits(g) : g_max_bits;
      gradient_bits |= abs_bits(grad);
      const bool begins_bin = slot - run.shift == bin_begin;
      if (i > 0 && !begins_bin) continue;
      if (slot < run.slots()) tile[slot] = g_max_bits | (gradient_bits != 0 ? kHasGradient : 0);
      own.g_max_bits = g_max_bits > own.g_max_bits ? g_max_bits : own.g_max_bits;
      own.gradient_bits |= gradient_bits;
      g_max_bits = gradient_bits = 0;
      bin_begin -= begins_bin ? run.bin_size : 0;
    }
  }
  return own;
}

// An element that is not finite keeps its old residual.
template <typename Run>
__device__ void store_residual(const Run& run, const Own& own) {
  const bool all = finite_bits(own.g_max_bits);
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    const int first = own_slot(k) - run.shift;
    Vector<float> vector;
    ADACOMP_UNROLL
    for (int i = 0; i < kOwnItems; ++i) {
      vector.items[i] = own.g[k][i];
      const bool inside = first + i >= 0 && first + i < run.elements;
      if (!all && inside && finite_bits(abs_bits(own.g[k][i]))) {
        run.residual[first + i] = own.g[k][i];
      }
    }
    if (all) store_vector(run.residual, first, run.elements, vector);
  }
}

}  // namespace adacomp::cuda
