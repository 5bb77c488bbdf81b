// `heddle wire-dump`: what processes of a job said to one another.
#include <heddle/error.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "tools/heddle/commands.h"
#include "tools/heddle/wire_stream.h"

namespace heddle::tools {
namespace {

constexpr std::uint64_t kPayloadMax = std::uint64_t{1} << 40;

struct DumpOptions {
  std::string input;
  std::uint64_t payload_bytes = 16;
};

// A stream of C: std::cin does not tell an error from the end.
void Dump(std::FILE* in, const std::string& name, const DumpOptions& options) {
  kvstore::dist::WireLimits limits;
  limits.payload_bytes_max = std::numeric_limits<std::uint64_t>::max();  // nothing is kept of it
  std::uint64_t count = 0;
  WireStream stream(limits, options.payload_bytes, [&](const WireRecord& record) {
    ++count;
    fmt::print("{:>9}  {}\n", record.offset, DescribeRecord(record));
  });
  std::vector<std::byte> buffer(1 << 16);
  for (std::size_t bytes = buffer.size(); bytes == buffer.size();) {
    bytes = std::fread(buffer.data(), 1, buffer.size(), in);
    const int error = errno;
    if (!stream.Feed(std::span(buffer).first(bytes))) {
      throw IoError(fmt::format("{}: {}", name, stream.why()));
    }
    if (std::ferror(in) != 0) {
      throw IoError(
          fmt::format("{}: cannot be read: {}", name, std::generic_category().message(error)));
    }
  }
  fmt::print("{} messages\n", count);
  const std::string missing = stream.Missing();
  if (!missing.empty()) throw IoError(fmt::format("{}: {}", name, missing));
}

void Run(const DumpOptions& options) {
  if (options.input == "-") return Dump(stdin, "standard input", options);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(options.input.c_str(), "rbe"), &std::fclose);
  if (file == nullptr) {
    throw IoError(fmt::format("{}: cannot be opened: {}", options.input,
                              std::generic_category().message(errno)));
  }
  Dump(file.get(), options.input, options);
}

}  // namespace

void AddWireDumpCommand(CLI::App& app) {
  auto options = std::make_shared<DumpOptions>();
  CLI::App* const command = app.add_subcommand(
      "wire-dump", "Print what a process of a distributed job sent to another one");
  command
      ->add_option("file", options->input,
                   "The bytes of one direction of a connection, from its first on; '-': standard "
                   "input")
      ->required();
  command->add_option("--payload", options->payload_bytes, "Bytes to show of each payload")
      ->check(CLI::Range(std::uint64_t{0}, kPayloadMax))
      ->capture_default_str();
  command->callback([options] { Run(*options); });
}

}  // namespace heddle::tools
