/* A stand-in for libcuda.so.1: it launches nothing, and keeps what it was told. */
#include "cuda.h"
#include <string.h>

static int sizes[64], count;
static unsigned char record[4096];
static int length;

void recorder_expect(const int *parameter_sizes, int parameter_count) {
  memcpy(sizes, parameter_sizes, sizeof(int) * (size_t)parameter_count);
  count = parameter_count;
}

int recorder_read(unsigned char *out) {
  memcpy(out, record, (size_t)length);
  return length;
}

static void put(const void *data, size_t size) {
  memcpy(record + length, data, size);
  length += (int)size;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  length = 0;
  const unsigned shape[] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                            config->blockDimZ, config->sharedMemBytes, config->numAttrs};
  put(shape, sizeof shape);
  put(&config->hStream, sizeof config->hStream);
  put(&function, sizeof function);
  put(&extra, sizeof extra);
  for (unsigned i = 0; i < config->numAttrs; i++) {
    put(&config->attrs[i].id, sizeof config->attrs[i].id);
    put(&config->attrs[i].value.programmaticStreamSerializationAllowed, sizeof(int));
  }
  for (int i = 0; i < count; i++)
    put(parameters[i], (size_t)sizes[i]);
  return CUDA_SUCCESS;
}
