// How a process takes part in a distributed job: its role, where the others are, and the limits
// that the dist stores keep to.
//
//   heddle::DistOptions options = heddle::DistOptions::FromEnvironment();
//   options.num_workers = 4;
//   options.Validate();
//
// docs/distributed.md lists every setting with its variables and default.
#pragma once

#include <heddle/error.h>
#include <heddle/key.h>
#include <heddle/ndarray.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle {

// A job has one scheduler (roster, barriers, health), servers (own parts of the keys) and workers.
// The values are those on the wire.
enum class DistRole : std::uint8_t { kScheduler = 1, kServer = 2, kWorker = 3 };

std::string_view DistRoleName(DistRole role);  // "scheduler", "server" or "worker"

struct DistOptions {
  // This process. A rank counts from 0 within a role; without one, ranks go by order of joining.
  DistRole role = DistRole::kWorker;
  std::optional<int> rank;        // of a worker or a server
  std::optional<int> local_rank;  // of a worker among those of its machine
  std::optional<int> local_size;  // workers of this machine

  // The job. The first four must be given, the same in all its processes.
  std::string root_host;  // where the scheduler listens
  int root_port = 0;
  int num_workers = 0;
  int num_servers = 0;
  std::string job_id;     // processes of jobs with other ids are turned away
  std::string token;      // the job's secret, which joining needs
  bool insecure = false;  // accept listening beyond loopback without a token

  // TLS, all of the job or none of it: files in PEM, all three or none.
  std::string tls_certificate;  // of this process, then those between it and an authority
  std::string tls_key;          // of that certificate, without a passphrase
  std::string tls_authorities;  // who may have signed the certificates of others
  std::string tls_name;  // what certificates of others must be for; else the host they are at

  // Where this process listens; docs/distributed.md says what follows from what is left out.
  std::string bind_address;  // that of a local interface, or 0.0.0.0
  std::string node_host;     // the address or name that others connect to
  std::string interface;     // the network interface to use, "eth0"
  int listen_fd = -1;        // scheduler: a listening socket to take over in place of binding one

  // Scheduler: a socket, inherited from a launcher, that gets a line when the job fails: the
  // process that failed first, "worker 1".
  int failure_fd = -1;

  // Limits in time.
  std::chrono::milliseconds connect_deadline{60'000};   // to have met all others, from the start
  std::chrono::milliseconds op_deadline{0};             // of each push, pull, ...; 0: none
  std::chrono::milliseconds warning_time{10'000};       // what waits so long is logged
  std::chrono::milliseconds heartbeat_interval{1'000};  // between signs of life
  int dead_after = 3;                                   // heartbeats missed

  // How data travels.
  std::int64_t slice_bytes = 0;        // of the parts of dense arrays; 0: 1 MiB; the scheduler's
  std::int64_t cut_bound = 1'000'000;  // larger arrays than so many float32: to all servers
  bool shared_memory = true;           // between processes of one host and user, in place of TCP
  std::chrono::microseconds spin{0};   // to poll the network before sleeping
  std::int64_t peer_bytes_max = std::int64_t{1} << 30;  // unfinished pushes to one server
  int io_threads = 0;  // for the network of a scheduler or server; 0: one. Workers have one
  int io_cpu = -1;     // the first I/O thread runs on this CPU alone, the next one
                       // on the next; -1: where the system likes

  // Where values came from, for error messages: name of the field -> variable or option. A field
  // that is not in here was set by the program, or has its default.
  std::map<std::string, std::string, std::less<>> sources;

  // The defaults, changed by HEDDLE_* and DMLC_* variables, of which HEDDLE_* win; a worker without
  // HEDDLE_RANK takes the index that mpirun or srun gave it, if they started just the workers.
  // Throws InvalidArgument, naming field, variable, expected and given, for a value that does not
  // parse, is out of range or contradicts another one, and for a token file that cannot be read.
  static DistOptions FromEnvironment();

  // Throws InvalidArgument if something is missing, out of range or contradicts something else.
  void Validate() const;

  // Name, value and source of a field, "root_port 9091 (DMLC_PS_ROOT_PORT)"; of the token only
  // whether there is one. InvalidArgument for an unknown field.
  std::string Describe(std::string_view field) const;
};

// What a server runs when a worker calls SendCommandToServers, one call at a time, on a thread of
// the server's engine. An exception is that call's error at the worker.
using ServerController = std::function<void(int head, std::string_view body)>;

// What an optimizer that a server has and heddle does not is to do: to update `weight` by the sum
// `gradient`, in place: dense arrays of the whole key, of one shape and dtype. `parameters` are
// those that workers have set, as they were with the push; the rates are what these workers'
// schedules and multipliers give for the key.
struct ServerUpdate {
  KeyRef key;
  std::span<const std::pair<std::string, double>> parameters;
  double learning_rate;
  double weight_decay;
  NDArray gradient;
  NDArray weight;
};
// Such an optimizer, for the keys of one store. Called on threads of the server, for one push of a
// key at a time; updates and forgetting may take their time. While states are saved or loaded the
// server does nothing else, so that must be over before the others take it for dead.
struct ServerUpdater {
  // The update is complete when it returns; an exception is the error of that push. It is called
  // within an op that writes the arrays: it works on their data() itself, of the key's dtype, and
  // neither waits nor pushes ops on them.
  std::function<void(const ServerUpdate& update)> update;
  // What is kept of a key, for files of states: bytes that `load_state` takes, also on another
  // server; nothing where nothing is kept. None: the states stay on the server.
  std::function<std::optional<std::string>(KeyRef key)> save_state{};
  // Takes such bytes in place of what is kept of the key. Throws, changing nothing, if they do not
  // fit.
  std::function<void(KeyRef key, std::string_view state)> load_state{};
  // The key is gone, as all workers have removed it, dropped the store or left the job, or begins
  // anew, as it is reset or initialised again. None: nothing is kept.
  std::function<void(KeyRef key)> forget{};
};
// Makes the updater of a store when a worker sets an optimizer of that name, which heddle does not
// have. The server does nothing else meanwhile. Throws, which is the worker's error, for a name
// that the server does not have either.
using ServerOptimizers = std::function<ServerUpdater(std::string_view name)>;

// What a server does besides.
struct ServerProgram {
  ServerController controller{};  // none: commands are errors
  ServerOptimizers optimizers{};  // none: heddle's own are all
};

// Run a role until the job ends. Return when all workers have left in order. Errors: as
// DistOptions::Validate for options that cannot work, or are of another role; NetworkError and
// TimeoutError when the job does not come together; NetworkError naming role, rank and address when
// a process of the job has failed.
void RunScheduler(const DistOptions& options);
void RunServer(const DistOptions& options, ServerProgram program = {});

}  // namespace heddle
