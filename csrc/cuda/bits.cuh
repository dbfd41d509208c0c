// Sets of slots or bins as bits in shared memory, with the number of members before any of them:
// how a block finds the place of each entry without passing over the entries before.
#pragma once

#include "device.cuh"
#include "warp.cuh"

namespace adacomp::cuda {

constexpr int kWordBits = 32;

struct BitSet {
  shared_array<uint32_t> words;
  shared_array<int> before;  // one more than words: members in the words before; the last: in all
  int count;                 // words in use

  // Fills `before`. By one warp, which divides the words into one run per lane.
  __device__ void rank_words() const {
    const int run = (count + kWarpSize - 1) / kWarpSize;
    const int begin = lane_id() * run;
    const int end = begin + run < count ? begin + run : count;
    int members = 0;
    for (int i = begin; i < end; ++i) members += __popc(words[i]);
    int sum = inclusive_sum(members) - members;
    for (int i = begin; i < end; ++i) {
      before[i] = sum;
      sum += __popc(words[i]);
    }
    if (lane_id() == kWarpSize - 1) before[count] = sum;
  }

  // Members before `place`, which is at most kWordBits * count.
  __device__ int rank(unsigned place) const {
    const unsigned i = place / kWordBits;
    const int sum = before[i];
    const uint32_t below = (1u << place % kWordBits) - 1;
    return below == 0 ? sum : sum + __popc(words[i] & below);
  }

  // Calls f(place, rank) for all members, by the block. Every thread takes words: members are few,
  // and most words have none.
  template <typename F>
  __device__ void for_each(F&& f) const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      int rank = before[i];
      const uint32_t word = words[i];
      for (uint32_t rest = word; rest != 0; rest &= rest - 1) {
        f(i * kWordBits + __ffs(static_cast<int>(rest)) - 1, rank++);
      }
    }
  }

  __device__ int size() const { return before[count]; }
};

}  // namespace adacomp::cuda
