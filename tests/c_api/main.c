// c_api_test <topic>: runs the tests of one topic, in C11.
#include "check.h"

typedef struct Topic {
  const char* name;
  const Test* tests;
} Topic;

int main(int argc, char** argv) {
  const Topic topics[] = {
      {"errors", kErrorTests},    {"arrays", kArrayTests},   {"engine", kEngineTests},
      {"kvstore", kKVStoreTests}, {"threads", kThreadTests}, {"access", kAccessTests},
  };
  for (size_t i = 0; i < sizeof topics / sizeof topics[0]; ++i) {
    if (argc != 2 || strcmp(argv[1], topics[i].name) != 0) continue;
    for (const Test* test = topics[i].tests; test->name != NULL; ++test) {
      printf("%s\n", test->name);
      fflush(stdout);
      test->run();
    }
    return 0;
  }
  fprintf(stderr, "usage: c_api_test errors|arrays|engine|kvstore|threads|access\n");
  return 2;
}
