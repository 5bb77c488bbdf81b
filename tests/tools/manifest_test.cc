// What `heddle launch` prints for clusters that start a job themselves. The texts are taken apart
// as the clusters' documentation describes them; nothing of them has been run by a cluster.
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/tools/child_process.h"

namespace heddle::tools {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Strings = std::vector<std::string>;

constexpr const char* kHeddle = HEDDLE_COMMAND;

ProgramResult Launch(const std::string& launcher, const Strings& options) {
  Strings command = {kHeddle, "launch", "--launcher", launcher, "-n",
                     "3",     "-s",     "2",          "--env",  "LR=0.1 $x"};
  command.insert(command.end(), options.begin(), options.end());
  for (const char* const word : {"--", "train", "a 'b'"}) command.emplace_back(word);
  return RunProgram(command);
}

json Printed(const std::string& launcher, const Strings& options) {
  const ProgramResult result = Launch(launcher, options);
  EXPECT_EQ(result.status, 0) << result.output;
  return json::parse(result.output);
}

json Kind(const json& list, const std::string& kind) {
  for (const json& item : list.at("items")) {
    if (item.at("kind") == kind) return item;
  }
  ADD_FAILURE() << "no " << kind;
  return {};
}

std::string ValueOf(const json& environment, const std::string& name) {
  for (const json& entry : environment) {
    if (entry.at("name") == name) return entry.at("value");
  }
  return "not there";
}

TEST(KubernetesManifest, IsAnIndexedJobWithAHeadlessServiceAndASecret) {
  const json list = Printed("kubernetes", {"--name", "mine", "--image", "registry/train:1"});
  const json job = Kind(list, "Job");
  EXPECT_EQ(job.at("apiVersion"), "batch/v1");
  const json& spec = job.at("spec");
  EXPECT_EQ(spec.at("completionMode"), "Indexed");
  EXPECT_EQ(spec.at("completions"), 6);
  EXPECT_EQ(spec.at("parallelism"), 6) << "all at once, or they wait for one another for ever";
  EXPECT_EQ(spec.at("backoffLimit"), 0) << "a job does not go on after a failure";
  const json& pod = spec.at("template").at("spec");
  EXPECT_EQ(pod.at("restartPolicy"), "Never");
  const json service = Kind(list, "Service");
  EXPECT_EQ(service.at("spec").at("clusterIP"), "None");
  EXPECT_EQ(service.at("spec").at("selector").at("job-name"), job.at("metadata").at("name"));
  EXPECT_EQ(pod.at("subdomain"), service.at("metadata").at("name"));
  EXPECT_TRUE(service.at("spec").at("publishNotReadyAddresses").get<bool>());
  const json& container = pod.at("containers").at(0);
  EXPECT_EQ(container.at("image"), "registry/train:1");
  EXPECT_EQ(container.at("command"),
            (json{"heddle", "run", "-n", "3", "-s", "2", "--root-host", "mine-0.mine",
                  "--root-port", "9091", "--", "train", "a 'b'"}));
  EXPECT_EQ(ValueOf(container.at("env"), "LR"), "0.1 $x");
  // The token is in the Secret alone, which is mounted where HEDDLE_TOKEN_FILE says.
  const json secret = Kind(list, "Secret");
  const std::string token = secret.at("stringData").at("token");
  EXPECT_EQ(token.size(), 64u);
  EXPECT_THAT(job.dump(), Not(HasSubstr(token)));
  EXPECT_EQ(pod.at("volumes").at(0).at("secret").at("secretName"),
            secret.at("metadata").at("name"));
  EXPECT_EQ(container.at("volumeMounts").at(0).at("name"), pod.at("volumes").at(0).at("name"));
  EXPECT_EQ(container.at("volumeMounts").at(0).at("mountPath").get<std::string>() + "/token",
            ValueOf(container.at("env"), "HEDDLE_TOKEN_FILE"));
}

TEST(KubernetesManifest, BadInputIsNamed) {
  EXPECT_THAT(Launch("kubernetes", {}).output, HasSubstr("--image"));
  for (const char* const name : {"Mine", "-a", "a_b", "1a", "a.b", ""}) {
    const ProgramResult result = Launch("kubernetes", {"--image", "i", "--name", name});
    EXPECT_EQ(result.status, 1);
    EXPECT_THAT(result.output,
                AllOf(HasSubstr("--name"), HasSubstr("'" + std::string(name) + "'")));
  }
  EXPECT_THAT(Launch("kubernetes", {"--image", "i", "--hosts", "a"}).output,
              HasSubstr("expected no hosts"));
}

TEST(KubernetesManifest, WordsAndValuesStayWhatTheyAre) {
  // By the rules of Kubernetes: "$(NAME)" is replaced, "$$" stands for "$".
  const ProgramResult result =
      RunProgram({kHeddle, "launch", "--launcher", "kubernetes", "--image", "i", "-n", "1", "--env",
                  "SECRET=a$(b)", "--", "train", "$$", "$(HEDDLE_JOB_ID)", "$5", "a$"});
  ASSERT_EQ(result.status, 0) << result.output;
  const json container = Kind(json::parse(result.output), "Job")
                             .at("spec")
                             .at("template")
                             .at("spec")
                             .at("containers")
                             .at(0);
  const Strings command = container.at("command");
  EXPECT_EQ(Strings(command.end() - 5, command.end()),
            (Strings{"train", "$$$$", "$$(HEDDLE_JOB_ID)", "$5", "a$"}));
  EXPECT_EQ(ValueOf(container.at("env"), "SECRET"), "a$$(b)");
}

TEST(Manifests, OptionsThatAClusterDoesNotFollowAreNamed) {
  const auto refused = [](const std::string& launcher, const Strings& given,
                          const std::string& option) {
    Strings options = given;
    options.push_back(option);
    const ProgramResult result = Launch(launcher, options);
    EXPECT_EQ(result.status, 1) << option;
    EXPECT_THAT(result.output, HasSubstr("launcher " + launcher + ": expected no " +
                                         option.substr(0, option.find('='))));
  };
  for (const char* const option : {"--folder=/f", "--grace=1", "--linger=1", "--root-host=node1"}) {
    refused("kubernetes", {"--image", "i"}, option);
    refused("yarn", {"--token-file", "hdfs:///secret"}, option);
  }
  for (const char* const option :
       {"--all-roles", "--cpus=2", "--memory=64", "--scheduler-command=schedule",
        "--server-command=serve", "--token-file=hdfs:///secret"}) {
    refused("kubernetes", {"--image", "i"}, option);
  }
}

// A job without the settings of TLS that it was launched with would speak in plain text.
TEST(Manifests, TheSettingsHereArePassedOnUnderThoseThatAreGiven) {
  const Strings here = {"HEDDLE_TLS_CERTIFICATE=/tls/job.pem",
                        "DMLC_PS_WATCH=1",
                        "MXNET_KVSTORE_BIGARRAY_BOUND=10",
                        "OMP_NUM_THREADS=4",
                        "HEDDLE_LOG_LEVEL=info",
                        "EMPTY=full",
                        "OTHER=1",
                        "PYTHONPATH=/here",
                        "HEDDLE_NODE_HOST=here",
                        "HEDDLE_TOKEN=secret of another job",
                        "HEDDLE_RANK=7"};
  const auto printed = [&here](const std::string& launcher, const Strings& options) {
    Strings command = {kHeddle, "launch", "--launcher", launcher, "-n", "1"};
    command.insert(command.end(), options.begin(), options.end());
    for (const char* const word :
         {"--env", "HEDDLE_LOG_LEVEL=debug", "--env", "EMPTY=", "--", "train"}) {
      command.emplace_back(word);
    }
    const ProgramResult result = RunProgram(command, here);
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.output, Not(HasSubstr("secret of another job")));
    return json::parse(result.output);
  };
  std::vector<json> environments;
  const json service = printed("yarn", {"--token-file", "hdfs:///secret"});
  for (const json& component : service.at("components")) {
    environments.push_back(component.at("configuration").at("env"));
  }
  const json job = Kind(printed("kubernetes", {"--image", "i"}), "Job");
  const json& pod = job.at("spec").at("template").at("spec");
  json& of_pods = environments.emplace_back(json::object());
  for (const json& entry : pod.at("containers").at(0).at("env")) {
    EXPECT_FALSE(of_pods.contains(entry.at("name"))) << "twice: " << entry;
    of_pods[entry.at("name").get<std::string>()] = entry.at("value");
  }
  ASSERT_EQ(environments.size(), 4u);
  for (const json& environment : environments) {
    for (const auto& [name, value] :
         std::map<std::string, std::string>{{"HEDDLE_TLS_CERTIFICATE", "/tls/job.pem"},
                                            {"DMLC_PS_WATCH", "1"},
                                            {"MXNET_KVSTORE_BIGARRAY_BOUND", "10"},
                                            {"OMP_NUM_THREADS", "4"},
                                            {"HEDDLE_LOG_LEVEL", "debug"},
                                            {"EMPTY", ""}}) {
      EXPECT_EQ(environment.value(name, "not there"), value) << name;
    }
    for (const char* const name : {"OTHER", "PYTHONPATH", "HEDDLE_NODE_HOST"}) {
      EXPECT_FALSE(environment.contains(name)) << name;
    }
    EXPECT_NE(environment.value("HEDDLE_RANK", ""), "7");
  }
}

TEST(YarnManifest, RolesRunWhatTheyAreGiven) {
  const auto scheduler = [](const Strings& options) {
    Strings all = {"--token-file", "hdfs:///secret"};
    all.insert(all.end(), options.begin(), options.end());
    return Printed("yarn", all).at("components").at(0).at("launch_command").get<std::string>();
  };
  EXPECT_EQ(scheduler({}), "exec 'heddle' 'scheduler'");
  EXPECT_EQ(scheduler({"--scheduler-command", "schedule x"}), "exec '/bin/sh' '-c' 'schedule x'");
  EXPECT_EQ(scheduler({"--all-roles"}), "exec 'train' 'a '\\''b'\\'''");
}

TEST(YarnManifest, IsAServiceWithAComponentARole) {
  const json service = Printed("yarn", {"--name", "mine", "--token-file", "hdfs:///secret",
                                        "--cpus", "2", "--memory", "64"});
  EXPECT_EQ(service.at("name"), "mine");
  EXPECT_EQ(service.at("version"), "1.0");
  const json& components = service.at("components");
  ASSERT_EQ(components.size(), 3u);
  const Strings names = {"scheduler", "server", "worker"};
  const std::vector<int> counts = {1, 2, 3};
  for (std::size_t i = 0; i < 3; ++i) {
    const json& component = components.at(i);
    EXPECT_EQ(component.at("name"), names[i]);
    EXPECT_EQ(component.at("number_of_containers"), counts[i]);
    EXPECT_EQ(component.at("restart_policy"), "NEVER");
    EXPECT_EQ(component.at("resource"), (json{{"cpus", 2}, {"memory", "64"}}));
    const json& env = component.at("configuration").at("env");
    EXPECT_EQ(env.at("HEDDLE_ROLE"), names[i]);
    EXPECT_EQ(env.at("DMLC_ROLE"), names[i]);
    EXPECT_EQ(env.at("HEDDLE_JOB_WORKERS"), "3");
    EXPECT_EQ(env.at("HEDDLE_ROOT_HOST"), "scheduler-0.${SERVICE_NAME}.${USER}.${DOMAIN}");
    EXPECT_EQ(env.at("LR"), "0.1 $x");
    EXPECT_EQ(env.contains("HEDDLE_RANK"), i > 0);
    EXPECT_FALSE(env.contains("HEDDLE_LOCAL_RANK"));
    EXPECT_FALSE(env.contains("HEDDLE_TOKEN"));
    const json& file = component.at("configuration").at("files").at(0);
    EXPECT_EQ(file, (json{{"type", "STATIC"},
                          {"src_file", "hdfs:///secret"},
                          {"dest_file", env.at("HEDDLE_TOKEN_FILE")}}));
  }
  EXPECT_EQ(components.at(1).at("configuration").at("env").at("HEDDLE_RANK"), "${COMPONENT_ID}");
  EXPECT_EQ(components.at(1).at("launch_command"), "exec 'heddle' 'server'");
  EXPECT_EQ(components.at(2).at("launch_command"), "exec 'train' 'a '\\''b'\\'''");
}

TEST(YarnManifest, WithoutAPlaceForTheTokenItAsksForOne) {
  const ProgramResult result = Launch("yarn", {"--name", "mine"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, HasSubstr("--token-file"));
}

}  // namespace
}  // namespace heddle::tools
