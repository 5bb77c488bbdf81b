// The roles of a job over TCP, and the worker that this process is.
#pragma once

#include <heddle/dist.h>
#include <heddle/kvstore.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "kvstore/dist/protocol/ids.h"
#include "kvstore/dist/transport/tcp/tcp_transport.h"
#include "kvstore/dist/transport/transport.h"
#include "kvstore/dist/worker/worker_node.h"

namespace heddle::kvstore::dist {

// Over TCP, as the options say; for all but workers it listens.
TcpOptions TcpOptionsOf(const DistOptions& options);
TransportFactory TcpTransports(const DistOptions& options);

// A store of the worker that this process is. The first one joins the job, as the environment says,
// and the last one that goes leaves it, unless an exception is on its way through: then the worker
// has failed. So it has if the process exits with a status other than 0 or is terminated by an
// exception; the job is told why.
std::unique_ptr<KVStore> MakeProcessStore(const std::string& type, Engine& engine,
                                          const KVStoreOptions& options = {});

// The worker that this process is, if it is one, has failed, and the process ends now: the job is
// told `why`. Returns when the message has gone.
void FailProcessWorker(const std::string& why);
// The servers of the store, a dist one, record what they do to files by that name, as bodies.h says
// of kTraceCommand; empty: they end that. InvalidArgument for another store.
void TraceServers(KVStore& store, const std::string& file);
// Why the job of that worker cannot go on, see WorkerNode::failure.
std::optional<std::string> FailureOfProcessJob();
// The worker that this process is, if it is one with stores, leaves the job when the process exits
// with status 0, not when its last store goes.
void LeaveAtProcessExit();

}  // namespace heddle::kvstore::dist
