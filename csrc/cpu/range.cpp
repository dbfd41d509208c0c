#include "range.h"

#include <algorithm>

#include "kernels.h"

namespace adacomp::cpu {
namespace {

bool all_zero(const uint8_t* bytes, int64_t begin, int64_t end) {
  uint8_t any = 0;
  for (int64_t i = begin; i < end; ++i) any |= bytes[i];
  return any == 0;
}

int64_t count_bins(const uint8_t* entries, int64_t count, uint8_t limit, uint8_t nothing) {
  return kernels().count_bins8(entries, count, limit, nothing);
}

int64_t count_bins(const uint16_t* entries, int64_t count, uint16_t limit, uint16_t nothing) {
  return kernels().count_bins16(entries, count, limit, nothing);
}

}  // namespace

Field RangeReader::add(const Range& range, float* target) {
  return with_entry_type(range.bin_size,
                         [&](auto entry) { return add<decltype(entry)>(range, target); });
}

template <typename Entry>
Field RangeReader::add(const Range& range, float* target) {
  const Chunk& chunk = range.chunk;
  const int64_t codes = codes_bytes(chunk.bins, bin_scales_);
  if (range.bytes < codes) return Field::kBinCount;
  SendingBin* const bins = bins_.reserve(chunk.bins + 1);
  int64_t sending = chunk.bins;
  if (bin_scales_) {
    sending =
        list_sending_bins(range.begin, chunk.bins, range.bin_size, scale_of_code_, bins) - bins;
  }
  const auto* const entries = reinterpret_cast<const Entry*>(range.begin + codes);
  const auto* end = entries + (range.bytes - codes) / static_cast<int64_t>(sizeof(Entry));
  // No bin ends with a 0: it is the padding to a multiple of 2, which 8-bit entries may need.
  if (sizeof(Entry) == 1 && end != entries && end[-1] == 0) --end;
  if (!is_valid(range, entries, end, bins, sending)) return find_fault<Entry>(range);
  if (target == nullptr) return Field::kNone;
  if (bin_scales_) {
    cpu::add(entries, end, bins, target);
  } else {
    cpu::add(entries, end, range.bin_size, range.scale, target);
  }
  return Field::kNone;
}

// A quick yes; a no is for find_fault() to explain.
template <typename Entry>
bool RangeReader::is_valid(const Range& range, const Entry* entries, const Entry* end,
                           const SendingBin* bins, int64_t sending) const {
  const Chunk& chunk = range.chunk;
  if (bin_scales_) {
    if (!all_zero(range.begin, chunk.bins, codes_bytes(chunk.bins, true))) return false;
    for (int64_t b = 0; b < sending; ++b) {
      if (bins[b].scale == 0.0f) return false;
    }
  }
  const int64_t count = end - entries;
  if (count == 0 || sending == 0) return count == sending;
  // With bin scales a code says it, and no entry may: 0 is an index like any other.
  const auto nothing = static_cast<Entry>(bin_scales_ ? 0 : nothing_entry(sizeof(Entry)));
  const int64_t last_bin = bin_scales_ ? bins[sending - 1].first : (sending - 1) * range.bin_size;
  const Entry last = end[-1];
  const bool ends_within = entry_index(last) < chunk.elements - last_bin || last == nothing;
  const auto limit = static_cast<Entry>(make_entry(range.bin_size, false));
  return ends_within && entry_last(last) && count_bins(entries, count, limit, nothing) == sending;
}

// Reads entry by entry to the first fault, in the order in which the device's decoder does.
template <typename Entry>
Field RangeReader::find_fault(const Range& range) const {
  const Chunk& chunk = range.chunk;
  const int64_t codes = codes_bytes(chunk.bins, bin_scales_);
  if (!all_zero(range.begin, bin_scales_ ? chunk.bins : 0, codes)) return Field::kPadding;
  const auto* entry = reinterpret_cast<const Entry*>(range.begin + codes);
  const auto* const end = entry + (range.bytes - codes) / static_cast<int64_t>(sizeof(Entry));
  int64_t b = 0;
  int64_t j = 0;          // first element of bin b
  int64_t previous = -1;  // index of the entry before in bin b
  while (true) {
    if (bin_scales_ && previous < 0) {
      for (; b < chunk.bins && range.begin[b] == 0; ++b) j += range.bin_size;
      if (b < chunk.bins && scale_of_code_[range.begin[b]] == 0.0f) return Field::kBinCode;
    }
    if (b == chunk.bins || entry == end) break;
    const int64_t k = entry_index(*entry);
    const bool last = entry_last(*entry);
    const bool silent = !bin_scales_ && previous < 0 && *entry == nothing_entry(sizeof(Entry));
    if (!silent && (k <= previous || k >= std::min(range.bin_size, chunk.elements - j))) {
      return Field::kEntryIndex;
    }
    previous = last ? -1 : k;
    b += last;
    j += last ? range.bin_size : 0;
    ++entry;
  }
  if (b < chunk.bins) return Field::kBinCount;
  // 8-bit entries may leave one byte of padding.
  if (sizeof(Entry) == 1 && (entry - reinterpret_cast<const Entry*>(range.begin)) % 2 != 0) {
    if (*entry++ != 0) return Field::kPadding;
  }
  return entry == end ? Field::kNone : Field::kBinCount;
}

}  // namespace adacomp::cpu
