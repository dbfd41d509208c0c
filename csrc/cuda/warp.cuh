// Sums and votes of the threads of a warp.
#pragma once

#include "../adacomp.h"
#include "device.cuh"

namespace adacomp::cuda {

__device__ inline int lane_id() {
  return static_cast<int>(threadIdx.x) % kWarpSize;
}
__device__ inline int warp_id() {
  return static_cast<int>(threadIdx.x) / kWarpSize;
}

__device__ inline bool any_lane(bool predicate) {
  return __ballot_sync(kAllLanes, predicate) != 0;
}

// The sum over this lane and those below.
__device__ inline int inclusive_sum(int value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int below = __shfl_up_sync(kAllLanes, value, distance);
    value += lane_id() >= distance ? below : 0;
  }
  return value;
}

__device__ inline int warp_sum(int value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Maximum over each `lanes` (a power of two) consecutive lanes, in all of them.
__device__ inline uint32_t group_max(uint32_t value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// LaneSum::total(), of the sums that the lanes hold; in lane 0.
__device__ inline double lane_total(double value) {
  static_assert(LaneSum::kLanes == kWarpSize, "a lane of the sum is a lane of a warp");
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(kAllLanes, value, distance);
  }
  return value;
}

}  // namespace adacomp::cuda
