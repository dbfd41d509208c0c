#include "kernels_test.h"

#include <cmath>

#include "../../csrc/cpu/compress.h"
#include "../../csrc/cpu/decompress.h"
#include "../../csrc/cuda/compress.cuh"
#include "../../csrc/cuda/restore.cuh"

namespace {

int64_t item_bytes(GradType type) {
  return type == GradType::kFloat32 ? 4 : 2;
}

// Residuals lie in the reverse order of the bucket, with gaps, as hooks have them.
std::vector<Segment> make_segments(const std::vector<Part>& parts) {
  std::vector<Segment> segments;
  int64_t offset = 0;
  for (const Part& part : parts) {
    segments.push_back({offset, part.numel, part.bin_size, -1});
    offset += part.numel;
  }
  int64_t residual = 0;
  for (auto s = segments.rbegin(); s != segments.rend(); ++s) {
    if (s->is_raw()) continue;
    s->residual_offset = residual;
    residual += s->numel + 1;
  }
  return segments;
}

int64_t residual_elements(const std::vector<Segment>& segments) {
  int64_t end = 0;
  for (const Segment& s : segments) {
    if (!s.is_raw()) end = std::max(end, s.residual_offset + s.numel);
  }
  return end;
}

float gradient_value(Kind kind, float residual) {
  const float normal = std::normal_distribution<float>()(rng);
  switch (kind) {
    case kTies:
      return std::round(2 * normal);
    case kRare:
      return draw(0, 499) == 0 ? normal : 0.0f;
    case kWide:
      return std::ldexp(normal, static_cast<int>(draw(-150, 126)));
    case kNonFinite:
      return draw(0, 999) > 0 ? normal : draw(0, 1) ? INFINITY : std::nanf("");
    case kZero:
      return draw(0, 1) ? 0.0f : -0.0f;
    case kCancel:
      return draw(0, 1) ? -residual : normal;
    case kTiny:
      return tiny_value(4096);
    case kDense:
      return draw(0, 2) ? 1.0f : normal;
    default:
      return normal;
  }
}

std::string describe(int64_t status) {
  return "(rank " + std::to_string(status_rank(status)) + ", " + field_name(status_field(status)) +
         ", " + std::to_string(status_place(status)) + ")";
}

}  // namespace

Bucket::Bucket(const std::vector<Part>& parts, const Options& options)
    : segments_(make_segments(parts)),
      layout_(segments_.data(), static_cast<int64_t>(segments_.size())),
      options_(options),
      codec_{options.type, options.bin_scales, options.factor} {
  for (int64_t i = 0; i <= layout_.segments(); ++i) {
    first_chunk_.push_back(layout_.first_chunk(i));
    const bool is_raw = i > 0 && segments_[i - 1].is_raw();
    first_raw_.push_back(i == 0 ? 0 : first_raw_.back() + (is_raw ? segments_[i - 1].numel : 0));
  }
  const int64_t worst = layout_.worst_case_bytes(options.bin_scales);
  const int64_t fixed = layout_.fixed_bytes();
  capacity_ = fixed + static_cast<int64_t>((worst - fixed) * options.room) / 16 * 16;
  for (int device = 0; device < 2; ++device) {
    payloads_.emplace_back(options.world_size * capacity_);
    for (int64_t rank = 0; rank < options.world_size; ++rank) {
      residuals_[device].emplace_back(4 * residual_elements(segments_), 4 * options.residual_shift);
      std::memset(residuals_[device].back().get(), 0, residuals_[device].back().bytes());
    }
  }
}

void Bucket::step(Kind kind, int64_t step) {
  for (int64_t rank = 0; rank < options_.world_size; ++rank) compress(kind, rank, step);
  payloads_[1].expect_equal(payloads_[0], "payloads");
  if (decode(step, 0) != 0) throw std::runtime_error("its own payload is refused");
}

void Bucket::compress(Kind kind, int64_t rank, int64_t step) {
  const Memory grad = make_gradient(kind, rank);
  Memory same(grad.bytes());
  same.fill(grad);
  const int64_t counters_bytes = 16 * layout_.segments();
  Memory counters[2] = {Memory(counters_bytes), Memory(counters_bytes)};
  int64_t* counts[2] = {counters[0].get<int64_t>(), counters[1].get<int64_t>()};
  if (!options_.counts) counts[0] = counts[1] = nullptr;
  std::vector<cpu::Staging> staging(1);
  cpu::Compressor compressor(layout_, codec_, grad.get(), residuals_[0][rank].get<float>(),
                             payload(rank), capacity_, step, counts[0], staging);
  compressor.select(0);
  compressor.assemble();
  compressor.commit(0);
  compressor.copy_raw(0, layout_.raw_elements());
  const Memory scratch(cuda::compress_scratch_bytes(device_layout()));
  cuda::compress(device_layout(), grad.get(), residuals_[1][rank].get<float>(),
                 payloads_[1].get() + rank * capacity_, capacity_, step, counts[1], scratch.get(),
                 nullptr);
  grad.expect_equal(same, "gradient");
  counters[1].expect_equal(counters[0], "counters");
  residuals_[1][rank].expect_equal(residuals_[0][rank], "residual");
}

int64_t Bucket::decode(int64_t step, int64_t before) {
  const int64_t bytes = layout_.elements() * item_bytes(options_.type);
  Memory grads[2] = {Memory(bytes, options_.grad_shift * item_bytes(options_.type)),
                     Memory(bytes, options_.grad_shift * item_bytes(options_.type))};
  cpu::Decompressor decompressor(layout_, codec_, payloads_[0].get(), options_.world_size,
                                 capacity_, step, grads[0].get());
  decompressor.check_payloads();
  if (decompressor.status() == 0) {
    decompressor.decode(0, layout_.chunks());
    decompressor.decode_raw(0, layout_.raw_elements());
  }
  if (decompressor.status() != 0) decompressor.fill_nan();
  const int64_t expected = before != 0 ? before : decompressor.status();
  const Memory scratch(cuda::decompress_scratch_bytes());
  int64_t status = before;
  cuda::decompress(device_layout(), payloads_[0].get(), options_.world_size, capacity_, step,
                   grads[1].get(), &status, scratch.get(), nullptr);
  grads[1].expect_equal(grads[0], "decoded gradient");
  const int64_t rank = draw(0, options_.world_size - 1);
  restore(rank, step, false);
  if (draw(0, 1) == 0) restore(rank, step, true);
  if (status != expected) {
    throw std::runtime_error("status is " + describe(status) + " instead of " + describe(expected));
  }
  return decompressor.status();
}

void Bucket::restore(int64_t rank, int64_t step, bool condition) {
  auto* const residual = residuals_[0][rank].get<float>();
  cpu::Decompressor decompressor(layout_, codec_, payload(rank), 1, capacity_, step, nullptr);
  if (condition) decompressor.check_payloads();
  for (float* target : {static_cast<float*>(nullptr), residual}) {
    if (!condition || decompressor.status() != 0) break;
    decompressor.restore(0, layout_.chunks(), target);
  }
  const Memory scratch(cuda::decompress_scratch_bytes());
  cuda::restore(device_layout(), payload(rank), capacity_, step, residuals_[1][rank].get<float>(),
                &condition, scratch.get(), nullptr);
  residuals_[1][rank].expect_equal(residuals_[0][rank], "restored residual");
}

cuda::DeviceLayout Bucket::device_layout() const {
  return {segments_.data(),       first_chunk_.data(),
          first_raw_.data(),      layout_.segments(),
          layout_.chunks(),       layout_.elements(),
          layout_.raw_elements(), layout_.worst_case_bytes(options_.bin_scales),
          layout_.offsets(),      codec_,
          layout_.hash(codec_)};
}

Memory Bucket::make_gradient(Kind kind, int64_t rank) const {
  Memory grad(layout_.elements() * item_bytes(options_.type),
              options_.grad_shift * item_bytes(options_.type));
  const float* const residual = residuals_[0][rank].get<float>();
  for (const Segment& s : segments_) {
    // One parameter of a few has no gradient, whatever the others have.
    const Kind own = draw(0, 9) == 0 ? kZero : kind;
    for (int64_t j = 0; j < s.numel; ++j) {
      const float value = gradient_value(own, s.is_raw() ? 0 : residual[s.residual_offset + j]);
      const int64_t i = s.bucket_offset + j;
      if (options_.type == GradType::kFloat32) grad.get<float>()[i] = value;
      if (options_.type == GradType::kFloat16) grad.get<Half>()[i] = from_float<Half>(value);
      if (options_.type == GradType::kBFloat16) {
        grad.get<BFloat16>()[i] = from_float<BFloat16>(value);
      }
    }
  }
  return grad;
}
