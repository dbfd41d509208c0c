// The launchers of kernels.cu, for code that is not compiled by nvcc. See compress.cuh,
// decompress.cuh and restore.cuh for what they need and write.
#pragma once

#include <cuda_runtime_api.h>

#include "../layout.h"

namespace adacomp::cuda {

// A layout's tables in one run of int64 words: Segment[segments], first_chunk[segments + 1],
// first_raw[segments + 1].
int64_t table_words(const Layout& layout);
void fill_tables(const Layout& layout, int64_t* words);

// A bucket as kernels see it; `tables` is device memory with what fill_tables() wrote.
struct Bucket {
  const Layout& layout;
  const Codec& codec;
  const int64_t* tables;
};

int64_t compress_scratch_bytes(const Bucket& bucket);
int64_t fault_scratch_bytes();  // of launch_decompress and launch_restore

cudaError_t launch_compress(const Bucket& bucket, const void* grad, float* residual,
                            uint8_t* payload, int64_t capacity, int64_t step, int64_t* counters,
                            void* scratch, cudaStream_t stream);
cudaError_t launch_decompress(const Bucket& bucket, const uint8_t* payloads, int64_t world_size,
                              int64_t capacity, int64_t step, void* grad, int64_t* status,
                              void* scratch, cudaStream_t stream);
cudaError_t launch_restore(const Bucket& bucket, const uint8_t* payload, int64_t capacity,
                           int64_t step, float* residual, const bool* condition, void* scratch,
                           cudaStream_t stream);

}  // namespace adacomp::cuda
