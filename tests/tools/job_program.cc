// What the processes of a job run in tests of `heddle launch`.
//
//   job_program env            prints the environment that a job gives
//   job_program lines SEED N   writes N lines to stdout and to stderr, in pieces that end anywhere
//   job_program tree           starts descendants that are hard to find and to end; waits for ever
//   job_program accept         takes over the scheduler's socket; ends when all workers have come
//   job_program connect        comes to the scheduler, and waits for it to answer
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/tools/job_lines.h"

namespace {

void Write(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written <= 0) std::exit(EXIT_FAILURE);
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

int PrintEnvironment() {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (text.starts_with("HEDDLE_") || text.starts_with("DMLC_")) std::puts(*entry);
  }
  return 0;
}

int WriteLines(unsigned seed, int count) {
  std::mt19937 random(seed);
  std::array<std::string, 2> texts;
  for (const int fd : {0, 1}) {
    for (const std::string& line : heddle::tools::JobLines(seed, fd == 1, count)) {
      texts[static_cast<std::size_t>(fd)] += line + "\n";
    }
    texts[static_cast<std::size_t>(fd)].pop_back();  // the last line has no end
  }
  while (!texts[0].empty() || !texts[1].empty()) {
    std::string& text = texts[random() % 2];
    const std::string piece = text.substr(0, 1 + random() % 3000);
    text.erase(0, piece.size());
    Write(&text == &texts[0] ? STDOUT_FILENO : STDERR_FILENO, piece);
  }
  return 0;
}

[[noreturn]] void WaitForEver(int ready) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) std::signal(signal, SIG_IGN);
  Write(ready, "x");
  for (;;) pause();
}

// A child, a child in a session of its own, a daemon whose parent has gone, and a child of that.
int MakeTree() {
  std::array<int, 2> ready;
  if (pipe(ready.data()) != 0) return EXIT_FAILURE;
  if (fork() == 0) WaitForEver(ready[1]);
  if (fork() == 0) {
    setsid();
    WaitForEver(ready[1]);
  }
  if (fork() == 0) {
    setsid();
    if (fork() == 0) {
      if (fork() == 0) WaitForEver(ready[1]);
      WaitForEver(ready[1]);
    }
    _exit(0);
  }
  for (int i = 0; i < 4; ++i) {
    char byte = 0;
    if (read(ready[0], &byte, 1) != 1) return EXIT_FAILURE;
  }
  Write(STDOUT_FILENO, "ready\n");
  WaitForEver(ready[1]);
}

int Accept() {
  const int listener = std::atoi(std::getenv("HEDDLE_LISTEN_FD"));
  for (int i = std::atoi(std::getenv("HEDDLE_JOB_WORKERS")); i > 0; --i) {
    const int worker = accept(listener, nullptr, nullptr);
    if (worker < 0) return EXIT_FAILURE;
    Write(worker, "x");
    close(worker);
  }
  return 0;
}

int Connect() {
  sockaddr_in root{};
  root.sin_family = AF_INET;
  root.sin_port = htons(static_cast<in_port_t>(std::atoi(std::getenv("HEDDLE_ROOT_PORT"))));
  inet_pton(AF_INET, std::getenv("HEDDLE_ROOT_HOST"), &root.sin_addr);
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(connection, reinterpret_cast<sockaddr*>(&root), sizeof(root)) != 0) {
    std::perror("connect");
    return EXIT_FAILURE;
  }
  char byte = 0;
  return read(connection, &byte, 1) == 1 ? 0 : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "env") return PrintEnvironment();
  if (what == "lines" && argc == 4) {
    const int rank = std::atoi(std::getenv("HEDDLE_RANK"));
    return WriteLines(static_cast<unsigned>(std::atoi(argv[2]) + rank), std::atoi(argv[3]));
  }
  if (what == "tree") return MakeTree();
  if (what == "accept") return Accept();
  if (what == "connect") return Connect();
  std::fprintf(stderr, "job_program: what is '%s'?\n", argc > 1 ? argv[1] : "");
  return 2;
}
