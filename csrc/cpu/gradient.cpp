#include "gradient.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.h"

namespace adacomp::cpu {
namespace {

template <typename T>
void copy_as_float(const void* grad, int64_t offset, int64_t count, float* target) {
  const T* const source = static_cast<const T*>(grad) + offset;
  for (int64_t j = 0; j < count; ++j) target[j] = to_float(source[j]);
}

template <typename T>
void fill_nan_as(void* grad, int64_t offset, int64_t count) {
  std::fill_n(static_cast<T*>(grad) + offset, count, from_float<T>(bits_float(kNanBits)));
}

}  // namespace

const float* load_gradient(const void* grad, GradType type, int64_t offset, int64_t count,
                           float* buffer) {
  switch (type) {
    case GradType::kFloat32:
      return static_cast<const float*>(grad) + offset;
    case GradType::kFloat16:
      kernels().load_half(static_cast<const Half*>(grad) + offset, count, buffer);
      break;
    case GradType::kBFloat16:
      kernels().load_bfloat16(static_cast<const BFloat16*>(grad) + offset, count, buffer);
      break;
  }
  return buffer;
}

void copy_exact(const void* grad, GradType type, int64_t offset, int64_t count, float* target) {
  switch (type) {
    case GradType::kFloat32:
      return copy_as_float<float>(grad, offset, count, target);
    case GradType::kFloat16:
      return copy_as_float<Half>(grad, offset, count, target);
    case GradType::kBFloat16:
      return copy_as_float<BFloat16>(grad, offset, count, target);
  }
}

void store_quotient(void* grad, GradType type, int64_t offset, int64_t count, float* sums,
                    float divisor) {
  switch (type) {
    case GradType::kFloat32:
      return kernels().store_float(sums, divisor, count, static_cast<float*>(grad) + offset);
    case GradType::kFloat16:
      return kernels().store_half(sums, divisor, count, static_cast<Half*>(grad) + offset);
    case GradType::kBFloat16:
      return kernels().store_bfloat16(sums, divisor, count, static_cast<BFloat16*>(grad) + offset);
  }
}

void stream_quotient(float* grad, int64_t count, float* sums, float divisor, float* buffer) {
  kernels().store_float(sums, divisor, count, buffer);
  int64_t j = 0;
#if defined(__SSE2__)
  constexpr int64_t kWidth = 4;
  for (; j < count && reinterpret_cast<uintptr_t>(grad + j) % 16 != 0; ++j) grad[j] = buffer[j];
  for (; j + kWidth <= count; j += kWidth) _mm_stream_ps(grad + j, _mm_loadu_ps(buffer + j));
#endif
  std::memcpy(grad + j, buffer + j, (count - j) * sizeof(float));
}

void flush_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void fill_nan(void* grad, GradType type, int64_t offset, int64_t count) {
  switch (type) {
    case GradType::kFloat32:
      return fill_nan_as<float>(grad, offset, count);
    case GradType::kFloat16:
      return fill_nan_as<Half>(grad, offset, count);
    case GradType::kBFloat16:
      return fill_nan_as<BFloat16>(grad, offset, count);
  }
}

}  // namespace adacomp::cpu
