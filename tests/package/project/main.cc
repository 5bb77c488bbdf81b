// A program outside of heddle's tree: three ops on one variable, in order.
#include <heddle/engine.h>

#include <cstdio>

int main() {
  int sum = 0;
  heddle::Engine engine;
  const heddle::Var var = engine.NewVar("sum");
  engine.Push({.name = "set", .writes = {var}}, [&] { sum = 20; });
  engine.Push({.name = "add", .reads = {var}, .writes = {var}}, [&] { sum += 1; });
  engine.Push({.name = "double", .reads = {var}, .writes = {var}}, [&] { sum *= 2; });
  engine.WaitForVar(var);
  std::printf("sum %d, version %llu\n", sum, static_cast<unsigned long long>(engine.version(var)));
}
