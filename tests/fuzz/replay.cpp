// Feeds files to the fuzz target, for compilers without libFuzzer: replay FILE...
// Built with ADACOMP_FUZZ_SELF_TEST: replay NUMBER FILE..., the number of a fuzz::SelfTest.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "scene.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  int first = 1;
#ifdef ADACOMP_FUZZ_SELF_TEST
  fuzz::self_test = static_cast<fuzz::SelfTest>(std::atoi(argv[first++]));
#endif
  for (int i = first; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", argv[i]);
      return 2;
    }
    const std::vector<char> read{std::istreambuf_iterator<char>(file), {}};
    const fuzz::HeapBlock data(static_cast<int64_t>(read.size()), 0);
    std::copy(read.begin(), read.end(), data.data());
    LLVMFuzzerTestOneInput(data.data(), read.size());
  }
  std::printf("%d inputs\n", argc - first);
  return 0;
}
