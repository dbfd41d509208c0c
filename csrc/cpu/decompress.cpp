#include "decompress.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <vector>

#include "gradient.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kNoFault = std::numeric_limits<int64_t>::max();

bool all_zero(const uint8_t* bytes, int64_t begin, int64_t end) {
  uint8_t any = 0;
  for (int64_t i = begin; i < end; ++i) any |= bytes[i];
  return any == 0;
}

Header header_of(const uint8_t* payload) {
  Header header;
  std::memcpy(&header, payload, sizeof header);
  return header;
}

}  // namespace

Decompressor::Decompressor(const Layout& layout, const Codec& codec, const uint8_t* payloads,
                           int64_t world_size, int64_t capacity, int64_t step, void* grad)
    : layout_(layout),
      codec_(codec),
      payloads_(payloads),
      world_size_(world_size),
      capacity_(capacity),
      step_(step),
      grad_(grad),
      offsets_(layout.offsets()),
      layout_hash_(layout.hash(codec)),
      fault_(kNoFault) {}

int64_t Decompressor::status() const {
  const int64_t fault = fault_.load();
  return fault == kNoFault ? 0 : fault;
}

const float* Decompressor::scales(int64_t rank) const {
  return reinterpret_cast<const float*>(payload(rank) + offsets_.scales);
}

const uint32_t* Decompressor::table(int64_t rank) const {
  return reinterpret_cast<const uint32_t*>(payload(rank) + offsets_.table);
}

// Keeps the smallest status, so that the fault named does not depend on thread timing.
void Decompressor::report(int64_t rank, Field field, int64_t place) {
  const int64_t status = make_status(rank, field, place);
  int64_t seen = fault_.load();
  while (status < seen && !fault_.compare_exchange_weak(seen, status)) {
  }
}

void Decompressor::check_payloads() {
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    // Each check relies on the ones before it.
    if (!check_header(rank) || !check_scales(rank) || !check_table(rank) || !check_padding(rank)) {
      return;
    }
  }
}

bool Decompressor::check_header(int64_t rank) {
  const Header h = header_of(payload(rank));
  const auto fixed = static_cast<uint64_t>(offsets_.entries);
  const auto worst = static_cast<uint64_t>(layout_.worst_case_bytes(codec_.bin_scales));
  const uint16_t flags = codec_.bin_scales ? kFlagBinScales : 0;
  Field field = Field::kNone;
  if (h.magic != kMagic) {
    field = Field::kMagic;
  } else if (h.version != kVersion) {
    field = Field::kVersion;
  } else if (h.flags != flags) {
    field = Field::kFlags;
  } else if (h.layout_hash != layout_hash_) {
    field = Field::kLayoutHash;
  } else if (h.step != static_cast<uint32_t>(step_)) {
    field = Field::kStep;
  } else if (h.needed_bytes < fixed || h.needed_bytes > worst) {
    field = Field::kNeededBytes;
  } else if (h.used_bytes < fixed || h.used_bytes > h.needed_bytes ||
             h.used_bytes > static_cast<uint64_t>(capacity_)) {
    field = Field::kUsedBytes;
  }
  if (field != Field::kNone) report(rank, field, 0);
  return field == Field::kNone;
}

// A scale is NaN, 0 or positive and finite; with bin scales only 1 is positive; raw: 0.
bool Decompressor::check_scales(int64_t rank) {
  for (int64_t i = 0; i < layout_.segments(); ++i) {
    const uint32_t bits = float_bits(scales(rank)[i]);
    const bool none = bits == 0 || (bits == kNanBits && !layout_.segment(i).is_raw());
    const bool positive = codec_.bin_scales ? bits == float_bits(1.0f) : finite_bits(bits);
    if (none || (positive && layout_.first_chunk(i) < layout_.first_chunk(i + 1))) continue;
    report(rank, Field::kScale, i);
    return false;
  }
  return true;
}

// Offsets start at 0, never decrease, are even, and end at `used`; no scale, empty ranges.
bool Decompressor::check_table(int64_t rank) {
  const uint32_t* const offset = table(rank);
  const auto used = static_cast<int64_t>(header_of(payload(rank)).used_bytes);
  if (offset[0] != 0 || offset[layout_.chunks()] != used - offsets_.entries) {
    report(rank, Field::kChunkTable, 0);
    return false;
  }
  for (int64_t segment = 0; segment < layout_.segments(); ++segment) {
    const bool sends = scales(rank)[segment] > 0.0f;
    for (int64_t i = layout_.first_chunk(segment); i < layout_.first_chunk(segment + 1); ++i) {
      const bool ordered = sends ? offset[i] <= offset[i + 1] : offset[i] == offset[i + 1];
      if (ordered && offset[i + 1] % 2 == 0) continue;
      report(rank, Field::kChunkTable, i);
      return false;
    }
  }
  return true;
}

bool Decompressor::check_padding(int64_t rank) {
  const uint8_t* const bytes = payload(rank);
  const auto used = static_cast<int64_t>(header_of(bytes).used_bytes);
  const bool zero = all_zero(bytes, offsets_.scales + 4 * layout_.segments(), offsets_.table) &&
                    all_zero(bytes, offsets_.table + 4 * (layout_.chunks() + 1), offsets_.raw) &&
                    all_zero(bytes, offsets_.raw + 4 * layout_.raw_elements(), offsets_.entries) &&
                    all_zero(bytes, used, capacity_);
  if (!zero) report(rank, Field::kPadding, 0);
  return zero;
}

void Decompressor::decode(int64_t first_chunk, int64_t last_chunk) {
  std::vector<float> sums;
  for (int64_t i = first_chunk; i < last_chunk; ++i) {
    sums.assign(layout_.chunk(i).elements, 0.0f);
    decode_chunk(i, sums.data());
  }
}

void Decompressor::decode_chunk(int64_t index, float* sums) {
  const Chunk chunk = layout_.chunk(index);
  const Segment& segment = layout_.segment(chunk.segment);
  const int64_t target = segment.bucket_offset + chunk.first_element;
  bool non_finite = false;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    non_finite |= float_bits(scales(rank)[chunk.segment]) == kNanBits;
    if (!add_chunk(index, rank, sums)) return;
  }
  if (non_finite) {
    cpu::fill_nan(grad_, codec_.grad_type, target, chunk.elements);
  } else {
    store_quotient(grad_, codec_.grad_type, target, chunk.elements, sums,
                   static_cast<float>(world_size_));
  }
}

// Adds what a rank sent of a chunk to `sums`, or reports the fault and returns false.
bool Decompressor::add_chunk(int64_t index, int64_t rank, float* sums) {
  const uint32_t* const offset = table(rank) + index;
  const int64_t bytes = offset[1] - offset[0];
  if (bytes == 0) return true;
  const Chunk chunk = layout_.chunk(index);
  const float scale = scales(rank)[chunk.segment];
  const uint8_t* const range = payload(rank) + offsets_.entries + offset[0];
  const Field field = entry_bytes(layout_.segment(chunk.segment).bin_size) == 1
                          ? add_range<uint8_t>(chunk, range, bytes, scale, sums)
                          : add_range<uint16_t>(chunk, range, bytes, scale, sums);
  if (field != Field::kNone) report(rank, field, index);
  return field == Field::kNone;
}

void Decompressor::restore(int64_t first_chunk, int64_t last_chunk, float* residual) {
  std::vector<float> sums;
  for (int64_t i = first_chunk; i < last_chunk; ++i) {
    const Chunk chunk = layout_.chunk(i);
    sums.assign(chunk.elements, 0.0f);
    if (!add_chunk(i, 0, sums.data())) return;
    if (residual == nullptr) continue;
    float* const target =
        residual + layout_.segment(chunk.segment).residual_offset + chunk.first_element;
    for (int64_t j = 0; j < chunk.elements; ++j) {
      if (sums[j] != 0.0f) target[j] += sums[j];  // -0.0 stays
    }
  }
}

// Adds the entries of a chunk's range to `sums`; reads only range[0, bytes) and writes only the
// chunk's elements, whatever the bytes are.
template <typename Entry>
Field Decompressor::add_range(const Chunk& chunk, const uint8_t* range, int64_t bytes, float scale,
                              float* sums) const {
  const int64_t bin_size = layout_.segment(chunk.segment).bin_size;
  const int64_t codes = codes_bytes(chunk.bins, codec_.bin_scales);
  if (bytes < codes) return Field::kBinCount;
  if (!all_zero(range, codec_.bin_scales ? chunk.bins : 0, codes)) return Field::kPadding;
  const auto* entry = reinterpret_cast<const Entry*>(range + codes);
  const auto* const end = entry + (bytes - codes) / static_cast<int64_t>(sizeof(Entry));
  // A loop over entries, not over bins: how many a bin has is hard to predict.
  int64_t b = 0;
  int64_t j = 0;          // first element of bin b
  int64_t previous = -1;  // index of the entry before in bin b
  while (true) {
    if (codec_.bin_scales && previous < 0) {
      for (; b < chunk.bins && range[b] == 0; ++b) j += bin_size;
      if (b < chunk.bins) scale = bin_scale(range[b], codec_.grad_type);
      if (scale == 0.0f) return Field::kBinCode;
    }
    if (b == chunk.bins || entry == end) break;
    const int64_t k = entry_index(*entry);
    const bool last = entry_last(*entry);
    if (!codec_.bin_scales && previous < 0 && *entry == nothing_entry(sizeof(Entry))) {
      // this bin sends nothing
    } else if (k <= previous || k >= std::min(bin_size, chunk.elements - j)) {
      return Field::kEntryIndex;
    } else {
      sums[j + k] += signed_scale(scale, entry_negative(*entry));
    }
    previous = last ? -1 : k;
    b += last;
    j += last ? bin_size : 0;
    ++entry;
  }
  if (b < chunk.bins) return Field::kBinCount;
  // 8-bit entries may leave one byte of padding.
  if (sizeof(Entry) == 1 && (entry - reinterpret_cast<const Entry*>(range)) % 2 != 0) {
    if (*entry++ != 0) return Field::kPadding;
  }
  return entry == end ? Field::kNone : Field::kBinCount;
}

void Decompressor::decode_raw(int64_t begin, int64_t end) {
  constexpr int64_t kRun = 1024;
  float sums[kRun];
  layout_.for_each_raw_run(begin, end, [&](int64_t target, int64_t source, int64_t length) {
    for (int64_t done = 0; done < length; done += kRun) {
      const int64_t n = std::min(kRun, length - done);
      std::memset(sums, 0, sizeof sums);
      for (int64_t rank = 0; rank < world_size_; ++rank) {
        const auto* raw =
            reinterpret_cast<const float*>(payload(rank) + offsets_.raw) + source + done;
        for (int64_t j = 0; j < n; ++j) sums[j] += raw[j];
      }
      store_quotient(grad_, codec_.grad_type, target + done, n, sums,
                     static_cast<float>(world_size_));
    }
  });
}

void Decompressor::fill_nan() {
  for (int64_t i = 0; i < layout_.segments(); ++i) {
    const Segment& s = layout_.segment(i);
    cpu::fill_nan(grad_, codec_.grad_type, s.bucket_offset, s.numel);
  }
}

std::string Decompressor::describe_fault() const {
  const int64_t status = fault_.load();
  const Field field = status_field(status);
  const int64_t place = status_place(status);
  const Header h = header_of(payload(status_rank(status)));
  std::ostringstream text;
  text << "payload of rank " << status_rank(status) << ": " << field_name(field) << ": expected ";
  const auto values = [&](auto expected, auto actual) { text << expected << ", got " << actual; };
  const auto range = [&](auto low, auto high, auto actual) {
    text << low << " to " << high << ", got " << actual;
  };
  const auto in_chunk = [&](const char* expected) {
    text << expected << ", got something else in chunk " << place;
  };
  switch (field) {
    case Field::kMagic:
      text << std::hex << std::showbase;
      values(kMagic, h.magic);
      break;
    case Field::kVersion:
      values(kVersion, h.version);
      break;
    case Field::kFlags:
      values(codec_.bin_scales ? kFlagBinScales : 0, h.flags);
      break;
    case Field::kLayoutHash:
      text << std::hex << std::showbase;
      values(layout_hash_, h.layout_hash);
      break;
    case Field::kStep:
      values(static_cast<uint32_t>(step_), h.step);
      break;
    case Field::kNeededBytes:
      range(offsets_.entries, layout_.worst_case_bytes(codec_.bin_scales), h.needed_bytes);
      break;
    case Field::kUsedBytes:
      range(offsets_.entries, std::min<uint64_t>(h.needed_bytes, capacity_), h.used_bytes);
      break;
    case Field::kScale:
      text << (codec_.bin_scales ? "0, NaN or 1" : "0, NaN or a positive finite number") << ", got "
           << scales(status_rank(status))[place] << " in segment " << place;
      break;
    case Field::kChunkTable:
      in_chunk("even, non-decreasing offsets that end at used_bytes");
      break;
    case Field::kBinCode:
      in_chunk("a scale that the gradient's dtype can hold");
      break;
    case Field::kEntryIndex:
      in_chunk("increasing indices within the bin");
      break;
    case Field::kBinCount:
      in_chunk("exactly the chunk's bins");
      break;
    default:
      text << "zeros, got something else";
  }
  return text.str();
}

}  // namespace adacomp::cpu
