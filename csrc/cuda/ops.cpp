// The ops on CUDA: checks, then the kernels on the current stream, without synchronisation.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../op_checks.h"
#include "kernels.h"

namespace adacomp::cuda {
namespace {

// The device's copy of a layout's tables, uploaded when the layout is first seen; that call waits,
// so that any stream may read them later. Some 48 bytes per parameter, kept for the process's life:
// buckets are few, and what kernels may still read must not be freed.
const int64_t* device_tables(const Layout& layout, c10::DeviceIndex device) {
  using Key = std::pair<c10::DeviceIndex, std::vector<int64_t>>;
  static std::mutex mutex;
  static auto& uploaded = *new std::map<Key, at::Tensor>;  // outlives CUDA's own shutdown
  at::Tensor host = at::empty({table_words(layout)}, at::kLong);
  auto* const words = host.data_ptr<int64_t>();
  fill_tables(layout, words);
  Key key{device, {words, words + host.numel()}};
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = uploaded.find(key);
  if (found == uploaded.end()) {
    found = uploaded.emplace(std::move(key), host.to(at::Device(at::kCUDA, device))).first;
  }
  return found->second.const_data_ptr<int64_t>();
}

at::Tensor scratch_for(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

at::Tensor payload_capacity(const at::Tensor& layout, bool) {
  checked_layout(layout);  // says that a layout lives on the CPU
  return layout;
}

void compress(const at::Tensor& grad, const at::Tensor& residual, const at::Tensor& layout,
              const at::Tensor& payload, const std::optional<at::Tensor>& counters, int64_t step,
              bool bin_scales, double threshold_factor) {
  const auto [checked, codec] =
      check_compress(grad, residual, layout, payload, counters, step, bin_scales, threshold_factor);
  const c10::cuda::CUDAGuard guard(grad.device());
  const Bucket bucket{checked, codec, device_tables(checked, grad.device().index())};
  const at::Tensor scratch = scratch_for(compress_scratch_bytes(bucket), grad);
  C10_CUDA_CHECK(launch_compress(bucket, grad.const_data_ptr(), residual.data_ptr<float>(),
                                 payload.data_ptr<uint8_t>(), payload.numel(), step,
                                 counters ? counters->data_ptr<int64_t>() : nullptr,
                                 scratch.data_ptr(), at::cuda::getCurrentCUDAStream()));
}

// What is malformed shows in `status`: raising would mean waiting for the device.
void decompress(const at::Tensor& payloads, const at::Tensor& grad, const at::Tensor& layout,
                const at::Tensor& status, int64_t step, bool bin_scales, double threshold_factor) {
  const auto [checked, codec] =
      check_decompress(payloads, grad, layout, status, step, bin_scales, threshold_factor);
  const c10::cuda::CUDAGuard guard(grad.device());
  const Bucket bucket{checked, codec, device_tables(checked, grad.device().index())};
  const at::Tensor scratch = scratch_for(fault_scratch_bytes(), grad);
  C10_CUDA_CHECK(launch_decompress(bucket, payloads.const_data_ptr<uint8_t>(), payloads.size(0),
                                   payloads.size(1), step, grad.data_ptr(),
                                   status.data_ptr<int64_t>(), scratch.data_ptr(),
                                   at::cuda::getCurrentCUDAStream()));
}

void restore(const at::Tensor& payload, const at::Tensor& residual, const at::Tensor& layout,
             const at::Tensor& condition, at::ScalarType dtype, int64_t step, bool bin_scales,
             double threshold_factor) {
  const auto [checked, codec] = check_restore(payload, residual, layout, condition, dtype, step,
                                              bin_scales, threshold_factor);
  const c10::cuda::CUDAGuard guard(residual.device());
  const Bucket bucket{checked, codec, device_tables(checked, residual.device().index())};
  const at::Tensor scratch = scratch_for(fault_scratch_bytes(), residual);
  C10_CUDA_CHECK(launch_restore(bucket, payload.const_data_ptr<uint8_t>(), payload.numel(), step,
                                residual.data_ptr<float>(), condition.const_data_ptr<bool>(),
                                scratch.data_ptr(), at::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(adacomp, CUDA, m) {
  m.impl("payload_capacity", payload_capacity);
  m.impl("compress", compress);
  m.impl("decompress", decompress);
  m.impl("restore", restore);
}

}  // namespace adacomp::cuda
