#include "tools/heddle/job_part.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/build_info.h"
#include "base/parse.h"
#include "tools/heddle/hosts.h"

namespace heddle::tools {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 4> kPrefixes = {"HEDDLE_", "DMLC_", "MXNET_", "OMP_"};
constexpr std::array<std::string_view, 4> kPaths = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH",
                                                    "VIRTUAL_ENV"};

bool IsSetting(std::string_view name) {
  return !IsOfLauncher(name) && !IsOfOnePlace(name) &&
         std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [name](std::string_view prefix) { return name.starts_with(prefix); });
}

bool IsPath(std::string_view name) {
  return std::find(kPaths.begin(), kPaths.end(), name) != kPaths.end();
}

template <class Wanted>
std::vector<Variable> VariablesHere(const Wanted& wanted) {
  std::vector<Variable> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t end = text.find('=');
    if (end == std::string_view::npos || !wanted(text.substr(0, end))) continue;
    variables.emplace_back(text.substr(0, end), text.substr(end + 1));
  }
  return variables;
}

std::vector<std::string> NamesOf(const std::vector<Host>& hosts) {
  std::vector<std::string> names;
  for (const Host& host : hosts) names.push_back(host.name);
  return names;
}

json ToJson(const std::vector<std::vector<Place>>& places) {
  json hosts = json::array();
  for (const std::vector<Place>& of_host : places) {
    json list = json::array();
    for (const Place& place : of_host) {
      list.push_back(
          {static_cast<int>(place.role), place.rank, place.local_rank, place.local_size});
    }
    hosts.push_back(std::move(list));
  }
  return hosts;
}

std::vector<std::vector<Place>> PlacesOf(const json& hosts) {
  std::vector<std::vector<Place>> places;
  for (const json& list : hosts) {
    std::vector<Place>& of_host = places.emplace_back();
    for (const json& place : list) {
      of_host.push_back({.role = static_cast<DistRole>(place.at(0).get<int>()),
                         .rank = place.at(1),
                         .local_rank = place.at(2),
                         .local_size = place.at(3)});
    }
  }
  return places;
}

void ReadAll(int fd, char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = read(fd, data, bytes);
    if (got <= 0) throw IoError("the description of the job ends early");
    data += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

}  // namespace

std::string ToText(const JobPart& part) {
  const Job& job = part.job;
  try {
    return json{{"version", kVersion},
                {"workers", job.num_workers},
                {"servers", job.num_servers},
                {"server", job.server},
                {"worker", job.worker},
                {"environment", job.environment},
                {"id", job.id},
                {"token", job.token},
                {"folder", job.folder},
                {"grace_ms", job.grace.count()},
                {"root_host", part.root_host},
                {"root_port", part.root_port},
                {"hosts", NamesOf(job.hosts)},
                {"places", ToJson(part.places)}}
        .dump();
  } catch (const json::exception&) {
    throw InvalidArgument(
        "a variable, argument or folder of the job is not UTF-8, and cannot be passed on");
  }
}

JobPart ParseJobPart(std::string_view text) {
  try {
    const json object = json::parse(text);
    if (object.at("version") != kVersion) {
      throw InvalidArgument(fmt::format("the job is of heddle {}, and this host's is {}",
                                        object.at("version").get<std::string>(), kVersion));
    }
    JobPart part;
    part.job.num_workers = object.at("workers");
    part.job.num_servers = object.at("servers");
    part.job.server = object.at("server").get<std::vector<std::string>>();
    part.job.worker = object.at("worker").get<std::vector<std::string>>();
    part.job.environment = object.at("environment").get<std::vector<Variable>>();
    part.job.id = object.at("id");
    part.job.token = object.at("token");
    part.job.folder = object.at("folder");
    part.job.grace = std::chrono::milliseconds(object.at("grace_ms").get<std::int64_t>());
    part.root_host = object.at("root_host");
    part.root_port = object.at("root_port");
    for (const json& name : object.at("hosts")) part.job.hosts.push_back({name});
    part.places = PlacesOf(object.at("places"));
    return part;
  } catch (const json::exception&) {  // whose text may show the token
    throw InvalidArgument("what was given is no description of a job");
  }
}

std::string Framed(const std::string& text) { return fmt::format("{}\n{}", text.size(), text); }

std::string ReadFramed(int fd) {
  constexpr std::size_t kBytesMax = 1 << 30;
  std::string length;
  for (char c = 0; c != '\n'; length.push_back(c)) ReadAll(fd, &c, 1);
  length.pop_back();
  const std::optional<std::size_t> bytes = ParseWhole<std::size_t>(length);
  if (!bytes || *bytes > kBytesMax) {
    throw InvalidArgument("what was given is no description of a job");
  }
  std::string text(*bytes, '\0');
  ReadAll(fd, text.data(), text.size());
  return text;
}

std::vector<Variable> SettingsPassedOn() { return VariablesHere(IsSetting); }

std::vector<Variable> PassedOn() {
  return VariablesHere([](std::string_view name) { return IsSetting(name) || IsPath(name); });
}

JobPart MakeJobPart(const Job& job, DistRole role, const std::vector<Host>& hosts,
                    const std::string& root_host, int root_port) {
  JobPart part = {.job = job, .root_host = root_host, .root_port = root_port, .places = {}};
  part.job.hosts = hosts;
  part.job.environment = PassedOn();
  part.job.environment.insert(part.job.environment.end(), job.environment.begin(),
                              job.environment.end());
  part.places =
      PlacesOnHosts(hosts, role, role == DistRole::kWorker ? job.num_workers : job.num_servers);
  return part;
}

}  // namespace heddle::tools
