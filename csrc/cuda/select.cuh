// First kernel of compress(): the one pass over gradient and residual. Per chunk it writes
// residual = G, which elements are selected (a bit each), and what later kernels need to know.
//
// A block works on a chunk. Groups of lanes find the maximum of each bin in shared memory and leave
// it in place of the bin's first element; then every thread tests the elements it holds. A chunk of
// one bin, which can be larger than shared memory, is read twice instead.
#pragma once

#include "scratch.cuh"
#include "tile.cuh"
#include "warp.cuh"

namespace adacomp::cuda {

constexpr uint32_t kSelectsNothing = 0xffffffff;  // above every |H|, in place of a g_max

// The least |H| that a bin sends, given its largest |G| and whether it has any gradient.
__device__ inline uint32_t threshold_bits(uint32_t g_max_bits, bool any_gradient,
                                          const Codec& codec) {
  if (g_max_bits == 0 || !finite_bits(g_max_bits)) return kSelectsNothing;
  if (!codec.bin_scales) return g_max_bits;
  const bool sends =
      any_gradient && bin_scale(bin_code(bits_float(g_max_bits)), codec.grad_type) != 0.0f;
  return sends ? g_max_bits : kSelectsNothing;
}

// Joins the bits of the 4 slots of each of 8 lanes to a word, in all 8.
__device__ inline uint32_t join_word(uint32_t bits) {
  uint32_t word = bits << kOwnItems * (lane_id() % 8);
  for (int distance = 1; distance < 8; distance *= 2) {
    word |= __shfl_xor_sync(kAllLanes, word, distance);
  }
  return word;
}

// ---- a chunk of several bins, in one tile ----

// Leaves threshold_bits() of each bin in the place of its first element. Each bin has a group of
// lanes, as many as keep most of the block at work.
template <typename T>
__device__ void reduce_bins(const Run<T>& run, const Tile& tile) {
  int log_lanes = 0;
  while (log_lanes < 5 && run.bins << (log_lanes + 1) <= kSelectThreads) ++log_lanes;
  const int lanes = 1 << log_lanes;
  const int thread = static_cast<int>(threadIdx.x);
  for (int first = 0; first < run.bins; first += kSelectThreads >> log_lanes) {
    const int b = first + (thread >> log_lanes);  // past the last for some of the last lanes
    const int begin = b * run.bin_size;
    const int end = begin + run.bin_size < run.elements ? begin + run.bin_size : run.elements;
    uint32_t g_max = 0;
    uint32_t gradient = 0;
    for (int e = begin + thread % lanes; e < end; e += lanes) {
      const uint32_t word = tile[e + run.shift];
      g_max = (word & kAbsMask) > g_max ? word & kAbsMask : g_max;
      gradient |= word & kHasGradient;
    }
    g_max = group_max(g_max, lanes);
    gradient = group_max(gradient, lanes);
    if (b < run.bins && thread % lanes == 0) {
      tile[begin + run.shift] = threshold_bits(g_max, gradient != 0, run.codec);
    }
  }
}

// The sum of g_max in the order of LaneSum, by one warp; in its lane 0.
template <typename T>
__device__ double sum_bins(const Run<T>& run, const Tile& tile) {
  double sum = 0.0;
  for (int b = lane_id(); b < run.bins; b += kWarpSize) {
    const uint32_t bits = tile[b * run.bin_size + run.shift];
    sum += bits == kSelectsNothing ? 0.0 : static_cast<double>(bits_float(bits));
  }
  return lane_total(sum);
}

// One bit per own slot: is it selected?
template <typename T>
__device__ void select_own(const Run<T>& run, const Tile& tile, const Own& own,
                           uint32_t (&bits)[kOwnVectors]) {
  const BinOf bin_of(run.bin_size);
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    bits[k] = 0;
    int bin_end = 0;
    uint32_t threshold = 0;
    ADACOMP_UNROLL
    for (int i = 0; i < kOwnItems; ++i) {
      const int e = own_slot(k) + i - run.shift;
      if (e < 0 || e >= run.elements) continue;
      if (e >= bin_end) {
        const int begin = bin_of(e) * run.bin_size;
        bin_end = begin + run.bin_size;
        threshold = tile[begin + run.shift];
      }
      const bool selected = selects(own.g[k][i], own.h[k][i], bits_float(threshold));
      bits[k] |= static_cast<uint32_t>(selected) << i;
    }
  }
}

// Writes own bits as words, for this block and for later kernels.
__device__ inline void write_words(const uint32_t (&bits)[kOwnVectors], const BitSet& selected,
                                   uint32_t* out) {
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    const uint32_t word = join_word(bits[k]);
    const int i = own_slot(k) / kWordBits;
    if (lane_id() % 8 != 0 || i >= selected.count) continue;
    selected.words[i] = word;
    out[i] = word;
  }
}

// Corrects the residuals of what is selected, in registers, and keeps their G.
template <typename T>
__device__ void correct_own(const Run<T>& run, const Tile& tile,
                            const uint32_t (&bits)[kOwnVectors], const BitSet& selected,
                            float* values, Own& own) {
  const BinOf bin_of(run.bin_size);
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    ADACOMP_UNROLL
    for (int i = 0; i < kOwnItems; ++i) {
      if ((bits[k] >> i & 1) == 0) continue;
      const int slot = own_slot(k) + i;
      const uint32_t g_max = tile[bin_of(slot - run.shift) * run.bin_size + run.shift];
      const float scale = bin_scale(bin_code(bits_float(g_max)), run.codec.grad_type);
      const float g = own.g[k][i];
      values[selected.rank(slot)] = g;
      own.g[k][i] = corrected(g, scale, float_bits(g) >> 31);
    }
  }
}

// Bins of the block's share that nothing is selected of; writes the codes of all, if there are any.
template <typename T>
__device__ int count_silent_bins(const Run<T>& run, const Tile& tile, const BitSet& selected,
                                 uint8_t* codes) {
  int silent = 0;
  for (int b = static_cast<int>(threadIdx.x); b < run.bins; b += kSelectThreads) {
    const int begin = b * run.bin_size;
    const int end = begin + run.bin_size < run.elements ? begin + run.bin_size : run.elements;
    const bool sends = selected.rank(begin + run.shift) != selected.rank(end + run.shift);
    silent += !sends;
    if (codes == nullptr) continue;
    const uint32_t g_max = tile[begin + run.shift];
    codes[b] = static_cast<uint8_t>(sends ? bin_code(bits_float(g_max)) : 0);
  }
  return silent;
}

// ---- what is left for later kernels ----

// A warp's share of a chunk's result.
struct Tally {
  int32_t count;  // of silent bins, or of entries
  uint32_t g_max_bits;
  uint32_t gradient_bits;
};

// Of the whole block, in all threads. Contains a barrier.
__device__ inline Tally tally_block(shared_array<Tally> tallies, const Tally& own) {
  const Tally mine{warp_sum(own.count), group_max(own.g_max_bits, kWarpSize),
                   group_max(own.gradient_bits, kWarpSize)};
  if (lane_id() == 0) tallies[warp_id()] = mine;
  __syncthreads();
  Tally all{};
  for (int w = 0; w < kSelectWarps; ++w) {
    const Tally other = tallies[w];
    all.count += other.count;
    all.g_max_bits = other.g_max_bits > all.g_max_bits ? other.g_max_bits : all.g_max_bits;
    all.gradient_bits |= other.gradient_bits;
  }
  return all;
}

// By one thread.
template <typename T>
__device__ void write_result(const Run<T>& run, const CompressScratch& scratch, int64_t index,
                             int entries, int silent_bins, const Tally& tally, bool is_corrected) {
  const int markers = run.codec.bin_scales ? 0 : silent_bins;
  scratch.bytes[index] =
      static_cast<uint32_t>(codes_bytes(run.bins, run.codec.bin_scales) +
                            align_up((entries + markers) * entry_bytes(run.bin_size), 2));
  scratch.notes[index] = {entries, tally.gradient_bits != 0, !finite_bits(tally.g_max_bits),
                          is_corrected};
}

template <typename T>
__device__ void select_bins(const Run<T>& run, const CompressScratch& scratch, int64_t index,
                            const Kept& kept, uint32_t* out, const Tile& tile,
                            const BitSet& selected, shared_array<Tally> tallies) {
  Own own{};
  uint32_t bits[kOwnVectors];
  load_tile(run, tile, own);
  __syncthreads();
  reduce_bins(run, tile);
  __syncthreads();
  select_own(run, tile, own, bits);
  write_words(bits, selected, out);
  if (!run.codec.bin_scales && warp_id() == kSelectWarps - 1) {
    const double sum = sum_bins(run, tile);
    if (lane_id() == 0) scratch.sums[index] = sum;
  }
  __syncthreads();
  if (warp_id() == 0) selected.rank_words();
  __syncthreads();
  const bool corrects = run.codec.bin_scales && selected.size() <= kept.room;
  if (corrects) correct_own(run, tile, bits, selected, kept.values, own);
  store_residual(run, own);
  const int silent =
      count_silent_bins(run, tile, selected, run.codec.bin_scales ? kept.codes : nullptr);
  const Tally tally = tally_block(tallies, {silent, own.g_max_bits, own.gradient_bits});
  if (threadIdx.x == 0) {
    write_result(run, scratch, index, selected.size(), tally.count, tally, corrects);
  }
}

// ---- a chunk of one bin ----

// An element that no thread holds: loaded twice, as it is needed before and after the maximum is
// known. A lane per slot, so that a vote makes a word.
template <typename T>
__device__ void select_wide_bin(const Run<T>& run, const CompressScratch& scratch, int64_t index,
                                const Kept& kept, uint32_t* out, shared_array<Tally> tallies) {
  const float weight = run.codec.threshold_factor - 1.0f;
  Tally tally{};
  for (int e = static_cast<int>(threadIdx.x); e < run.elements; e += kSelectThreads) {
    const float grad = to_float(run.grad[e]);
    const uint32_t g_bits = abs_bits(sum_gradient(run.residual[e], grad));
    tally.g_max_bits = g_bits > tally.g_max_bits ? g_bits : tally.g_max_bits;
    tally.gradient_bits |= abs_bits(grad);
  }
  tally = tally_block(tallies, tally);
  const uint32_t threshold = threshold_bits(tally.g_max_bits, tally.gradient_bits != 0, run.codec);
  for (int i = warp_id(); i < num_words(run.elements + run.shift); i += kSelectWarps) {
    const int e = i * kWordBits + lane_id() - run.shift;
    const bool inside = e >= 0 && e < run.elements;
    const float grad = inside ? to_float(run.grad[e]) : 0.0f;
    const float g = inside ? sum_gradient(run.residual[e], grad) : 0.0f;
    if (inside && finite_bits(abs_bits(g))) run.residual[e] = g;
    const bool selected = selects(g, probe(g, grad, weight), bits_float(threshold));
    const uint32_t word = __ballot_sync(kAllLanes, selected);
    if (lane_id() == 0) out[i] = word;
    tally.count += selected;
  }
  __syncthreads();
  tally = tally_block(tallies, tally);
  if (threadIdx.x != 0) return;
  const float g_max = bits_float(tally.g_max_bits);
  scratch.sums[index] = g_max;
  if (run.codec.bin_scales) {
    kept.codes[0] = static_cast<uint8_t>(tally.count > 0 ? bin_code(g_max) : 0);
  }
  write_result(run, scratch, index, tally.count, tally.count == 0, tally, false);
}

// One block per chunk: its bins share the tile, and what a chunk yields has one writer.
template <typename T>
__global__ void __launch_bounds__(kSelectThreads)
    select_chunks(DeviceLayout layout, CompressScratch scratch, const T* grad, float* residual) {
  ADACOMP_SHARED(uint32_t, words, kTileSlots);
  ADACOMP_SHARED(uint32_t, bits, kTileWords);
  ADACOMP_SHARED(int, bits_before, kTileWords + 1);
  ADACOMP_SHARED(Tally, tallies, kSelectWarps);
  const int64_t index = blockIdx.x;
  const ChunkPlace place = locate_chunk(layout, index);
  float* const begin = residual + place.residual_begin;
  const Run<T> run{
      grad + place.bucket_begin, begin,       place.elements, place.bins, place.bin_size,
      misalignment(begin),       layout.codec};
  const Kept kept = kept_of(scratch, place);
  uint32_t* const out = selected_words(scratch, place, index);
  if (bins_per_chunk(run.bin_size) == 1) {
    select_wide_bin(run, scratch, index, kept, out, tallies);
  } else {
    const BitSet selected{bits, bits_before, num_words(run.elements + run.shift)};
    select_bins(run, scratch, index, kept, out, Tile{words}, selected, tallies);
  }
}

}  // namespace adacomp::cuda
