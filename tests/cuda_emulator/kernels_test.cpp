// The CUDA kernels in the emulator against the CPU's, over ugly buckets and malformed payloads.
//
//   kernels_test --list        the cases' names
//   kernels_test NAME [SEED]   runs one
#include "kernels_test.h"

#include <cstdio>
#include <cstdlib>

#include "emulator_test.h"

namespace {

constexpr GradType kTypes[] = {GradType::kFloat32, GradType::kFloat16, GradType::kBFloat16};
constexpr float kFactors[] = {2.0f, 1.0f, 3.0f};

// Takes turns, so that every combination comes up without running all of them for every bucket.
Options options_of(int64_t turn) {
  Options o;
  o.type = kTypes[turn % 3];
  o.bin_scales = turn / 3 % 2 != 0;
  o.factor = kFactors[turn / 6 % 3];
  o.world_size = 1 + turn % 3;
  o.grad_shift = draw(0, 7);
  o.residual_shift = draw(0, 3);
  return o;
}

void check_steps(const std::vector<Part>& parts, const Options& options,
                 const std::vector<Kind>& kinds) {
  Bucket bucket(parts, options);
  int64_t step = (int64_t{1} << 32) - 1;
  for (const Kind kind : kinds) bucket.step(kind, step++);
}

// Around the bin, around the chunk, and primes.
void check_sizes(int64_t bin_size) {
  const int64_t chunk = bins_per_chunk(bin_size) * bin_size;
  std::vector<int64_t> sizes = {0,
                                1,
                                2,
                                bin_size - 1,
                                bin_size,
                                bin_size + 1,
                                2 * bin_size + 3,
                                509,
                                chunk - 1,
                                chunk,
                                chunk + 1,
                                2 * chunk + bin_size + 1};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto kind = static_cast<Kind>(i % kKinds);
    check_steps({{sizes[i], bin_size}}, options_of(draw(0, 17)), {kNormal, kind});
  }
  std::vector<Part> parts = {{7, 0}, {0, 0}};
  for (const int64_t size : sizes) {
    parts.push_back({size, bin_size});
    if (size % 2 != 0) parts.push_back({size % 100, 0});
  }
  for (int64_t turn = 0; turn < 2; ++turn) check_steps(parts, options_of(draw(0, 17)), {kNormal});
}

TEST(sizes_of_bin_1) {
  check_sizes(1);
}
TEST(sizes_of_bin_2) {
  check_sizes(2);
}
TEST(sizes_of_bin_49) {
  check_sizes(49);
}
TEST(sizes_of_bin_50) {
  check_sizes(50);
}
TEST(sizes_of_bin_63) {
  check_sizes(63);
}
TEST(sizes_of_bin_64) {
  check_sizes(64);
}
TEST(sizes_of_bin_500) {
  check_sizes(500);
}
TEST(sizes_of_bin_2048) {
  check_sizes(2048);
}
TEST(sizes_of_bin_2049) {
  check_sizes(2049);
}
TEST(sizes_of_bin_5000) {
  check_sizes(5000);
}
TEST(sizes_of_bin_16383) {
  check_sizes(16383);
}

// Every dtype, scale mode and factor with every kind of gradient, in steps that build on another.
const std::vector<Part> kMixed = {{700, 50}, {5, 0}, {1200, 500}, {0, 50}, {130, 63}, {9, 1}};

void check_kind(Kind kind) {
  for (int64_t turn = 0; turn < 18; ++turn) {
    check_steps(kMixed, options_of(turn), {kNormal, kind, kind, kNormal});
  }
}

TEST(gradients_normal) {
  check_kind(kNormal);
}
TEST(gradients_ties) {
  check_kind(kTies);
}
TEST(gradients_rare) {
  check_kind(kRare);
}
TEST(gradients_wide) {
  check_kind(kWide);
}
TEST(gradients_non_finite) {
  check_kind(kNonFinite);
}
TEST(gradients_zero) {
  check_kind(kZero);
}
TEST(gradients_cancel) {
  check_kind(kCancel);
}
TEST(gradients_dense) {
  check_kind(kDense);
}

TEST(alignments) {
  for (int64_t turn = 0; turn < 4 * 8; ++turn) {
    for (const int64_t numel : {4093, 4096}) {
      Options o = options_of(draw(0, 17));
      o.residual_shift = turn % 4;
      o.grad_shift = turn / 4;
      check_steps({{numel, 64}}, o, {kNormal});
    }
  }
}

// From no room for entries to room for all; the chunks that are dropped change with the step.
TEST(dropped_chunks) {
  const std::vector<Part> parts = {{900, 50},   {3, 0},       {4200, 2},
                                   {8300, 500}, {5000, 5000}, {40, 63}};
  for (int64_t turn = 0; turn < 12; ++turn) {
    Options o = options_of(draw(0, 17));
    o.bin_scales = turn % 2 != 0;
    o.room = static_cast<double>(turn) / 24;
    check_steps(parts, o, {kNormal, turn % 3 == 0 ? kNonFinite : kNormal, kDense});
  }
}

// One chunk, one bin, one element each: admission and offsets with nothing else around.
TEST(many_small_segments) {
  for (const bool bin_scales : {false, true}) {
    Options o;
    o.bin_scales = bin_scales;
    for (const double room : {0.3, 1.0}) {
      o.room = room;
      std::vector<Part> parts;
      for (int64_t i = 0; i < 150; ++i) parts.push_back({1 + i % 3, i % 4});
      check_steps(parts, o, {kNormal, kNormal});
    }
  }
}

TEST(nothing_at_all) {
  for (int64_t turn = 0; turn < 6; ++turn) {
    check_steps({}, options_of(turn), {kNormal});
    check_steps({{0, 50}, {0, 0}}, options_of(turn), {kNormal});
    check_steps({{5000, 0}}, options_of(turn), {kNormal});
  }
}

TEST(no_counters) {
  Options o;
  o.counts = false;
  o.room = 0.2;
  check_steps(kMixed, o, {kNormal, kNormal});
}

TEST(many_ranks) {
  Options o;
  for (const bool bin_scales : {false, true}) {
    o.bin_scales = bin_scales;
    o.world_size = cuda::kRanksAtOnce + 2;
    check_steps({{300, 50}, {3, 0}}, o, {kNormal});
  }
}

// ---- kernels over tables that are too large for whole buckets here ----

// A segment of more chunks than a tile of sums holds: its scale has the order of LaneSum.
TEST(scale_of_many_chunks) {
  for (const int64_t chunks : {1, 31, 33, 1023, 1025, 3333}) {
    Bucket bucket({{chunks * 4096, 4096}}, {});
    cuda::DeviceLayout layout = bucket.device_layout();
    const Memory memory(cuda::compress_scratch_bytes(layout));
    const cuda::CompressScratch scratch = cuda::compress_scratch(layout, memory.get());
    LaneSum sum;
    for (int64_t i = 0; i < chunks; ++i) {
      scratch.notes[i] = {1, i == chunks - 1, false, false};
      scratch.sums[i] = std::ldexp(std::uniform_real_distribution<>()(rng), draw(-3, 3));
      sum.add(scratch.sums[i]);
    }
    cuda::launch(cuda::scale_segments, 1, cuda::kScaleThreads, nullptr, layout, scratch,
                 bucket.payload(0));
    const float scale = *reinterpret_cast<float*>(bucket.payload(0) + layout.offsets.scales);
    CHECK(scale == segment_scale(sum.total(), chunks, GradType::kFloat32));
  }
}

// Against the rule as the design has it: cyclic visits until the first that does not fit.
TEST(places_of_many_chunks) {
  for (const int64_t chunks : {1, 2, 100, 4095, 4096, 4097, 10000}) {
    Bucket bucket({{chunks * 4096, 4096}}, {});
    const cuda::DeviceLayout layout = bucket.device_layout();
    const Memory memory(cuda::compress_scratch_bytes(layout));
    const cuda::CompressScratch scratch = cuda::compress_scratch(layout, memory.get());
    int64_t needed = 0;
    for (int64_t i = 0; i < chunks; ++i) {
      scratch.bytes[i] = static_cast<uint32_t>(2 * std::max<int64_t>(0, draw(-2000, 4096)));
      needed += scratch.bytes[i];
    }
    for (int64_t step = 0; step < 20; ++step) {
      const int64_t budget = needed * step / 19;
      cuda::launch(cuda::place_ranges, 1, cuda::kPlaceThreads, nullptr, layout, scratch,
                   bucket.payload(0), layout.offsets.entries + budget, step);
      std::vector<bool> admitted(chunks, false);
      int64_t rest = budget;
      for (int64_t k = 0; k < chunks; ++k) {
        const int64_t i = (first_admitted_chunk(step, chunks) + k) % chunks;
        if (scratch.bytes[i] > rest) break;
        admitted[i] = true;
        rest -= scratch.bytes[i];
      }
      int64_t end = 0;
      for (int64_t i = 0; i < chunks; ++i) {
        CHECK(cuda::range_begin(*scratch.admission, scratch.prefix, i) == end);
        if (scratch.bytes[i] == 0) continue;
        CHECK(cuda::is_admitted(*scratch.admission, i) == admitted[i]);
        end += admitted[i] ? scratch.bytes[i] : 0;
      }
      const auto* const header = reinterpret_cast<const Header*>(bucket.payload(0));
      CHECK(header->needed_bytes == static_cast<uint64_t>(layout.offsets.entries + needed));
      CHECK(header->used_bytes == static_cast<uint64_t>(layout.offsets.entries + end));
    }
  }
}

// ---- malformed payloads ----

constexpr int64_t kStep = 7;

// Decodes with some bytes changed, then puts them back. Returns whether it was refused.
bool refuses(Bucket& bucket, const std::function<void()>& damage) {
  const std::vector<uint8_t> good(bucket.payload(0), bucket.payload(0) + bucket.payload_bytes());
  damage();
  const int64_t status = bucket.decode(kStep, draw(0, 9) == 0 ? draw(1, 1000) : 0);
  std::copy(good.begin(), good.end(), bucket.payload(0));
  return status != 0;
}

Bucket good_bucket(const std::vector<Part>& parts, Options options, Kind kind = kNormal) {
  Bucket bucket(parts, options);
  bucket.step(kind, kStep);
  return bucket;
}

const std::vector<Part> kSmall = {{300, 50}, {5, 0}, {1200, 500}, {0, 5}, {9, 1}, {70, 63}};

template <typename T>
void put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

TEST(malformed_headers) {
  for (int64_t turn = 0; turn < 6; ++turn) {
    Bucket bucket = good_bucket(kSmall, options_of(turn));
    for (size_t field = 0; field < sizeof(Header); field += 4) {
      for (const uint32_t value : {0u, 1u, 2u, 7u, 1u << 31, ~0u, kMagic, 1u << 16, 1u << 16 | 2}) {
        refuses(bucket, [&] { put(bucket.payload(draw(0, turn % 3)) + field, value); });
      }
    }
    const auto* const header = reinterpret_cast<const Header*>(bucket.payload(0));
    for (int64_t delta = -40; delta <= 40; ++delta) {
      for (const size_t field : {16, 24}) {
        const uint64_t value = (field == 16 ? header->needed_bytes : header->used_bytes) + delta;
        const bool refused = refuses(bucket, [&] { put(bucket.payload(0) + field, value); });
        CHECK(refused || delta == 0 || field == 16);
      }
    }
  }
}

TEST(malformed_scales_and_tables) {
  for (int64_t turn = 0; turn < 6; ++turn) {
    Bucket bucket = good_bucket(kSmall, options_of(turn));
    const Offsets o = bucket.layout().offsets();
    for (int64_t at = o.scales; at < o.raw; at += 4) {
      for (const uint32_t bits : {0u, 1u, 2u, 0x3f800000u, 0x7f800000u, 0x7fc00000u, 0x7fc00001u,
                                  0xbf800000u, 1u << 31, 100u, 1000u, ~0u}) {
        refuses(bucket, [&] { put(bucket.payload(draw(0, turn % 3)) + at, bits); });
      }
      uint32_t word;
      std::memcpy(&word, bucket.payload(0) + at, 4);
      for (int32_t delta = -5; delta <= 5; ++delta) {
        refuses(bucket, [&] { put(bucket.payload(0) + at, word + delta); });
      }
    }
  }
}

// A word of a rank's entries; mostly such that bins and indices are wrong, and in several places.
void damage_entries(Bucket& bucket, int64_t world_size) {
  const Offsets o = bucket.layout().offsets();
  for (int64_t count = draw(1, 3); count > 0; --count) {
    uint8_t* const payload = bucket.payload(draw(0, world_size - 1));
    const auto used = static_cast<int64_t>(reinterpret_cast<const Header*>(payload)->used_bytes);
    if (used <= o.entries) continue;
    const int64_t at = draw(o.entries, used - 1);
    const uint8_t values[] = {0,
                              1,
                              0xfc,
                              0xfd,
                              0xff,
                              static_cast<uint8_t>(payload[at] ^ 1),
                              static_cast<uint8_t>(payload[at] ^ 4),
                              static_cast<uint8_t>(rng())};
    payload[at] = values[draw(0, 7)];
  }
}

void check_damaged_entries(const std::vector<Part>& parts, Kind kind, int64_t rounds) {
  int64_t refused = 0;
  for (int64_t turn = 0; turn < 6; ++turn) {
    const Options options = options_of(turn);
    Bucket bucket = good_bucket(parts, options, kind);
    for (int64_t round = 0; round < rounds; ++round) {
      refused += refuses(bucket, [&] { damage_entries(bucket, options.world_size); });
    }
  }
  CHECK(refused > rounds);
}

TEST(malformed_entries) {
  check_damaged_entries(kSmall, kNormal, 150);
}
TEST(malformed_entries_of_rare_bins) {
  check_damaged_entries({{4000, 63}, {900, 64}}, kRare, 60);
}
TEST(malformed_entries_of_many) {
  check_damaged_entries({{4100, 1}, {4100, 2}}, kDense, 15);
}
TEST(malformed_entries_of_wide_bins) {
  check_damaged_entries({{16383, 16383}}, kNormal, 20);
}

// Ranges that begin and end elsewhere, so that they are read out of step.
TEST(moved_ranges) {
  for (int64_t turn = 0; turn < 12; ++turn) {
    Bucket bucket = good_bucket({{9000, 50}, {3000, 500}, {70, 1}, {70, 1}}, options_of(turn));
    const Offsets o = bucket.layout().offsets();
    auto* const table = reinterpret_cast<uint32_t*>(bucket.payload(0) + o.table);
    int64_t refused = 0;
    for (int64_t round = 0; round < 20; ++round) {
      refused += refuses(bucket, [&] {
        const int64_t i = draw(1, bucket.layout().chunks() - 1);
        table[i] = static_cast<uint32_t>(draw(table[i - 1] / 2, table[i + 1] / 2) * 2);
      });
    }
    CHECK(refused > 5);
  }
}

TEST(every_bit_flip) {
  for (const bool bin_scales : {false, true}) {
    Options o;
    o.bin_scales = bin_scales;
    o.type = bin_scales ? GradType::kFloat16 : GradType::kFloat32;
    Bucket bucket = good_bucket({{70, 50}, {1, 0}, {100, 64}}, o);
    for (int64_t bit = 0; bit < 8 * bucket.payload_bytes(); ++bit) {
      refuses(bucket, [&] { bucket.payload(0)[bit / 8] ^= 1 << bit % 8; });
    }
  }
}

TEST(noise) {
  for (int64_t turn = 0; turn < 6; ++turn) {
    const Options options = options_of(turn);
    Bucket bucket = good_bucket(kSmall, options);
    int64_t refused = 0;
    for (int64_t round = 0; round < 60; ++round) {
      refused += refuses(bucket, [&] {
        uint8_t* const payload = bucket.payload(draw(0, options.world_size - 1));
        const int64_t begin = draw(sizeof(Header), bucket.capacity() - 1);
        const int64_t end = std::min(bucket.capacity(), begin + draw(1, 64));
        for (int64_t i = begin; i < end; ++i) payload[i] = static_cast<uint8_t>(rng());
      });
    }
    CHECK(refused > 20);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const auto& named : cases()) std::puts(named.first.c_str());
    return 0;
  }
  const auto found = argc > 1 ? cases().find(argv[1]) : cases().end();
  if (found == cases().end()) {
    std::fprintf(stderr, "usage: kernels_test --list | NAME [SEED]\n");
    return 2;
  }
  const unsigned seed = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 0;
  rng.seed(seed);
  emulator::set_seed(seed);
  emulator::set_warp_operations_order_memory(false);
  try {
    found->second();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
