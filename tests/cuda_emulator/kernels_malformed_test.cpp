// Malformed payloads: the CUDA kernels refuse what the CPU refuses, with the same status word.
#include <functional>

#include "emulator_test.h"
#include "kernels_test.h"

namespace {

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
    const Options options = options_of(turn);
    Bucket bucket = good_bucket(kSmall, options);
    for (size_t field = 0; field < sizeof(Header); field += 4) {
      for (const uint32_t value : {0u, 1u, 2u, 7u, 1u << 31, ~0u, kMagic, 1u << 16, 1u << 16 | 2}) {
        refuses(bucket,
                [&] { put(bucket.payload(draw(0, options.world_size - 1)) + field, value); });
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
    const Options options = options_of(turn);
    Bucket bucket = good_bucket(kSmall, options);
    const Offsets o = bucket.layout().offsets();
    for (int64_t at = o.scales; at < o.raw; at += 4) {
      for (const uint32_t bits : {0u, 1u, 2u, 0x3f800000u, 0x7f800000u, 0x7fc00000u, 0x7fc00001u,
                                  0xbf800000u, 1u << 31, 100u, 1000u, ~0u}) {
        refuses(bucket, [&] { put(bucket.payload(draw(0, options.world_size - 1)) + at, bits); });
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
  int64_t refused = 0;
  for (int64_t turn = 0; turn < 12; ++turn) {
    Bucket bucket = good_bucket({{9000, 50}, {3000, 500}, {70, 1}, {70, 1}}, options_of(turn));
    const Offsets o = bucket.layout().offsets();
    auto* const table = reinterpret_cast<uint32_t*>(bucket.payload(0) + o.table);
    for (int64_t round = 0; round < 20; ++round) {
      refused += refuses(bucket, [&] {
        const int64_t i = draw(1, bucket.layout().chunks() - 1);
        table[i] = static_cast<uint32_t>(draw(table[i - 1] / 2, table[i + 1] / 2) * 2);
      });
    }
  }
  CHECK(refused > 100);
}

// The used part ends in the middle of a 4-byte word: all of the payload is looked at all the same.
TEST(every_bit_flip) {
  for (const bool bin_scales : {false, true}) {
    Options o;
    o.bin_scales = bin_scales;
    o.type = bin_scales ? GradType::kFloat16 : GradType::kFloat32;
    const std::vector<Part> parts = {{70, 50}, {1, 0}, {100, 64}};
    Bucket bucket = good_bucket(parts, o);
    const auto used = [&] { return reinterpret_cast<Header*>(bucket.payload(0))->used_bytes; };
    while (used() % 4 != 2) bucket = good_bucket(parts, o);
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
