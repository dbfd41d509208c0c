#include "compress.h"

#include <cmath>
#include <cstring>

#include "gradient.h"
#include "multiarch.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kSelectedBlock = 64;

// What one pass over a bin finds.
struct BinSummary {
  uint32_t g_max_bits;     // max over abs_bits(G): not finite if any G is not
  uint32_t gradient_bits;  // 0 iff all dW are zero
};

ADACOMP_MULTIARCH BinSummary summarize(const float* __restrict residual,
                                       const float* __restrict grad, int64_t n) {
  uint32_t g_max = 0;
  uint32_t gradient = 0;
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t g = abs_bits(sum_gradient(residual[j], grad[j]));
    g_max = g > g_max ? g : g_max;
    gradient |= abs_bits(grad[j]);
  }
  return {g_max, gradient};
}

ADACOMP_MULTIARCH void accumulate(float* __restrict residual, const float* __restrict grad,
                                  int64_t n) {
  for (int64_t j = 0; j < n; ++j) residual[j] = sum_gradient(residual[j], grad[j]);
}

void accumulate_finite(float* __restrict residual, const float* __restrict grad, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    const float g = sum_gradient(residual[j], grad[j]);
    if (finite_bits(abs_bits(g))) residual[j] = g;
  }
}

// residual = G, selected[j] = 1 where the element is sent.
ADACOMP_MULTIARCH void accumulate_and_select(float* __restrict residual,
                                             const float* __restrict grad, int64_t n, float g_max,
                                             float weight, uint8_t* __restrict selected) {
  for (int64_t j = 0; j < n; ++j) {
    const float g = sum_gradient(residual[j], grad[j]);
    residual[j] = g;
    selected[j] = selects(g, probe(g, grad[j], weight), g_max);
  }
}

// One bit per selected[0, 64) != 0, of which each is 0 or 1.
uint64_t bit_mask(const uint8_t* selected) {
  uint64_t mask = 0;
  for (int byte = 0; byte < 8; ++byte) {
    uint64_t eight;
    std::memcpy(&eight, selected + 8 * byte, 8);
    mask |= (eight * 0x0102040810204080u >> 56) << (8 * byte);
  }
  return mask;
}

// Packs the selected elements of a bin in index order; selected is 0 from n to a multiple of 64.
template <typename Entry>
Entry* pack(const uint8_t* selected, const float* g, int64_t n, Entry* out) {
  for (int64_t j = 0; j < n; j += kSelectedBlock) {
    for (uint64_t mask = bit_mask(selected + j); mask != 0; mask &= mask - 1) {
      const int64_t index = j + __builtin_ctzll(mask);
      *out++ = static_cast<Entry>(make_entry(index, std::signbit(g[index])));
    }
  }
  return out;
}

}  // namespace

Compressor::Compressor(const Layout& layout, const Codec& codec, const void* grad, float* residual,
                       uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters,
                       int64_t tasks)
    : layout_(layout),
      codec_(codec),
      grad_(grad),
      residual_(residual),
      payload_(payload),
      capacity_(capacity),
      step_(step),
      counters_(counters),
      offsets_(layout.offsets()),
      results_(layout.chunks()),
      staged_(tasks) {}

int64_t Compressor::first_chunk_of(int64_t task) const {
  return layout_.chunks() * task / static_cast<int64_t>(staged_.size());
}

void Compressor::select(int64_t task) {
  for (int64_t i = first_chunk_of(task); i < first_chunk_of(task + 1); ++i) {
    select_chunk(i, staged_[task]);
  }
}

void Compressor::select_chunk(int64_t index, std::vector<uint8_t>& staged) {
  const Chunk chunk = layout_.chunk(index);
  const Segment& segment = layout_.segment(chunk.segment);
  thread_local std::vector<float> converted;
  thread_local std::vector<uint8_t> range;
  converted.resize(chunk.elements);
  range.resize(worst_range_bytes(chunk.elements, chunk.bins, segment.bin_size, codec_.bin_scales));
  const float* grad =
      load_gradient(grad_, codec_.grad_type, segment.bucket_offset + chunk.first_element,
                    chunk.elements, converted.data());
  float* residual = residual_ + segment.residual_offset + chunk.first_element;
  ChunkResult& result = results_[index];
  result.staged = static_cast<int64_t>(staged.size());
  result.bytes = entry_bytes(segment.bin_size) == 1
                     ? pack_bins<uint8_t>(chunk, residual, grad, result, range.data())
                     : pack_bins<uint16_t>(chunk, residual, grad, result, range.data());
  staged.insert(staged.end(), range.data(), range.data() + result.bytes);
}

// Returns the bytes of the range.
template <typename Entry>
int64_t Compressor::pack_bins(const Chunk& chunk, float* residual, const float* grad,
                              ChunkResult& result, uint8_t* range) const {
  const int64_t bin_size = layout_.segment(chunk.segment).bin_size;
  const float weight = codec_.threshold_factor - 1.0f;
  const int64_t codes = codes_bytes(chunk.bins, codec_.bin_scales);
  auto* const entries = reinterpret_cast<Entry*>(range + codes);
  Entry* out = entries;
  LaneSum sum;
  alignas(kSelectedBlock) uint8_t selected[align_up(kMaxBinSize, kSelectedBlock)];
  std::memset(range, 0, codes);
  for (int64_t b = 0, j = 0; b < chunk.bins; ++b, j += bin_size) {
    const int64_t n = std::min(bin_size, chunk.elements - j);
    const BinSummary bin = summarize(residual + j, grad + j, n);
    result.any_gradient |= bin.gradient_bits != 0;
    if (!finite_bits(bin.g_max_bits)) {
      accumulate_finite(residual + j, grad + j, n);
      result.non_finite = true;
      continue;
    }
    const float g_max = bits_float(bin.g_max_bits);
    sum.add(g_max);
    const uint32_t code = codec_.bin_scales ? bin_code(g_max) : 0;
    const bool silent = bin.g_max_bits == 0 ||
                        (codec_.bin_scales &&
                         (bin.gradient_bits == 0 || bin_scale(code, codec_.grad_type) == 0.0f));
    Entry* const first = out;
    if (silent) {
      accumulate(residual + j, grad + j, n);
    } else {
      std::memset(selected + (n - 1) / kSelectedBlock * kSelectedBlock, 0, kSelectedBlock);
      accumulate_and_select(residual + j, grad + j, n, g_max, weight, selected);
      out = pack(selected, residual + j, n, out);
    }
    if (out != first) {
      out[-1] |= kLastInBin;
      if (codec_.bin_scales) range[b] = static_cast<uint8_t>(code);
    } else if (!codec_.bin_scales) {
      *out++ = static_cast<Entry>(nothing_entry(sizeof(Entry)));
      --result.entries;
    }
  }
  result.entries += out - entries;
  result.sum_of_g_max = sum.total();
  if (sizeof(Entry) == 1 && (out - entries) % 2 != 0) *out++ = 0;
  return codes + (out - entries) * static_cast<int64_t>(sizeof(Entry));
}

float Compressor::scale_of(int64_t segment) const {
  LaneSum sum;
  bool any_gradient = false;
  bool any_entry = false;
  for (int64_t i = layout_.first_chunk(segment); i < layout_.first_chunk(segment + 1); ++i) {
    const ChunkResult& chunk = results_[i];
    if (chunk.non_finite) return bits_float(kNanBits);
    sum.add(chunk.sum_of_g_max);
    any_gradient |= chunk.any_gradient;
    any_entry |= chunk.entries > 0;
  }
  if (!any_gradient) return 0.0f;  // raw and empty segments too
  if (codec_.bin_scales) return any_entry ? 1.0f : 0.0f;
  return segment_scale(sum.total(), num_bins(layout_.segment(segment)), codec_.grad_type);
}

void Compressor::write_scales() {
  auto* const scales = reinterpret_cast<float*>(payload_ + offsets_.scales);
  std::memset(scales, 0, offsets_.table - offsets_.scales);
  for (int64_t i = 0; i < layout_.segments(); ++i) {
    scales[i] = scale_of(i);
    if (scales[i] > 0.0f) continue;
    for (int64_t c = layout_.first_chunk(i); c < layout_.first_chunk(i + 1); ++c) {
      results_[c].bytes = 0;
      results_[c].entries = 0;
    }
  }
}

// Drops chunks until the rest fits; returns the bytes of all ranges before that.
int64_t Compressor::admit() {
  const int64_t chunks = layout_.chunks();
  int64_t needed = 0;
  for (const ChunkResult& chunk : results_) needed += chunk.bytes;
  int64_t budget = capacity_ - offsets_.entries;
  if (needed <= budget) return needed;
  const int64_t first = first_admitted_chunk(step_, chunks);
  bool full = false;
  for (int64_t k = 0; k < chunks; ++k) {
    const int64_t index = first + k < chunks ? first + k : first + k - chunks;
    ChunkResult& chunk = results_[index];
    full |= chunk.bytes > budget;
    if (!full) {
      budget -= chunk.bytes;
    } else if (chunk.bytes > 0) {
      if (counters_ != nullptr) ++counters_[2 * layout_.chunk(index).segment + 1];
      chunk.bytes = 0;
      chunk.entries = 0;
    }
  }
  return needed;
}

void Compressor::assemble() {
  write_scales();
  const int64_t needed = admit();
  auto* const table = reinterpret_cast<uint32_t*>(payload_ + offsets_.table);
  std::memset(table, 0, offsets_.raw - offsets_.table);
  int64_t end = 0;
  for (int64_t segment = 0; segment < layout_.segments(); ++segment) {
    for (int64_t i = layout_.first_chunk(segment); i < layout_.first_chunk(segment + 1); ++i) {
      table[i] = static_cast<uint32_t>(end);
      end += results_[i].bytes;
      if (counters_ != nullptr) counters_[2 * segment] += results_[i].entries;
    }
  }
  table[layout_.chunks()] = static_cast<uint32_t>(end);
  const int64_t raw_end = offsets_.raw + 4 * layout_.raw_elements();
  std::memset(payload_ + raw_end, 0, offsets_.entries - raw_end);
  const int64_t used = offsets_.entries + end;
  std::memset(payload_ + used, 0, capacity_ - used);
  const Header header =
      make_header(codec_, layout_.hash(codec_), step_, offsets_.entries + needed, used);
  std::memcpy(payload_, &header, sizeof header);
}

void Compressor::commit(int64_t task) {
  const auto* const table = reinterpret_cast<const uint32_t*>(payload_ + offsets_.table);
  const auto* const scales = reinterpret_cast<const float*>(payload_ + offsets_.scales);
  for (int64_t i = first_chunk_of(task); i < first_chunk_of(task + 1); ++i) {
    if (results_[i].bytes == 0) continue;
    uint8_t* const range = payload_ + offsets_.entries + table[i];
    std::memcpy(range, staged_[task].data() + results_[i].staged, results_[i].bytes);
    const Chunk chunk = layout_.chunk(i);
    const Segment& segment = layout_.segment(chunk.segment);
    float* residual = residual_ + segment.residual_offset + chunk.first_element;
    if (entry_bytes(segment.bin_size) == 1) {
      correct<uint8_t>(chunk, range, results_[i].entries, scales[chunk.segment], residual);
    } else {
      correct<uint16_t>(chunk, range, results_[i].entries, scales[chunk.segment], residual);
    }
  }
}

template <typename Entry>
void Compressor::correct(const Chunk& chunk, const uint8_t* range, int64_t entries, float scale,
                         float* residual) const {
  const int64_t bin_size = layout_.segment(chunk.segment).bin_size;
  const auto* entry =
      reinterpret_cast<const Entry*>(range + codes_bytes(chunk.bins, codec_.bin_scales));
  // A loop over entries, not over bins: how many a bin has is hard to predict.
  const uint8_t* code = range;
  while (entries > 0) {
    if (codec_.bin_scales) {
      for (; *code == 0; ++code) residual += bin_size;
      scale = bin_scale(*code, codec_.grad_type);
    } else if (*entry == nothing_entry(sizeof(Entry))) {
      residual += bin_size;
      ++entry;
      continue;
    }
    float& r = residual[entry_index(*entry)];
    r = corrected(r, scale, entry_negative(*entry));
    residual += entry_last(*entry) ? bin_size : 0;
    code += entry_last(*entry);
    ++entry;
    --entries;
  }
}

void Compressor::copy_raw(int64_t begin, int64_t end) {
  auto* const raw = reinterpret_cast<float*>(payload_ + offsets_.raw);
  layout_.for_each_raw_run(begin, end, [&](int64_t offset, int64_t target, int64_t length) {
    const float* values = load_gradient(grad_, codec_.grad_type, offset, length, raw + target);
    if (values != raw + target) std::memcpy(raw + target, values, 4 * length);
  });
}

}  // namespace adacomp::cpu
