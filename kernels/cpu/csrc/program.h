// What a generated program is called with. The launcher (kernels/launch/cpu.py) mirrors these structs field by field.
#pragma once

#include <stdint.h>

#include "attention.h"

// A name that the launcher looks up; everything else stays inside the library.
#define CLLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace cllm {

// One step's metadata, as ir/step.py documents it; all arrays int32.
struct StepArgs {
  const int* token_ids;
  const int* positions;
  const int* query_start;
  const int* seq_lens;
  const int* slots;
  const int* sample_rows;
  const int* adapter_id;
  const int* token_types;   // null where no program of the artifact asks for it
  const int* block_tables;  // [groups, sequences, max_blocks]
  int64_t sequences;
  int64_t max_blocks;
};

struct Ctx {
  const int64_t* dims;
  const StepArgs* step;
  void* const* params;
  void* const* states;
  void* const* inputs;
  void* const* outputs;
  char* arena;
  const int64_t* offsets;  // planned values
  const int64_t* scratch;  // copies and tables of the generated code's own
  void (*host)(int call, const void* const* operands);

  AttnMeta meta(int group) const {
    return {int(step->sequences), step->query_start, step->seq_lens,
            step->block_tables + group * step->sequences * step->max_blocks, int(step->max_blocks)};
  }
};

}  // namespace cllm
