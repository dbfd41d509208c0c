#include "decompress.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <vector>

#include "gradient.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kStreamedElements = 4 << 20;  // 16 MiB: more than a core has of most caches
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
  const Header expected = make_header(
      codec_, layout_hash_, step_, layout_.worst_case_bytes(codec_.bin_scales), offsets_.entries);
  const Field field = header_fault(header_of(payload(rank)), expected, capacity_);
  if (field != Field::kNone) report(rank, field, 0);
  return field == Field::kNone;
}

bool Decompressor::check_scales(int64_t rank) {
  for (int64_t i = 0; i < layout_.segments(); ++i) {
    const bool has_chunks = layout_.first_chunk(i) < layout_.first_chunk(i + 1);
    if (valid_scale(float_bits(scales(rank)[i]), codec_.bin_scales, layout_.segment(i).is_raw(),
                    has_chunks)) {
      continue;
    }
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
      if (valid_range(offset[i], offset[i + 1], sends)) continue;
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
  RangeReader reader(codec_);
  const int64_t largest = layout_.largest_chunk(first_chunk, last_chunk);
  std::vector<float> sums(largest, 0.0f);
  const bool streams =
      codec_.grad_type == GradType::kFloat32 && layout_.elements() >= kStreamedElements;
  std::vector<float> buffer(streams ? largest : 0);
  for (int64_t i = first_chunk; i < last_chunk; ++i) {
    const Chunk chunk = layout_.chunk(i);
    const int64_t target = layout_.segment(chunk.segment).bucket_offset + chunk.first_element;
    bool non_finite = false;
    bool well_formed = true;  // if not, look on: another chunk may have the smaller status
    for (int64_t rank = 0; rank < world_size_ && well_formed; ++rank) {
      non_finite |= float_bits(scales(rank)[chunk.segment]) == kNanBits;
      well_formed = add_chunk(chunk, i, rank, reader, sums.data());
    }
    const auto divisor = static_cast<float>(world_size_);
    if (streams) {
      stream_quotient(static_cast<float*>(grad_) + target, chunk.elements, sums.data(), divisor,
                      buffer.data());
    } else {
      store_quotient(grad_, codec_.grad_type, target, chunk.elements, sums.data(), divisor);
    }
    if (non_finite) cpu::fill_nan(grad_, codec_.grad_type, target, chunk.elements);
  }
  flush_stores();
}

// Adds what a rank sent of a chunk to `sums`, or reports the fault and returns false.
bool Decompressor::add_chunk(const Chunk& chunk, int64_t index, int64_t rank, RangeReader& reader,
                             float* sums) {
  const uint32_t* const offset = table(rank) + index;
  if (offset[0] == offset[1]) return true;
  const Field field = reader.add(
      {chunk, layout_.segment(chunk.segment).bin_size, payload(rank) + offsets_.entries + offset[0],
       offset[1] - offset[0], scales(rank)[chunk.segment]},
      sums);
  if (field != Field::kNone) report(rank, field, index);
  return field == Field::kNone;
}

void Decompressor::restore(int64_t first_chunk, int64_t last_chunk, float* residual) {
  RangeReader reader(codec_);
  for (int64_t i = first_chunk; i < last_chunk; ++i) {
    const Chunk chunk = layout_.chunk(i);
    float* const target =
        residual == nullptr
            ? nullptr
            : residual + layout_.segment(chunk.segment).residual_offset + chunk.first_element;
    if (!add_chunk(chunk, i, 0, reader, target)) return;
  }
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
