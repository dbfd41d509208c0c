#include "gradient.h"

#include <algorithm>
#include <type_traits>

#include "multiarch.h"

namespace adacomp::cpu {
namespace {

ADACOMP_MULTIARCH void load(const Half* __restrict source, int64_t count,
                            float* __restrict target) {
  for (int64_t j = 0; j < count; ++j) target[j] = to_float(source[j]);
}

ADACOMP_MULTIARCH void load(const BFloat16* __restrict source, int64_t count,
                            float* __restrict target) {
  for (int64_t j = 0; j < count; ++j) target[j] = to_float(source[j]);
}

ADACOMP_MULTIARCH void store(const float* __restrict values, float divisor, int64_t count,
                             float* __restrict target) {
  for (int64_t j = 0; j < count; ++j) target[j] = from_float<float>(values[j] / divisor);
}

ADACOMP_MULTIARCH void store(const float* __restrict values, float divisor, int64_t count,
                             Half* __restrict target) {
  for (int64_t j = 0; j < count; ++j) target[j] = from_float<Half>(values[j] / divisor);
}

ADACOMP_MULTIARCH void store(const float* __restrict values, float divisor, int64_t count,
                             BFloat16* __restrict target) {
  for (int64_t j = 0; j < count; ++j) target[j] = from_float<BFloat16>(values[j] / divisor);
}

// Calls f with `grad` as a pointer to its storage type.
template <typename F>
void with_storage(void* grad, GradType type, F&& f) {
  switch (type) {
    case GradType::kFloat32:
      return f(static_cast<float*>(grad));
    case GradType::kFloat16:
      return f(static_cast<Half*>(grad));
    case GradType::kBFloat16:
      return f(static_cast<BFloat16*>(grad));
  }
}

}  // namespace

const float* load_gradient(const void* grad, GradType type, int64_t offset, int64_t count,
                           float* buffer) {
  if (type == GradType::kFloat32) return static_cast<const float*>(grad) + offset;
  if (type == GradType::kFloat16) {
    load(static_cast<const Half*>(grad) + offset, count, buffer);
  } else {
    load(static_cast<const BFloat16*>(grad) + offset, count, buffer);
  }
  return buffer;
}

void store_quotient(void* grad, GradType type, int64_t offset, int64_t count, const float* values,
                    float divisor) {
  with_storage(grad, type, [&](auto* storage) { store(values, divisor, count, storage + offset); });
}

void fill_nan(void* grad, GradType type, int64_t offset, int64_t count) {
  with_storage(grad, type, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    std::fill_n(storage + offset, count, from_float<T>(bits_float(kNanBits)));
  });
}

}  // namespace adacomp::cpu
