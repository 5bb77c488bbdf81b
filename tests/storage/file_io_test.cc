// Files that are written whole or not at all, where only some of it is allowed.
#include "storage/file_io.h"

#include <heddle/error.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>

#include "base/unique_fd.h"
#include "tests/message_of.h"
#include "tests/small_files.h"
#include "tools/testing/temp_folder.h"

namespace heddle::storage {
namespace {

// Calls `body` on a thread that may read and write no more than anybody, also in a program of
// root's.
template <class F>
void RunAsAnybody(const F& body) {
  constexpr uid_t kNobody = 65534;
  const int dumpable = prctl(PR_GET_DUMPABLE);  // which a process that changes users loses
  std::thread([&] {
    setfsuid(kNobody);
    body();
  }).join();
  prctl(PR_SET_DUMPABLE, dumpable);
}

TEST(AtomicFileTest, AFileThatMayNotGrowIsAnErrorAndTheOldOneStays) {
  const tools::TempFolder folder;
  const std::string path = folder / "file";
  std::ofstream(path) << "old";
  const std::string content(5000, 'x');
  EXPECT_EQ(WithSmallFiles(1000,
                           [&] {
                             try {
                               AtomicFile file(path);
                               file.Write(content.data(), std::ssize(content));
                             } catch (const IoError& error) {
                               const std::string message = error.what();
                               return message.ends_with("File too large") ? 7 : 8;
                             }
                             return 9;
                           }),
            7);
  EXPECT_EQ(std::filesystem::file_size(path), 3u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()),
                          std::filesystem::directory_iterator()),
            1);
}

TEST(AtomicFileTest, ANameWithAZeroByteIsRefused) {
  const tools::TempFolder folder;
  const std::string file = folder / "file";
  std::ofstream(file) << "old";
  const std::string name = file + std::string("\0more", 5);
  EXPECT_THAT(MessageOf<IoError>([&] { AtomicFile out(name); }), testing::HasSubstr("zero byte"));
  EXPECT_THAT(MessageOf<IoError>([&] { InputFile in(name); }), testing::HasSubstr("zero byte"));
  std::ifstream in(file);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "old");
}

TEST(AtomicFileTest, TheOldFileStaysInAFolderThatMayBeWrittenToButNotRead) {
  const tools::TempFolder folder;
  const std::string file = folder / "file";
  std::ofstream(file) << "old";
  std::filesystem::permissions(folder.path(), static_cast<std::filesystem::perms>(0333));
  bool is_bound = false;
  std::string message;
  RunAsAnybody([&] {
    const UniqueFd opened(open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    std::error_code error;
    is_bound = opened.get() < 0 && std::filesystem::exists(file, error);
    if (!is_bound) return;
    message = MessageOf<IoError>([&] {
      AtomicFile out(file);
      out.Write("new", 3);
      out.Commit();
    });
  });
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_all);
  if (!is_bound) GTEST_SKIP() << "this user may read what nobody may";
  EXPECT_NE(message.find("open directory " + folder.path()), std::string::npos) << message;
  std::ifstream in(file);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

}  // namespace
}  // namespace heddle::storage
