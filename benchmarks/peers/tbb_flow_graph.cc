// Peer: oneTBB's flow graph, a continue_node for each op.
//
// A continue_node that has fired ignores edges made later, so a graph over data cannot grow while
// it runs without a tracker beside it. The graph is therefore built first and then started at its
// sources; both count, freeing it does not.

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include <oneapi/tbb/flow_graph.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include "benchmarks/peers/harness.h"

namespace heddle::bench {
namespace {

class FlowGraphRunner {
 public:
  FlowGraphRunner(int workers, bool pusher_included)
      : threads_(pusher_included ? workers : workers + 1),
        control_(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(threads_)),
        arena_(threads_) {}

  void Prepare(Workload& workload) {
    vars_.assign(static_cast<std::size_t>(workload.num_vars()), {});
    arena_.execute([&] { graph_ = std::make_unique<tbb::flow::graph>(); });
  }

  void Run(Workload& workload) {
    arena_.execute([&] {
      for (int i = 0; i < workload.num_ops(); ++i) Add(workload, i);
      for (Node* source : sources_) source->try_put(tbb::flow::continue_msg());
      graph_->wait_for_all();
    });
  }

  void Finish() {
    sources_.clear();
    vars_.clear();
    nodes_.clear();
    graph_.reset();
  }

 private:
  using Node = tbb::flow::continue_node<tbb::flow::continue_msg>;

  struct Variable {
    Node* writer = nullptr;
    std::vector<Node*> readers;  // since the last writer
  };

  void Add(Workload& workload, int index) {
    const OpSpec& spec = workload.op(index);
    Node& node = nodes_.emplace_back(
        *graph_, [&workload, index](const tbb::flow::continue_msg&) { workload.RunBody(index); });
    bool source = true;
    for (int i = 0; i < spec.num_vars(); ++i) {
      Variable& var = vars_[spec.vars[i]];
      const bool write = i == spec.num_reads();
      if (var.writer != nullptr && (!write || var.readers.empty())) {
        tbb::flow::make_edge(*var.writer, node);
        source = false;
      }
      if (!write) {
        var.readers.push_back(&node);
        continue;
      }
      for (Node* reader : var.readers) tbb::flow::make_edge(*reader, node);
      source = source && var.readers.empty();
      var.readers.clear();
      var.writer = &node;
    }
    if (source) sources_.push_back(&node);
  }

  const int threads_;
  tbb::global_control control_;
  tbb::task_arena arena_;
  std::unique_ptr<tbb::flow::graph> graph_;
  std::deque<Node> nodes_;
  std::vector<Variable> vars_;
  std::vector<Node*> sources_;
};

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::HarnessMain<heddle::bench::FlowGraphRunner>("tbb_flow_graph", argc, argv);
}
