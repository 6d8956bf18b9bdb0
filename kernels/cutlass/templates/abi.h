// What an instance offers to the table, and the codes that the C ABI answers.
#pragma once
#include <cstddef>

namespace cllm {
enum Code {
  kOk,
  kNoInstance,
  kBadShape,
  kMisaligned,
  kNoOperand,
  kSmallWorkspace,
  kRefused,
  kNotPrepared,
  kNotLaunched,
  kNoDevice
};

struct Call {
  const void* a;
  const void* b;
  const void* c;
  const void* bias;
  void* d;
  int m, n, k;
  const float* scales;  // on the device; null: 1
  const int* offsets;   // of a grouped product, on the device: groups + 1 row numbers
  int groups;
};

struct Instance {
  const char* name;
  bool grouped;
  int operand_alignment, output_alignment;  // in elements: what K and N must be multiples of
  bool needs_c, needs_bias;
  size_t (*workspace)(const Call&);
  int (*launch)(const Call&, void* memory, void* stream);
};
}  // namespace cllm
