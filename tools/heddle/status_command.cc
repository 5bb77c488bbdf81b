// `heddle status`: how a running job is, live on the terminal or as JSON.
#include <heddle/dist.h>
#include <heddle/error.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/env.h"
#include "base/parse.h"
#include "kvstore/dist/config.h"
#include "kvstore/dist/run.h"
#include "kvstore/dist/status.h"
#include "tools/heddle/commands.h"
#include "tools/heddle/seconds_option.h"

namespace heddle::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct StatusArguments {
  std::string address;  // "": as HEDDLE_ROOT_HOST and HEDDLE_ROOT_PORT say
  bool as_json = false, once = false;
  double every_s = 1, timeout_s = 10;
};

// "host:port" or "[address]:port".
void SetAddress(const std::string& address, DistOptions& options) {
  const std::size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  const int port =
      colon == std::string::npos ? 0 : ParseWhole<int>(address.substr(colon + 1)).value_or(0);
  constexpr int kPortMax = 65535;
  if (host.empty() || port < 1 || port > kPortMax) {
    throw InvalidArgument(
        fmt::format("expected the scheduler's address as host:port, given '{}'", address));
  }
  options.root_host = host;
  options.root_port = port;
  options.sources["root_host"] = options.sources["root_port"] = "given";
}

// Only what leads to the scheduler matters, and whether it may be asked.
DistOptions Options(const StatusArguments& arguments) {
  DistOptions options =
      kvstore::dist::ReadDistOptions([](const std::string& name) -> std::optional<std::string> {
        if (name == "HEDDLE_ROLE" || name == "DMLC_ROLE" || name == "HEDDLE_RANK") return {};
        return EnvString(name.c_str());
      });
  if (!arguments.address.empty()) SetAddress(arguments.address, options);
  if (options.root_host.empty() || options.root_port == 0) {
    throw InvalidArgument(
        "which job? Give its scheduler's address, host:port, or set HEDDLE_ROOT_HOST and "
        "HEDDLE_ROOT_PORT");
  }
  options.num_workers = std::max(options.num_workers, 1);
  options.num_servers = std::max(options.num_servers, 1);
  return options;
}

std::string Amount(double number) {
  constexpr const char* kUnits[] = {"", "K", "M", "G", "T", "P"};
  std::size_t unit = 0;
  for (; number >= 1000 && unit + 1 < std::size(kUnits); ++unit) number /= 1000;
  return unit == 0 ? fmt::format("{:.0f}", number) : fmt::format("{:.1f}{}", number, kUnits[unit]);
}

std::string AmountOf(const json& node, const char* field) {
  return node.contains(field) ? Amount(node.at(field).get<double>()) : "-";
}

std::string NameOf(const json& node) {
  const std::string role = node.at("role");
  const int rank = node.at("rank");
  return rank < 0 ? role : fmt::format("{} {}", role, rank);
}

// The first columns are as wide as what is in them.
struct Widths {
  std::size_t name = 12, address = 24;
};

Widths WidthsOf(const json& nodes) {
  constexpr std::size_t kGap = 2;
  Widths widths;
  for (const json& node : nodes) {
    widths.name = std::max(widths.name, NameOf(node).size() + kGap);
    widths.address = std::max(widths.address, node.at("address").get<std::string>().size() + kGap);
  }
  return widths;
}

std::string Line(const json& node, const Widths& widths) {
  const bool server = node.at("role") == "server";
  return fmt::format("{:<{}}{:<{}}{:<6}{:>7.1f}s{:>10}{:>9}{:>11}{:>10}{:>11}\n", NameOf(node),
                     widths.name, node.at("address").get<std::string>(), widths.address,
                     node.at("presence").get<std::string>(),
                     node.at("last_heard_seconds_ago").get<double>(), AmountOf(node, "requests"),
                     AmountOf(node, "requests_per_second"), AmountOf(node, "bytes_per_second"),
                     AmountOf(node, server ? "rounds" : "barriers"),
                     AmountOf(node, server ? "unfinished_bytes" : "open_requests"));
}

// For people. A stall names who is missing, so it is shown once and not for every server.
std::string Show(const json& status) {
  std::string text = fmt::format(
      "job at {}: {} for {:.0f} s, {} workers, {} servers, {} barriers done\n",
      status.at("address").get<std::string>(), status.at("phase").get<std::string>(),
      status.at("seconds").get<double>(), status.at("num_workers").get<int>(),
      status.at("num_servers").get<int>(), status.at("barriers_done").get<std::uint64_t>());
  const Widths widths = WidthsOf(status.at("nodes"));
  text += fmt::format("{:<{}}{:<{}}{:<6}{:>8}{:>10}{:>9}{:>11}{:>10}{:>11}\n", "", widths.name,
                      "address", widths.address, "", "heard", "requests", "a sec.", "bytes/s",
                      "rounds", "waiting");
  std::string stalls;
  for (const json& node : status.at("nodes")) {
    text += Line(node, widths);
    if (node.contains("stall")) {
      stalls += fmt::format("stalled at {} {} ({} parts): {}\n", node.at("role").get<std::string>(),
                            node.at("rank").get<int>(), node.at("stalled_parts").get<int>(),
                            node.at("stall").get<std::string>());
    }
  }
  if (status.contains("nodes_left_out")) {
    text += fmt::format("and {} more\n", status.at("nodes_left_out").get<std::int64_t>());
  }
  if (const std::string waits = status.at("waits"); !waits.empty()) text += waits + "\n";
  return text + stalls;
}

void Run(const StatusArguments& arguments) {
  const auto timeout = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(arguments.timeout_s));
  const DistOptions options = Options(arguments);
  kvstore::dist::StatusClient client(options, kvstore::dist::TcpTransports(options),
                                     Clock::now() + timeout);
  // Into a file or a pipe goes one look, unless more are asked for.
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  const bool once = arguments.once || arguments.as_json || !terminal;
  constexpr const char* kClear = "\033[H\033[2J";
  for (;;) {
    const std::optional<std::string> answer = client.Ask(Clock::now() + timeout);
    if (!answer) {
      if (once) throw NetworkError("the scheduler closed the connection without an answer");
      fmt::print("the scheduler has gone\n");
      return;
    }
    if (arguments.as_json) {
      fmt::print("{}\n", *answer);
    } else {
      fmt::print("{}{}", once ? "" : kClear, Show(json::parse(*answer)));
    }
    std::fflush(stdout);
    if (once) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(arguments.every_s));
  }
}

}  // namespace

void AddStatusCommand(CLI::App& app) {
  auto arguments = std::make_shared<StatusArguments>();
  CLI::App* const status = app.add_subcommand(
      "status", "Show how a running job is: who is there, rounds, queues, rates, what stalls");
  status->add_option(
      "address", arguments->address,
      "host:port of its scheduler (HEDDLE_ROOT_HOST and HEDDLE_ROOT_PORT). Its token "
      "is that of HEDDLE_TOKEN or HEDDLE_TOKEN_FILE");
  status->add_flag("--json", arguments->as_json, "As a JSON object, once");
  status->add_flag("--once", arguments->once, "Once, also on a terminal");
  status->add_option("--every", arguments->every_s, "Seconds between looks")
      ->check(SecondsFrom(0.05))
      ->capture_default_str();
  status->add_option("--timeout", arguments->timeout_s, "Seconds to wait for an answer")
      ->check(SecondsFrom(0.05))
      ->capture_default_str();
  status->callback([arguments] { Run(*arguments); });
}

}  // namespace heddle::tools
