// Second and third kernel of compress(): the scale of each segment, and the place of each chunk's
// range in the payload or that it has none. Everything here is per segment or per chunk, so that a
// single block can do what has to be in order.
#pragma once

#include "bucket.cuh"
#include "scratch.cuh"
#include "warp.cuh"

namespace adacomp::cuda {

// ---- scales ----

constexpr int kScaleThreads = 256;
constexpr int kScaleTile = 4 * kScaleThreads;  // sums that are on their way at the same time

struct SegmentTally {
  bool any_gradient, any_entry, any_non_finite;
};

// As Compressor::scale_of on the CPU.
__device__ inline float scale_of(const SegmentTally& tally, double sum_of_g_max, int64_t bins,
                                 const Codec& codec) {
  if (tally.any_non_finite) return bits_float(kNanBits);
  if (!tally.any_gradient) return 0.0f;
  if (codec.bin_scales) return tally.any_entry ? 1.0f : 0.0f;
  return segment_scale(sum_of_g_max, bins, codec.grad_type);
}

// Adds the sums of chunks [begin, end), at most a tile, to what lane l of warp 0 holds for its lane
// of LaneSum. Contains barriers.
__device__ inline void add_sums(shared_array<double> tile, const double* sums, int64_t begin,
                                int64_t end, double& sum) {
  const int count = static_cast<int>(end - begin < kScaleTile ? end - begin : kScaleTile);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kScaleThreads) {
    tile[i] = sums[begin + i];
  }
  __syncthreads();
  if (warp_id() != 0) return;
  for (int i = lane_id(); i < count; i += kWarpSize) sum += tile[i];
}

// One block per segment: its chunks' sums have one order, and warp 0 has the lanes for it; the
// others fetch.
static __global__ void __launch_bounds__(kScaleThreads)
    scale_segments(DeviceLayout layout, CompressScratch scratch, uint8_t* payload) {
  ADACOMP_SHARED(double, tile, kScaleTile);
  ADACOMP_SHARED(SegmentTally, tallies, kScaleThreads / kWarpSize);
  ADACOMP_SHARED(float, shared_scale, 1);
  const int64_t i = blockIdx.x;
  const int64_t begin = layout.first_chunk[i];
  const int64_t end = layout.first_chunk[i + 1];
  SegmentTally tally{};
  double sum = 0.0;
  for (int64_t first = begin; first < end; first += kScaleTile) {
    for (int64_t c = first + threadIdx.x; c < end && c < first + kScaleTile; c += kScaleThreads) {
      const ChunkNote note = scratch.notes[c];
      tally.any_gradient |= note.any_gradient;
      tally.any_entry |= note.entries > 0;
      tally.any_non_finite |= note.any_non_finite;
    }
    if (!layout.codec.bin_scales) add_sums(tile, scratch.sums, first, end, sum);
  }
  tally = {any_lane(tally.any_gradient), any_lane(tally.any_entry), any_lane(tally.any_non_finite)};
  if (lane_id() == 0) tallies[warp_id()] = tally;
  sum = lane_total(sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kScaleThreads / kWarpSize; ++w) {
      const SegmentTally other = tallies[w];
      tally.any_gradient |= other.any_gradient;
      tally.any_entry |= other.any_entry;
      tally.any_non_finite |= other.any_non_finite;
    }
    const float scale = scale_of(tally, sum, num_bins(layout.segments[i]), layout.codec);
    reinterpret_cast<float*>(payload + layout.offsets.scales)[i] = scale;
    shared_scale[0] = scale;
  }
  __syncthreads();
  const float scale = shared_scale[0];
  if (scale > 0.0f) return;
  for (int64_t c = begin + threadIdx.x; c < end; c += kScaleThreads) scratch.bytes[c] = 0;
}

// ---- places ----

constexpr int kPlaceThreads = 512;
constexpr int kPlaceWarps = kPlaceThreads / kWarpSize;
constexpr int kPlacePerThread = 8;
constexpr int kPlaceStrip = kPlaceThreads * kPlacePerThread;  // chunks; their bytes fit an int
static_assert(kPlaceStrip <= INT32_MAX / (2 * kMaxBinSize + 4));

// prefix[i] = bytes of the ranges before chunk i, prefix[chunks] = of all. Contains barriers.
__device__ inline void sum_ranges(const CompressScratch& scratch, int64_t chunks,
                                  shared_array<int> warp_totals) {
  int64_t before = 0;
  for (int64_t strip = 0; strip < chunks; strip += kPlaceStrip) {
    const int64_t first = strip + int64_t{threadIdx.x} * kPlacePerThread;
    int bytes[kPlacePerThread];
    int own = 0;
    ADACOMP_UNROLL
    for (int k = 0; k < kPlacePerThread; ++k) {
      bytes[k] = first + k < chunks ? static_cast<int>(scratch.bytes[first + k]) : 0;
      own += bytes[k];
    }
    const int sum = inclusive_sum(own);
    if (lane_id() == kWarpSize - 1) warp_totals[warp_id()] = sum;
    __syncthreads();
    int64_t place = before + sum - own;
    for (int w = 0; w < kPlaceWarps; ++w) {
      const int total = warp_totals[w];
      place += w < warp_id() ? total : 0;
      before += total;
    }
    ADACOMP_UNROLL
    for (int k = 0; k < kPlacePerThread; ++k) {
      if (first + k < chunks) scratch.prefix[first + k] = place;
      place += bytes[k];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) scratch.prefix[chunks] = before;
  __syncthreads();
}

// The largest i from `low` to `high` with prefix[i] <= most; prefix[low] is.
__device__ inline int64_t last_fitting(const int64_t* prefix, int64_t low, int64_t high,
                                       int64_t most) {
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (prefix[middle] <= most) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Chunks are visited cyclically from `first`; the first that does not fit ends it. Ranges of no
// bytes make no difference, so a chunk is admitted if all up to its end fit.
__device__ inline Admission admit(const int64_t* prefix, int64_t chunks, int64_t budget,
                                  int64_t step) {
  if (prefix[chunks] <= budget) return {0, 0, chunks};
  const int64_t first = first_admitted_chunk(step, chunks);
  const int64_t tail_end = last_fitting(prefix, first, chunks, prefix[first] + budget);
  if (tail_end < chunks) return {first, 0, tail_end};
  const int64_t tail = prefix[chunks] - prefix[first];
  return {first, last_fitting(prefix, 0, first, budget - tail), tail_end};
}

__device__ inline bool is_admitted(const Admission& a, int64_t chunk) {
  return chunk < a.head_end || (chunk >= a.first && chunk < a.tail_end);
}

// Bytes of admitted ranges before chunk i, or of all.
__device__ inline int64_t range_begin(const Admission& a, const int64_t* prefix, int64_t i) {
  const int64_t head = i < a.head_end ? i : a.head_end;
  const int64_t tail = i < a.first ? a.first : i < a.tail_end ? i : a.tail_end;
  return prefix[head] + prefix[tail] - prefix[a.first];
}

__device__ inline void zero_words(uint8_t* payload, int64_t begin, int64_t end) {
  auto* const words = reinterpret_cast<uint32_t*>(payload);
  for (int64_t i = begin / 4 + threadIdx.x; i < end / 4; i += blockDim.x) words[i] = 0;
}

// One block: a prefix sum over chunks, 4,096 per round, then constant work. A chunk stands for
// 48 KiB that other kernels move, so this is short also for large buckets.
static __global__ void __launch_bounds__(kPlaceThreads)
    place_ranges(DeviceLayout layout, CompressScratch scratch, uint8_t* payload, int64_t capacity,
                 int64_t step) {
  ADACOMP_SHARED(int, warp_totals, kPlaceWarps);
  const Offsets& offsets = layout.offsets;
  const int64_t chunks = layout.chunk_count;
  zero_words(payload, offsets.scales + 4 * layout.segment_count, offsets.table);
  zero_words(payload, offsets.table + 4 * (chunks + 1), offsets.raw);
  zero_words(payload, offsets.raw + 4 * layout.raw_elements, offsets.entries);
  sum_ranges(scratch, chunks, warp_totals);
  if (threadIdx.x != 0) return;
  const Admission admission = admit(scratch.prefix, chunks, capacity - offsets.entries, step);
  const int64_t end = range_begin(admission, scratch.prefix, chunks);
  *scratch.admission = admission;
  reinterpret_cast<uint32_t*>(payload + offsets.table)[chunks] = static_cast<uint32_t>(end);
  *reinterpret_cast<Header*>(payload) =
      make_header(layout.codec, layout.hash, step, offsets.entries + scratch.prefix[chunks],
                  offsets.entries + end);
}

}  // namespace adacomp::cuda
