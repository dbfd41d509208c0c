// What a payload says about itself, for tests and debugging. Torch-free; nothing is validated but
// the size. Each function returns "", or one sentence that says what is wrong.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "layout.h"

namespace adacomp {

struct PayloadTables {
  std::vector<float> scales;          // one per segment
  std::vector<uint32_t> chunk_table;  // one per chunk, and the end
};

inline std::string too_short(const std::string& expected, int64_t size) {
  return "payload: expected at least " + expected + " bytes, got " + std::to_string(size);
}

// bytes: `size` bytes, of any alignment, here and below.
inline std::string read_header(const uint8_t* bytes, int64_t size, Header& header) {
  constexpr int64_t kBytes = sizeof(Header);
  if (size < kBytes) return too_short(std::to_string(kBytes), size);
  std::memcpy(&header, bytes, kBytes);
  return "";
}

inline std::string read_tables(const uint8_t* bytes, int64_t size, const Layout& layout,
                               PayloadTables& tables) {
  const Offsets offsets = layout.offsets();
  if (size < offsets.entries) {
    return too_short("the layout's " + std::to_string(offsets.entries), size);
  }
  tables.scales.resize(layout.segments());
  tables.chunk_table.resize(layout.chunks() + 1);
  // An empty vector's data() may be null, which memcpy must not get.
  if (!tables.scales.empty()) {
    std::memcpy(tables.scales.data(), bytes + offsets.scales, 4 * tables.scales.size());
  }
  std::memcpy(tables.chunk_table.data(), bytes + offsets.table, 4 * tables.chunk_table.size());
  return "";
}

}  // namespace adacomp
