// Blocks of CUDA threads on the CPU, for tests of the kernels in csrc/cuda without a GPU.
//
// Every thread of a block is a fiber. Fibers switch only where threads wait for each other
// (barrier, syncwarp, shuffle, ballot), in an order drawn from a seed; blocks run one after
// another, in a drawn order too. Threads that do not meet where they must, and accesses to shared
// memory that are out of bounds, uninitialised or unordered between threads, throw emulator::Error
// out of launch(). Global memory is plain memory: AddressSanitizer watches it. One launch at a
// time.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace emulator {

constexpr int kNobody = -1;

enum class Kind {
  kInvalidLaunch,
  kDivergentBarrier,         // a thread ended or waits elsewhere while others wait at a barrier
  kIncompleteWarpOperation,  // not all lanes of a warp arrive at the same one
  kSharedRace,               // accesses of two threads, one a write, that nothing orders
  kSharedBounds,
  kUninitialisedRead,  // of shared memory that no thread of this block has written
};

const char* kind_name(Kind kind);

struct Fault {
  Kind kind;
  int64_t block = -1;
  int thread = kNobody;
  int other_thread = kNobody;  // the one it conflicts with, or waits for
  std::string array = "";
  int64_t index = -1;
};

// what() names all of the fault.
class Error : public std::runtime_error, public Fault {
 public:
  Error(const Fault& fault, const std::string& detail);
};

void set_seed(uint64_t seed);

// Whether shuffles and ballots order the memory accesses of a warp's lanes, as __syncwarp does;
// true at first. CUDA's guide promises it of __syncwarp only: false holds kernels to that.
void set_warp_operations_order_memory(bool ordered);

void run(int64_t blocks, int threads, const std::function<void()>& body);

// ---- what threads wait for ----

// The arguments are those of the call in the kernel: two calls are the same if they are one line.
struct Place {
  const char* operation;
  const char* file;
  int line;
};

void barrier(const Place& place);

// Waits for all lanes of the warp; returns the 32 values they brought.
const uint64_t* exchange(uint64_t value, unsigned mask, const Place& place,
                         bool orders_memory = false);

inline int lane();

// The value of lane `source`, or one's own if there is no such lane.
template <typename T>
T shuffle(T value, int source, unsigned mask, const Place& place) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t* all = exchange(bits, mask, place);
  bits = all[source < 0 || source > 31 ? lane() : source];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- shared memory ----

// Who accessed an element of shared memory, and when.
struct Access {
  int thread = kNobody;
  uint32_t block_epoch = 0;
  uint32_t warp_epoch = 0;
};

// An element's last write, and of the reads two lanes of one warp at its latest epoch and a thread
// of another warp: a write conflicts with any of all the reads exactly if it conflicts with one of
// these. Older entries stay, for they conflict with nothing.
struct History {
  Access write;
  Access reads[2];
  Access foreign_read;
};

// An array: one per block and place where kernels declare it.
struct SharedStorage {
  const void* key;
  const char* name;
  int64_t count;
  int64_t item_bytes;
  std::vector<unsigned char> data;
  std::vector<History> histories;
};

struct SharedPlace {
  SharedStorage* storage;
  int64_t index;
};

SharedPlace declare_shared(const void* key, const char* name, int64_t count, int64_t item_bytes);
void read_shared(const SharedPlace& place, void* item);
void write_shared(const SharedPlace& place, const void* item);

// One element, to be read or written at once: kept in a variable, it would be read too late. Hence
// every operation is for temporaries only.
template <typename T>
class SharedElement {
 public:
  explicit SharedElement(const SharedPlace& place) : place_(place) {}

  operator T() && { return read(); }
  T operator=(T value) && { return write(value); }
  T operator=(SharedElement&& other) && { return write(other.read()); }

  template <typename U>
  T operator+=(U value) && {
    return write(static_cast<T>(read() + static_cast<U&&>(value)));
  }
  template <typename U>
  T operator-=(U value) && {
    return write(static_cast<T>(read() - static_cast<U&&>(value)));
  }
  template <typename U>
  T operator|=(U value) && {
    return write(static_cast<T>(read() | static_cast<U&&>(value)));
  }
  template <typename U>
  T operator&=(U value) && {
    return write(static_cast<T>(read() & static_cast<U&&>(value)));
  }
  template <typename U>
  T operator^=(U value) && {
    return write(static_cast<T>(read() ^ static_cast<U&&>(value)));
  }

 private:
  T read() const {
    T value;
    read_shared(place_, &value);
    return value;
  }
  T write(T value) const {
    write_shared(place_, &value);
    return value;
  }

  SharedPlace place_;
};

}  // namespace emulator

// ---- the part of CUDA that device.cuh lists ----

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct EmulatedIndex {
  unsigned x, y, z;
};
extern EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

inline int emulator::lane() {
  return static_cast<int>(threadIdx.x % 32);
}

namespace adacomp::cuda {

using Stream = void*;
enum Error { kSuccess };

template <typename T>
class shared_array {
 public:
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);

  explicit shared_array(const emulator::SharedPlace& first) : first_(first) {}

  emulator::SharedElement<T> operator[](int64_t index) const {
    return emulator::SharedElement<T>({first_.storage, first_.index + index});
  }
  shared_array operator+(int64_t count) const {
    return shared_array({first_.storage, first_.index + count});
  }

 private:
  emulator::SharedPlace first_;
};

template <typename... Params>
Error launch(void (*kernel)(Params...), int64_t blocks, int threads, Stream,
             std::decay_t<Params>... args) {
  static_assert((std::is_trivially_copyable_v<Params> && ...));
  emulator::run(blocks, threads, [&] { kernel(args...); });
  return kSuccess;
}

inline Error set_zero(void* pointer, int64_t bytes, Stream) {
  std::memset(pointer, 0, static_cast<size_t>(bytes));
  return kSuccess;
}

}  // namespace adacomp::cuda

// Last parameters of the functions below: where the kernel calls them.
#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_PLACE) {
  emulator::barrier({"__syncthreads", file, line});
}

inline void __syncwarp(unsigned mask, EMULATOR_PLACE) {
  emulator::exchange(0, mask, {"__syncwarp", file, line}, /*orders_memory=*/true);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_PLACE) {
  const uint64_t* all = emulator::exchange(predicate != 0, mask, {"__ballot_sync", file, line});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}

// Offsets use 5 bits, as the instruction does.
#define EMULATOR_SHUFFLES(T)                                                          \
  inline T __shfl_sync(unsigned mask, T value, int lane, EMULATOR_PLACE) {            \
    return emulator::shuffle(value, lane & 31, mask, {"__shfl_sync", file, line});    \
  }                                                                                   \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, EMULATOR_PLACE) {   \
    const int source = emulator::lane() - static_cast<int>(delta & 31);               \
    return emulator::shuffle(value, source, mask, {"__shfl_up_sync", file, line});    \
  }                                                                                   \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, EMULATOR_PLACE) { \
    const int source = emulator::lane() + static_cast<int>(delta & 31);               \
    return emulator::shuffle(value, source, mask, {"__shfl_down_sync", file, line});  \
  }                                                                                   \
  inline T __shfl_xor_sync(unsigned mask, T value, int bits, EMULATOR_PLACE) {        \
    const int source = emulator::lane() ^ (bits & 31);                                \
    return emulator::shuffle(value, source, mask, {"__shfl_xor_sync", file, line});   \
  }
EMULATOR_SHUFFLES(int)
EMULATOR_SHUFFLES(unsigned)
EMULATOR_SHUFFLES(float)
EMULATOR_SHUFFLES(double)
#undef EMULATOR_SHUFFLES
#undef EMULATOR_PLACE

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}

#define EMULATOR_ATOMIC(name, T, result) \
  inline T name(T* address, T value) {   \
    const T old = *address;              \
    *address = result;                   \
    return old;                          \
  }
#define EMULATOR_ATOMICS(T)                                \
  EMULATOR_ATOMIC(atomicAdd, T, old + value)               \
  EMULATOR_ATOMIC(atomicMin, T, old < value ? old : value) \
  EMULATOR_ATOMIC(atomicMax, T, old > value ? old : value) \
  EMULATOR_ATOMIC(atomicOr, T, old | value)
EMULATOR_ATOMICS(unsigned)
EMULATOR_ATOMICS(unsigned long long)
#undef EMULATOR_ATOMICS
#undef EMULATOR_ATOMIC
