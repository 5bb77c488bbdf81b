// A C program outside of heddle's tree: pushes and pulls a number.
#include <heddle/c_api.h>

#include <stdio.h>

int main(void) {
  const HeddleKey key = {.text = "number"};
  const int64_t shape[] = {1};
  float number = 8;
  HeddleArray array = NULL;
  HeddleKVStore store = NULL;
  if (HeddleGetAbiVersion() != HEDDLE_ABI_VERSION ||
      HeddleKVStoreCreate("local", NULL, &store) != HEDDLE_OK ||
      HeddleArrayFromHost(1, &number, HEDDLE_FLOAT32, 1, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0,
                          &array) != HEDDLE_OK ||
      HeddleKVStorePush(store, 1, &key, &array, 0) != HEDDLE_OK ||
      HeddleArrayFill(array, 0, 0) != HEDDLE_OK ||
      HeddleKVStorePull(store, 1, &key, &array, 0, 1) != HEDDLE_OK ||
      HeddleArrayCopyToHost(array, 1, &number, HEDDLE_FLOAT32) != HEDDLE_OK) {
    fprintf(stderr, "%s\n", HeddleLastErrorMessage());
    return 1;
  }
  printf("pulled %g\n", (double)number);
  return HeddleArrayFree(array) != HEDDLE_OK || HeddleKVStoreFree(store) != HEDDLE_OK;
}
