#include "kernels.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace adacomp::cpu {

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

namespace {

#if defined(__x86_64__)

// clang 14 does not know "f16c" in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
}

#endif

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found = {&kPortableKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx2()) found.push_back(&kAvx2Kernels);
  if (has_avx512()) found.push_back(&kAvx512Kernels);
#endif
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels(available().back());
  return kernels;
}

}  // namespace

const Kernels& kernels() {
  return *chosen().load(std::memory_order_relaxed);
}

std::vector<std::string> available_kernels() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.push_back(kernels->name);
  return names;
}

bool set_kernels(const std::string& name) {
  for (const Kernels* kernels : available()) {
    if (name != kernels->name) continue;
    chosen() = kernels;
    return true;
  }
  return false;
}

}  // namespace adacomp::cpu
