// Cases of the emulator's tests. TEST(name) { ... } adds one; it fails by an exception.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.cuh"

#define CHECK(condition) \
  if (!(condition)) throw std::logic_error(std::to_string(__LINE__) + ": " #condition)

#define TEST(name)                                        \
  static void name();                                     \
  static const bool name##_added = add_case(#name, name); \
  static void name()

using Case = void (*)();

inline std::map<std::string, Case>& cases() {
  static std::map<std::string, Case> by_name;
  return by_name;
}

inline bool add_case(const char* name, Case run) {
  return cases().emplace(name, run).second;
}

constexpr int kSeeds = 50;

// Runs `launches` under many seeds, which must fail each time, and returns the last error.
inline emulator::Error error_of(emulator::Kind kind, const std::function<void()>& launches) {
  std::vector<emulator::Error> errors;
  for (int seed = 0; seed < kSeeds; ++seed) {
    emulator::set_seed(seed);
    try {
      launches();
    } catch (const emulator::Error& error) {
      if (error.kind != kind) throw;
      errors.push_back(error);
    }
    CHECK(errors.size() == seed + size_t{1});
  }
  CHECK(std::string(errors.back().what()).find(kind_name(kind)) == 0);
  return errors.back();
}
