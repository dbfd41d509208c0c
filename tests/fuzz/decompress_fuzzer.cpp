// Fuzz target of the decoder and the payload inspector; with one bit of the input, of the round
// trip instead. For libFuzzer (`make fuzz`) and for replay.cpp.
//
// Input: options (1 byte), the scene (scene.h), then what the mode reads: payload bytes, a seed and
// patches on valid payloads, or gradients (round_trip.h).
//
// The corpus: `make fuzz-corpus` adds one input per new edge of the code to it.
#include "../../csrc/cpu/decompress.h"

#include <string>

#include "../../csrc/inspect.h"
#include "naive_decoder.h"
#include "round_trip.h"
#include "scene.h"

namespace fuzz {
namespace {

enum Option : uint32_t {
  kRoundTrip = 1,
  kStartValid = 2,    // payloads of the Compressor, then patched
  kRepairHeader = 4,  // magic, version, flags, hash, step
  kRepairSizes = 8,   // needed and used from the chunk table
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }

 private:
  uint64_t state_;
};

float random_gradient(Random& random, int style) {
  const float u = random.uniform();
  switch (style) {
    case 0:
      return 0.0f;
    case 1:
      return random.next() % 64 == 0 ? u : 0.0f;
    case 2:
      return random.next() % 4096 == 0 ? bits_float(adacomp::kNanBits) : u;
    case 3:
      return std::ldexp(u, static_cast<int>(random.next() % 60) - 40);
    default:
      return u * u * u;
  }
}

void write_valid_payload(const Scene& scene, uint64_t seed, uint8_t* payload) {
  const GradType type = scene.codec.grad_type;
  Random random(seed);
  const HeapBlock grad(scene.layout.elements() * element_bytes(type), 0);
  for (int64_t i = 0; i < scene.layout.segments(); ++i) {
    const Segment& s = scene.layout.segment(i);
    const auto style = static_cast<int>(random.next() % 8);
    for (int64_t j = s.bucket_offset; j < s.bucket_offset + s.numel; ++j) {
      put_value(grad.data(), type, j, random_gradient(random, style));
    }
  }
  std::vector<float> residual(scene.residual_elements);
  for (float& r : residual) r = random.uniform();
  compress(scene, scene.step, grad.data(), residual.data(), payload, nullptr, 1);
}

struct Part {
  int64_t begin;
  int64_t end;
};

// Parts differ much in size, and every byte of a small one matters.
Part read_part(const Scene& scene, uint32_t choice, const uint8_t* payload) {
  const adacomp::Offsets parts = scene.layout.offsets();
  adacomp::Header header;
  std::memcpy(&header, payload, sizeof header);
  const auto used =
      static_cast<int64_t>(std::clamp<uint64_t>(header.used_bytes, parts.entries, scene.capacity));
  const Part entries{parts.entries, used};
  const Part all[] = {{0, 16},
                      {16, parts.scales},
                      {parts.scales, parts.table},
                      {parts.table, parts.raw},
                      {parts.raw, parts.entries},
                      entries,
                      {used, scene.capacity},
                      entries};
  return all[choice % 8];
}

// A patch: rank and part (1 byte), offset within the part (2), kind (1), what the kind reads.
void apply_patch(const Scene& scene, Input& input, uint8_t* payloads) {
  constexpr uint32_t kWords[] = {0,           1,           2,           0x3f800000u,
                                 0x7f800000u, 0x7fc00000u, 0x80000000u, 0xfffffffeu};
  constexpr uint32_t kEntries[] = {0xfc, 0xfd, 0xfe, 0xff, 0xfffc, 0xfffd, 0xfffe, 0xffff};
  const uint32_t choice = input.byte();
  uint8_t* const payload = payloads + choice / 8 % scene.world_size * scene.capacity;
  const Part part = read_part(scene, choice, payload);
  const int64_t offset = input.half();
  const uint32_t kind = input.byte();
  const uint32_t detail = kind / 4 % 8;
  if (part.begin == part.end) return;
  const auto at = [&](int64_t i) -> uint8_t& {
    return payload[part.begin + i % (part.end - part.begin)];
  };
  const auto put = [&](int64_t begin, uint32_t value, int width) {
    for (int i = 0; i < width; ++i) at(begin + i) = static_cast<uint8_t>(value >> 8 * i);
  };
  const int64_t word = offset / 4 * 4;
  if (kind % 4 == 0) {  // some bytes
    for (uint32_t i = 0; i <= detail; ++i) at(offset + i) = input.byte();
  } else if (kind % 4 == 1) {  // a little more or less
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(at(word + i)) << 8 * i;
    put(word, value + static_cast<uint32_t>(static_cast<int8_t>(input.byte())), 4);
  } else if (kind % 4 == 2) {
    put(word, kWords[detail], 4);
  } else {
    put(offset, kEntries[detail], detail < 4 ? 1 : 2);
  }
}

void repair_header(const Scene& scene, uint32_t options, uint8_t* payload) {
  adacomp::Header header;
  std::memcpy(&header, payload, sizeof header);
  if ((options & kRepairHeader) != 0) {
    header.magic = adacomp::kMagic;
    header.version = adacomp::kVersion;
    header.flags = scene.codec.bin_scales ? adacomp::kFlagBinScales : 0;
    header.layout_hash = scene.layout.hash(scene.codec);
    header.step = static_cast<uint32_t>(scene.step);
  }
  if ((options & kRepairSizes) != 0) {
    const adacomp::Offsets parts = scene.layout.offsets();
    header.used_bytes =
        parts.entries + get_bits(payload + parts.table, GradType::kFloat32, scene.layout.chunks());
    const auto worst = static_cast<uint64_t>(scene.layout.worst_case_bytes(scene.codec.bin_scales));
    if (header.needed_bytes > worst) header.needed_bytes = worst;
    if (header.needed_bytes < header.used_bytes) header.needed_bytes = header.used_bytes;
  }
  std::memcpy(payload, &header, sizeof header);
}

// The payloads of all ranks; returns whether they are untouched ones of the Compressor.
bool read_payloads(const Scene& scene, uint32_t options, Input& input, std::vector<uint8_t>& all) {
  const int64_t ranks = scene.world_size;
  all.assign(ranks * scene.capacity, 0);
  std::vector<uint8_t> valid;
  if ((options & kStartValid) != 0) {
    const uint64_t seed = input.byte();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      write_valid_payload(scene, seed * 8 + rank, all.data() + rank * scene.capacity);
    }
    valid = all;
    while (!input.empty()) apply_patch(scene, input, all.data());
  } else {
    for (uint8_t& byte : all) byte = input.byte();
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    repair_header(scene, options, all.data() + rank * scene.capacity);
  }
  return all == valid;
}

// ---- decoding ----

struct Result {
  int64_t status;
  std::string fault;
};

// `per_call` chunks and raw elements at a time, from the front or from the back.
Result decode(const Scene& scene, const uint8_t* payloads, uint8_t* grad, int64_t per_call,
              bool backwards) {
  adacomp::cpu::Decompressor decompressor(scene.layout, scene.codec, payloads, scene.world_size,
                                          scene.capacity, scene.step, grad);
  const auto each_range = [&](int64_t count, auto&& f) {
    const int64_t calls = adacomp::ceil_div(count, per_call);
    for (int64_t call = 0; call < calls; ++call) {
      const int64_t begin = (backwards ? calls - 1 - call : call) * per_call;
      f(begin, std::min(count, begin + per_call));
    }
  };
  decompressor.check_payloads();
  if (decompressor.status() == 0) {
    const int64_t skipped = self_test == SelfTest::kSkippedChunk ? 1 : 0;
    each_range(scene.layout.chunks() - skipped,
               [&](int64_t begin, int64_t end) { decompressor.decode(begin, end); });
    each_range(scene.layout.raw_elements(),
               [&](int64_t begin, int64_t end) { decompressor.decode_raw(begin, end); });
  }
  if (decompressor.status() == 0) return {0, ""};
  if (self_test != SelfTest::kMissedNan) decompressor.fill_nan();
  return {decompressor.status(), decompressor.describe_fault()};
}

void check_fault(const Scene& scene, const Result& result) {
  FUZZ_CHECK(!result.fault.empty(), "fault is described");
  const int64_t rank = adacomp::status_rank(result.status);
  const adacomp::Field field = adacomp::status_field(result.status);
  FUZZ_CHECK(rank >= 0 && rank < scene.world_size, "rank of a fault");
  FUZZ_CHECK(field > adacomp::Field::kNone && field <= adacomp::Field::kPadding,
             "field of a fault");
  const std::string start =
      "payload of rank " + std::to_string(rank) + ": " + adacomp::field_name(field) + ": ";
  FUZZ_CHECK(result.fault.rfind(start, 0) == 0, "text of a fault");
}

// Elements are all written, or all NaN.
void check_bucket(const Scene& scene, const uint8_t* grad, bool accepted) {
  const GradType type = scene.codec.grad_type;
  for (int64_t i = 0; i < scene.layout.elements(); ++i) {
    const uint32_t bits = get_bits(grad, type, i);
    if (accepted) {
      FUZZ_CHECK(bits != sentinel_bits(type), "every element is written");
    } else {
      FUZZ_CHECK(bits == nan_bits(type), "a refused bucket is NaN");
    }
  }
}

// The same status and bits as the format's description asks for.
void check_against_naive(const Scene& scene, const uint8_t* payloads, const uint8_t* grad,
                         bool accepted) {
  const HeapBlock expected(scene.layout.elements() * element_bytes(scene.codec.grad_type), 0);
  const bool valid = naive_decode(scene, payloads, expected.data());
  FUZZ_CHECK(valid == accepted, "malformed, by the description of the format");
  FUZZ_CHECK(!valid || std::memcmp(grad, expected.data(), expected.size()) == 0, "values");
}

// `grad` and `again`: what two decodes of the same payloads wrote.
void put_faults_in(const Scene& scene, bool accepted, uint8_t* grad, uint8_t* again) {
  const GradType type = scene.codec.grad_type;
  const int64_t elements = scene.layout.elements();
  if (self_test == SelfTest::kWriteBeyond) put_bits(grad, type, elements, 0);
  if (elements == 0) return;
  if (self_test == SelfTest::kOtherSecondTime) again[0] ^= 1;
  if (self_test == SelfTest::kOtherValue && accepted) {
    grad[0] ^= 1;
    again[0] ^= 1;
  }
}

// Decodes between guards in one call, then in pieces from the back into a block without guards.
void check_decode(const Scene& scene, const uint8_t* payloads, bool intact) {
  constexpr int64_t kGuard = 64;  // bytes
  const GradType type = scene.codec.grad_type;
  const int64_t bytes = scene.layout.elements() * element_bytes(type);
  const HeapBlock guarded(bytes + 2 * kGuard, 0x77);
  const HeapBlock exact(bytes, 0);
  uint8_t* const grad = guarded.data() + kGuard;
  for (int64_t i = 0; i < scene.layout.elements(); ++i) {
    put_bits(grad, type, i, sentinel_bits(type));
    put_bits(exact.data(), type, i, sentinel_bits(type));
  }
  const Result first = decode(scene, payloads, grad, 1 << 20, false);
  const Result second = decode(scene, payloads, exact.data(), 1 + scene.step % 3, true);
  const bool accepted = first.status == 0;
  put_faults_in(scene, accepted, grad, exact.data());
  for (int64_t i = 0; i < kGuard; ++i) {
    FUZZ_CHECK(grad[-1 - i] == 0x77 && grad[bytes + i] == 0x77, "guards");
  }
  FUZZ_CHECK(first.status == second.status && first.fault == second.fault, "the same status");
  FUZZ_CHECK(std::memcmp(grad, exact.data(), bytes) == 0, "the same bits");
  check_bucket(scene, grad, accepted);
  if (!accepted) check_fault(scene, first);
  FUZZ_CHECK(accepted || !intact, "an untouched payload is accepted");
  check_against_naive(scene, payloads, grad, accepted);
}

void check_inspection(const Scene& scene, const uint8_t* bytes, int64_t size) {
  adacomp::Header header;
  adacomp::PayloadTables tables;
  const bool read = adacomp::read_header(bytes, size, header).empty();
  FUZZ_CHECK(read == (size >= 32), "size of a header");
  FUZZ_CHECK(!read || std::memcmp(&header, bytes, 32) == 0, "header");
  const bool whole = adacomp::read_tables(bytes, size, scene.layout, tables).empty();
  FUZZ_CHECK(whole == (size >= scene.layout.fixed_bytes()), "size of the tables");
  if (!whole) return;
  const adacomp::Offsets parts = scene.layout.offsets();
  for (int64_t i = 0; i < scene.layout.segments(); ++i) {
    FUZZ_CHECK(
        float_bits(tables.scales[i]) == get_bits(bytes + parts.scales, GradType::kFloat32, i),
        "scales");
  }
  for (int64_t i = 0; i <= scene.layout.chunks(); ++i) {
    FUZZ_CHECK(tables.chunk_table[i] == get_bits(bytes + parts.table, GradType::kFloat32, i),
               "chunk table");
  }
}

void decode_any(const Scene& scene, uint32_t options, Input& input) {
  std::vector<uint8_t> all;
  const bool intact = read_payloads(scene, options, input, all);
  const int64_t missing = self_test == SelfTest::kShortPayload ? 1 : 0;
  const HeapBlock payloads(static_cast<int64_t>(all.size()) - missing, 0);
  std::memcpy(payloads.data(), all.data(), payloads.size());
  check_decode(scene, payloads.data(), intact);
  check_inspection(scene, payloads.data(), scene.capacity);
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint32_t options = input.byte();
  const fuzz::Scene scene = fuzz::read_scene(input);
  // Any bytes, of any number, at an address of any alignment.
  fuzz::check_inspection(scene, data, static_cast<int64_t>(size));
  if ((options & fuzz::kRoundTrip) != 0) {
    fuzz::round_trip(scene, input);
  } else {
    fuzz::decode_any(scene, options, input);
  }
  return 0;
}
