// The smallest useful embedding: docs/embedding.md walks through it.
//
// A program with data of its own (plain vectors, a file) lets heddle order its work: every piece of
// data gets a Var, every piece of work says which it reads and writes, and runs when they are
// ready.
#include <heddle/engine.h>
#include <heddle/error.h>

#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

int main() {
  std::vector<double> left, right;  // the program's data, declared before the engine that uses it
  double product = 0;
  std::thread sender;

  heddle::Engine engine;
  const heddle::Var left_var = engine.NewVar("left");
  const heddle::Var right_var = engine.NewVar("right");
  const heddle::Var product_var = engine.NewVar("product");

  // Two ops without a common var: they may run at the same time.
  engine.Push({.name = "fill left", .writes = {left_var}}, [&] { left.assign(1000, 0.5); });
  engine.Push({.name = "fill right", .writes = {right_var}}, [&] {
    right.resize(1000);
    std::iota(right.begin(), right.end(), 1.0);
  });

  // Runs after both.
  engine.Push({.name = "dot", .reads = {left_var, right_var}, .writes = {product_var}},
              [&] { product = std::inner_product(left.begin(), left.end(), right.begin(), 0.0); });

  // Waits for "dot" to have read `left`, although it was pushed without waiting for anything.
  engine.Push({.name = "clear left", .writes = {left_var}}, [&] { left.clear(); });

  // An op that ends elsewhere: here on a thread of the program's own, as a network library would.
  engine.PushAsync({.name = "send", .reads = {product_var}, .lane = heddle::Lane::kComm},
                   [&](heddle::Completion done) {
                     sender = std::thread([&product, done = std::move(done)] {
                       std::printf("sent %.1f\n", product);
                       done();
                     });
                   });

  // An op that fails: what depends on it is skipped, and whoever waits for its result hears why.
  const heddle::Var saved = engine.NewVar("saved file");
  engine.Push({.name = "save", .reads = {product_var}, .writes = {saved}},
              [] { throw heddle::IoError("no such folder"); });
  try {
    engine.WaitForVar(saved);
  } catch (const heddle::IoError& error) {
    std::printf("save failed: %s\n", error.what());
  }

  engine.WaitForVar(product_var);  // the program may read `product` now
  std::printf("product %.1f\n", product);
  engine.WaitForReadsAndWrites(product_var);  // "send" is done too
  sender.join();
}
