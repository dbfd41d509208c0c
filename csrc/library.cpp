// The op schemas, and the pybind11 module for what is not an op.
//
// Ops (the CPU kernels are in cpu/ops.cpp; docstrings and fake kernels in adacomp_torch/ops.py):
//   grad       1-D float32, float16 or bfloat16: one bucket
//   residual   1-D float32: residuals of all parameters
//   layout     int64 [segments, 4], CPU: bucket_offset, numel, bin_size (0: raw), residual_offset
//   payload    uint8 [capacity]
//   payloads   uint8 [world_size, capacity]
//   counters   int64 [segments, 2]: entries sent and chunks dropped are added
//   status     int64 [1]: receives the first fault of a malformed payload
//   condition  bool [1]: whether anything is to be done
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <atomic>
#include <string>

#include "cpu/kernels.h"
#include "inspect.h"
#include "op_checks.h"

namespace py = pybind11;

TORCH_LIBRARY(adacomp, m) {
  m.def("payload_capacity(Tensor layout, bool bin_scales) -> Tensor");
  m.def(
      "compress(Tensor grad, Tensor(a!) residual, Tensor layout, Tensor(b!) payload, Tensor(c!)? "
      "counters, "
      "int step, bool bin_scales, float threshold_factor) -> ()");
  m.def(
      "decompress(Tensor payloads, Tensor(a!) grad, Tensor layout, Tensor(b!) status, int step, "
      "bool bin_scales, float threshold_factor) -> ()");
  m.def(
      "restore(Tensor payload, Tensor(a!) residual, Tensor layout, Tensor condition, "
      "ScalarType dtype, int step, bool bin_scales, float threshold_factor) -> ()");
}

namespace {

// Of a decoder that cannot look at the payload any more; what it expected is not known here.
std::string describe_status(int64_t status) {
  const adacomp::Field field = adacomp::status_field(status);
  return "payload of rank " + std::to_string(adacomp::status_rank(status)) + ": " +
         adacomp::field_name(field) + ": got something else than was expected, at place " +
         std::to_string(adacomp::status_place(status));
}

py::dict inspect_payload(const at::Tensor& payload, const std::optional<at::Tensor>& layout) {
  TORCH_CHECK(payload.scalar_type() == at::kByte && payload.dim() == 1 && payload.is_contiguous() &&
                  payload.device().is_cpu(),
              "payload: expected a 1-D contiguous uint8 tensor on the CPU, got ",
              payload.scalar_type(), " of sizes ", payload.sizes(), " on ", payload.device());
  const auto* bytes = payload.const_data_ptr<uint8_t>();
  adacomp::Header header;
  const std::string header_error = adacomp::read_header(bytes, payload.numel(), header);
  TORCH_CHECK(header_error.empty(), header_error);
  py::dict result;
  result["magic"] = py::bytes(reinterpret_cast<const char*>(bytes), 4);
  result["version"] = header.version;
  result["flags"] = header.flags;
  result["layout_hash"] = header.layout_hash;
  result["step"] = header.step;
  result["needed_bytes"] = header.needed_bytes;
  result["used_bytes"] = header.used_bytes;
  if (!layout) return result;
  const adacomp::Layout checked = adacomp::checked_layout(*layout);
  adacomp::PayloadTables tables;
  const std::string table_error = adacomp::read_tables(bytes, payload.numel(), checked, tables);
  TORCH_CHECK(table_error.empty(), table_error);
  result["fixed_bytes"] = checked.fixed_bytes();
  result["scales"] = tables.scales;
  result["chunk_table"] = tables.chunk_table;
  return result;
}

}  // namespace

#ifndef ADACOMP_WITH_CUDA
namespace {

void refuse_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(
      false, op.schema().name(),
      ": expected CPU tensors, because adacomp_torch was built without CUDA, got a CUDA tensor");
}

}  // namespace

TORCH_LIBRARY_IMPL(adacomp, CUDA, m) {
  for (const char* op : {"payload_capacity", "compress", "decompress", "restore"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_cuda>());
  }
}
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = TORCH_VERSION;
#ifdef ADACOMP_WITH_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.attr("compiler") = __VERSION__;
  m.attr("wire_version") = adacomp::kVersion;
  m.attr("max_bin_size") = adacomp::kMaxBinSize;
  m.attr("max_payload_bytes") = adacomp::kMaxPayloadBytes;
  m.def("is_non_overlapping_and_dense",
        [](const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); });
  m.def("inspect_payload", &inspect_payload, py::arg("payload"), py::arg("layout") = py::none());
  m.def("parallel_threads", [] {
    std::atomic<int64_t> threads{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { ++threads; });
    return threads.load();
  });
  m.def("kernels", [] { return adacomp::cpu::kernels().name; });
  m.def("available_kernels", &adacomp::cpu::available_kernels);
  m.def(
      "set_kernels",
      [](const std::string& name) {
        TORCH_CHECK_VALUE(adacomp::cpu::set_kernels(name), "kernels: expected one of ",
                          adacomp::cpu::available_kernels(), ", got ", name);
      },
      py::arg("name"));
  m.def("describe_status", &describe_status, py::arg("status"));
  m.def(
      "layout_hash",
      [](const at::Tensor& layout, const at::Tensor& grad, bool bin_scales,
         double threshold_factor) {
        return adacomp::checked_layout(layout).hash(
            adacomp::checked_codec("grad", grad.scalar_type(), 0, bin_scales, threshold_factor));
      },
      py::arg("layout"), py::arg("grad"), py::arg("bin_scales"), py::arg("threshold_factor"));
}
