// All kernels, in one translation unit without torch.
#include "kernels.h"

#include <algorithm>

#include "compress.cuh"
#include "restore.cuh"

namespace adacomp::cuda {
namespace {

constexpr int64_t kSegmentWords = sizeof(Segment) / sizeof(int64_t);

DeviceLayout device_layout(const Bucket& bucket) {
  const Layout& layout = bucket.layout;
  const int64_t segments = layout.segments();
  const int64_t* const first_chunk = bucket.tables + kSegmentWords * segments;
  DeviceLayout device{};
  device.segments = reinterpret_cast<const Segment*>(bucket.tables);
  device.first_chunk = first_chunk;
  device.first_raw = first_chunk + segments + 1;
  device.segment_count = segments;
  device.chunk_count = layout.chunks();
  device.elements = layout.elements();
  device.raw_elements = layout.raw_elements();
  device.worst_case_bytes = layout.worst_case_bytes(bucket.codec.bin_scales);
  device.offsets = layout.offsets();
  device.codec = bucket.codec;
  device.hash = layout.hash(bucket.codec);
  return device;
}

}  // namespace

int64_t table_words(const Layout& layout) {
  return (kSegmentWords + 2) * layout.segments() + 2;
}

void fill_tables(const Layout& layout, int64_t* words) {
  const int64_t segments = layout.segments();
  int64_t* const first_chunk = words + kSegmentWords * segments;
  int64_t* const first_raw = first_chunk + segments + 1;
  for (int64_t i = 0; i <= segments; ++i) {
    first_chunk[i] = layout.first_chunk(i);
    first_raw[i] = layout.first_raw(i);
    if (i < segments) reinterpret_cast<Segment*>(words)[i] = layout.segment(i);
  }
}

int64_t compress_scratch_bytes(const Bucket& bucket) {
  return compress_scratch_bytes(device_layout(bucket));
}

int64_t fault_scratch_bytes() {
  return decompress_scratch_bytes();
}

cudaError_t launch_compress(const Bucket& bucket, const void* grad, float* residual,
                            uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters,
                            void* scratch, cudaStream_t stream) {
  return compress(device_layout(bucket), grad, residual, payload, capacity, step, counters, scratch,
                  stream);
}

cudaError_t launch_decompress(const Bucket& bucket, const uint8_t* payloads, int64_t world_size,
                              int64_t capacity, int64_t step, void* grad, int64_t* status,
                              void* scratch, cudaStream_t stream) {
  return decompress(device_layout(bucket), payloads, world_size, capacity, step, grad, status,
                    scratch, stream);
}

cudaError_t launch_restore(const Bucket& bucket, const uint8_t* payload, int64_t capacity,
                           int64_t step, float* residual, const bool* condition, void* scratch,
                           cudaStream_t stream) {
  return restore(device_layout(bucket), payload, capacity, step, residual, condition, scratch,
                 stream);
}

}  // namespace adacomp::cuda
