#include "op_checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

namespace adacomp {
namespace {

// Keeps every product and sum of the layout arithmetic far from overflow.
constexpr int64_t kMaxElements = int64_t{1} << 48;

struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;  // null: not given
};

void check_segment(const Segment& s, int64_t i, int64_t expected_offset) {
  TORCH_CHECK(s.bucket_offset == expected_offset, "layout: expected segment ", i,
              " at bucket_offset ", expected_offset, ", got ", s.bucket_offset);
  TORCH_CHECK(s.numel >= 0 && s.numel <= kMaxElements - expected_offset,
              "layout: expected numel of segment ", i, " from 0 to ",
              kMaxElements - expected_offset, ", got ", s.numel);
  TORCH_CHECK(s.bin_size >= 0 && s.bin_size <= kMaxBinSize, "layout: expected bin_size of segment ",
              i, " from 1 to ", kMaxBinSize, ", or 0 for raw values, got ", s.bin_size);
  TORCH_CHECK(s.is_raw() ? s.residual_offset == -1 : s.residual_offset >= 0,
              "layout: expected residual_offset of segment ", i, s.is_raw() ? " to be -1" : " >= 0",
              ", got ", s.residual_offset);
}

void check_device(const char* name, const at::Tensor& tensor, const NamedTensor& other) {
  TORCH_CHECK(tensor.device() == other.tensor->device(), name, ": expected ", other.name,
              "'s device ", other.tensor->device(), ", got ", tensor.device());
}

void check_grad(const at::Tensor& grad, const Layout& layout) {
  TORCH_CHECK(grad.dim() == 1 && grad.is_contiguous(),
              "grad: expected a 1-D contiguous tensor, got sizes ", grad.sizes(), " strides ",
              grad.strides());
  TORCH_CHECK(grad.numel() == layout.elements(), "grad: expected the layout's ", layout.elements(),
              " elements, got ", grad.numel());
}

void check_residual(const at::Tensor& residual, const Layout& layout) {
  TORCH_CHECK(residual.scalar_type() == at::kFloat, "residual: expected dtype float32, got ",
              residual.scalar_type());
  TORCH_CHECK(residual.dim() == 1 && residual.is_contiguous(),
              "residual: expected a 1-D contiguous tensor, got sizes ", residual.sizes(),
              " strides ", residual.strides());
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t i = 0; i < layout.segments(); ++i) {
    const Segment& s = layout.segment(i);
    if (s.is_raw()) continue;
    TORCH_CHECK(s.numel <= residual.numel() && s.residual_offset <= residual.numel() - s.numel,
                "residual: expected room for ", s.numel, " elements of segment ", i, " at ",
                s.residual_offset, ", got ", residual.numel(), " elements");
    if (s.numel > 0) ranges.emplace_back(s.residual_offset, s.residual_offset + s.numel);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    TORCH_CHECK(ranges[i - 1].second <= ranges[i].first,
                "layout: expected disjoint residual ranges, got one at ", ranges[i].first,
                " before the end ", ranges[i - 1].second, " of another");
  }
}

void check_payloads(const char* name, const at::Tensor& payloads, int64_t dims,
                    const Layout& layout) {
  TORCH_CHECK(payloads.scalar_type() == at::kByte, name, ": expected dtype uint8, got ",
              payloads.scalar_type());
  TORCH_CHECK(payloads.dim() == dims && payloads.is_contiguous(), name, ": expected a contiguous ",
              dims, "-D tensor, got sizes ", payloads.sizes(), " strides ", payloads.strides());
  const int64_t capacity = payloads.size(-1);
  TORCH_CHECK(capacity >= layout.fixed_bytes() && capacity <= kMaxPayloadBytes, name,
              ": expected a capacity from ", layout.fixed_bytes(), " to ", kMaxPayloadBytes,
              " bytes, got ", capacity);
  TORCH_CHECK(capacity % kAlignment == 0, name, ": expected a capacity that is a multiple of ",
              kAlignment, ", got ", capacity);
  const auto address = reinterpret_cast<uintptr_t>(payloads.const_data_ptr());
  TORCH_CHECK(address % kAlignment == 0, name, ": expected memory aligned to ", kAlignment,
              " bytes, got an address that is ", address % kAlignment, " past it");
}

void check_small(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                 at::IntArrayRef sizes) {
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.is_contiguous(),
              name, ": expected a contiguous ", dtype == at::kBool ? "bool" : "int64",
              " tensor of sizes ", sizes, ", got ", tensor.scalar_type(), " of sizes ",
              tensor.sizes());
}

// Contiguous tensors of which some are written share no memory. By address, so that views of
// foreign memory are compared too.
void check_distinct(std::initializer_list<NamedTensor> tensors) {
  const auto overlap = [](const at::Tensor& a, const at::Tensor& b) {
    const auto a_begin = reinterpret_cast<uintptr_t>(a.const_data_ptr());
    const auto b_begin = reinterpret_cast<uintptr_t>(b.const_data_ptr());
    const bool apart = a_begin + a.nbytes() <= b_begin || b_begin + b.nbytes() <= a_begin;
    return a.nbytes() > 0 && b.nbytes() > 0 && !apart;
  };
  for (auto b = tensors.begin(); b != tensors.end(); ++b) {
    for (auto a = tensors.begin(); a != b; ++a) {
      if (a->tensor == nullptr || b->tensor == nullptr) continue;
      TORCH_CHECK(!overlap(*a->tensor, *b->tensor), b->name,
                  ": expected memory of its own, got an overlap with ", a->name);
    }
  }
}

}  // namespace

Layout checked_layout(const at::Tensor& layout) {
  TORCH_CHECK(layout.scalar_type() == at::kLong, "layout: expected dtype int64, got ",
              layout.scalar_type());
  TORCH_CHECK(layout.device().is_cpu(), "layout: expected device cpu, got ", layout.device());
  TORCH_CHECK(layout.dim() == 2 && layout.size(1) == 4 && layout.is_contiguous(),
              "layout: expected a contiguous [segments, 4] tensor, got sizes ", layout.sizes(),
              " strides ", layout.strides());
  const auto* segments = reinterpret_cast<const Segment*>(layout.const_data_ptr<int64_t>());
  int64_t end = 0;
  for (int64_t i = 0; i < layout.size(0); ++i) {
    check_segment(segments[i], i, end);
    end += segments[i].numel;
  }
  Layout result(segments, layout.size(0));
  TORCH_CHECK(result.fixed_bytes() <= kMaxPayloadBytes, "layout: expected at most ",
              kMaxPayloadBytes, " bytes before the entries, got ", result.fixed_bytes());
  return result;
}

Codec checked_codec(const char* name, at::ScalarType dtype, int64_t step, bool bin_scales,
                    double threshold_factor) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, name,
              ": expected dtype float32, float16 or bfloat16, got ", dtype);
  TORCH_CHECK(step >= 0, "step: expected >= 0, got ", step);
  const auto factor = static_cast<float>(threshold_factor);
  TORCH_CHECK(std::isfinite(factor) && factor >= 1.0f,
              "threshold_factor: expected a finite float32 >= 1, got ", threshold_factor);
  const GradType type = dtype == at::kFloat  ? GradType::kFloat32
                        : dtype == at::kHalf ? GradType::kFloat16
                                             : GradType::kBFloat16;
  return {type, bin_scales, factor};
}

Checked check_compress(const at::Tensor& grad, const at::Tensor& residual, const at::Tensor& layout,
                       const at::Tensor& payload, const std::optional<at::Tensor>& counters,
                       int64_t step, bool bin_scales, double threshold_factor) {
  Checked checked{checked_layout(layout),
                  checked_codec("grad", grad.scalar_type(), step, bin_scales, threshold_factor)};
  const NamedTensor device_of{"grad", &grad};
  check_grad(grad, checked.layout);
  check_device("residual", residual, device_of);
  check_residual(residual, checked.layout);
  check_device("payload", payload, device_of);
  check_payloads("payload", payload, 1, checked.layout);
  if (counters) {
    check_device("counters", *counters, device_of);
    check_small("counters", *counters, at::kLong, {checked.layout.segments(), 2});
  }
  check_distinct({{"layout", &layout},
                  {"grad", &grad},
                  {"residual", &residual},
                  {"payload", &payload},
                  {"counters", counters ? &*counters : nullptr}});
  return checked;
}

Checked check_decompress(const at::Tensor& payloads, const at::Tensor& grad,
                         const at::Tensor& layout, const at::Tensor& status, int64_t step,
                         bool bin_scales, double threshold_factor) {
  Checked checked{checked_layout(layout),
                  checked_codec("grad", grad.scalar_type(), step, bin_scales, threshold_factor)};
  const NamedTensor device_of{"grad", &grad};
  check_grad(grad, checked.layout);
  check_device("payloads", payloads, device_of);
  check_payloads("payloads", payloads, 2, checked.layout);
  TORCH_CHECK(payloads.size(0) >= 1, "payloads: expected at least one rank, got 0");
  check_device("status", status, device_of);
  check_small("status", status, at::kLong, {1});
  check_distinct(
      {{"layout", &layout}, {"payloads", &payloads}, {"grad", &grad}, {"status", &status}});
  return checked;
}

Checked check_restore(const at::Tensor& payload, const at::Tensor& residual,
                      const at::Tensor& layout, const at::Tensor& condition, at::ScalarType dtype,
                      int64_t step, bool bin_scales, double threshold_factor) {
  Checked checked{checked_layout(layout),
                  checked_codec("dtype", dtype, step, bin_scales, threshold_factor)};
  const NamedTensor device_of{"residual", &residual};
  check_residual(residual, checked.layout);
  check_device("payload", payload, device_of);
  check_payloads("payload", payload, 1, checked.layout);
  check_device("condition", condition, device_of);
  check_small("condition", condition, at::kBool, {1});
  check_distinct({{"layout", &layout},
                  {"payload", &payload},
                  {"residual", &residual},
                  {"condition", &condition}});
  return checked;
}

}  // namespace adacomp
