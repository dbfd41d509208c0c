// Compression of one bucket on the CPU. Torch-free: raw pointers in, the caller brings the threads.
//
// 1. select()    per task, in parallel: residual = G, entries staged; with bin scales, which wait
//                for nothing, also residual -= sign(G) s, with what G was kept
// 2. assemble()  once: scales, admission, everything of the payload but entries and raw values
// 3. commit()    per task, in parallel: entries into the payload; with the layer scale, the mean
//                over the whole segment, residual -= sign(G) s; with bin scales the kept G back
//                into the residual where the entries are not sent after all
// copy_raw() may run at any time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../adacomp.h"
#include "../layout.h"
#include "arena.h"
#include "entries.h"
#include "kernels.h"

namespace adacomp::cpu {

// What a task stages. Reused from call to call, so that no call waits for fresh pages.
struct Staging {
  Arena<uint8_t> ranges;   // of its chunks
  Arena<float> kept;       // with bin scales: G of every entry, as it was before the correction
  Arena<float> converted;  // some bins' gradients as float32
  Arena<SendingBin> bins;  // one chunk's

  void clear() {
    ranges.clear();
    kept.clear();
  }

  // Gives back what a step took that selected far more than fits into a payload of `bytes`.
  void trim(int64_t bytes) {
    if (std::max(ranges.capacity(), kept.capacity()) > 2 * bytes + kLeastKept) *this = Staging();
  }
  static constexpr int64_t kLeastKept = 64 * 1024;
};

class Compressor {
 public:
  // grad: layout's elements of codec.grad_type. residual: float32, updated. payload: `capacity`
  // bytes, all written. counters: null, or int64 [segments, 2] to which entries sent and chunks
  // dropped are added. staging: one for each task; nobody else's until commit() has returned.
  Compressor(const Layout& layout, const Codec& codec, const void* grad, float* residual,
             uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters,
             std::vector<Staging>& staging);

  void select(int64_t task);
  void assemble();
  void commit(int64_t task);
  void copy_raw(int64_t begin, int64_t end);  // a range of the layout's raw elements

 private:
  struct ChunkResult {
    double sum_of_g_max;
    int64_t staged;     // offset of its range in its task's ranges
    int64_t kept;       // offset of its elements in its task's kept
    int32_t bytes;      // of its range
    int32_t stored;     // entries in it, those for "nothing" too
    int32_t selected;   // elements selected
    bool any_gradient;  // some dW != 0
    bool non_finite;    // some r + dW is not finite
    bool sent;          // in the payload
  };

  // Where the bins of a chunk are packed to.
  template <typename Entry>
  struct Bins {
    Entry* out;
    uint8_t* code;   // of the next bin, with bin scales
    int64_t silent;  // entries for "nothing"
    LaneSum sum_of_g_max;
  };

  int64_t first_chunk_of(int64_t task) const;
  float* residual_of(const Chunk& chunk) const;
  template <typename Entry>
  void pack(const Chunk& chunk, ChunkResult& result, Staging& staging) const;
  template <typename Entry>
  void pack_bin(float* residual, const float* grad, int64_t n, ChunkResult& result,
                Bins<Entry>& packed) const;
  template <typename Entry>
  void correct(const Chunk& chunk, const uint8_t* codes, const Entry* entries, ChunkResult& result,
               Staging& staging) const;
  template <typename Entry>
  void put_back(const Chunk& chunk, const uint8_t* codes, const Entry* entries,
                const ChunkResult& result, Staging& staging) const;
  void write_scales();
  float scale_of(int64_t segment) const;
  int64_t admit();
  void prefetch_residual(int64_t index, Staging& staging) const;
  template <typename Entry>
  void commit_chunk(const Chunk& chunk, const ChunkResult& result, Staging& staging, int64_t index);

  const Layout& layout_;
  const Codec codec_;
  const BinScales scale_of_code_;
  const Kernels& kernels_;
  const void* grad_;
  float* residual_;
  uint8_t* payload_;
  const int64_t capacity_;
  const int64_t step_;
  int64_t* counters_;
  const Offsets offsets_;
  std::vector<ChunkResult> results_;
  std::vector<Staging>& staging_;
};

}  // namespace adacomp::cpu
