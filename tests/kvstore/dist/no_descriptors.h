// A process that has run out of file descriptors.
#pragma once

#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

namespace heddle::kvstore::dist_test {

// While one lives this process gets no more; what is open stays so. (poll() fails meanwhile.)
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit none{.rlim_cur = 0, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptors() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

// While one lives all that this process may have are in use: it gets another when one is closed.
class DescriptorsInUse {
 public:
  DescriptorsInUse() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int lowest = dup(STDERR_FILENO);
    const rlimit few{.rlim_cur = static_cast<rlim_t>(lowest) + 8, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int fd = lowest; fd >= 0; fd = dup(STDERR_FILENO)) fds_.push_back(fd);
  }
  ~DescriptorsInUse() {
    while (!fds_.empty()) GiveOneBack();
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0);
  }
  DescriptorsInUse(const DescriptorsInUse&) = delete;
  DescriptorsInUse& operator=(const DescriptorsInUse&) = delete;

  void GiveOneBack() {
    close(fds_.back());
    fds_.pop_back();
  }

 private:
  rlimit before_{};
  std::vector<int> fds_;
};

}  // namespace heddle::kvstore::dist_test
