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

// Joins the bits of the 4 slots of each of 8 lanes to a word, in all 8.
__device__ inline uint32_t join_word(uint32_t bits) {
  uint32_t word = bits << kOwnItems * (lane_id() % 8);
  for (int distance = 1; distance < 8; distance *= 2) {
    word |= __shfl_xor_sync(kAllLanes, word, distance);
  }
  return word;
}

// ---- a chunk of several bins, in one tile ----

// Leaves the threshold_bits() of each bin under its first slot. Each bin has a group of lanes, as
// many as keep most of the block at work: the first takes the part at the bin's first slot, then
// all take those at the vectors that begin inside the bin.
template <typename Run>
__device__ void reduce_bins(const Run& run, const Tile& tile) {
  int log_lanes = 0;
  while (log_lanes < 5 && run.bins << (log_lanes + 1) <= kSelectThreads) ++log_lanes;
  const int lanes = 1 << log_lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (int first = 0; first < run.bins; first += kSelectThreads >> log_lanes) {
    const int b = first + (static_cast<int>(threadIdx.x) >> log_lanes);
    const bool exists = b < run.bins;  // not for some of the last lanes
    const unsigned begin = run.bin_begin(b) + run.shift;
    const unsigned end = exists ? run.bin_end(b) + run.shift : 0;
    uint32_t g_max = 0;
    uint32_t gradient = 0;
    for (unsigned slot = lane == 0 ? begin : (begin / kOwnItems + lane) * kOwnItems; slot < end;
         slot = (slot / kOwnItems + lanes) * kOwnItems) {
      const uint32_t word = tile[slot];
      g_max = (word & kAbsMask) > g_max ? word & kAbsMask : g_max;
      gradient |= word & kHasGradient;
    }
    g_max = group_max(g_max, lanes);
    gradient = group_max(gradient, lanes);
    if (exists && lane == 0) tile[begin] = Run::threshold_bits(g_max, gradient != 0);
  }
}

// The sum of g_max in the order of LaneSum, by one warp; in its lane 0.
template <typename Run>
__device__ double sum_bins(const Run& run, const Tile& tile) {
  double sum = 0.0;
  for (int b = lane_id(); b < run.bins; b += kWarpSize) {
    const uint32_t bits = tile[run.bin_begin(b) + run.shift];
    sum += bits == kSelectsNothing ? 0.0 : static_cast<double>(bits_float(bits));
  }
  return lane_total(sum);
}

// One bit per own slot: is it selected?
template <typename Run>
__device__ void select_own(const Run& run, const Tile& tile, const BinOf& bin_of, const Own& own,
                           uint32_t (&bits)[kOwnVectors]) {
  ADACOMP_UNROLL
  for (int k = 0; k < kOwnVectors; ++k) {
    bits[k] = 0;
    if (own_slot(k) >= run.slots()) continue;
    const int first = own_slot(k) - run.shift;
    int bin_begin = bin_of(first < 0 ? 0 : first) * run.bin_size;
    uint32_t threshold = tile[bin_begin + run.shift];
    ADACOMP_UNROLL
    for (int i = 0; i < kOwnItems; ++i) {
      if (first + i == bin_begin + run.bin_size && first + i < run.elements) {
        bin_begin += run.bin_size;
        threshold = tile[bin_begin + run.shift];
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
    const int i = static_cast<int>(static_cast<unsigned>(own_slot(k)) / kWordBits);
    if (lane_id() % 8 != 0 || i >= selected.count) continue;
    selected.words[i] = word;
    out[i] = word;
  }
}

// Corrects the residual of what is selected and keeps its G. In memory, a word of bits per thread:
// in registers every warp would have to go through all that its threads hold.
template <typename Run>
__device__ void correct_residual(const Run& run, const Tile& tile, const BinOf& bin_of,
                                 const BitSet& selected, float* values) {
  selected.for_each([&](int slot, int rank) {
    const int e = slot - run.shift;
    const uint32_t g_max = tile[run.bin_begin(bin_of(e)) + run.shift];
    const float scale = bin_scale(bin_code(bits_float(g_max)), Run::grad_type);
    const float g = run.residual[e];
    values[rank] = g;
    run.residual[e] = corrected(g, scale, float_bits(g) >> 31);
  });
}

// Bins of the thread's share that nothing is selected of; writes the codes, if there are any.
template <typename Run>
__device__ int count_silent_bins(const Run& run, const Tile& tile, const BitSet& selected,
                                 uint8_t* codes) {
  int silent = 0;
  for (int b = static_cast<int>(threadIdx.x); b < run.bins; b += kSelectThreads) {
    const int begin = run.bin_begin(b) + run.shift;
    const bool sends = selected.rank(begin) != selected.rank(run.bin_end(b) + run.shift);
    silent += !sends;
    if (codes == nullptr) continue;
    const uint32_t g_max = tile[begin];
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
template <typename Run>
__device__ void write_result(const Run& run, const CompressScratch& scratch, int64_t index,
                             int entries, int silent_bins, const Tally& tally, bool is_corrected) {
  const int markers = Run::bin_scales ? 0 : silent_bins;
  scratch.bytes[index] =
      static_cast<uint32_t>(codes_bytes(run.bins, Run::bin_scales) +
                            align_up((entries + markers) * entry_bytes(run.bin_size), 2));
  scratch.notes[index] = {entries, tally.gradient_bits != 0, !finite_bits(tally.g_max_bits),
                          is_corrected};
}

template <typename Run>
__device__ void select_bins(const Run& run, const CompressScratch& scratch, int64_t index,
                            const ChunkFinder& finder, uint32_t* out, const Tile& tile,
                            const BitSet& selected, shared_array<Tally> tallies) {
  const BinOf bin_of(run.bin_size);
  const Own own = make_own(run, load_own(run), bin_of, tile);
  uint32_t bits[kOwnVectors];
  __syncthreads();
  reduce_bins(run, tile);
  __syncthreads();
  select_own(run, tile, bin_of, own, bits);
  write_words(bits, selected, out);
  if (!Run::bin_scales && warp_id() == kSelectWarps - 1) {
    const double sum = sum_bins(run, tile);
    if (lane_id() == 0) scratch.sums[index] = sum;
  }
  store_residual(run, own);
  __syncthreads();
  if (warp_id() == 0) selected.rank_words();
  __syncthreads();
  const Kept kept = kept_of(scratch, finder.found());
  const bool corrects = Run::bin_scales && selected.size() <= kept.room;
  if (corrects) correct_residual(run, tile, bin_of, selected, kept.values);
  const int silent = count_silent_bins(run, tile, selected, Run::bin_scales ? kept.codes : nullptr);
  const Tally tally = tally_block(tallies, {silent, own.g_max_bits, own.gradient_bits});
  if (threadIdx.x == 0) {
    write_result(run, scratch, index, selected.size(), tally.count, tally, corrects);
  }
}

// ---- a chunk of one bin ----

// An element that no thread holds: loaded twice, as it is needed before and after the maximum is
// known. A lane per slot, so that a vote makes a word.
template <typename Run>
__device__ void select_wide_bin(const Run& run, const CompressScratch& scratch, int64_t index,
                                const ChunkFinder& finder, uint32_t* out,
                                shared_array<Tally> tallies) {
  Tally tally{};
  for (int e = static_cast<int>(threadIdx.x); e < run.elements; e += kSelectThreads) {
    const float grad = to_float(run.grad[e]);
    const uint32_t g_bits = abs_bits(sum_gradient(run.residual[e], grad));
    tally.g_max_bits = g_bits > tally.g_max_bits ? g_bits : tally.g_max_bits;
    tally.gradient_bits |= abs_bits(grad);
  }
  tally = tally_block(tallies, tally);
  const uint32_t threshold = Run::threshold_bits(tally.g_max_bits, tally.gradient_bits != 0);
  for (int i = warp_id(); i < num_words(run.slots()); i += kSelectWarps) {
    const int e = i * kWordBits + lane_id() - run.shift;
    const bool inside = e >= 0 && e < run.elements;
    const float grad = inside ? to_float(run.grad[e]) : 0.0f;
    const float g = inside ? sum_gradient(run.residual[e], grad) : 0.0f;
    if (inside && finite_bits(abs_bits(g))) run.residual[e] = g;
    const bool selected = selects(g, probe(g, grad, run.weight), bits_float(threshold));
    const uint32_t word = __ballot_sync(kAllLanes, selected);
    if (lane_id() == 0) out[i] = word;
    tally.count += selected;
  }
  __syncthreads();
  tally = tally_block(tallies, tally);
  if (threadIdx.x != 0) return;
  const float g_max = bits_float(tally.g_max_bits);
  scratch.sums[index] = g_max;
  if (Run::bin_scales) {
    const Kept kept = kept_of(scratch, finder.found());
    kept.codes[0] = static_cast<uint8_t>(tally.count > 0 ? bin_code(g_max) : 0);
  }
  write_result(run, scratch, index, tally.count, tally.count == 0, tally, false);
}

// One block per chunk: its bins share the tile, and what a chunk yields has one writer.
template <typename T, bool kBinScales>
__global__ void __launch_bounds__(kSelectThreads)
    select_chunks(DeviceLayout layout, CompressScratch scratch, const T* grad, float* residual) {
  ADACOMP_SHARED(uint32_t, words, kTileSlots);
  ADACOMP_SHARED(uint32_t, bits, kTileWords);
  ADACOMP_SHARED(int, bits_before, kTileWords + 1);
  ADACOMP_SHARED(Tally, tallies, kSelectWarps);
  ADACOMP_SHARED(ChunkBegin, chunk_begin, 1);
  ADACOMP_SHARED(ChunkSize, chunk_size, 1);
  const int64_t index = blockIdx.x;
  const ChunkFinder finder{chunk_begin, chunk_size};
  const ChunkPlace place = finder.find(layout, index);
  float* const begin = residual + place.residual_begin;
  const ChunkRun<T, kBinScales> run{grad + place.bucket_begin,
                                    begin,
                                    place.elements,
                                    place.bins,
                                    place.bin_size,
                                    misalignment(begin),
                                    layout.codec.threshold_factor - 1.0f};
  uint32_t* const out = selected_words(scratch, place, index);
  if (bins_per_chunk(run.bin_size) == 1) {
    select_wide_bin(run, scratch, index, finder, out, tallies);
  } else {
    const BitSet selected{bits, bits_before, num_words(run.slots())};
    select_bins(run, scratch, index, finder, out, Tile{words}, selected, tallies);
  }
}

}  // namespace adacomp::cuda
