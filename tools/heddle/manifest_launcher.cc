// Jobs that a cluster starts by itself from a description, which these launchers print: the user
// hands it over. Nothing is started.
#include <heddle/error.h>

#include <cctype>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/heddle/job_part.h"
#include "tools/heddle/launcher.h"

namespace heddle::tools {
namespace {

using nlohmann::ordered_json;

constexpr int kRootPort = 9091;  // each job has its own network name, so all can have the same

int RootPort(const Job& job) { return job.root_port > 0 ? job.root_port : kRootPort; }

// A name as the DNS has them, which both clusters ask for.
void CheckName(const std::string& name) {
  constexpr std::size_t kLengthMax = 48;  // with an index behind it, a label of the DNS has 63
  bool good = !name.empty() && name.size() <= kLengthMax && name.front() != '-' &&
              name.back() != '-' && std::isalpha(static_cast<unsigned char>(name.front())) != 0;
  for (const char c : name) {
    good = good && (c == '-' || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'));
  }
  if (!good) {
    throw InvalidArgument(
        fmt::format("--name: expected at most {} of a-z, 0-9 and '-', beginning "
                    "with a letter, given '{}'",
                    kLengthMax, name));
  }
}

void CheckNothingElse(const Job& job, std::string_view launcher) {
  if (!job.hosts.empty() || !job.launcher_arguments.empty()) {
    throw InvalidArgument(fmt::format(
        "launcher {} only prints what the cluster starts: expected no hosts and no --launcher-arg",
        launcher));
  }
}

// With the settings of this process under those of the user. Its paths stay here: containers have
// folders of their own.
Job WithSettings(Job job) {
  std::vector<Variable> environment = SettingsPassedOn();
  environment.insert(environment.end(), job.environment.begin(), job.environment.end());
  job.environment = std::move(environment);
  return job;
}

void Print(const ordered_json& description) {
  try {
    fmt::print("{}\n", description.dump(2));
  } catch (const ordered_json::exception&) {
    throw InvalidArgument("a variable or argument of the job is not UTF-8, and cannot be printed");
  }
}

class ManifestLauncher : public Launcher {
 public:
  std::string HeddleThere() const override { return "heddle"; }  // as its container finds it
  bool SchedulerIsHere() const override { return false; }
  std::vector<std::string_view> UselessOptions() const override {
    return {"--folder", "--grace", "--linger", "--root-host"};
  }
};

// Kubernetes replaces "$(NAME)" in commands and values, and "$$" by "$". A "$" elsewhere stays.
std::string Escaped(const std::string& text) {
  std::string escaped;
  for (std::size_t i = 0; i < text.size(); ++i) {
    escaped.push_back(text[i]);
    if (text[i] != '$') continue;
    const char before = i > 0 ? text[i - 1] : '\0';
    const char behind = i + 1 < text.size() ? text[i + 1] : '\0';
    if (before == '$' || behind == '$' || behind == '(') escaped.push_back('$');
  }
  return escaped;
}

// An Indexed Job whose pods find one another through a headless Service, and a Secret.
class KubernetesLauncher final : public ManifestLauncher {
 public:
  int Run(const Job& job) override {
    CheckNothingElse(job, "kubernetes");
    CheckName(job.name);
    if (job.image.empty()) {
      throw InvalidArgument("launcher kubernetes: expected --image, the container to run");
    }
    Print({{"apiVersion", "v1"},
           {"kind", "List"},
           {"items", {Secret(job), Service(job), IndexedJob(WithSettings(job))}}});
    return 0;
  }

  // `heddle run` knows by itself what the roles are.
  std::vector<std::string_view> UselessOptions() const override {
    std::vector<std::string_view> options = ManifestLauncher::UselessOptions();
    options.insert(options.end(), {"--all-roles", "--cpus", "--memory", "--scheduler-command",
                                   "--server-command", "--token-file"});
    return options;
  }

 private:
  static ordered_json Secret(const Job& job) {
    return {{"apiVersion", "v1"},
            {"kind", "Secret"},
            {"metadata", {{"name", job.name}}},
            {"type", "Opaque"},
            {"stringData", {{"token", job.token}}}};
  }

  // Pods must find the scheduler before they are ready.
  static ordered_json Service(const Job& job) {
    return {{"apiVersion", "v1"},
            {"kind", "Service"},
            {"metadata", {{"name", job.name}}},
            {"spec",
             {{"clusterIP", "None"},
              {"publishNotReadyAddresses", true},
              {"selector", {{"job-name", job.name}}}}}};
  }

  // A pod that fails is not replaced: the job fails, and its other pods are ended.
  static ordered_json IndexedJob(const Job& job) {
    const int pods = 1 + job.num_servers + job.num_workers;
    return {
        {"apiVersion", "batch/v1"},
        {"kind", "Job"},
        {"metadata", {{"name", job.name}}},
        {"spec",
         {{"completions", pods},
          {"parallelism", pods},
          {"completionMode", "Indexed"},
          {"backoffLimit", 0},
          {"template",
           {{"spec",
             {{"subdomain", job.name},
              {"restartPolicy", "Never"},
              {"containers", ordered_json::array({Container(job)})},
              {"volumes", ordered_json::array({{{"name", "token"},
                                                {"secret", {{"secretName", job.name}}}}})}}}}}}}};
  }

  static ordered_json Container(const Job& job) {
    constexpr const char* kFolder = "/var/run/secrets/heddle";
    const std::string heddle = Escaped(job.heddle);
    ordered_json command = {heddle,        "run",
                            "-n",          std::to_string(job.num_workers),
                            "-s",          std::to_string(job.num_servers),
                            "--root-host", fmt::format("{0}-0.{0}", job.name),
                            "--root-port", std::to_string(RootPort(job)),
                            "--"};
    for (const std::string& word : job.worker) command.push_back(Escaped(word));
    std::map<std::string, std::string> variables = {
        {"HEDDLE_TOKEN_FILE", fmt::format("{}/token", kFolder)}, {"HEDDLE_JOB_ID", job.id}};
    for (const auto& [name, value] : job.environment) variables.insert_or_assign(name, value);
    ordered_json environment = ordered_json::array();
    for (const auto& [name, value] : variables) {
      environment.push_back({{"name", name}, {"value", Escaped(value)}});
    }
    return {
        {"name", "heddle"},
        {"image", job.image},
        {"command", std::move(command)},
        {"env", std::move(environment)},
        {"volumeMounts",
         ordered_json::array({{{"name", "token"}, {"mountPath", kFolder}, {"readOnly", true}}})}};
  }
};

// A service of YARN's Services API, a component a role. YARN replaces ${COMPONENT_ID} and the like
// in the text.
class YarnLauncher final : public ManifestLauncher {
 public:
  int Run(const Job& job) override {
    CheckNothingElse(job, "yarn");
    CheckName(job.name);
    if (job.token_file.empty()) {
      throw InvalidArgument(
          "launcher yarn: expected --token-file, where the job's token is in a file system of the "
          "cluster: hdfs://...");
    }
    const Job whole = WithSettings(job);
    ordered_json components = {Component(whole, DistRole::kScheduler, 1, job.scheduler),
                               Component(whole, DistRole::kServer, job.num_servers, job.server),
                               Component(whole, DistRole::kWorker, job.num_workers, job.worker)};
    Print({{"name", job.name}, {"version", "1.0"}, {"components", std::move(components)}});
    return 0;
  }

 private:
  static ordered_json Component(const Job& job, DistRole role, int count,
                                const std::vector<std::string>& command) {
    constexpr const char* kTokenFile = "heddle_token";
    std::string line;
    for (const std::string& word : command) {
      line += (line.empty() ? "exec " : " ") + QuotedForShell(word);
    }
    const std::string name(DistRoleName(role));
    // The name that YARN's registry gives the scheduler's container in the DNS.
    const std::string root = "scheduler-0.${SERVICE_NAME}.${USER}.${DOMAIN}";
    ordered_json environment = ordered_json::object();
    for (const auto& [variable, value] : EnvironmentOf(job, {.role = role}, root, RootPort(job))) {
      const bool is_unset = value.empty() && IsOfLauncher(variable);
      if (!is_unset && variable != "HEDDLE_TOKEN") environment[variable] = value;
    }
    for (const char* const variable : {"HEDDLE_LOCAL_RANK", "HEDDLE_LOCAL_SIZE"}) {
      environment.erase(variable);  // where it puts them, YARN alone knows
    }
    if (role != DistRole::kScheduler) environment["HEDDLE_RANK"] = "${COMPONENT_ID}";
    environment["HEDDLE_TOKEN_FILE"] = kTokenFile;
    ordered_json component = {
        {"name", name},
        {"number_of_containers", count},
        {"launch_command", line},
        {"restart_policy", "NEVER"},
        {"resource", {{"cpus", job.cpus}, {"memory", std::to_string(job.memory_mib)}}},
        {"configuration",
         {{"env", std::move(environment)},
          {"files",
           ordered_json::array(
               {{{"type", "STATIC"}, {"src_file", job.token_file}, {"dest_file", kTokenFile}}})}}}};
    if (!job.image.empty()) {
      component["artifact"] = {{"id", job.image}, {"type", "DOCKER"}};
    }
    return component;
  }
};

}  // namespace

std::unique_ptr<Launcher> MakeKubernetesLauncher() {
  return std::make_unique<KubernetesLauncher>();
}
std::unique_ptr<Launcher> MakeYarnLauncher() { return std::make_unique<YarnLauncher>(); }

}  // namespace heddle::tools
