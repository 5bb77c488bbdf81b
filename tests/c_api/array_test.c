#include "check.h"

static void ValuesComeBackAsTheyWent(void) {
  const int64_t shape[] = {2, 3};
  const double values[] = {1, -2, 3.5, 4, 5, 6};
  HeddleArray array = NULL;
  CHECK_OK(HeddleArrayFromHost(6, values, HEDDLE_FLOAT64, 2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 3,
                               &array));
  const float expected[] = {1, -2, 3.5F, 4, 5, 6};
  CHECK(HasValues(array, 6, expected));

  int32_t whole[6] = {0};
  CHECK_OK(HeddleArrayCopyToHost(array, 6, whole, HEDDLE_INT32));
  CHECK(whole[1] == -2 && whole[5] == 6);
  uint8_t truths[6] = {9, 9, 9, 9, 9, 9};
  CHECK_OK(HeddleArrayCombineScalar(array, HEDDLE_SUBTRACT, 1));
  CHECK_OK(HeddleArrayCopyToHost(array, 6, truths, HEDDLE_BOOL));
  CHECK(truths[0] == 0 && truths[1] == 1 && truths[5] == 1);

  size_t ndim = 0;
  const int64_t* dims = NULL;
  int dtype = -1, type = -1, id = -1, kind = -1;
  int64_t size = 0;
  CHECK_OK(HeddleArrayGetShape(array, &ndim, &dims));
  CHECK(ndim == 2 && dims[0] == 2 && dims[1] == 3);
  CHECK_OK(HeddleArrayGetSize(array, &size));
  CHECK(size == 6);
  CHECK_OK(HeddleArrayGetDType(array, &dtype));
  CHECK(dtype == HEDDLE_FLOAT32);
  CHECK_OK(HeddleArrayGetDevice(array, &type, &id));
  CHECK(type == HEDDLE_CPU && id == 3);
  CHECK_OK(HeddleArrayGetKind(array, &kind));
  CHECK(kind == HEDDLE_DENSE);
  CHECK_OK(HeddleArrayFree(array));
}

// From and to host memory of every dtype, into arrays of every dtype: 0 and 1 are in all of them.
static void EveryDTypeGoesInAndOut(void) {
  const int64_t shape[] = {3};
  unsigned char host[3 * 8], back[3 * 8];
  for (int from = HEDDLE_FLOAT32; from <= HEDDLE_BOOL; ++from) {
    const uint8_t bits[] = {0, 1, 1};
    HeddleArray seed = NULL;
    CHECK_OK(HeddleArrayFromHost(3, bits, HEDDLE_UINT8, 1, shape, from, HEDDLE_CPU, 0, &seed));
    CHECK_OK(HeddleArrayCopyToHost(seed, 3, host, from));
    for (int to = HEDDLE_FLOAT32; to <= HEDDLE_BOOL; ++to) {
      HeddleArray array = NULL;
      CHECK_OK(HeddleArrayFromHost(3, host, from, 1, shape, to, HEDDLE_CPU, 0, &array));
      const float expected[] = {0, 1, 1};
      CHECK(HasValues(array, 3, expected));
      CHECK_OK(HeddleArrayFill(array, 0, 0));
      CHECK_OK(HeddleArrayCopyFromHost(array, 3, host, from, 0));
      memset(back, 0xAB, sizeof back);
      CHECK_OK(HeddleArrayCopyToHost(array, 3, back, from));
      CHECK(memcmp(host, back,
                   3 * (from == HEDDLE_FLOAT64 || from == HEDDLE_INT64      ? 8
                        : from == HEDDLE_FLOAT32 || from == HEDDLE_INT32    ? 4
                        : from == HEDDLE_FLOAT16 || from == HEDDLE_BFLOAT16 ? 2
                                                                            : 1)) == 0);
      CHECK_OK(HeddleArrayFree(array));
    }
    CHECK_OK(HeddleArrayFree(seed));
  }
}

static void Arithmetic(void) {
  HeddleArray a = Full(6, 0), b = Full(2, 0);
  CHECK_OK(HeddleArrayCombine(a, HEDDLE_ADD, b));
  CHECK(IsFull(a, 6, 8));
  CHECK_OK(HeddleArrayCombine(a, HEDDLE_SUBTRACT, b));
  CHECK_OK(HeddleArrayCombine(a, HEDDLE_MULTIPLY, b));
  CHECK(IsFull(a, 6, 12));
  CHECK_OK(HeddleArrayCombine(a, HEDDLE_DIVIDE, b));
  CHECK(IsFull(a, 6, 6));
  CHECK_OK(HeddleArrayCombineScalar(a, HEDDLE_ADD, 0.5));
  CHECK_OK(HeddleArrayCombineScalar(a, HEDDLE_MULTIPLY, 4));
  CHECK_OK(HeddleArrayCombineScalar(a, HEDDLE_SUBTRACT, 2));
  CHECK_OK(HeddleArrayCombineScalar(a, HEDDLE_DIVIDE, 3));
  CHECK(IsFull(a, 6, 8));

  HeddleArray copy = NULL;
  CHECK_OK(HeddleArrayCopy(a, &copy));
  CHECK_OK(HeddleArrayFill(a, -1, 0));
  CHECK(IsFull(copy, 6, 8));
  CHECK_OK(HeddleArrayCopyTo(copy, a, 0));
  CHECK(IsFull(a, 6, 8));

  const int64_t other_shape[] = {3, 2};
  HeddleArray c = NULL;
  CHECK_OK(HeddleArrayReshape(b, 2, other_shape, &c));
  CHECK_FAILS(HeddleArrayCombine(a, HEDDLE_ADD, c), HEDDLE_INVALID_ARGUMENT, "(3, 2)");
  CHECK_FAILS(HeddleArrayCopyTo(a, c, 0), HEDDLE_INVALID_ARGUMENT, "(3, 2)");
  CHECK_OK(HeddleArrayFree(a));
  CHECK_OK(HeddleArrayFree(b));
  CHECK_OK(HeddleArrayFree(c));
  CHECK_OK(HeddleArrayFree(copy));
}

static void ViewsAndSharesShowTheSameElements(void) {
  HeddleArray array = Full(1, 0), same = NULL, row = NULL, flat = NULL;
  const int64_t six[] = {6};
  CHECK_OK(HeddleArrayShare(array, &same));
  CHECK(same != array);
  CHECK_OK(HeddleArraySlice(array, 1, 2, &row));
  CHECK_OK(HeddleArrayReshape(array, 1, six, &flat));
  CHECK_OK(HeddleArrayFree(array));  // the others keep the elements
  CHECK_OK(HeddleArrayFill(row, 5, 0));
  const float expected[] = {1, 1, 1, 5, 5, 5};
  CHECK(HasValues(same, 6, expected));
  CHECK(HasValues(flat, 6, expected));
  CHECK_FAILS(HeddleArraySlice(same, 1, 3, &row), HEDDLE_INVALID_ARGUMENT, "[1, 3)");
  CHECK_OK(HeddleArrayFree(same));
  CHECK_OK(HeddleArrayFree(row));
  CHECK_OK(HeddleArrayFree(flat));
}

static void ElementsInPlaceAfterAWait(void) {
  HeddleArray array = Full(3, 0);
  void* data = NULL;
  const void* const_data = NULL;
  CHECK_OK(HeddleArrayWaitToWrite(array, HEDDLE_FOREVER));
  CHECK_OK(HeddleArrayGetData(array, &data));
  ((float*)data)[5] = 7;
  const float expected[] = {3, 3, 3, 3, 3, 7};
  CHECK(HasValues(array, 6, expected));
  CHECK_OK(HeddleArrayWaitToRead(array, 60000));
  CHECK_OK(HeddleArrayGetConstData(array, &const_data));
  CHECK(const_data == data);
  CHECK_OK(HeddleArrayFree(array));
}

static void RowSparseArrays(void) {
  const int64_t shape[] = {4, 2};
  const int64_t ids[] = {3, 1};
  const double rows[] = {30, 31, 10, 11};
  HeddleArray sparse = NULL;
  CHECK_OK(HeddleRowSparseFromHost(2, ids, rows, HEDDLE_FLOAT64, 2, shape, HEDDLE_FLOAT32,
                                   HEDDLE_CPU, 0, &sparse));
  size_t num_rows = 0;
  const int64_t* row_ids = NULL;
  const void* data = NULL;
  int kind = -1;
  CHECK_OK(HeddleArrayGetKind(sparse, &kind));
  CHECK(kind == HEDDLE_ROW_SPARSE);
  CHECK_OK(HeddleArrayWaitToRead(sparse, HEDDLE_FOREVER));
  CHECK_OK(HeddleRowSparseGetRows(sparse, &num_rows, &row_ids, &data));
  CHECK(num_rows == 2 && row_ids[0] == 1 && row_ids[1] == 3);
  CHECK(((const float*)data)[0] == 10 && ((const float*)data)[3] == 31);
  const float expected[] = {0, 0, 10, 11, 0, 0, 30, 31};
  CHECK(HasValues(sparse, 8, expected));  // as the dense array that it stands for

  // To dense and back.
  HeddleArray dense = NULL, again = NULL;
  CHECK_OK(HeddleArrayCopyAsKind(sparse, HEDDLE_DENSE, &dense));
  CHECK(HasValues(dense, 8, expected));
  CHECK_OK(HeddleRowSparseCreate(2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &again));
  CHECK(IsFull(again, 8, 0));
  CHECK_OK(HeddleArrayCopyTo(dense, again, 0));
  CHECK_OK(HeddleArrayWaitToRead(again, HEDDLE_FOREVER));
  CHECK_OK(HeddleRowSparseGetRows(again, &num_rows, NULL, NULL));
  CHECK(num_rows == 2);
  CHECK_OK(HeddleArrayFill(dense, 1, 0));
  CHECK_OK(HeddleArrayCopyTo(again, dense, 0));
  CHECK(HasValues(dense, 8, expected));

  // What arithmetic there is.
  CHECK_OK(HeddleArrayCombineScalar(again, HEDDLE_MULTIPLY, 2));
  CHECK_OK(HeddleArrayCombine(again, HEDDLE_ADD, sparse));
  CHECK_OK(HeddleArrayCombine(dense, HEDDLE_ADD, again));
  const float fourfold[] = {0, 0, 40, 44, 0, 0, 120, 124};
  CHECK(HasValues(dense, 8, fourfold));
  HeddleArray none = NULL;
  CHECK_FAILS(HeddleArrayCombine(sparse, HEDDLE_ADD, dense), HEDDLE_INVALID_ARGUMENT,
              "array: expected a dense array, got a row-sparse one");
  CHECK_FAILS(HeddleArrayCombine(dense, HEDDLE_MULTIPLY, sparse), HEDDLE_INVALID_ARGUMENT, "other");
  CHECK_FAILS(HeddleArrayCombineScalar(sparse, HEDDLE_ADD, 1), HEDDLE_INVALID_ARGUMENT, "dense");
  CHECK_FAILS(HeddleArrayFill(sparse, 1, 0), HEDDLE_INVALID_ARGUMENT, "dense");
  CHECK_FAILS(HeddleArraySlice(sparse, 0, 1, &none), HEDDLE_INVALID_ARGUMENT, "dense");
  CHECK_FAILS(HeddleRowSparseGetRows(dense, &num_rows, NULL, NULL), HEDDLE_INVALID_ARGUMENT,
              "array: expected a row-sparse array, got a dense one");

  // Ids that cannot be.
  const int64_t twice[] = {1, 1};
  const int64_t outside[] = {1, 4};
  const int64_t many[] = {0, 1, 2, 3, 0};
  const double many_rows[10] = {0};
#define MAKE(count, which, ndim, values)                                                     \
  HeddleRowSparseFromHost(count, which, values, HEDDLE_FLOAT64, ndim, shape, HEDDLE_FLOAT32, \
                          HEDDLE_CPU, 0, &none)
  CHECK_FAILS(MAKE(2, twice, 2, rows), HEDDLE_INVALID_ARGUMENT, "1");
  CHECK_FAILS(MAKE(2, outside, 2, rows), HEDDLE_INVALID_ARGUMENT, "4");
  CHECK_FAILS(MAKE(5, many, 2, many_rows), HEDDLE_INVALID_ARGUMENT,
              "num_rows: expected at most the 4 rows of the shape, got 5");
  CHECK_FAILS(MAKE(1, ids, 0, rows), HEDDLE_INVALID_ARGUMENT, "ndim");
  CHECK_FAILS(HeddleRowSparseCreate(0, NULL, HEDDLE_FLOAT32, HEDDLE_CPU, 0, &none),
              HEDDLE_INVALID_ARGUMENT, "axis");
  CHECK(none == NULL);
  CHECK_OK(HeddleArrayFree(sparse));
  CHECK_OK(HeddleArrayFree(dense));
  CHECK_OK(HeddleArrayFree(again));
}

// What C has written as a bool may be any byte.
static void BoolsAreZeroOrOne(void) {
  const unsigned char bytes[] = {0, 1, 2, 255}, expected[] = {0, 1, 1, 1};
  const int64_t shape[] = {4};
  HeddleArray array = NULL;
  unsigned char found[4] = {9, 9, 9, 9};
  CHECK_OK(
      HeddleArrayFromHost(4, bytes, HEDDLE_BOOL, 1, shape, HEDDLE_BOOL, HEDDLE_CPU, 0, &array));
  CHECK_OK(HeddleArrayCopyToHost(array, 4, found, HEDDLE_BOOL));
  CHECK(memcmp(found, expected, 4) == 0);
  CHECK_OK(HeddleArrayFill(array, 0, 0));
  CHECK_OK(HeddleArrayCopyFromHost(array, 4, bytes, HEDDLE_BOOL, 0));
  CHECK_OK(HeddleArrayCopyToHost(array, 4, found, HEDDLE_BOOL));
  CHECK(memcmp(found, expected, 4) == 0);
  CHECK_OK(HeddleArrayFree(array));
}

static void ArraysOfNoElementsAndScalars(void) {
  const int64_t shape[] = {0, 3}, narrow[] = {5, 0}, ids[] = {1, 3};
  HeddleArray rows = NULL;
  CHECK_OK(HeddleRowSparseFromHost(2, ids, NULL, HEDDLE_FLOAT32, 2, narrow, HEDDLE_FLOAT32,
                                   HEDDLE_CPU, 0, &rows));
  CHECK_OK(HeddleArrayFree(rows));
  HeddleArray empty = NULL, scalar = NULL;
  CHECK_OK(HeddleArrayFromHost(0, NULL, HEDDLE_FLOAT32, 2, shape, HEDDLE_FLOAT32, HEDDLE_CPU, 0,
                               &empty));
  CHECK_OK(HeddleArrayCopyToHost(empty, 0, NULL, HEDDLE_FLOAT32));
  const int32_t value = 7;
  CHECK_OK(
      HeddleArrayFromHost(1, &value, HEDDLE_INT32, 0, NULL, HEDDLE_INT64, HEDDLE_CPU, 0, &scalar));
  CHECK(IsFull(scalar, 1, 7));
  CHECK_OK(HeddleArrayFree(empty));
  CHECK_OK(HeddleArrayFree(scalar));
}

const Test kArrayTests[] = {
    {"ValuesComeBackAsTheyWent", ValuesComeBackAsTheyWent},
    {"EveryDTypeGoesInAndOut", EveryDTypeGoesInAndOut},
    {"Arithmetic", Arithmetic},
    {"ViewsAndSharesShowTheSameElements", ViewsAndSharesShowTheSameElements},
    {"ElementsInPlaceAfterAWait", ElementsInPlaceAfterAWait},
    {"RowSparseArrays", RowSparseArrays},
    {"BoolsAreZeroOrOne", BoolsAreZeroOrOne},
    {"ArraysOfNoElementsAndScalars", ArraysOfNoElementsAndScalars},
    {NULL, NULL},
};
