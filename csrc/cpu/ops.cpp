// The ops on the CPU: checks, then the torch-free kernels on at::parallel_for's threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../op_checks.h"
#include "compress.h"
#include "decompress.h"

namespace adacomp::cpu {
namespace {

constexpr int64_t kChunksPerTask = 8;       // 32k elements, tens of microseconds
constexpr int64_t kRawPerTask = 32 * 1024;  // elements

at::Tensor payload_capacity(const at::Tensor& layout, bool bin_scales) {
  const Layout checked = checked_layout(layout);
  const at::Tensor bytes = at::empty({2}, layout.options());
  bytes.data_ptr<int64_t>()[0] = checked.fixed_bytes();
  bytes.data_ptr<int64_t>()[1] = checked.worst_case_bytes(bin_scales);
  return bytes;
}

void compress(const at::Tensor& grad, const at::Tensor& residual, const at::Tensor& layout,
              const at::Tensor& payload, const std::optional<at::Tensor>& counters, int64_t step,
              bool bin_scales, double threshold_factor) {
  const auto [checked, codec] =
      check_compress(grad, residual, layout, payload, counters, step, bin_scales, threshold_factor);
  const int64_t tasks =
      std::clamp<int64_t>(checked.chunks() / kChunksPerTask, 1, at::get_num_threads());
  // Of the calling thread, which waits here for the others: no two calls share it.
  thread_local std::vector<Staging> staging;
  staging.resize(tasks);
  Compressor compressor(checked, codec, grad.const_data_ptr(), residual.data_ptr<float>(),
                        payload.data_ptr<uint8_t>(), payload.numel(), step,
                        counters ? counters->data_ptr<int64_t>() : nullptr, staging);
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) compressor.select(task);
  });
  compressor.assemble();
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) compressor.commit(task);
  });
  at::parallel_for(0, checked.raw_elements(), kRawPerTask,
                   [&](int64_t begin, int64_t end) { compressor.copy_raw(begin, end); });
  for (Staging& used : staging) used.trim(payload.numel());
}

void decompress(const at::Tensor& payloads, const at::Tensor& grad, const at::Tensor& layout,
                const at::Tensor& status, int64_t step, bool bin_scales, double threshold_factor) {
  const auto [checked, codec] =
      check_decompress(payloads, grad, layout, status, step, bin_scales, threshold_factor);
  Decompressor decompressor(checked, codec, payloads.const_data_ptr<uint8_t>(), payloads.size(0),
                            payloads.size(1), step, grad.data_ptr());
  decompressor.check_payloads();
  if (decompressor.status() == 0) {
    at::parallel_for(0, checked.chunks(), kChunksPerTask,
                     [&](int64_t begin, int64_t end) { decompressor.decode(begin, end); });
    at::parallel_for(0, checked.raw_elements(), kRawPerTask,
                     [&](int64_t begin, int64_t end) { decompressor.decode_raw(begin, end); });
  }
  if (decompressor.status() == 0) return;
  decompressor.fill_nan();
  int64_t& word = *status.data_ptr<int64_t>();
  if (word == 0) word = decompressor.status();
  TORCH_CHECK(false, decompressor.describe_fault());
}

void restore(const at::Tensor& payload, const at::Tensor& residual, const at::Tensor& layout,
             const at::Tensor& condition, at::ScalarType dtype, int64_t step, bool bin_scales,
             double threshold_factor) {
  const auto [checked, codec] = check_restore(payload, residual, layout, condition, dtype, step,
                                              bin_scales, threshold_factor);
  if (!*condition.const_data_ptr<bool>()) return;
  Decompressor decompressor(checked, codec, payload.const_data_ptr<uint8_t>(), 1, payload.numel(),
                            step, nullptr);
  decompressor.check_payloads();
  // Twice over the entries: nothing is added unless all of them are right.
  for (float* target : {static_cast<float*>(nullptr), residual.data_ptr<float>()}) {
    if (decompressor.status() != 0) break;
    at::parallel_for(0, checked.chunks(), kChunksPerTask,
                     [&](int64_t begin, int64_t end) { decompressor.restore(begin, end, target); });
  }
  TORCH_CHECK(decompressor.status() == 0, decompressor.describe_fault());
}

}  // namespace

TORCH_LIBRARY_IMPL(adacomp, CPU, m) {
  m.impl("payload_capacity", payload_capacity);
  m.impl("compress", compress);
  m.impl("decompress", decompress);
  m.impl("restore", restore);
}

}  // namespace adacomp::cpu
