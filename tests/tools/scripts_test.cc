// The scripts in tools/ that need no GPU and no long time, with stand-ins for what they call.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/tools/child_process.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Strings = std::vector<std::string>;

const std::string kScripts = HEDDLE_TOOLS_FOLDER;

class ScriptsTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  void WriteProgram(const std::string& name, const std::string& text) const {
    Write(name, "#!/bin/sh\n" + text);
    std::filesystem::permissions(folder_ / name, std::filesystem::perms::owner_all);
  }
  void CopyProgram(const std::string& from, const std::string& name) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::filesystem::copy_file(from, path);
  }
  // With the programs of the folder `bin` before others.
  ProgramResult Run(const Strings& command, const Strings& environment = {}) const {
    Strings variables = {"PATH=" + folder_ / "bin:" + std::getenv("PATH")};
    variables.insert(variables.end(), environment.begin(), environment.end());
    return RunProgram(command, variables);
  }

  const TempFolder folder_;
};

// tools/ itself has a gpu.sh; it used to be removed.
TEST_F(ScriptsTest, AFolderThatIsNoBundleIsNotReplacedByOne) {
  WriteProgram("bin/patchelf", "exit 1\n");
  Write("mine/gpu.sh", "mine\n");
  const ProgramResult result =
      Run({kScripts + "/bundle.sh", "--build-dir", folder_ / "build", folder_ / "mine"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.output, HasSubstr(folder_ / "mine is there and no bundle"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "mine/gpu.sh"));
}

TEST_F(ScriptsTest, ABundleIsMadeOfABuildWhosePathHasASpace) {
  WriteProgram("bin/patchelf", "exit 0\n");
  CopyProgram("/bin/true", "a build/tools/heddle/heddle");
  CopyProgram("/bin/true", "a build/tests/gpu_test");
  Write("a build/gpu_tests.txt", folder_ / "a build/tests/gpu_test\n");
  Write("a build/CMakeCache.txt", "");
  for (int again = 0; again < 2; ++again) {  // a bundle may be made anew
    const ProgramResult result =
        Run({kScripts + "/bundle.sh", "--build-dir", folder_ / "a build", folder_ / "made"});
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_TRUE(std::filesystem::exists(folder_ / "made/tests/gpu_test"));
  }
}

TEST_F(ScriptsTest, AHeddleThatDoesNotRunIsNoMissingDevice) {
  const Strings environment = {"BUILD=" + folder_.path()};
  WriteProgram("tools/heddle/heddle", "echo libheddle.so: not found; exit 127\n");
  const ProgramResult broken = Run({kScripts + "/gpu.sh"}, environment);
  EXPECT_EQ(broken.status, 1);
  EXPECT_THAT(broken.output,
              AllOf(HasSubstr("does not run here"), HasSubstr("libheddle.so: not found")));
  WriteProgram("tools/heddle/heddle",
               "[ \"$1\" != doctor ] || printf 'GPUs\\n  none  no driver\\n\\nEnd\\n'\n");
  const ProgramResult none = Run({kScripts + "/gpu.sh"}, environment);
  EXPECT_EQ(none.status, 0);
  EXPECT_THAT(none.output, HasSubstr("no device found: no driver"));
}

// A name used to be taken for a file of the repository.
TEST_F(ScriptsTest, AWheelIsBuiltWithAPythonThatThePathKnowsByItsName) {
  CopyProgram(kScripts + "/wheel.sh", "tools/wheel.sh");
  WriteProgram("bin/python3.99",
               "echo \"python3.99 $*\"\n"
               "while [ $# -gt 0 ]; do\n"
               "  [ \"$1\" != --wheel-dir ] || { mkdir -p \"$2\"; : > \"$2/heddle.whl\"; }\n"
               "  shift\n"
               "done\n");
  const ProgramResult named = Run({folder_ / "tools/wheel.sh"}, {"PYTHON=python3.99"});
  EXPECT_EQ(named.status, 0) << named.output;
  EXPECT_THAT(named.output,
              AllOf(HasSubstr("python3.99 -m pip wheel "),
                    HasSubstr("python3.99 -m auditwheel repair "), HasSubstr("/heddle.whl\n")));
  const ProgramResult by_path =
      Run({folder_ / "tools/wheel.sh"}, {"PYTHON=" + folder_ / "bin/python3.99"});
  EXPECT_EQ(by_path.status, 0) << by_path.output;
  const ProgramResult missing = Run({folder_ / "tools/wheel.sh"}, {"PYTHON=python3.98"});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.output, HasSubstr("there is no program python3.98"));
}

class SoakScriptTest : public ScriptsTest {
 protected:
  // With a program in place of the engine's tests that has one test, which fails.
  SoakScriptTest() {
    WriteProgram("bin/cmake", "exit 0\n");
    CopyProgram(kScripts + "/soak.sh", "tools/soak.sh");
    for (const std::string preset : {"dev", "tsan"}) {
      WriteProgram("build/" + preset + "/tests/engine/engine_test",
                   "case \"$*\" in\n"
                   "  *Nothing*) echo HEDDLE_TEST_SEED=1 ;;\n"
                   "  *--gtest_list_tests*) printf 'Suite.\\n  Test\\n' ;;\n"
                   "  *) echo \"options $TSAN_OPTIONS\"; exit 1 ;;\n"
                   "esac\n");
    }
  }
};

TEST_F(SoakScriptTest, AFilterThatMatchesNothingIsAnError) {
  const ProgramResult result = Run({folder_ / "tools/soak.sh", "-t", "1", "Nothing*"});
  EXPECT_EQ(result.status, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("no test of engine_test matches 'Nothing*'"));
}

// Nothing ran, and nothing failed.
TEST_F(SoakScriptTest, SecondsThatAreNoNumberAreNamedBeforeAnythingIsBuilt) {
  for (const std::string seconds : {"10m", "-1", "0", ""}) {
    const ProgramResult soak = Run({folder_ / "tools/soak.sh", "-t", seconds, "Suite*"});
    EXPECT_EQ(soak.status, 2);
    EXPECT_EQ(soak.output, "soak: -t: expected a number of seconds, given '" + seconds + "'\n");
  }
  const ProgramResult fuzz = Run({kScripts + "/fuzz.sh", "-help"});
  EXPECT_EQ(fuzz.status, 2);
  EXPECT_EQ(fuzz.output, "fuzz: expected a number of seconds, given '-help'\n");
}

TEST_F(SoakScriptTest, UnderTsanTestsHaveTheOptionsThatTheyHaveUnderCtest) {
  const ProgramResult result =
      Run({folder_ / "tools/soak.sh", "-p", "tsan", "Suite*"}, {"TSAN_OPTIONS="});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("options halt_on_error=1:second_deadlock_stack=1\n"),
                                   HasSubstr("repeat with: env TSAN_OPTIONS=halt_on_error=1")));
}

}  // namespace
}  // namespace heddle::tools
