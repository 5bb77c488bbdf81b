// The fuzz target without libFuzzer: honest inputs, then random changes of them.
//
//   wire_mutations --runs <count>      HEDDLE_TEST_SEED repeats a run
//   wire_mutations --corpus <folder>   writes the honest inputs, a file each
//
// What fails aborts, after the input of the moment is in wire_mutations.failed.
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "tests/fuzz/wire_fuzz.h"

namespace heddle::fuzz {
namespace {

using kvstore::dist_test::Below;
using kvstore::dist_test::Random;

std::string g_input;  // for OnAbort

void OnAbort(int /*signal*/) {
  if (std::FILE* const file = std::fopen("wire_mutations.failed", "wb")) {
    std::fwrite(g_input.data(), 1, g_input.size(), file);
    std::fclose(file);
  }
}

void Mutate(Random& random, const std::vector<std::string>& honest, std::string* input) {
  const std::size_t at = Below(random, input->size() + 1);
  switch (Below(random, 7)) {
    case 0:
      input->resize(at);
      break;
    case 1:
      input->insert(at, 1 + Below(random, 8), static_cast<char>(random()));
      break;
    case 2:
      if (at < input->size()) input->erase(at, 1 + Below(random, 8));
      break;
    case 3:  // numbers at their bounds
      for (std::size_t i = at; i < std::min(at + 4, input->size()); ++i) {
        (*input)[i] = Below(random, 2) == 0 ? '\xff' : '\0';
      }
      break;
    case 4: {  // the end of another one
      const std::string& other = honest[Below(random, honest.size())];
      *input = input->substr(0, at) + other.substr(Below(random, other.size() + 1));
      break;
    }
    case 5:
      if (at < input->size())
        (*input)[at] = static_cast<char>((*input)[at] ^ (1 << Below(random, 8)));
      break;
    default:
      if (at < input->size()) (*input)[at] = static_cast<char>(random());
  }
}

void Run(std::uint64_t runs) {
  Random random(kvstore::dist_test::TestSeed());
  const std::vector<std::string> honest = HonestInputs(random);
  std::signal(SIGABRT, OnAbort);
  const auto read = [] {
    ReadWire(reinterpret_cast<const std::uint8_t*>(g_input.data()), g_input.size());
  };
  for (const std::string& input : honest) {
    g_input = input;
    read();
  }
  for (std::uint64_t i = 0; i < runs; ++i) {
    g_input = honest[Below(random, honest.size())];
    for (std::uint64_t changes = 1 + Below(random, 4); changes > 0; --changes) {
      Mutate(random, honest, &g_input);
    }
    read();
  }
  fmt::print("{} honest inputs and {} changed ones were read\n", honest.size(), runs);
}

void WriteCorpus(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  Random random(kvstore::dist_test::TestSeed());
  int count = 0;
  for (const std::string& input : HonestInputs(random)) {
    std::ofstream(folder / fmt::format("honest{:03}", count++), std::ios::binary) << input;
  }
}

int Main(int argc, char** argv) {
  const std::string_view option = argc == 3 ? argv[1] : "";
  std::uint64_t runs = 0;
  if (option == "--corpus") {
    WriteCorpus(argv[2]);
  } else if (const char* const end = argc == 3 ? argv[2] + std::strlen(argv[2]) : nullptr;
             option == "--runs" && std::from_chars(argv[2], end, runs).ptr == end) {
    Run(runs);
  } else {
    fmt::print(stderr, "usage: wire_mutations --runs <count> | --corpus <folder>\n");
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace heddle::fuzz

int main(int argc, char** argv) { return heddle::fuzz::Main(argc, argv); }
