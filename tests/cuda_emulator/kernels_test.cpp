// The CUDA kernels in the emulator against the CPU's, over ugly buckets and malformed payloads.
//
//   kernels_test --list        the cases' names
//   kernels_test NAME [SEED]   runs one
#include "kernels_test.h"

#include <cstdio>
#include <cstdlib>

#include "../../csrc/cuda/compress.cuh"
#include "../../csrc/cuda/decompress.cuh"
#include "emulator_test.h"

namespace {

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

// 64 bins to a chunk, so that the division by their number is exact.
TEST(order_of_sums) {
  for (int round = 0; round < 40; ++round) check_steps({{4096, 64}}, {}, {kTiny});
}

// Every dtype, scale mode and factor with every kind of gradient, in steps that build on another.
const std::vector<Part> kMixed = {{700, 50}, {5, 0}, {1200, 500}, {0, 50}, {130, 63}, {9, 1}};

void check_kind(Kind kind) {
  for (int64_t turn = 0; turn < 18; ++turn) {
    check_steps(kMixed, options_of(turn), {kNormal, kind, kNormal});
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
      for (int64_t i = 0; i < 90; ++i) parts.push_back({1 + i % 3, i % 4});
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
  for (const int64_t chunks : {1, 32, 64, 100, 1024, 2048, 4096}) {
    Bucket bucket({{chunks * 4096, 4096}}, {});
    cuda::DeviceLayout layout = bucket.device_layout();
    const Memory memory(cuda::compress_scratch_bytes(layout));
    const cuda::CompressScratch scratch = cuda::compress_scratch(layout, memory.get());
    for (int round = 0; round < 20; ++round) {
      LaneSum sum;
      for (int64_t i = 0; i < chunks; ++i) {
        scratch.notes[i] = {1, i == chunks - 1, false, false};
        scratch.sums[i] = tiny_value(chunks);
        sum.add(scratch.sums[i]);
      }
      cuda::launch(cuda::scale_segments, 1, cuda::kScaleThreads, nullptr, layout, scratch,
                   bucket.payload(0));
      const float scale = *reinterpret_cast<float*>(bucket.payload(0) + layout.offsets.scales);
      CHECK(scale == segment_scale(sum.total(), chunks, GradType::kFloat32));
    }
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
