// SIGUSR1: a process of a job prints what it waits for.
#pragma once

#include <functional>
#include <string>

namespace heddle::kvstore::dist {

// While one lives, SIGUSR1 prints describe() to stderr, on a thread of its own. The first of a
// process takes the signal over, unless the program handles or ignores it.
class StateOnSignal {
 public:
  explicit StateOnSignal(std::function<std::string()> describe);
  ~StateOnSignal();
  StateOnSignal(const StateOnSignal&) = delete;
  StateOnSignal& operator=(const StateOnSignal&) = delete;

 private:
  const std::function<std::string()> describe_;
};

// Takes the signal over as the first one does, before there is a state to print: for a process that
// will have one, of which the signal shall not be the end until then.
void ExpectStateSignal();

}  // namespace heddle::kvstore::dist
