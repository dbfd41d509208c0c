#include "compress.h"

#include <algorithm>
#include <cstring>

#include "gradient.h"
#include "kernels.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kConvertedElements = 512;

void accumulate(float* __restrict residual, const float* __restrict grad, int64_t n) {
  for (int64_t j = 0; j < n; ++j) residual[j] = sum_gradient(residual[j], grad[j]);
}

void accumulate_finite(float* __restrict residual, const float* __restrict grad, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    const float g = sum_gradient(residual[j], grad[j]);
    if (finite_bits(abs_bits(g))) residual[j] = g;
  }
}

uint8_t* select(const Kernels& k, float* residual, const float* grad, int64_t n, float g_max,
                float weight, uint8_t* out) {
  return k.select8(residual, grad, n, g_max, weight, out);
}

uint16_t* select(const Kernels& k, float* residual, const float* grad, int64_t n, float g_max,
                 float weight, uint16_t* out) {
  return k.select16(residual, grad, n, g_max, weight, out);
}

}  // namespace

Compressor::Compressor(const Layout& layout, const Codec& codec, const void* grad, float* residual,
                       uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters,
                       std::vector<Staging>& staging)
    : layout_(layout),
      codec_(codec),
      scale_of_code_(codec.grad_type),
      kernels_(kernels()),
      grad_(grad),
      residual_(residual),
      payload_(payload),
      capacity_(capacity),
      step_(step),
      counters_(counters),
      offsets_(layout.offsets()),
      results_(layout.chunks()),
      staging_(staging) {}

int64_t Compressor::first_chunk_of(int64_t task) const {
  return layout_.chunks() * task / static_cast<int64_t>(staging_.size());
}

float* Compressor::residual_of(const Chunk& chunk) const {
  return residual_ + layout_.segment(chunk.segment).residual_offset + chunk.first_element;
}

void Compressor::select(int64_t task) {
  Staging& staging = staging_[task];
  staging.clear();
  for (int64_t i = first_chunk_of(task); i < first_chunk_of(task + 1); ++i) {
    const Chunk chunk = layout_.chunk(i);
    with_entry_type(layout_.segment(chunk.segment).bin_size,
                    [&](auto entry) { pack<decltype(entry)>(chunk, results_[i], staging); });
  }
}

template <typename Entry>
void Compressor::pack(const Chunk& chunk, ChunkResult& result, Staging& staging) const {
  const Segment& segment = layout_.segment(chunk.segment);
  const int64_t bin_size = segment.bin_size;
  const int64_t codes = codes_bytes(chunk.bins, codec_.bin_scales);
  uint8_t* const range = staging.ranges.reserve(
      worst_range_bytes(chunk.elements, chunk.bins, bin_size, codec_.bin_scales) + kEntrySlack);
  auto* const entries = reinterpret_cast<Entry*>(range + codes);
  float* const residual = residual_of(chunk);
  // Several short bins at a time: few calls, and what was converted is still in the first cache.
  const int64_t block = std::max<int64_t>(1, kConvertedElements / bin_size) * bin_size;
  float* const converted = staging.converted.reserve(block);
  Bins<Entry> packed{entries, range, 0, {}};
  std::memset(range, 0, codes);
  for (int64_t first = 0; first < chunk.elements; first += block) {
    const int64_t end = std::min(first + block, chunk.elements);
    const float* grad =
        load_gradient(grad_, codec_.grad_type, segment.bucket_offset + chunk.first_element + first,
                      end - first, converted);
    for (int64_t j = first; j < end; j += bin_size, grad += bin_size) {
      pack_bin(residual + j, grad, std::min(bin_size, end - j), result, packed);
    }
  }
  result.sum_of_g_max = packed.sum_of_g_max.total();
  result.staged = staging.ranges.size();
  result.stored = static_cast<int32_t>(packed.out - entries);
  result.selected = static_cast<int32_t>(result.stored - packed.silent);
  if (codec_.bin_scales) correct<Entry>(chunk, range, entries, result, staging);
  if (sizeof(Entry) == 1 && result.stored % 2 != 0) *packed.out++ = 0;
  result.bytes = static_cast<int32_t>(reinterpret_cast<uint8_t*>(packed.out) - range);
  staging.ranges.grow(result.bytes);
}

template <typename Entry>
void Compressor::pack_bin(float* residual, const float* grad, int64_t n, ChunkResult& result,
                          Bins<Entry>& packed) const {
  const BinSummary bin = kernels_.summarize(residual, grad, n);
  uint8_t* const code_byte = packed.code++;
  result.any_gradient |= bin.gradient_bits != 0;
  if (!finite_bits(bin.g_max_bits)) {
    accumulate_finite(residual, grad, n);
    result.non_finite = true;
    return;
  }
  const float g_max = bits_float(bin.g_max_bits);
  packed.sum_of_g_max.add(g_max);
  const uint32_t code = codec_.bin_scales ? bin_code(g_max) : 0;
  const bool sends_nothing =
      bin.g_max_bits == 0 ||
      (codec_.bin_scales && (bin.gradient_bits == 0 || scale_of_code_[code] == 0.0f));
  Entry* const first = packed.out;
  if (sends_nothing) {
    accumulate(residual, grad, n);
  } else {
    const float weight = codec_.threshold_factor - 1.0f;
    packed.out = cpu::select(kernels_, residual, grad, n, g_max, weight, first);
  }
  if (packed.out != first) {
    packed.out[-1] |= kLastInBin;
    if (codec_.bin_scales) *code_byte = static_cast<uint8_t>(code);
  } else if (!codec_.bin_scales) {
    *packed.out++ = static_cast<Entry>(nothing_entry(sizeof(Entry)));
    ++packed.silent;
  }
}

// With bin scales, while the chunk is in cache: residual = G - sign(G) s, and G is kept.
template <typename Entry>
void Compressor::correct(const Chunk& chunk, const uint8_t* codes, const Entry* entries,
                         ChunkResult& result, Staging& staging) const {
  const int64_t bin_size = layout_.segment(chunk.segment).bin_size;
  SendingBin* const bins = staging.bins.reserve(chunk.bins + 1);
  list_sending_bins(codes, chunk.bins, bin_size, scale_of_code_, bins);
  float* const residual = residual_of(chunk);
  float* kept = staging.kept.reserve(result.stored);
  for_each_sent(entries, entries + result.stored, bins, [&](int64_t j, bool negative, float scale) {
    *kept++ = residual[j];
    residual[j] = corrected(residual[j], scale, negative);
  });
  result.kept = staging.kept.size();
  staging.kept.grow(result.stored);
}

template <typename Entry>
void Compressor::put_back(const Chunk& chunk, const uint8_t* codes, const Entry* entries,
                          const ChunkResult& result, Staging& staging) const {
  const int64_t bin_size = layout_.segment(chunk.segment).bin_size;
  SendingBin* const bins = staging.bins.reserve(chunk.bins + 1);
  list_sending_bins(codes, chunk.bins, bin_size, scale_of_code_, bins);
  float* const residual = residual_of(chunk);
  const float* kept = staging.kept.at(result.kept);
  for_each_sent(entries, entries + result.stored, bins,
                [&](int64_t j, bool, float) { residual[j] = *kept++; });
}

float Compressor::scale_of(int64_t segment) const {
  LaneSum sum;
  bool any_gradient = false;
  bool any_selected = false;
  for (int64_t i = layout_.first_chunk(segment); i < layout_.first_chunk(segment + 1); ++i) {
    const ChunkResult& chunk = results_[i];
    if (chunk.non_finite) return bits_float(kNanBits);
    sum.add(chunk.sum_of_g_max);
    any_gradient |= chunk.any_gradient;
    any_selected |= chunk.selected > 0;
  }
  if (!any_gradient) return 0.0f;  // raw and empty segments too
  if (codec_.bin_scales) return any_selected ? 1.0f : 0.0f;
  return segment_scale(sum.total(), num_bins(layout_.segment(segment)), codec_.grad_type);
}

void Compressor::write_scales() {
  auto* const scales = reinterpret_cast<float*>(payload_ + offsets_.scales);
  std::memset(scales, 0, offsets_.table - offsets_.scales);
  for (int64_t i = 0; i < layout_.segments(); ++i) {
    scales[i] = scale_of(i);
    for (int64_t c = layout_.first_chunk(i); c < layout_.first_chunk(i + 1); ++c) {
      results_[c].sent = scales[i] > 0.0f;
    }
  }
}

// Drops chunks until the rest fits; returns the bytes of all ranges before that.
int64_t Compressor::admit() {
  const int64_t chunks = layout_.chunks();
  int64_t needed = 0;
  for (const ChunkResult& chunk : results_) needed += chunk.sent ? chunk.bytes : 0;
  int64_t budget = capacity_ - offsets_.entries;
  if (needed <= budget) return needed;
  const int64_t first = first_admitted_chunk(step_, chunks);
  bool full = false;
  for (int64_t k = 0; k < chunks; ++k) {
    const int64_t index = first + k < chunks ? first + k : first + k - chunks;
    ChunkResult& chunk = results_[index];
    if (!chunk.sent) continue;
    full |= chunk.bytes > budget;
    if (!full) {
      budget -= chunk.bytes;
    } else {
      if (counters_ != nullptr) ++counters_[2 * layout_.chunk(index).segment + 1];
      chunk.sent = false;
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
      if (!results_[i].sent) continue;
      end += results_[i].bytes;
      if (counters_ != nullptr) counters_[2 * segment] += results_[i].selected;
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
  Staging& staging = staging_[task];
  const int64_t end = first_chunk_of(task + 1);
  for (int64_t i = first_chunk_of(task); i < end; ++i) {
    if (i + 1 < end && !codec_.bin_scales) prefetch_residual(i + 1, staging);
    const Chunk chunk = layout_.chunk(i);
    with_entry_type(layout_.segment(chunk.segment).bin_size, [&](auto entry) {
      commit_chunk<decltype(entry)>(chunk, results_[i], staging, i);
    });
  }
}

// With few entries the lines of the residual that they touch are far apart: no processor guesses.
void Compressor::prefetch_residual(int64_t index, Staging& staging) const {
  const Chunk chunk = layout_.chunk(index);
  const int64_t bin_size = layout_.segment(chunk.segment).bin_size;
  if (bin_size <= kMaxBinSize8Bit) return;
  const auto* const entries =
      reinterpret_cast<const uint16_t*>(staging.ranges.at(results_[index].staged));
  const float* const residual = residual_of(chunk);
  for_each_sent(entries, entries + results_[index].stored, bin_size,
                [&](int64_t j, uint32_t) { __builtin_prefetch(residual + j, 1); });
}

template <typename Entry>
void Compressor::commit_chunk(const Chunk& chunk, const ChunkResult& result, Staging& staging,
                              int64_t index) {
  const uint8_t* const range = staging.ranges.at(result.staged);
  const auto* const entries =
      reinterpret_cast<const Entry*>(range + codes_bytes(chunk.bins, codec_.bin_scales));
  if (!result.sent) {
    if (codec_.bin_scales) put_back(chunk, range, entries, result, staging);
    return;
  }
  const auto* const table = reinterpret_cast<const uint32_t*>(payload_ + offsets_.table);
  std::memcpy(payload_ + offsets_.entries + table[index], range, result.bytes);
  if (codec_.bin_scales) return;
  const auto* const scales = reinterpret_cast<const float*>(payload_ + offsets_.scales);
  add(entries, entries + result.stored, layout_.segment(chunk.segment).bin_size,
      -scales[chunk.segment], residual_of(chunk));
}

void Compressor::copy_raw(int64_t begin, int64_t end) {
  auto* const raw = reinterpret_cast<float*>(payload_ + offsets_.raw);
  layout_.for_each_raw_run(begin, end, [&](int64_t offset, int64_t target, int64_t length) {
    copy_exact(grad_, codec_.grad_type, offset, length, raw + target);
  });
}

}  // namespace adacomp::cpu
