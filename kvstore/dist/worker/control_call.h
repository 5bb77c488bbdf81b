// Requests about whole servers, barriers and look-ups: started, or waited for.
#pragma once

#include <heddle/engine.h>

#include <exception>
#include <functional>
#include <vector>

#include "kvstore/dist/worker/worker_link.h"

namespace heddle::kvstore::dist {

// Called with the answers in the order of the requests, or with the first error among them.
using CallEnded = std::function<void(std::exception_ptr error, std::vector<Message> answers)>;

// Submits requests whose tokens are set here; Carry `out` afterwards.
void StartCall(WorkerLink& link, std::vector<Request> requests, CallEnded ended, Outputs* out);

// Submits the requests (one at least) and waits, as the engine waits: the waiting thread may run
// the transport. Returns the answers in the order of the requests; throws the first error. Inside
// an op nothing is sent: InvalidState, naming what the first request is for.
std::vector<Message> CallAndWait(Engine& engine, WorkerLink& link,
                                 const std::vector<Request>& requests);
void BarrierAndWait(Engine& engine, WorkerLink& link);

}  // namespace heddle::kvstore::dist
