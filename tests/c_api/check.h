// What the C tests share: checks that stop the program, and the list of tests.
#pragma once

#include <heddle/c_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                         \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      fprintf(stderr, "%s:%d: expected %s; last error %d: %s\n", __FILE__, __LINE__, #condition, \
              HeddleLastError(), HeddleLastErrorMessage());                                      \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (0)

#define CHECK_OK(call) CHECK((call) == HEDDLE_OK)

// The call fails with this status, which is the last error, whose message has this part.
#define CHECK_FAILS(call, status, part)                      \
  do {                                                       \
    HeddleSetLastError(HEDDLE_OK, "no failure");             \
    CHECK((call) == (status));                               \
    CHECK(HeddleLastError() == (status));                    \
    CHECK(strstr(HeddleLastErrorMessage(), (part)) != NULL); \
  } while (0)

typedef struct Test {
  const char* name;
  void (*run)(void);
} Test;

// Each ends with a test without a name.
extern const Test kErrorTests[];
extern const Test kArrayTests[];
extern const Test kEngineTests[];
extern const Test kKVStoreTests[];
extern const Test kThreadTests[];
extern const Test kAccessTests[];

// Arrays of float32, shape (2, 3), on cpu(device).
static inline HeddleArray Full(double value, int device) {
  const int64_t shape[] = {2, 3};
  HeddleArray array = NULL;
  CHECK_OK(HeddleArrayCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, device, &array));
  CHECK_OK(HeddleArrayFill(array, value, 0));
  return array;
}

static inline int HasValues(HeddleArray array, size_t count, const float* expected) {
  float* const values = malloc(count * sizeof(float));
  CHECK(values != NULL);
  CHECK_OK(HeddleArrayCopyToHost(array, count, values, HEDDLE_FLOAT32));
  int same = 1;
  for (size_t i = 0; i < count; ++i) {
    if (values[i] != expected[i]) {
      fprintf(stderr, "element %zu: expected %g, got %g\n", i, (double)expected[i],
              (double)values[i]);
      same = 0;
    }
  }
  free(values);
  return same;
}

// Whether the array has `count` elements that all are `value`.
static inline int IsFull(HeddleArray array, size_t count, float value) {
  float* const expected = malloc(count * sizeof(float));
  CHECK(expected != NULL);
  for (size_t i = 0; i < count; ++i) expected[i] = value;
  const int same = HasValues(array, count, expected);
  free(expected);
  return same;
}
