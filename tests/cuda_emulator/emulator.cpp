#include "emulator.h"

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;  // over a guard page; only touched pages take memory

enum class State { kReady, kAtBarrier, kAtWarpOperation, kEnded };

struct Thread {
  boost::context::fiber fiber;
  boost::context::stack_context stack;
  void* fake_stack = nullptr;  // AddressSanitizer's, while others run
  State state = State::kEnded;
  Place place{};
};

struct Warp {
  int arrived = 0;
  Place place{};  // where those are
  uint32_t epoch = 0;
  // Two sets: the last lanes may still read theirs while the first ones bring the next.
  uint64_t values[2][kWarpSize] = {};
  int set = 0;
};

struct Unwind {};  // thrown through the fibers of a block that has failed

struct Machine {
  std::mt19937_64 random;
  bool warp_operations_order_memory = true;

  const std::function<void()>* body = nullptr;
  std::vector<Thread> threads;  // as many as the widest block needed so far
  std::vector<std::unique_ptr<SharedStorage>> shared;

  // The block that runs.
  int64_t block = 0;
  int count = 0;
  int current = 0;
  std::vector<int> ready;
  std::vector<Warp> warps;
  int at_barrier = 0;
  Place barrier_place{};  // where those are
  uint32_t epoch = 1;     // steps at each barrier; that of no access is 0
  int ended = 0;
  std::exception_ptr error;
  bool unwinding = false;

  boost::context::fiber scheduler;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

// Never destroyed: its fibers wait at the top of their loops until the process ends.
Machine& m = *new Machine;

// ---- fibers: made once, each runs thread i of one block after the other ----

void resume(int index) {
  Thread& thread = m.threads[index];
  const char* bottom = static_cast<const char*>(thread.stack.sp) - thread.stack.size;
  m.current = index;
  threadIdx = {static_cast<unsigned>(index), 0, 0};
  __sanitizer_start_switch_fiber(&m.scheduler_fake_stack, bottom, thread.stack.size);
  thread.fiber = std::move(thread.fiber).resume();
  __sanitizer_finish_switch_fiber(m.scheduler_fake_stack, nullptr, nullptr);
}

void switch_to_scheduler() {
  Thread& thread = m.threads[m.current];
  __sanitizer_start_switch_fiber(&thread.fake_stack, m.scheduler_stack, m.scheduler_stack_bytes);
  m.scheduler = std::move(m.scheduler).resume();
  __sanitizer_finish_switch_fiber(thread.fake_stack, &m.scheduler_stack, &m.scheduler_stack_bytes);
}

boost::context::fiber run_threads(boost::context::fiber&& scheduler) {
  m.scheduler = std::move(scheduler);
  __sanitizer_finish_switch_fiber(nullptr, &m.scheduler_stack, &m.scheduler_stack_bytes);
  for (;;) {
    try {
      if (!m.unwinding) (*m.body)();
    } catch (const Unwind&) {
    } catch (...) {
      m.error = std::current_exception();
    }
    m.threads[m.current].state = State::kEnded;
    ++m.ended;
    switch_to_scheduler();
  }
}

void add_fiber() {
  boost::context::protected_fixedsize_stack allocator(kStackBytes);
  Thread thread;
  thread.stack = allocator.allocate();
  // Stacks that begin at different cache lines of a page are not all in the same sets of the cache.
  const size_t shift = m.threads.size() % 64 * 64;
  const boost::context::preallocated memory(static_cast<char*>(thread.stack.sp) - shift,
                                            thread.stack.size - shift, thread.stack);
  thread.fiber = boost::context::fiber(std::allocator_arg, memory, allocator, run_threads);
  m.threads.push_back(std::move(thread));
}

// ---- threads that wait for each other ----

std::string describe(int thread) {
  const std::string name = "thread " + std::to_string(thread);
  if (m.threads[thread].state == State::kEnded) return name + ", which has ended";
  const Place& place = m.threads[thread].place;
  const char* slash = std::strrchr(place.file, '/');
  return name + " at " + place.operation + " (" + (slash ? slash + 1 : place.file) + ":" +
         std::to_string(place.line) + ")";
}

[[noreturn]] void fail_to_meet(Kind kind, int thread, int other) {
  throw Error({kind, m.block, thread, other}, describe(thread) + " without " + describe(other));
}

int find(State state, int begin, int end) {
  for (int thread = begin; thread < end; ++thread) {
    if (m.threads[thread].state == state) return thread;
  }
  return kNobody;
}

// Nobody can run: who waits in a warp waits for one of its lanes, others for any thread.
[[noreturn]] void fail_stuck() {
  const int lane = find(State::kAtWarpOperation, 0, m.count);
  const bool in_warp = lane != kNobody;
  const int thread = in_warp ? lane : find(State::kAtBarrier, 0, m.count);
  int other = in_warp ? thread / kWarpSize * kWarpSize : 0;
  while (m.threads[other].state == m.threads[thread].state) ++other;
  fail_to_meet(in_warp ? Kind::kIncompleteWarpOperation : Kind::kDivergentBarrier, thread, other);
}

bool same(const char* a, const char* b) {
  return a == b || std::strcmp(a, b) == 0;
}

bool same(const Place& a, const Place& b) {
  return a.line == b.line && same(a.operation, b.operation) && same(a.file, b.file);
}

void make_ready(int begin, int end) {
  for (int thread = begin; thread < end; ++thread) {
    m.threads[thread].state = State::kReady;
    m.ready.push_back(thread);
  }
}

void wait() {
  switch_to_scheduler();
  if (m.unwinding) throw Unwind{};
}

}  // namespace

void barrier(const Place& place) {
  Thread& thread = m.threads[m.current];
  thread.place = place;
  if (m.at_barrier > 0 && !same(m.barrier_place, place)) {
    fail_to_meet(Kind::kDivergentBarrier, m.current, find(State::kAtBarrier, 0, m.count));
  }
  m.barrier_place = place;
  thread.state = State::kAtBarrier;
  if (++m.at_barrier == m.count) {
    m.at_barrier = 0;
    ++m.epoch;
    make_ready(0, m.count);
  }
  wait();
}

const uint64_t* exchange(uint64_t value, unsigned mask, const Place& place, bool orders_memory) {
  Thread& thread = m.threads[m.current];
  Warp& warp = m.warps[m.current / kWarpSize];
  const int begin = m.current - lane();
  thread.place = place;
  if (mask != 0xffffffff) {
    throw Error({Kind::kIncompleteWarpOperation, m.block, m.current},
                describe(m.current) + " with a mask of some lanes only");
  }
  if (warp.arrived > 0 && !same(warp.place, place)) {
    const int other = find(State::kAtWarpOperation, begin, begin + kWarpSize);
    fail_to_meet(Kind::kIncompleteWarpOperation, m.current, other);
  }
  warp.place = place;
  thread.state = State::kAtWarpOperation;
  uint64_t* values = warp.values[warp.set];
  values[lane()] = value;
  if (++warp.arrived == kWarpSize) {
    warp.arrived = 0;
    warp.set ^= 1;
    warp.epoch += orders_memory || m.warp_operations_order_memory;
    make_ready(begin, begin + kWarpSize);
  }
  wait();
  return values;
}

// ---- shared memory ----

SharedPlace declare_shared(const void* key, const char* name, int64_t count, int64_t item_bytes) {
  for (const auto& storage : m.shared) {
    if (storage->key == key) return {storage.get(), 0};
  }
  std::vector<unsigned char> data(count * item_bytes);
  std::vector<History> histories(count);
  m.shared.emplace_back(
      new SharedStorage{key, name, count, item_bytes, std::move(data), std::move(histories)});
  return {m.shared.back().get(), 0};
}

namespace {

// `action`: what the running thread does there, "reads" or "writes".
[[noreturn]] void fail(Kind kind, const SharedPlace& place, const char* action,
                       const std::string& why, int other = kNobody) {
  const char* array = place.storage->name;
  throw Error({kind, m.block, m.current, other, array, place.index},
              "thread " + std::to_string(m.current) + " " + action + " " + array + "[" +
                  std::to_string(place.index) + "], " + why);
}

History& history_of(const SharedPlace& place, const char* action) {
  const int64_t count = place.storage->count;
  if (place.index < 0 || place.index >= count) {
    fail(Kind::kSharedBounds, place, action, "which has " + std::to_string(count) + " elements");
  }
  return place.storage->histories[place.index];
}

Access now() {
  return {m.current, m.epoch, m.warps[m.current / kWarpSize].epoch};
}

void check_order(const SharedPlace& place, const char* action, const Access& other,
                 const char* other_action) {
  if (other.thread == m.current || other.block_epoch != m.epoch) return;
  const bool same_warp = other.thread / kWarpSize == m.current / kWarpSize;
  if (same_warp && other.warp_epoch != now().warp_epoch) return;
  fail(Kind::kSharedRace, place, action,
       "which thread " + std::to_string(other.thread) + " " + other_action +
           " with nothing to order the two",
       other.thread);
}

void note_read(History& history) {
  const Access access = now();
  Access& first = history.reads[0];
  const bool this_epoch = first.block_epoch == access.block_epoch;
  const bool same_warp = first.thread / kWarpSize == access.thread / kWarpSize;
  if (this_epoch && !same_warp) {
    history.foreign_read = access;
  } else if (this_epoch && first.warp_epoch == access.warp_epoch && first.thread != access.thread) {
    history.reads[1] = access;
  } else {
    first = access;
  }
}

}  // namespace

void read_shared(const SharedPlace& place, void* item) {
  History& history = history_of(place, "reads");
  if (history.write.thread == kNobody) {
    fail(Kind::kUninitialisedRead, place, "reads", "which no thread of the block has written");
  }
  check_order(place, "reads", history.write, "wrote");
  note_read(history);
  const SharedStorage& storage = *place.storage;
  std::memcpy(item, &storage.data[place.index * storage.item_bytes], storage.item_bytes);
}

void write_shared(const SharedPlace& place, const void* item) {
  History& history = history_of(place, "writes");
  check_order(place, "writes", history.write, "wrote");
  for (const Access& read : history.reads) check_order(place, "writes", read, "read");
  check_order(place, "writes", history.foreign_read, "read");
  history.write = now();
  SharedStorage& storage = *place.storage;
  std::memcpy(&storage.data[place.index * storage.item_bytes], item, storage.item_bytes);
}

// ---- blocks ----

namespace {

// Ends what runs, so that destructors run and every fiber is back at the top of its loop.
void unwind() {
  m.unwinding = true;
  for (int thread = 0; thread < m.count; ++thread) {
    if (m.threads[thread].state != State::kEnded) resume(thread);
  }
  m.unwinding = false;
  m.error = nullptr;
}

void schedule() {
  while (m.ended < m.count) {
    if (m.ready.empty()) fail_stuck();
    const auto drawn = static_cast<size_t>((m.random() >> 32) * m.ready.size() >> 32);
    std::swap(m.ready[drawn], m.ready.back());
    const int thread = m.ready.back();
    m.ready.pop_back();
    resume(thread);
    if (m.error) std::rethrow_exception(m.error);
  }
}

void run_block(int64_t block) {
  m.block = block;
  blockIdx = {static_cast<unsigned>(block), 0, 0};
  m.at_barrier = m.ended = 0;
  m.warps.assign(m.count / kWarpSize, Warp{});
  for (const auto& storage : m.shared) {
    std::fill(storage->histories.begin(), storage->histories.end(), History{});
  }
  m.ready.clear();
  make_ready(0, m.count);
  try {
    schedule();
  } catch (...) {
    unwind();
    throw;
  }
}

}  // namespace

void run(int64_t blocks, int threads, const std::function<void()>& body) {
  if (blocks < 1 || blocks > INT32_MAX || threads < kWarpSize || threads > kMaxThreads ||
      threads % kWarpSize != 0) {
    throw Error({Kind::kInvalidLaunch},
                std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads");
  }
  m.body = &body;
  m.count = threads;
  m.threads.reserve(kMaxThreads);  // fibers hold references
  while (static_cast<int>(m.threads.size()) < threads) add_fiber();
  m.shared.clear();
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  blockDim = {static_cast<unsigned>(threads), 1, 1};

  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), m.random);
  for (const int block : order) run_block(block);
}

void set_seed(uint64_t seed) {
  m.random.seed(seed);
}

void set_warp_operations_order_memory(bool ordered) {
  m.warp_operations_order_memory = ordered;
}

const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {
      "invalid launch",        "divergent barrier",          "incomplete warp operation",
      "race on shared memory", "shared index out of bounds", "uninitialised shared read",
  };
  return kNames[static_cast<int>(kind)];
}

Error::Error(const Fault& fault, const std::string& detail)
    : std::runtime_error(std::string(kind_name(fault.kind)) + ": " +
                         (fault.block < 0 ? "" : "block " + std::to_string(fault.block) + ": ") +
                         detail),
      Fault(fault) {}

}  // namespace emulator
