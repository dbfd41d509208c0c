// Tests of the emulator: kernels that are right, whose results are exact, and kernels that are
// wrong on purpose, which must be reported as what they are.
//
//   emulator_test --list   the cases' names
//   emulator_test NAME     runs one
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "device.cuh"

using adacomp::cuda::kAllLanes;
using adacomp::cuda::launch;
using adacomp::cuda::shared_array;
using emulator::Kind;

#define CHECK(condition) \
  if (!(condition)) throw std::logic_error(std::to_string(__LINE__) + ": " #condition)

constexpr int kSeeds = 50;

// Runs `launches` under many seeds, which must fail each time, and returns the last error.
emulator::Error error_of(Kind kind, const std::function<void()>& launches) {
  std::vector<emulator::Error> errors;
  for (int seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    try {
      launches();
    } catch (const emulator::Error& error) {
      if (error.kind != kind) throw;
      errors.push_back(error);
    }
    CHECK(errors.size() == seed + size_t{1});
  }
  CHECK(std::string(errors.back().what()).find(kind_name(kind)) == 0);
  return errors.back();
}

// ---- right ----

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

void reduction() {
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

void warp_scan() {
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

void shuffles() {
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

void ballot_compaction() {
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

void wide_blocks() {
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

void atomics() {
  check_atomics<unsigned>();
  check_atomics<unsigned long long>();
}

void bits() {
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

void syncwarp_orders() {
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

void elements() {
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

void arguments() {
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

void seeds() {
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

// ---- wrong ----

// The array is initialised first, so that the missing barrier is all that is wrong.
__global__ void miss_barrier(int* out) {
  ADACOMP_SHARED(int, tile, 128);
  tile[threadIdx.x] = 0;
  __syncthreads();
  tile[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = tile[127 - threadIdx.x];
}

void missing_barrier() {
  std::vector<int> out(128);
  const auto error =
      error_of(Kind::kSharedRace, [&] { launch(miss_barrier, 3, 128, nullptr, out.data()); });
  CHECK(error.array == "tile" && error.thread + error.other_thread == 127);
  CHECK(error.index == error.thread || error.index == error.other_thread);
}

// Reads by readers[0..1] and nobody else, then a write by `writer`, in one epoch.
__global__ void write_after_reads(int reader0, int reader1, int writer, int* out) {
  ADACOMP_SHARED(int, tile, 8);
  const int i = threadIdx.x;
  if (i == 0) tile[7] = 1;
  __syncthreads();
  if (i == reader0 || i == reader1) out[i] = tile[7];
  if (i == writer) tile[7] = 2;
}

void write_race(int reader0, int reader1, int writer) {
  std::vector<int> out(128);
  const auto error = error_of(Kind::kSharedRace, [&] {
    launch(write_after_reads, 1, 128, nullptr, reader0, reader1, writer, out.data());
  });
  CHECK(error.array == "tile" && error.index == 7 && error.block == 0);
  CHECK(error.thread == writer || error.other_thread == writer);
  CHECK(std::string(error.what()).find("tile[7]") != std::string::npos);
}

void race_between_warps() {
  write_race(3, 3, 40);
  write_race(3, 40, 40);
  write_race(3, 40, 3);
  write_race(3, 40, 100);
}

void race_in_warp() {
  write_race(3, 3, 4);
  write_race(3, 4, 4);
  write_race(3, 4, 3);
}

// Each warp's first lanes exchange by `Order`; a write of another warp is ordered by neither.
template <void order()>
__global__ void exchange_after(int partner, int* out) {
  ADACOMP_SHARED(int, tile, 64);
  tile[threadIdx.x] = 0;
  __syncthreads();
  tile[threadIdx.x] = threadIdx.x;
  order();
  out[threadIdx.x] = tile[threadIdx.x ^ partner];
}

void nothing() {}
void by_syncwarp() {
  __syncwarp(kAllLanes);
}
void by_shuffle() {
  __shfl_sync(kAllLanes, 1, 0);
}
void by_ballot() {
  __ballot_sync(kAllLanes, true);
}

template <void order()>
bool orders(int partner) {
  std::vector<int> out(64);
  const auto run = [&] { launch(exchange_after<order>, 1, 64, nullptr, partner, out.data()); };
  try {
    run();
  } catch (const emulator::Error&) {
    error_of(Kind::kSharedRace, run);
    return false;
  }
  for (int i = 0; i < 64; ++i) CHECK(out[i] == (i ^ partner));
  return true;
}

void race_without_syncwarp() {
  CHECK(!orders<nothing>(1) && orders<by_syncwarp>(1));
  CHECK(orders<by_shuffle>(1) && orders<by_ballot>(1));
  CHECK(!orders<by_syncwarp>(32) && !orders<by_shuffle>(32) && !orders<by_ballot>(32));
  emulator::set_warp_operations_order_memory(false);
  CHECK(!orders<nothing>(1) && orders<by_syncwarp>(1));
  CHECK(!orders<by_shuffle>(1) && !orders<by_ballot>(1));
}

__global__ void write_same(int distance) {
  ADACOMP_SHARED(int, tile, 64);
  tile[threadIdx.x % distance] = 1;
}

void race_of_writes() {
  error_of(Kind::kSharedRace, [] { launch(write_same, 1, 64, nullptr, 32); });
  error_of(Kind::kSharedRace, [] { launch(write_same, 1, 32, nullptr, 31); });
  launch(write_same, 1, 64, nullptr, 64);
}

enum class Meeting { kBarrier, kOtherBarrier, kSyncWarp, kBallot, kShuffle, kOtherShuffle, kNone };

__device__ void meet(Meeting meeting) {
  if (meeting == Meeting::kBarrier) __syncthreads();
  if (meeting == Meeting::kOtherBarrier) __syncthreads();
  if (meeting == Meeting::kSyncWarp) __syncwarp(kAllLanes);
  if (meeting == Meeting::kBallot) __ballot_sync(kAllLanes, 1);
  if (meeting == Meeting::kShuffle) __shfl_sync(kAllLanes, 1.0, 0);
  if (meeting == Meeting::kOtherShuffle) __shfl_sync(kAllLanes, 1.0, 0);
}

// The threads below `count` of block 1 meet elsewhere than the others.
__global__ void part_ways(int count, Meeting some, Meeting others) {
  __syncthreads();
  const bool apart = blockIdx.x == 1 && static_cast<int>(threadIdx.x) < count;
  if (apart && some == Meeting::kNone) return;
  meet(apart ? some : others);
}

emulator::Error parted(Kind kind, int count, Meeting some, Meeting others) {
  const auto error =
      error_of(kind, [&] { launch(part_ways, 3, 96, nullptr, count, some, others); });
  CHECK(error.block == 1 && std::string(error.what()).find(": block 1: ") != std::string::npos);
  CHECK((error.thread < count) != (error.other_thread < count));
  return error;
}

void divergent_barrier() {
  for (const int count : {1, 31, 32, 50, 95}) {
    parted(Kind::kDivergentBarrier, count, Meeting::kBarrier, Meeting::kNone);
    parted(Kind::kDivergentBarrier, count, Meeting::kBarrier, Meeting::kOtherBarrier);
  }
}

void early_return() {
  const auto error = parted(Kind::kDivergentBarrier, 5, Meeting::kNone, Meeting::kBarrier);
  CHECK(error.thread >= 5 && error.other_thread < 5);
}

void incomplete_shuffle() {
  for (const Meeting meeting : {Meeting::kShuffle, Meeting::kBallot, Meeting::kSyncWarp}) {
    const auto error = parted(Kind::kIncompleteWarpOperation, 16, meeting, Meeting::kNone);
    CHECK(error.thread < 16 && error.other_thread == 16);
    parted(Kind::kIncompleteWarpOperation, 33, Meeting::kNone, meeting);
    parted(Kind::kIncompleteWarpOperation, 16, meeting, Meeting::kOtherShuffle);
  }
}

void shuffle_and_barrier() {
  for (const int count : {1, 16, 63}) {
    parted(Kind::kIncompleteWarpOperation, count, Meeting::kShuffle, Meeting::kBarrier);
    parted(Kind::kIncompleteWarpOperation, count, Meeting::kBarrier, Meeting::kBallot);
  }
}

__global__ void ballot_of(unsigned mask) {
  __ballot_sync(mask, 1);
}

void partial_mask() {
  error_of(Kind::kIncompleteWarpOperation, [] { launch(ballot_of, 1, 32, nullptr, 0xffff); });
}

template <bool kWrite>
__global__ void access(int64_t offset, int64_t index) {
  ADACOMP_SHARED(uint16_t, tile, 64);
  tile[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x != 5) return;
  if (kWrite) {
    (tile + offset)[index] = 1;
  } else {
    const int value = (tile + offset)[index];
    CHECK(value == 1);
  }
}

void shared_bounds() {
  const auto fails = [](auto kernel, int64_t offset, int64_t index) {
    const auto error =
        error_of(Kind::kSharedBounds, [&] { launch(kernel, 1, 64, nullptr, offset, index); });
    CHECK(error.array == "tile" && error.index == offset + index && error.thread == 5);
  };
  for (const auto kernel : {access<false>, access<true>}) {
    fails(kernel, 0, 64);
    fails(kernel, 0, -1);
    fails(kernel, 60, 4);
    fails(kernel, 60, -61);
    fails(kernel, 0, 0u - 1);
    launch(kernel, 1, 64, nullptr, 70, -7);
  }
}

// Only the block that runs first writes: what it wrote is not the next block's.
__global__ void write_once(unsigned* blocks, int* out) {
  ADACOMP_SHARED(int, tile, 32);
  ADACOMP_SHARED(int, first, 1);
  if (threadIdx.x == 0) first[0] = atomicAdd(blocks, 1u) == 0;
  __syncthreads();
  if (first[0]) tile[threadIdx.x] = 1;
  out[threadIdx.x] = tile[threadIdx.x];
}

void uninitialised_read() {
  std::vector<int> out(32);
  const auto launch_blocks = [&](int blocks) {
    unsigned ran = 0;
    launch(write_once, blocks, 32, nullptr, &ran, out.data());
  };
  const auto error = error_of(Kind::kUninitialisedRead, [&] { launch_blocks(2); });
  CHECK(error.array == "tile" && error.index == error.thread);
  launch_blocks(1);
}

// ---- after an error ----

int g_alive = 0;

struct Counted {
  Counted() { ++g_alive; }
  ~Counted() { --g_alive; }
};

__global__ void fail_at(int thread) {
  const Counted counted;
  ADACOMP_SHARED(int, tile, 1);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) == thread) tile[1] = 0;
  __syncthreads();
}

void next_launch() {
  for (const int threads : {1024, 32, 512}) {
    error_of(Kind::kSharedBounds, [&] { launch(fail_at, 2, threads, nullptr, threads / 2); });
    CHECK(g_alive == 0);
    reduction();
    wide_blocks();
    parted(Kind::kDivergentBarrier, 7, Meeting::kBarrier, Meeting::kNone);
    ballot_compaction();
  }
}

void invalid_launch() {
  const auto fails = [](int64_t blocks, int threads) {
    error_of(Kind::kInvalidLaunch, [&] { launch(ballot_of, blocks, threads, nullptr, 0); });
  };
  fails(0, 32);
  fails(int64_t{1} << 31, 32);
  fails(1, 0);
  fails(1, 33);
  fails(1, 1056);
}

#if defined(__SANITIZE_ADDRESS__)
__global__ void write_global(int* out) {
  out[threadIdx.x] = 1;
}

// AddressSanitizer ends the program.
void global_bounds() {
  std::vector<int> out(63);
  launch(write_global, 1, 64, nullptr, out.data());
}
#endif

struct Case {
  const char* name;
  void (*run)();
};

#define CASE(name) \
  Case {           \
#name, name    \
  }
const Case kCases[] = {
    CASE(reduction),
    CASE(warp_scan),
    CASE(shuffles),
    CASE(ballot_compaction),
    CASE(wide_blocks),
    CASE(atomics),
    CASE(bits),
    CASE(syncwarp_orders),
    CASE(elements),
    CASE(arguments),
    CASE(seeds),
    CASE(missing_barrier),
    CASE(race_between_warps),
    CASE(race_in_warp),
    CASE(race_without_syncwarp),
    CASE(race_of_writes),
    CASE(divergent_barrier),
    CASE(early_return),
    CASE(incomplete_shuffle),
    CASE(shuffle_and_barrier),
    CASE(partial_mask),
    CASE(shared_bounds),
    CASE(uninitialised_read),
    CASE(next_launch),
    CASE(invalid_launch),
#if defined(__SANITIZE_ADDRESS__)
    CASE(global_bounds),
#endif
};

int main(int argc, char** argv) {
  const std::string wanted = argc == 2 ? argv[1] : "";
  for (const Case& c : kCases) {
    if (wanted == "--list") std::puts(c.name);
    if (wanted != c.name) continue;
    try {
      c.run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", c.name, error.what());
      return 1;
    }
    return 0;
  }
  return wanted == "--list" ? 0 : 2;
}
