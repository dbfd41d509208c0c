// Kernels that are wrong on purpose, each of which must be reported as what it is.
#include "emulator_test.h"

#include <array>
#include <random>

using adacomp::cuda::kAllLanes;
using adacomp::cuda::launch;
using emulator::Kind;

// The array is initialised first, so that the missing barrier is all that is wrong.
__global__ void miss_barrier(int* out) {
  ADACOMP_SHARED(int, tile, 128);
  tile[threadIdx.x] = 0;
  __syncthreads();
  tile[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = tile[127 - threadIdx.x];
}

TEST(missing_barrier) {
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

TEST(race_between_warps) {
  write_race(3, 3, 40);
  write_race(3, 40, 40);
  write_race(3, 40, 3);
  write_race(3, 40, 100);
}

TEST(race_in_warp) {
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

TEST(race_without_syncwarp) {
  CHECK(!orders<nothing>(1) && orders<by_syncwarp>(1));
  CHECK(orders<by_shuffle>(1) && orders<by_ballot>(1));
  CHECK(!orders<by_syncwarp>(32) && !orders<by_shuffle>(32) && !orders<by_ballot>(32));
  emulator::set_warp_operations_order_memory(false);
  CHECK(!orders<nothing>(1) && orders<by_syncwarp>(1));
  CHECK(!orders<by_shuffle>(1) && !orders<by_ballot>(1));
}

// Random accesses to one element by lanes of two warps, each followed by one of:
enum Order { kNothing, kSwitch, kSyncWarp, kBarrier };
constexpr int kSteps = 6;
constexpr std::array kActors = {0, 1, 2, 32, 33};

struct Step {
  int thread;
  bool writes;
  Order after;
};
using Program = std::array<Step, kSteps>;

__global__ void run_program(Program program) {
  ADACOMP_SHARED(int, tile, 1);
  if (threadIdx.x == 0) tile[0] = 0;
  __syncthreads();
  for (const Step& step : program) {
    const bool acts = step.thread == static_cast<int>(threadIdx.x);
    if (acts && step.writes) tile[0] = 1;
    if (acts && !step.writes) static_cast<void>(static_cast<int>(tile[0]));
    if (step.after == kSwitch) by_shuffle();
    if (step.after == kSyncWarp) by_syncwarp();
    if (step.after == kBarrier) __syncthreads();
  }
}

// By looking at each pair of accesses.
bool has_race(const Program& program) {
  for (int i = 0; i < kSteps; ++i) {
    const Step& first = program[i];
    bool warp_ordered = false, block_ordered = false;
    for (int j = i + 1; j < kSteps; ++j) {
      warp_ordered |= program[j - 1].after == kSyncWarp;
      block_ordered |= program[j - 1].after == kBarrier;
      const Step& second = program[j];
      const bool same_warp = first.thread / 32 == second.thread / 32;
      const bool ordered =
          block_ordered || (warp_ordered && same_warp) || first.thread == second.thread;
      if (!ordered && (first.writes || second.writes)) return true;
    }
  }
  return false;
}

TEST(random_accesses) {
  emulator::set_warp_operations_order_memory(false);
  std::mt19937 random(1);
  int races = 0;
  constexpr int kPrograms = 20000;
  for (int i = 0; i < kPrograms; ++i) {
    Program program;
    for (Step& step : program) {
      step.thread = kActors[random() % kActors.size()];
      step.writes = random() % 4 == 0;
      step.after = static_cast<Order>(random() % 4);
    }
    bool reported = false;
    try {
      launch(run_program, 1, 64, nullptr, program);
    } catch (const emulator::Error& error) {
      CHECK(error.kind == Kind::kSharedRace);
      reported = true;
    }
    CHECK(reported == has_race(program));
    races += reported;
  }
  CHECK(races > kPrograms / 10 && races < kPrograms * 9 / 10);
}

__global__ void write_same(int distance) {
  ADACOMP_SHARED(int, tile, 64);
  tile[threadIdx.x % distance] = 1;
}

TEST(race_of_writes) {
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

TEST(divergent_barrier) {
  for (const int count : {1, 31, 32, 50, 95}) {
    parted(Kind::kDivergentBarrier, count, Meeting::kBarrier, Meeting::kNone);
    parted(Kind::kDivergentBarrier, count, Meeting::kBarrier, Meeting::kOtherBarrier);
  }
}

TEST(early_return) {
  const auto error = parted(Kind::kDivergentBarrier, 5, Meeting::kNone, Meeting::kBarrier);
  CHECK(error.thread >= 5 && error.other_thread < 5);
}

__global__ void mix_on_one_line() {
  (threadIdx.x == 5) ? __syncwarp(kAllLanes) : void(__ballot_sync(kAllLanes, 1));
}

TEST(incomplete_warp_operation) {
  for (const Meeting meeting : {Meeting::kShuffle, Meeting::kBallot, Meeting::kSyncWarp}) {
    const auto error = parted(Kind::kIncompleteWarpOperation, 16, meeting, Meeting::kNone);
    CHECK(error.thread < 16 && error.other_thread == 16);
    parted(Kind::kIncompleteWarpOperation, 33, Meeting::kNone, meeting);
    parted(Kind::kIncompleteWarpOperation, 16, meeting, Meeting::kOtherShuffle);
  }
  error_of(Kind::kIncompleteWarpOperation, [] { launch(mix_on_one_line, 1, 32, nullptr); });
}

TEST(shuffle_and_barrier) {
  for (const int count : {1, 16, 63}) {
    parted(Kind::kIncompleteWarpOperation, count, Meeting::kShuffle, Meeting::kBarrier);
    parted(Kind::kIncompleteWarpOperation, count, Meeting::kBarrier, Meeting::kBallot);
  }
}

__global__ void ballot_of(unsigned mask) {
  __ballot_sync(mask, 1);
}

TEST(partial_mask) {
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

TEST(shared_bounds) {
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

TEST(uninitialised_read) {
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

__global__ void fail_at_once(unsigned* started) {
  ADACOMP_SHARED(int, tile, 1);
  atomicAdd(started, 1u);
  tile[1] = 0;
}

TEST(next_launch) {
  unsigned started = 0;
  error_of(Kind::kSharedBounds, [&] { launch(fail_at_once, 2, 64, nullptr, &started); });
  CHECK(started == kSeeds);  // no other thread begins after an error
  for (const int threads : {1024, 32, 512}) {
    error_of(Kind::kSharedBounds, [&] { launch(fail_at, 2, threads, nullptr, threads / 2); });
    CHECK(g_alive == 0);
    launch(fail_at, 2, threads, nullptr, -1);
    CHECK(g_alive == 0);
    parted(Kind::kDivergentBarrier, 7, Meeting::kBarrier, Meeting::kNone);
    CHECK(orders<by_shuffle>(1));
  }
}

TEST(invalid_launch) {
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
TEST(global_bounds) {
  std::vector<int> out(63);
  launch(write_global, 1, 64, nullptr, out.data());
}
#endif
