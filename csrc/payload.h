// Wire format, version 1: what one rank sends for one bucket. No torch, no CUDA.
//
//   header | scales | chunk table | raw values | entries | zeros up to the capacity
//
// Little endian; every part starts at a multiple of 16 bytes. "fixed" bytes are all parts before
// the entries: they depend on the layout alone. docs/wire-format.md describes each field.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define ADACOMP_HD __host__ __device__
#else
#define ADACOMP_HD
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

namespace adacomp {

constexpr uint32_t kMagic = 0x31434441;  // "ADC1"
constexpr uint16_t kVersion = 1;
constexpr uint16_t kFlagBinScales = 1;

constexpr int64_t kAlignment = 16;
constexpr int64_t kMaxPayloadBytes = (int64_t{1} << 32) - kAlignment;
constexpr int64_t kMaxBinSize = 16383;   // 14 index bits; all ones means "nothing"
constexpr int64_t kMaxBinSize8Bit = 63;  // 6 index bits; likewise
constexpr int64_t kChunkElements = 4096;

constexpr uint32_t kNanBits = 0x7fc00000;  // the one NaN that is written, as a scale or a gradient

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;
  uint32_t layout_hash;
  uint32_t step;
  uint64_t needed_bytes;  // of the whole payload had every chunk been admitted
  uint64_t used_bytes;    // of the whole payload as sent, without the zeros at its end
};
static_assert(sizeof(Header) == 32 && offsetof(Header, needed_bytes) == 16);

// One parameter inside a bucket; the row of a layout tensor (int64 [segments, 4]).
struct Segment {
  int64_t bucket_offset;
  int64_t numel;
  int64_t bin_size;         // 0: raw float32 values, no bins
  int64_t residual_offset;  // -1 for raw

  ADACOMP_HD bool is_raw() const { return bin_size == 0; }
};
static_assert(sizeof(Segment) == 4 * sizeof(int64_t));

enum class GradType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// What both ends of the wire must agree on besides the layout.
struct Codec {
  GradType grad_type;
  bool bin_scales;
  float threshold_factor;
};

ADACOMP_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
ADACOMP_HD constexpr int64_t align_up(int64_t bytes, int64_t to = kAlignment) {
  return ceil_div(bytes, to) * to;
}

ADACOMP_HD constexpr int64_t bins_per_chunk(int64_t bin_size) {
  return bin_size >= kChunkElements ? 1 : kChunkElements / bin_size;
}

ADACOMP_HD constexpr int64_t num_bins(const Segment& s) {
  return s.bin_size == 0 ? 0 : ceil_div(s.numel, s.bin_size);
}

ADACOMP_HD constexpr int64_t num_chunks(const Segment& s) {
  return s.bin_size == 0 ? 0 : ceil_div(num_bins(s), bins_per_chunk(s.bin_size));
}

ADACOMP_HD constexpr int64_t entry_bytes(int64_t bin_size) {
  return bin_size <= kMaxBinSize8Bit ? 1 : 2;
}

// The unit of parallel work: consecutive bins of one segment.
struct Chunk {
  int64_t segment;
  int64_t first_element;  // within the segment
  int64_t elements;
  int64_t bins;
};

// Chunk `index` of the segment's own.
ADACOMP_HD constexpr Chunk make_chunk(const Segment& s, int64_t segment, int64_t index) {
  const int64_t most = bins_per_chunk(s.bin_size) * s.bin_size;
  const int64_t first = index * most;
  const int64_t elements = most < s.numel - first ? most : s.numel - first;
  return {segment, first, elements, ceil_div(elements, s.bin_size)};
}

// The bin scales' codes at the head of a chunk's range.
ADACOMP_HD constexpr int64_t codes_bytes(int64_t bins, bool bin_scales) {
  return bin_scales ? align_up(bins, 2) : 0;
}

// The most a chunk's range can take: every element is sent.
ADACOMP_HD constexpr int64_t worst_range_bytes(int64_t elements, int64_t bins, int64_t bin_size,
                                               bool bin_scales) {
  return codes_bytes(bins, bin_scales) + align_up(elements * entry_bytes(bin_size), 2);
}

// entry = index_in_bin << 2 | negative << 1 | last_in_bin, in 8 or 16 bits.
ADACOMP_HD constexpr uint32_t make_entry(uint32_t index, bool negative) {
  return index << 2 | static_cast<uint32_t>(negative) << 1;
}
ADACOMP_HD constexpr uint32_t entry_index(uint32_t entry) {
  return entry >> 2;
}
ADACOMP_HD constexpr bool entry_negative(uint32_t entry) {
  return (entry & 2) != 0;
}
ADACOMP_HD constexpr bool entry_last(uint32_t entry) {
  return (entry & 1) != 0;
}
constexpr uint32_t kLastInBin = 1;

// "This bin sends nothing", with layer scales (else code 0 says it): all-ones index, last.
ADACOMP_HD constexpr uint32_t nothing_entry(int64_t entry_bytes) {
  return entry_bytes == 1 ? 0xFD : 0xFFFD;
}

// Byte offsets of the parts.
struct Offsets {
  int64_t scales;
  int64_t table;
  int64_t raw;
  int64_t entries;  // = fixed bytes
};

ADACOMP_HD constexpr Offsets payload_offsets(int64_t segments, int64_t chunks,
                                             int64_t raw_elements) {
  Offsets o{};
  o.scales = sizeof(Header);
  o.table = o.scales + align_up(4 * segments);
  o.raw = o.table + align_up(4 * (chunks + 1));
  o.entries = o.raw + align_up(4 * raw_elements);
  return o;
}

// Where admission starts when the entries do not fit: elsewhere every step, so that none starves.
ADACOMP_HD constexpr int64_t first_admitted_chunk(int64_t step, int64_t chunks) {
  const auto hashed = static_cast<uint32_t>(static_cast<uint64_t>(step) * 2654435761u);
  return static_cast<int64_t>(hashed * static_cast<uint64_t>(chunks) >> 32);
}

ADACOMP_HD constexpr Header make_header(const Codec& codec, uint32_t layout_hash, int64_t step,
                                        int64_t needed_bytes, int64_t used_bytes) {
  return {kMagic,
          kVersion,
          codec.bin_scales ? kFlagBinScales : uint16_t{0},
          layout_hash,
          static_cast<uint32_t>(step),
          static_cast<uint64_t>(needed_bytes),
          static_cast<uint64_t>(used_bytes)};
}

// FNV-1a, 32 bit.
class LayoutHash {
 public:
  void add(int64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      state_ = (state_ ^ (static_cast<uint64_t>(value) >> (8 * byte) & 0xff)) * 16777619u;
    }
  }
  uint32_t value() const { return state_; }

 private:
  uint32_t state_ = 2166136261u;
};

// What a decoder can find wrong in a payload.
enum class Field : uint8_t {
  kNone = 0,
  kMagic,
  kVersion,
  kFlags,
  kLayoutHash,
  kStep,
  kNeededBytes,
  kUsedBytes,
  kScale,
  kChunkTable,
  kBinCode,
  kEntryIndex,
  kBinCount,
  kPadding,
};

// The first field that differs from `expected`, or whose size is not from expected.used_bytes, the
// fixed bytes, to expected.needed_bytes, the worst case; what is used fits the capacity as well.
ADACOMP_HD constexpr Field header_fault(const Header& h, const Header& expected, int64_t capacity) {
  const uint64_t fixed = expected.used_bytes;
  if (h.magic != expected.magic) return Field::kMagic;
  if (h.version != expected.version) return Field::kVersion;
  if (h.flags != expected.flags) return Field::kFlags;
  if (h.layout_hash != expected.layout_hash) return Field::kLayoutHash;
  if (h.step != expected.step) return Field::kStep;
  if (h.needed_bytes < fixed || h.needed_bytes > expected.needed_bytes) return Field::kNeededBytes;
  const bool fits =
      h.used_bytes <= h.needed_bytes && h.used_bytes <= static_cast<uint64_t>(capacity);
  return h.used_bytes < fixed || !fits ? Field::kUsedBytes : Field::kNone;
}

// Ends of a chunk's range in the table; `sends`: its segment's scale is positive.
ADACOMP_HD constexpr bool valid_range(uint32_t begin, uint32_t end, bool sends) {
  return (sends ? begin <= end : begin == end) && end % 2 == 0;
}

inline const char* field_name(Field field) {
  constexpr const char* kNames[] = {
      "none",       "magic", "version",     "flags",    "layout_hash", "step",      "needed_bytes",
      "used_bytes", "scale", "chunk table", "bin code", "entry index", "bin count", "padding",
  };
  return kNames[static_cast<uint8_t>(field)];
}

// Status word of a decode: 0, or the first fault in the order (rank, field, place). `place` is the
// segment of a scale, the chunk of an entry fault, otherwise 0.
ADACOMP_HD constexpr int64_t make_status(int64_t rank, Field field, int64_t place) {
  return rank << 40 | static_cast<int64_t>(field) << 32 | place;
}
ADACOMP_HD constexpr int64_t status_rank(int64_t status) {
  return status >> 40;
}
ADACOMP_HD constexpr Field status_field(int64_t status) {
  return static_cast<Field>(status >> 32 & 0xff);
}
ADACOMP_HD constexpr int64_t status_place(int64_t status) {
  return status & 0xffffffff;
}

}  // namespace adacomp
