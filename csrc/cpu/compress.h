// Compression of one bucket on the CPU. Torch-free: raw pointers in, the caller brings the threads.
//
// 1. select()    per task, in parallel: residual = G; bin maxima; entries staged, no scale yet
// 2. assemble()  once: scales, admission, everything of the payload but entries and raw values
// 3. commit()    per task, in parallel: entries into the payload, sign(G) s off the residual
// copy_raw() may run at any time.
//
// With the layer scale 3 needs the mean over the whole segment: 1 cannot correct the residual.
#pragma once

#include <cstdint>
#include <vector>

#include "../adacomp.h"
#include "../layout.h"

namespace adacomp::cpu {

class Compressor {
 public:
  // grad: layout's elements of codec.grad_type. residual: float32, updated. payload: `capacity`
  // bytes, all written. counters: null, or int64 [segments, 2] to which entries sent and chunks
  // dropped are added.
  Compressor(const Layout& layout, const Codec& codec, const void* grad, float* residual,
             uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters, int64_t tasks);

  void select(int64_t task);
  void assemble();
  void commit(int64_t task);
  void copy_raw(int64_t begin, int64_t end);  // a range of the layout's raw elements

 private:
  struct ChunkResult {
    double sum_of_g_max;
    int64_t staged;     // offset of its range in its task's bytes
    int64_t bytes;      // of its range
    int64_t entries;    // elements selected
    bool any_gradient;  // some dW != 0
    bool non_finite;    // some r + dW is not finite
  };

  int64_t first_chunk_of(int64_t task) const;
  void select_chunk(int64_t index, std::vector<uint8_t>& staged);
  template <typename Entry>
  int64_t pack_bins(const Chunk& chunk, float* residual, const float* grad, ChunkResult& result,
                    uint8_t* range) const;
  void write_scales();
  float scale_of(int64_t segment) const;
  int64_t admit();
  template <typename Entry>
  void correct(const Chunk& chunk, const uint8_t* range, int64_t entries, float scale,
               float* residual) const;

  const Layout& layout_;
  const Codec codec_;
  const void* grad_;
  float* residual_;
  uint8_t* payload_;
  const int64_t capacity_;
  const int64_t step_;
  int64_t* counters_;
  const Offsets offsets_;
  std::vector<ChunkResult> results_;
  std::vector<std::vector<uint8_t>> staged_;  // per task: the ranges of its chunks
};

}  // namespace adacomp::cpu
