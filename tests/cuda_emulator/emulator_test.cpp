// Kernels that are right: their results are exact, in every order of threads and blocks.
//
//   emulator_test --list   the cases' names, and those of emulator_faults_test.cpp
//   emulator_test NAME     runs one
#include "emulator_test.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <numeric>
#include <set>

using adacomp::cuda::kAllLanes;
using adacomp::cuda::launch;
using adacomp::cuda::shared_array;

template <typename T>
__device__ __forceinline__ T block_sum(T value) {
  ADACOMP_SHARED(T, sums, 32);
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_down_sync(kAllLanes, value, distance);
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
  return sum;
}

// By halves in shared memory, and by warps; of two types, so that there are two arrays `sums`.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    reduce(const int* __restrict__ in, int* __restrict__ out, double* __restrict__ halves) {
  ADACOMP_SHARED(int, tile, kThreads);
  const int i = threadIdx.x;
  const int value = in[blockIdx.x * blockDim.x + threadIdx.x];
  tile[i] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (i < half) tile[i] += tile[i + half];
    __syncthreads();
  }
  const int sum = block_sum(value);
  const double half = block_sum(value / 2.0);
  if (i == 0) {
    out[2 * blockIdx.x] = tile[0];
    out[2 * blockIdx.x + 1] = sum;
    halves[blockIdx.x] = half;
  }
}

template <int kThreads>
void check_reduction() {
  constexpr int kBlocks = 5;
  std::vector<int> in(kBlocks * kThreads), out(2 * kBlocks, -1);
  std::vector<double> halves(kBlocks, -1);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i * i % 1009);
  launch(reduce<kThreads>, kBlocks, kThreads, nullptr, in.data(), out.data(), halves.data());
  for (int block = 0; block < kBlocks; ++block) {
    const auto first = in.begin() + block * kThreads;
    const int sum = std::accumulate(first, first + kThreads, 0);
    CHECK(out[2 * block] == sum && out[2 * block + 1] == sum && halves[block] == sum / 2.0);
  }
}

TEST(reduction) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    check_reduction<256>();
  }
  check_reduction<1024>();
  check_reduction<32>();
}

template <typename T>
__global__ void scan_warp(T* values) {
  const unsigned lane = threadIdx.x % 32;
  T value = values[threadIdx.x];
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += before;
  }
  values[threadIdx.x] = value;
}

template <typename T>
void check_scan() {
  std::vector<T> values(96), expected(96);
  for (int i = 0; i < 96; ++i) values[i] = static_cast<T>(i % 7) / 2;
  for (int i = 0; i < 96; ++i) expected[i] = values[i] + (i % 32 == 0 ? 0 : expected[i - 1]);
  launch(scan_warp<T>, 1, 96, nullptr, values.data());
  CHECK(values == expected);
}

TEST(warp_scan) {
  check_scan<int>();
  check_scan<unsigned>();
  check_scan<float>();
  check_scan<double>();
}

__global__ void shuffle_by(int n, int* out) {
  const int value = 100 + static_cast<int>(threadIdx.x);
  out[0 * 64 + threadIdx.x] = __shfl_sync(kAllLanes, value, n);
  out[1 * 64 + threadIdx.x] = __shfl_up_sync(kAllLanes, value, n);
  out[2 * 64 + threadIdx.x] = __shfl_down_sync(kAllLanes, value, n);
  out[3 * 64 + threadIdx.x] = __shfl_xor_sync(kAllLanes, value, n);
}

TEST(shuffles) {
  std::vector<int> out(4 * 64);
  for (int n = 0; n < 32; ++n) {
    launch(shuffle_by, 1, 64, nullptr, n, out.data());
    for (int i = 0; i < 64; ++i) {
      const int lane = i % 32, warp = i - lane;
      CHECK(out[i] == 100 + warp + n);
      CHECK(out[64 + i] == 100 + warp + (lane < n ? lane : lane - n));
      CHECK(out[128 + i] == 100 + warp + (lane + n > 31 ? lane : lane + n));
      CHECK(out[192 + i] == 100 + warp + (lane ^ n));
    }
  }
}

__global__ void compact(const int* in, int* out, int* kept) {
  ADACOMP_SHARED(int, counts, 32);
  const bool keep = in[threadIdx.x] % 3 == 0;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned ballot = __ballot_sync(kAllLanes, keep);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  int at = __popc(ballot & ((1u << lane) - 1)), total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (w < warp) at += counts[w];
    total += counts[w];
  }
  if (keep) out[at] = in[threadIdx.x];
  if (threadIdx.x == 0) *kept = total;
}

TEST(ballot_compaction) {
  std::vector<int> in(512), expected, out(512, -1);
  for (int i = 0; i < 512; ++i) in[i] = i * 37 % 101;
  std::copy_if(in.begin(), in.end(), std::back_inserter(expected),
               [](int x) { return x % 3 == 0; });
  int kept = -1;
  launch(compact, 1, 512, nullptr, in.data(), out.data(), &kept);
  CHECK(kept == static_cast<int>(expected.size()));
  out.resize(kept);
  CHECK(out == expected);
}

// Each round every thread takes its neighbour's number: after n rounds, that of thread i + n.
__global__ void rotate(int rounds, int* out) {
  ADACOMP_SHARED(int, ring, 1024);
  ring[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const int next = ring[(threadIdx.x + 1) % blockDim.x];
    __syncthreads();
    ring[threadIdx.x] = next;
    __syncthreads();
  }
  out[threadIdx.x] = ring[threadIdx.x];
}

TEST(wide_blocks) {
  std::vector<int> out(1024);
  launch(rotate, 3, 1024, nullptr, 17, out.data());
  for (int i = 0; i < 1024; ++i) CHECK(out[i] == (i + 17) % 1024);
}

template <typename T>
__global__ void use_atomics(T* results, T* tickets) {
  const T i = blockIdx.x * blockDim.x + threadIdx.x;
  tickets[i] = atomicAdd(&results[0], T{3});
  atomicMin(&results[1], i * 7 % 64 + 5);
  atomicMax(&results[2], i * 7 % 64 + 5);
  atomicOr(&results[3], T{1} << i % 32);
}

template <typename T>
void check_atomics() {
  std::vector<T> results = {0, T(-1), 0, 0}, tickets(4 * 64);
  launch(use_atomics<T>, 4, 64, nullptr, results.data(), tickets.data());
  CHECK((results == std::vector<T>{3 * 256, 5, 68, 0xffffffff}));
  std::sort(tickets.begin(), tickets.end());
  for (int i = 0; i < 256; ++i) CHECK(tickets[i] == T(3 * i));
}

TEST(atomics) {
  check_atomics<unsigned>();
  check_atomics<unsigned long long>();
}

TEST(bits) {
  CHECK(__popc(0) == 0 && __popc(0xffffffff) == 32 && __popc(0x80000001) == 2);
  CHECK(__ffs(0) == 0 && __ffs(1) == 1 && __ffs(INT32_MIN) == 32 && __ffs(0x50) == 5);
  CHECK(__clz(0) == 32 && __clz(1) == 31 && __clz(-1) == 0 && __clz(0x00ff0000) == 8);
}

__global__ void exchange_in_warp(int* out) {
  ADACOMP_SHARED(int, tile, 64);
  const unsigned i = threadIdx.x;
  for (int round = 0; round < 3; ++round) {
    tile[i] = static_cast<int>(i) + round;
    __syncwarp(kAllLanes);
    out[i] = tile[i ^ 31];
    __syncwarp(kAllLanes);
  }
}

TEST(syncwarp_orders) {
  std::vector<int> out(64);
  emulator::set_warp_operations_order_memory(false);
  launch(exchange_in_warp, 1, 64, nullptr, out.data());
  for (int i = 0; i < 64; ++i) CHECK(out[i] == (i ^ 31) + 2);
}

struct alignas(16) Pair {
  int64_t a, b;
};

// Bounds are those of the array, not of the part.
__device__ int sum_of(shared_array<uint8_t> bytes, int count) {
  int sum = 0;
  for (int i = -1; i < count - 1; ++i) sum += (bytes + 1)[i];
  return sum;
}

__global__ void use_elements(int64_t* out) {
  ADACOMP_SHARED(Pair, pairs, 32);
  ADACOMP_SHARED(uint8_t, bytes, 64);
  ADACOMP_SHARED(unsigned, words, 32);
  const unsigned i = threadIdx.x;
  pairs[i] = {0, 0};
  pairs[i] = Pair{i, 2 * i};
  bytes[i] = static_cast<uint8_t>(i);
  bytes[i + 32] = bytes[i];
  words[i] = 0xf0;
  words[i] += i;
  words[i] -= bytes[i];
  words[i] |= 0x0f;
  words[i] &= ~1u;
  words[i] ^= words[i] & 2;
  __syncthreads();
  const Pair pair = pairs[31 - i];
  out[i] = pair.a + pair.b + (words[0] == 0xfc ? 1 : words[0]);
  if (i == 0) out[32] = sum_of(bytes, 64);
}

TEST(elements) {
  using Element = emulator::SharedElement<int>;
  static_assert(std::is_convertible_v<Element, int> && std::is_assignable_v<Element, int>);
  static_assert(!std::is_convertible_v<Element&, int> && !std::is_assignable_v<Element&, int>);
  std::vector<int64_t> out(33);
  launch(use_elements, 1, 32, nullptr, out.data());
  for (int i = 0; i < 32; ++i) CHECK(out[i] == 3 * (31 - i) + 1);
  CHECK(out[32] == 31 * 32);
}

__global__ void own_arguments(Pair pair, int* out) {
  pair.a += threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = static_cast<int>(pair.a);
}

TEST(arguments) {
  std::vector<int> out(64);
  launch(own_arguments, 1, 64, nullptr, {5, 6}, out.data());
  for (int i = 0; i < 64; ++i) CHECK(out[i] == 5 + i);
}

__global__ void record_order(unsigned* ticket, unsigned* order) {
  const unsigned base = 192 * blockIdx.x + threadIdx.x;
  order[base] = atomicAdd(ticket, 1u);
  __syncthreads();
  order[base + 64] = atomicAdd(ticket, 1u) % 64;
  __syncthreads();
  order[base + 128] = atomicAdd(ticket, 1u) % 64;
}

TEST(seeds) {
  std::set<std::vector<unsigned>> orders, first_blocks;
  for (int run = 0; run < 2 * kSeeds; ++run) {
    emulator::set_seed(run / 2);
    unsigned ticket = 0;
    std::vector<unsigned> order(3 * 192);
    launch(record_order, 3, 64, nullptr, &ticket, order.data());
    const auto second = order.begin() + 64, third = order.begin() + 128;
    CHECK(!std::equal(second, third, third));
    orders.insert(order);
    first_blocks.insert({order[0] / 192, order[192] / 192, order[384] / 192});
  }
  CHECK(orders.size() == kSeeds);       // and the same one for the same seed
  CHECK(first_blocks.size() == 3 * 2);  // all permutations of the blocks
}

int main(int argc, char** argv) {
  const std::string wanted = argc == 2 ? argv[1] : "";
  if (wanted == "--list") {
    for (const auto& [name, run] : cases()) std::puts(name.c_str());
    return 0;
  }
  try {
    cases().at(wanted)();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", wanted.c_str(), error.what());
    return 1;
  }
  return 0;
}
