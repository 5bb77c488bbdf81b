#include "kvstore/dist/config.h"

#include <heddle/error.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "base/env.h"
#include "base/parse.h"

namespace heddle {
namespace kvstore::dist {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kNodesMax = 1 << 16;  // of a role
constexpr std::int64_t kDayMs = 86'400'000;

using SettingMember =
    std::variant<DistRole DistOptions::*, int DistOptions::*, std::optional<int> DistOptions::*,
                 std::int64_t DistOptions::*, bool DistOptions::*, std::string DistOptions::*,
                 milliseconds DistOptions::*, microseconds DistOptions::*>;

struct Row {
  const char* field;
  std::array<const char*, 2> variables;  // the first wins; null: none
  SettingMember member;
  const char* meaning;
  std::int64_t min = 0;
  std::int64_t max = kAny;
  bool required = false;  // the default, "" or 0, stands for: missing
};

// The fields in the order of the struct. What is 0 or -1 by default is so outside [min, max] only
// where it is required.
constexpr Row kRows[] = {
    {"role", {"HEDDLE_ROLE", "DMLC_ROLE"}, &DistOptions::role, "scheduler, server or worker"},
    {"rank", {"HEDDLE_RANK"}, &DistOptions::rank, "of a worker or a server", 0, kNodesMax - 1},
    {"local_rank",
     {"HEDDLE_LOCAL_RANK"},
     &DistOptions::local_rank,
     "of a worker among those of its machine",
     0,
     kNodesMax - 1},
    {"local_size",
     {"HEDDLE_LOCAL_SIZE"},
     &DistOptions::local_size,
     "workers of this machine",
     1,
     kNodesMax},
    {"root_host",
     {"HEDDLE_ROOT_HOST", "DMLC_PS_ROOT_URI"},
     &DistOptions::root_host,
     "address or name of the scheduler's machine",
     0,
     kAny,
     true},
    {"root_port",
     {"HEDDLE_ROOT_PORT", "DMLC_PS_ROOT_PORT"},
     &DistOptions::root_port,
     "port of the scheduler",
     1,
     65535,
     true},
    {"num_workers",
     {"HEDDLE_JOB_WORKERS", "DMLC_NUM_WORKER"},
     &DistOptions::num_workers,
     "workers of the job",
     1,
     kNodesMax,
     true},
    {"num_servers",
     {"HEDDLE_JOB_SERVERS", "DMLC_NUM_SERVER"},
     &DistOptions::num_servers,
     "servers of the job",
     1,
     kNodesMax,
     true},
    {"job_id", {"HEDDLE_JOB_ID"}, &DistOptions::job_id, "processes of other jobs are turned away"},
    {"token", {"HEDDLE_TOKEN", "HEDDLE_TOKEN_FILE"}, &DistOptions::token, "the job's secret"},
    {"insecure",
     {"HEDDLE_INSECURE"},
     &DistOptions::insecure,
     "listen beyond loopback without a token"},
    {"tls_certificate",
     {"HEDDLE_TLS_CERTIFICATE"},
     &DistOptions::tls_certificate,
     "file with this process's certificate, which turns TLS on"},
    {"tls_key", {"HEDDLE_TLS_KEY"}, &DistOptions::tls_key, "file with the certificate's key"},
    {"tls_authorities",
     {"HEDDLE_TLS_AUTHORITIES"},
     &DistOptions::tls_authorities,
     "file with certificates of those who sign certificates of the job"},
    {"tls_name",
     {"HEDDLE_TLS_NAME"},
     &DistOptions::tls_name,
     "name that certificates of others must be for"},
    {"bind_address", {"HEDDLE_BIND_ADDRESS"}, &DistOptions::bind_address, "address to listen on"},
    {"node_host",
     {"HEDDLE_NODE_HOST", "DMLC_NODE_HOST"},
     &DistOptions::node_host,
     "address or name that others connect to"},
    {"interface",
     {"HEDDLE_INTERFACE", "DMLC_INTERFACE"},
     &DistOptions::interface,
     "network interface to listen on"},
    {"listen_fd",
     {"HEDDLE_LISTEN_FD"},
     &DistOptions::listen_fd,
     "listening socket that the scheduler takes over",
     -1,
     std::numeric_limits<int>::max()},
    {"failure_fd",
     {"HEDDLE_FAILURE_FD"},
     &DistOptions::failure_fd,
     "socket to which the scheduler writes who failed first",
     -1,
     std::numeric_limits<int>::max()},
    {"connect_deadline",
     {"HEDDLE_CONNECT_DEADLINE_MS"},
     &DistOptions::connect_deadline,
     "milliseconds to have met all others",
     1,
     kDayMs},
    {"op_deadline",
     {"HEDDLE_OP_DEADLINE_MS"},
     &DistOptions::op_deadline,
     "milliseconds that an operation may take; 0: any",
     0,
     kDayMs},
    {"warning_time",
     {"HEDDLE_WARNING_MS"},
     &DistOptions::warning_time,
     "milliseconds after which what waits is logged",
     1,
     kDayMs},
    {"heartbeat_interval",
     {"HEDDLE_HEARTBEAT_MS"},
     &DistOptions::heartbeat_interval,
     "milliseconds between signs of life",
     10,
     kDayMs},
    {"dead_after",
     {"HEDDLE_DEAD_AFTER"},
     &DistOptions::dead_after,
     "heartbeats missed after which a peer is dead",
     2,
     1000},
    {"slice_bytes",
     {"HEDDLE_SLICE_BYTES"},
     &DistOptions::slice_bytes,
     "bytes of the parts that dense arrays are cut into; 0: 1 MiB; the scheduler's counts",
     0,
     std::int64_t{1} << 30},
    {"cut_bound",
     {"HEDDLE_BIGARRAY_BOUND", "MXNET_KVSTORE_BIGARRAY_BOUND"},
     &DistOptions::cut_bound,
     "arrays of more bytes than so many float32 elements are cut over all servers",
     1,
     kAny},
    {"shared_memory",
     {"HEDDLE_SHARED_MEMORY"},
     &DistOptions::shared_memory,
     "between processes of one host, in place of TCP"},
    {"spin",
     {"HEDDLE_SPIN_US"},
     &DistOptions::spin,
     "microseconds to poll the network before sleeping",
     0,
     1'000'000},
    {"peer_bytes_max",
     {"HEDDLE_PEER_BYTES_MAX"},
     &DistOptions::peer_bytes_max,
     "bytes of unfinished pushes to a server, at most",
     1,
     kAny},
    {"io_threads",
     {"HEDDLE_IO_THREADS"},
     &DistOptions::io_threads,
     "threads for the network of a scheduler or server; 0: one",
     0,
     256},
    {"io_cpu",
     {"HEDDLE_IO_CPU"},
     &DistOptions::io_cpu,
     "CPU of the first I/O thread; -1: any",
     -1,
     4095},
};

const Row& FindRow(std::string_view field) {
  for (const Row& row : kRows) {
    if (row.field == field) return row;
  }
  throw InvalidArgument(fmt::format("dist options have no field '{}'", field));
}

// A field's type, as text: Parse gives false for what is none, Print the inverse.

bool Parse(std::string_view text, DistRole& value) {
  for (const DistRole role : {DistRole::kScheduler, DistRole::kServer, DistRole::kWorker}) {
    if (text != DistRoleName(role)) continue;
    value = role;
    return true;
  }
  return false;
}

bool Parse(std::string_view text, std::string& value) {
  value = text;
  return true;
}

bool Parse(std::string_view text, bool& value) {
  const std::optional<bool> parsed = ParseBool(text);
  value = parsed.value_or(value);
  return parsed.has_value();
}

template <class Number>
bool Parse(std::string_view text, Number& value) {
  const std::optional<Number> parsed = ParseWhole<Number>(text);
  value = parsed.value_or(value);
  return parsed.has_value();
}

bool Parse(std::string_view text, std::optional<int>& value) {
  value = ParseWhole<int>(text);
  return value.has_value();
}

template <class Period>
bool Parse(std::string_view text, std::chrono::duration<std::int64_t, Period>& value) {
  const std::optional<std::int64_t> parsed = ParseWhole<std::int64_t>(text);
  value = std::chrono::duration<std::int64_t, Period>(parsed.value_or(value.count()));
  return parsed.has_value();
}

// The number that stands for a value in ranges; nothing if the type has none.
std::optional<std::int64_t> AsNumber(int value) { return value; }
std::optional<std::int64_t> AsNumber(std::int64_t value) { return value; }
std::optional<std::int64_t> AsNumber(std::optional<int> value) { return value; }
template <class Period>
std::optional<std::int64_t> AsNumber(std::chrono::duration<std::int64_t, Period> value) {
  return value.count();
}
std::optional<std::int64_t> AsNumber(DistRole) { return std::nullopt; }
std::optional<std::int64_t> AsNumber(bool) { return std::nullopt; }
std::optional<std::int64_t> AsNumber(const std::string&) { return std::nullopt; }

std::string Print(DistRole value) { return std::string(DistRoleName(value)); }
std::string Print(bool value) { return value ? "1" : "0"; }
std::string Print(const std::string& value) { return value; }
template <class T>
std::string Print(const T& value) {
  const std::optional<std::int64_t> number = AsNumber(value);
  return number ? std::to_string(*number) : "";
}

std::string Text(const DistOptions& options, const Row& row) {
  return std::visit([&](auto member) { return Print(options.*member); }, row.member);
}

bool IsMissing(const DistOptions& options, const Row& row) {
  return row.required && Text(options, row) == Text(DistOptions(), row);
}

std::string Expected(const Row& row) {
  if (std::holds_alternative<DistRole DistOptions::*>(row.member)) {
    return "scheduler, server or worker";
  }
  if (std::holds_alternative<bool DistOptions::*>(row.member)) {
    return "1, true, yes, on, 0, false, no or off";
  }
  if (row.max == kAny) return fmt::format("a whole number of at least {}", row.min);
  return fmt::format("a whole number from {} to {}", row.min, row.max);
}

[[noreturn]] void ThrowBadValue(const Row& row, std::string_view text, std::string_view source) {
  throw InvalidArgument(
      fmt::format("{}: expected {}, given '{}' ({})", row.field, Expected(row), text, source));
}

bool InRange(const DistOptions& options, const Row& row) {
  const std::optional<std::int64_t> number =
      std::visit([&](auto member) { return AsNumber(options.*member); }, row.member);
  return !number || (*number >= row.min && *number <= row.max);
}

void Set(const Row& row, std::string_view text, std::string_view source, DistOptions& options) {
  const bool parsed =
      std::visit([&](auto member) { return Parse(text, options.*member); }, row.member);
  if (!parsed || !InRange(options, row)) ThrowBadValue(row, text, source);
  options.sources[row.field] = source;
}

std::string ReadTokenFile(const std::string& path) {
  constexpr std::size_t kBytesMax = 4096;
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string token(kBytesMax + 1, '\0');
  file.read(token.data(), static_cast<std::streamsize>(token.size()));
  if (file.bad() || (file.gcount() == 0 && errno != 0)) {
    throw InvalidArgument(fmt::format("token: cannot read file '{}' (HEDDLE_TOKEN_FILE): {}", path,
                                      std::strerror(errno)));
  }
  token.resize(static_cast<std::size_t>(file.gcount()));
  if (token.size() > kBytesMax) {
    throw InvalidArgument(
        fmt::format("token: expected a file of at most {} bytes, given '{}' (HEDDLE_TOKEN_FILE), "
                    "which is longer",
                    kBytesMax, path));
  }
  token.erase(token.find_last_not_of(" \t\r\n") + 1);
  if (token.empty()) {
    throw InvalidArgument(fmt::format(
        "token: expected a file with a secret, given '{}' (HEDDLE_TOKEN_FILE), which is empty",
        path));
  }
  return token;
}

void ReadToken(const VariableLookup& variables, DistOptions& options) {
  const std::optional<std::string> token = variables("HEDDLE_TOKEN");
  const std::optional<std::string> path = variables("HEDDLE_TOKEN_FILE");
  if (token) {
    options.token = *token;
    options.sources["token"] = "HEDDLE_TOKEN";
  }
  if (!path) return;
  const std::string from_file = ReadTokenFile(*path);
  if (token && *token != from_file) {
    throw InvalidArgument(
        fmt::format("token: HEDDLE_TOKEN and the content of '{}' (HEDDLE_TOKEN_FILE) differ: "
                    "unset one of the two",
                    *path));
  }
  if (token) return;
  options.token = from_file;
  options.sources["token"] = fmt::format("HEDDLE_TOKEN_FILE '{}'", *path);
}

void ReadVariable(const Row& row, const VariableLookup& variables, DistOptions& options) {
  if (std::string_view(row.field) == "token") {
    ReadToken(variables, options);
    return;
  }
  for (const char* const name : row.variables) {
    const std::optional<std::string> text = name ? variables(name) : std::nullopt;
    if (!text) continue;
    Set(row, *text, name, options);
    return;
  }
}

// What the usual launchers tell their processes.
struct ProcessIndex {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr ProcessIndex kProcessIndices[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    // SLURM_NTASKS is there in batch scripts too, where SLURM_PROCID is always 0; this one is
    // srun's.
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};

std::optional<int> LookUpInt(const VariableLookup& variables, const char* name) {
  const std::optional<std::string> text = name ? variables(name) : std::nullopt;
  return text ? ParseWhole<int>(*text) : std::nullopt;
}

// A worker without a rank takes the launcher's index, but only if the launcher started as many
// processes as the job has workers: otherwise they are not the workers, or not all of them (each
// worker may be a launch of its own), and the indices are no ranks.
void TakeProcessIndex(const VariableLookup& variables, DistOptions& options) {
  if (options.role != DistRole::kWorker || options.rank || options.num_workers == 0) return;
  for (const LaunchedProcess& process : LaunchedProcesses(variables)) {
    if (process.size != options.num_workers) continue;
    options.rank = process.rank;
    options.sources["rank"] = process.rank_variable;
    if (process.local_rank && !options.local_rank) {
      options.local_rank = process.local_rank;
      options.sources["local_rank"] = process.local_rank_variable;
    }
    if (process.local_size && !options.local_size) {
      options.local_size = process.local_size;
      options.sources["local_size"] = process.local_size_variable;
    }
    return;
  }
}

std::string VariableNames(const Row& row) {
  std::string names = row.variables[0];
  if (row.variables[1] != nullptr) names += fmt::format(" or {}", row.variables[1]);
  return names;
}

// That the value of `row` is there, and in its range.
void CheckValue(const DistOptions& options, const Row& row) {
  if (IsMissing(options, row)) {
    throw InvalidArgument(fmt::format("{}: {} is missing: set {}", DistRoleName(options.role),
                                      row.field, VariableNames(row)));
  }
  if (InRange(options, row)) return;
  const auto source = options.sources.find(row.field);
  ThrowBadValue(row, Text(options, row),
                source != options.sources.end() ? source->second : "set by the program");
}

[[noreturn]] void ThrowContradiction(const DistOptions& options, std::string_view one,
                                     std::string_view other, std::string_view why) {
  throw InvalidArgument(
      fmt::format("{} contradicts {}: {}", options.Describe(one), options.Describe(other), why));
}

// What contradicts something else, among what is there.
void CheckContradictions(const DistOptions& options) {
  if (options.rank && options.role == DistRole::kScheduler) {
    ThrowContradiction(options, "rank", "role", "a scheduler has no rank");
  }
  const bool worker = options.role == DistRole::kWorker;
  const char* const count_field = worker ? "num_workers" : "num_servers";
  const int count = worker ? options.num_workers : options.num_servers;
  if (options.rank && count > 0 && *options.rank >= count) {
    ThrowContradiction(options, "rank", count_field, fmt::format("ranks are 0 to {}", count - 1));
  }
  if (options.local_rank && options.local_size && *options.local_rank >= *options.local_size) {
    ThrowContradiction(options, "local_rank", "local_size",
                       fmt::format("local ranks are 0 to {}", *options.local_size - 1));
  }
  if (options.local_size && options.num_workers > 0 && *options.local_size > options.num_workers) {
    ThrowContradiction(options, "local_size", "num_workers", "a machine has no more than all");
  }
  if (options.listen_fd >= 0 && options.role != DistRole::kScheduler) {
    ThrowContradiction(options, "listen_fd", "role", "only a scheduler takes a socket over");
  }
  if (options.failure_fd >= 0 && options.role != DistRole::kScheduler) {
    ThrowContradiction(options, "failure_fd", "role", "only a scheduler says who failed first");
  }
  const char* const tls_fields[] = {"tls_certificate", "tls_key", "tls_authorities"};
  for (const char* const field : tls_fields) {
    for (const char* const other : tls_fields) {
      if (Text(options, FindRow(field)).empty() || !Text(options, FindRow(other)).empty()) continue;
      ThrowContradiction(options, field, other, "TLS needs certificate, key and authorities");
    }
  }
}

}  // namespace

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const Row& row : kRows) {
    Setting setting{row.field, {}, row.meaning, {}};
    for (const char* const name : row.variables) {
      if (name != nullptr) setting.variables.push_back(name);
    }
    if (!row.required) setting.default_text = Text(DistOptions(), row);
    settings.push_back(std::move(setting));
  }
  return settings;
}

std::vector<LaunchedProcess> LaunchedProcesses(const VariableLookup& variables) {
  std::vector<LaunchedProcess> processes;
  for (const ProcessIndex& names : kProcessIndices) {
    const std::optional<int> rank = LookUpInt(variables, names.rank);
    if (!rank) continue;
    processes.push_back({.rank_variable = names.rank,
                         .local_rank_variable = names.local_rank,
                         .local_size_variable = names.local_size == nullptr ? "" : names.local_size,
                         .rank = *rank,
                         .size = LookUpInt(variables, names.size),
                         .local_rank = LookUpInt(variables, names.local_rank),
                         .local_size = LookUpInt(variables, names.local_size)});
  }
  return processes;
}

DistOptions ReadDistOptions(const VariableLookup& variables, const std::vector<GivenValue>& given) {
  DistOptions options;
  EnvReader reader;
  for (const Row& row : kRows) {
    reader.Read([&] { ReadVariable(row, variables, options); });
  }
  const DistRole role = options.role;
  const auto role_source = options.sources.find("role");
  const std::string role_variable =
      role_source != options.sources.end() ? role_source->second : std::string();
  for (const GivenValue& value : given) {
    reader.Read([&] { Set(FindRow(value.field), value.text, value.source, options); });
  }
  reader.ThrowIfAnyIsWrong();
  if (!role_variable.empty() && options.role != role) {
    throw InvalidArgument(fmt::format("{} contradicts role {} ({})", options.Describe("role"),
                                      DistRoleName(role), role_variable));
  }
  TakeProcessIndex(variables, options);
  CheckContradictions(options);
  return options;
}

}  // namespace kvstore::dist

std::string_view DistRoleName(DistRole role) {
  switch (role) {
    case DistRole::kScheduler:
      return "scheduler";
    case DistRole::kServer:
      return "server";
    case DistRole::kWorker:
      return "worker";
  }
  return "unknown";
}

DistOptions DistOptions::FromEnvironment() {
  return kvstore::dist::ReadDistOptions(
      [](const std::string& name) { return EnvString(name.c_str()); });
}

void DistOptions::Validate() const {
  using namespace kvstore::dist;  // NOLINT(google-build-using-namespace): the table above
  EnvReader reader;
  for (const Row& row : kRows) {
    reader.Read([&] { CheckValue(*this, row); });
  }
  reader.ThrowIfAnyIsWrong();
  CheckContradictions(*this);
}

std::string DistOptions::Describe(std::string_view field) const {
  using namespace kvstore::dist;  // NOLINT(google-build-using-namespace): the table above
  const Row& row = FindRow(field);
  const std::string text = Text(*this, row);
  if (text.empty()) return fmt::format("{} (not set)", field);
  const auto known = sources.find(field);
  const std::string source = known != sources.end()             ? known->second
                             : text == Text(DistOptions(), row) ? "default"
                                                                : "set by the program";
  if (field == "token") return fmt::format("token ({})", source);
  return fmt::format("{} {} ({})", field, text, source);
}

}  // namespace heddle
