// A bucket that the CPU and the emulated CUDA kernels compress and decode side by side: every step
// throws unless payloads, residuals, counters, decoded gradients and status are equal, bit for bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/cuda/bucket.cuh"
#include "../../csrc/layout.h"

using namespace adacomp;  // NOLINT: all of it is under test

inline std::mt19937 rng;  // seeded by the case

inline int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

// `bytes` of heap memory that end where the allocation does and begin `shift` bytes past a multiple
// of 16; dirty, and with a mark before the beginning.
class Memory {
 public:
  explicit Memory(int64_t bytes, int64_t shift = 0)
      : bytes_(bytes), shift_(shift), data_(new uint8_t[shift + bytes + (shift + bytes == 0)]) {
    std::memset(data_.get(), 0xa5, shift + bytes);
  }
  template <typename T = uint8_t>
  T* get() const {
    return reinterpret_cast<T*>(data_.get() + shift_);
  }
  void fill(const Memory& other) { std::memcpy(get(), other.get(), bytes_); }
  int64_t bytes() const { return bytes_; }

  // Throws, naming the first byte that differs or that was written before the beginning.
  void expect_equal(const Memory& other, const std::string& what) const {
    for (int64_t i = 0; i < shift_; ++i) {
      if (data_[i] != 0xa5) throw std::runtime_error(what + ": written before its beginning");
    }
    const auto at = std::mismatch(get(), get() + bytes_, other.get()).first - get();
    if (at == bytes_) return;
    throw std::runtime_error(what + ": byte " + std::to_string(at) + " of " +
                             std::to_string(bytes_) + " is " + std::to_string(get()[at]) +
                             " instead of " + std::to_string(other.get()[at]));
  }

 private:
  int64_t bytes_;
  int64_t shift_;
  std::unique_ptr<uint8_t[]> data_;
};

// ---- buckets ----

struct Part {
  int64_t numel;
  int64_t bin_size;  // 0: raw
};

struct Options {
  GradType type = GradType::kFloat32;
  bool bin_scales = false;
  float factor = 2.0f;
  int64_t world_size = 1;
  double room = 1.0;           // of the worst case
  int64_t grad_shift = 0;      // elements
  int64_t residual_shift = 0;  // likewise
  bool counts = true;
};

// kTiny: sums of g_max that round to another float32 if they are added in another order.
enum Kind { kNormal, kTies, kRare, kWide, kNonFinite, kZero, kCancel, kDense, kTiny, kKinds };

// 1, half of what is between 1 and the next float32, or half of that for double. Mostly 0.
inline float tiny_value(int64_t count) {
  if (draw(1, count) == 1) return 1.0f;
  if (draw(1, count) == 1) return 0x1p-24f;
  return draw(1, 64) == 1 ? 0x1p-53f : 0.0f;
}

constexpr GradType kTypes[] = {GradType::kFloat32, GradType::kFloat16, GradType::kBFloat16};
constexpr float kFactors[] = {2.0f, 1.0f, 3.0f};

// Takes turns, so that every combination comes up without running all of them for every bucket.
inline Options options_of(int64_t turn) {
  Options o;
  o.type = kTypes[turn % 3];
  o.bin_scales = turn / 3 % 2 != 0;
  o.factor = kFactors[turn / 6 % 3];
  o.world_size = draw(1, 3);
  o.grad_shift = draw(0, 7);
  o.residual_shift = draw(0, 3);
  return o;
}

// A bucket of all ranks, on both devices. What is a pair is {CPU, CUDA}.
class Bucket {
 public:
  Bucket(const std::vector<Part>& parts, const Options& options);

  const Layout& layout() const { return layout_; }
  cuda::DeviceLayout device_layout() const;
  int64_t capacity() const { return capacity_; }
  // The CPU's, which both decode.
  uint8_t* payload(int64_t rank) { return payloads_[0].get() + rank * capacity_; }
  int64_t payload_bytes() const { return payloads_[0].bytes(); }

  // Compresses and decodes on all ranks, compared.
  void step(Kind kind, int64_t step);
  // Decodes on both, compared; returns the status. `before`: what the status word holds.
  int64_t decode(int64_t step, int64_t before);
  // Puts back what a rank's payload took off its residual, compared; nothing if it is malformed.
  void restore(int64_t rank, int64_t step, bool condition);

 private:
  void compress(Kind kind, int64_t rank, int64_t step);
  Memory make_gradient(Kind kind, int64_t rank) const;

  std::vector<Segment> segments_;
  Layout layout_;
  Options options_;
  Codec codec_;
  std::vector<int64_t> first_chunk_, first_raw_;
  int64_t capacity_;
  std::vector<Memory> payloads_;
  std::vector<Memory> residuals_[2];
};
