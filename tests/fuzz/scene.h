// What a fuzz input chooses before its payload bytes begin: layout, codec, ranks, step, capacity.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/cpu/compress.h"
#include "../../csrc/layout.h"

#define FUZZ_CHECK(condition, what)                                     \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::fprintf(stderr, "check failed: %s: %s\n", what, #condition); \
      std::abort();                                                     \
    }                                                                   \
  } while (false)

namespace fuzz {

using adacomp::Codec;
using adacomp::GradType;
using adacomp::Layout;
using adacomp::Segment;

// Faults that the harness can put in, to prove that it sees them; replay.cpp chooses.
enum class SelfTest {
  kOff,
  kShortPayload,     // the decoder gets one byte less than it is told
  kSkippedChunk,     // the last chunk is not decoded
  kWriteBeyond,      // one element after the gradient is written
  kMissedNan,        // a refused bucket is not filled with NaN
  kOtherSecondTime,  // the second decode differs in one bit
  kOtherValue,       // both differ in one bit from what the format says
  kResidualOff,      // one residual is not what was kept
};
#ifdef ADACOMP_FUZZ_SELF_TEST
inline SelfTest self_test = SelfTest::kOff;
#else
constexpr SelfTest self_test = SelfTest::kOff;
#endif

// The input's bytes in order, then zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}

  bool empty() const { return next_ == end_; }
  uint8_t byte() { return empty() ? 0 : *next_++; }
  uint32_t half() {
    const uint32_t low = byte();
    return low | static_cast<uint32_t>(byte()) << 8;
  }
  uint32_t word() {
    const uint32_t low = half();
    return low | half() << 16;
  }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

// Exactly `size` bytes of heap, so that ASan sees the first byte past them.
class HeapBlock {
 public:
  HeapBlock(int64_t size, uint8_t fill)
      : size_(size), bytes_(static_cast<uint8_t*>(std::malloc(std::max<int64_t>(size, 1)))) {
    FUZZ_CHECK(reinterpret_cast<uintptr_t>(bytes_) % adacomp::kAlignment == 0, "alignment");
    std::fill_n(bytes_, size, fill);
  }
  ~HeapBlock() { std::free(bytes_); }
  HeapBlock(const HeapBlock&) = delete;
  HeapBlock& operator=(const HeapBlock&) = delete;

  uint8_t* data() const { return bytes_; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  uint8_t* bytes_;
};

struct Scene {
  std::vector<Segment> segments;
  Layout layout{nullptr, 0};
  Codec codec{};
  int64_t world_size = 1;
  int64_t step = 0;
  int64_t capacity = 0;
  int64_t residual_elements = 0;
};

inline int64_t read_bin_size(Input& input) {
  constexpr int64_t kBinSizes[] = {0,   1,   2,    7,    50,   63,   64,   65,
                                   500, 513, 2048, 4095, 4096, 4097, 5000, 16383};
  return kBinSizes[input.byte() % 16];
}

// Ugly sizes around a bin and around a chunk, or any small one.
inline int64_t read_numel(Input& input, int64_t bin_size) {
  const int64_t bin = bin_size == 0 ? 1024 : bin_size;  // raw values are decoded 1024 at a time
  const int64_t chunk = adacomp::bins_per_chunk(bin) * bin;
  const uint32_t choice = input.byte();
  const int64_t numels[] = {
      0, 1, bin - 1, bin, bin + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + bin + 1};
  return choice < 9 ? numels[choice] : choice;
}

inline void read_segments(Input& input, Scene& scene) {
  const uint32_t choice = input.byte();
  const int count = static_cast<int>(choice % 6);
  // Seldom enough for the largest bin, mostly for one chunk of another size: a fast execution.
  const int64_t most = choice / 6 % 8 == 7 ? 20000 : 6000;
  int64_t elements = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t bin_size = read_bin_size(input);
    const int64_t numel = std::min(read_numel(input, bin_size), most - elements);
    scene.segments.push_back({elements, numel, bin_size, -1});
    elements += numel;
  }
  // Residuals lie in another order than the bucket.
  for (int i = count - 1; i >= 0; --i) {
    Segment& s = scene.segments[i];
    if (s.is_raw()) continue;
    s.residual_offset = scene.residual_elements;
    scene.residual_elements += s.numel;
  }
  scene.layout = Layout(scene.segments.data(), count);
}

// From the fixed bytes to a little more than the worst case.
inline int64_t read_capacity(Input& input, const Scene& scene) {
  const int64_t fixed = scene.layout.fixed_bytes();
  const int64_t worst = scene.layout.worst_case_bytes(scene.codec.bin_scales);
  const int64_t choice = input.byte();
  if (choice >= 254) return worst + (choice - 254) * 3 * adacomp::kAlignment;
  return fixed + adacomp::align_up((worst - fixed) * choice / 254);
}

inline Scene read_scene(Input& input) {
  constexpr float kFactors[] = {2.0f, 1.0f, 1.5f, 3.0f, 1e30f};
  Scene scene;
  const uint32_t choice = input.byte();
  scene.codec.grad_type = static_cast<GradType>(choice % 3);
  scene.codec.bin_scales = choice / 3 % 2 != 0;
  scene.codec.threshold_factor = kFactors[choice / 6 % 5];
  scene.world_size = 1 + input.byte() % 3;
  scene.step = input.word();
  scene.step |= static_cast<int64_t>(input.byte() % 2) << 32;
  read_segments(input, scene);
  scene.capacity = read_capacity(input, scene);
  return scene;
}

// ---- elements of a bucket of any dtype ----

inline int64_t element_bytes(GradType type) {
  return type == GradType::kFloat32 ? 4 : 2;
}
inline uint32_t all_bits(GradType type) {
  return type == GradType::kFloat32 ? 0xffffffffu : 0xffffu;
}
// Calls f with `grad` as a pointer to its storage type.
template <typename F>
auto with_storage(uint8_t* grad, GradType type, F&& f) {
  if (type == GradType::kFloat32) return f(reinterpret_cast<float*>(grad));
  if (type == GradType::kFloat16) return f(reinterpret_cast<adacomp::Half*>(grad));
  return f(reinterpret_cast<adacomp::BFloat16*>(grad));
}
inline uint32_t get_bits(const uint8_t* grad, GradType type, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, grad + element_bytes(type) * i, element_bytes(type));
  return bits;
}
inline void put_bits(uint8_t* grad, GradType type, int64_t i, uint32_t bits) {
  std::memcpy(grad + element_bytes(type) * i, &bits, element_bytes(type));
}
inline float get_value(uint8_t* grad, GradType type, int64_t i) {
  return with_storage(grad, type, [i](auto* values) { return adacomp::to_float(values[i]); });
}
inline void put_value(uint8_t* grad, GradType type, int64_t i, float value) {
  with_storage(grad, type, [i, value](auto* values) {
    values[i] = adacomp::from_float<std::remove_pointer_t<decltype(values)>>(value);
  });
}
inline uint32_t nan_bits(GradType type) {
  return type == GradType::kFloat32   ? adacomp::kNanBits
         : type == GradType::kFloat16 ? 0x7e00u
                                      : adacomp::kNanBits >> 16;
}
// A NaN that decoding never writes.
inline uint32_t sentinel_bits(GradType type) {
  return nan_bits(type) | 0x15;
}

// ---- compression, as the op does it, in any number of tasks ----

inline void compress(const Scene& scene, int64_t step, const uint8_t* grad, float* residual,
                     uint8_t* payload, int64_t* counters, int64_t tasks) {
  std::vector<adacomp::cpu::Staging> staging(tasks);
  adacomp::cpu::Compressor compressor(scene.layout, scene.codec, grad, residual, payload,
                                      scene.capacity, step, counters, staging);
  for (int64_t task = tasks - 1; task >= 0; --task) compressor.select(task);
  compressor.assemble();
  for (int64_t task = tasks - 1; task >= 0; --task) compressor.commit(task);
  const int64_t raw = scene.layout.raw_elements();
  compressor.copy_raw(raw / tasks, raw);
  compressor.copy_raw(0, raw / tasks);
}

}  // namespace fuzz
