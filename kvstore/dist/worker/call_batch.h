// Requests that go to the servers together: of small keys that the program names in one call.
//
// What the single requests have in common (the node's lock, the clock, the way to the connection)
// is then done once for many of them. The requests themselves are what they would be one by one.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kvstore/dist/worker/worker_link.h"

namespace heddle::kvstore::dist {

class PartsCall;

// While one lives, calls on small keys that become ready on its thread wait in it for company: at
// most kTogetherMax of them, or until its end.
//
//   (B1) A call in a batch is at the front of its key's queue, and stays there until the batch has
//        submitted its requests: so whoever else makes calls on the key ready leaves them to the
//        batch, and the key's order stands.
//   (B2) Nothing waits for the servers while it lives. (A push of an op that finds the engine full
//        waits for room, but gives that up.)
// Threads: the one that made it. Another one made meanwhile on the thread does nothing.
class CallBatch {
 public:
  // For a call of the program that names so many keys; for one it does nothing.
  CallBatch(WorkerLink& link, std::size_t keys);
  CallBatch(const CallBatch&) = delete;
  CallBatch& operator=(const CallBatch&) = delete;
  ~CallBatch();  // sends

  // That of this thread, for requests over `link`; null: none.
  static CallBatch* OfThread(const WorkerLink& link);
  // Without locks of a key. The call is at the front of its queue, see DistKey::Ready.
  void Add(std::shared_ptr<PartsCall> call);

 private:
  // A server that sleeps is woken once for them, which takes as long as to make a dozen requests;
  // one that waits for the first of a long list does not wait for the others.
  static constexpr std::size_t kTogetherMax = 128;

  void Send();
  std::size_t SendAll();  // how many requests

  WorkerLink& link_;
  const bool active_;
  std::vector<std::shared_ptr<PartsCall>> calls_;
};

}  // namespace heddle::kvstore::dist
