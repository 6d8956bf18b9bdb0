// What every program library exports beside its own entry point: packing weights, the cache's block size, the ABI.
#include "kv_cache.h"
#include "pack.h"
#include "program.h"

using namespace cllm;

// Changes whenever program.h or an exported signature does; the launcher refuses another.
CLLM_EXPORT int cllm_abi() { return 1; }

CLLM_EXPORT size_t cllm_packed_bytes(int layout, int64_t rows, int64_t columns) { return packed_bytes(layout, rows, columns); }

CLLM_EXPORT void cllm_pack_rows(int layout, int source, void* target, const void* from, int64_t rows, int64_t columns, int64_t target_row,
                    int64_t panel_stride) {
  pack_rows(layout, source, target, from, rows, columns, target_row, panel_stride);
}

CLLM_EXPORT size_t cllm_kv_block_bytes(int is_bf16, int heads, int dim) {
  return is_bf16 ? kv_block_bytes<bf16>(heads, dim) : kv_block_bytes<float>(heads, dim);
}

// Reads memory once with all threads: the bandwidth that decoding is measured against. Returns a sum, so that nothing is
// optimised away.
struct ReadArgs {
  const float* data;
  int64_t count;
  float sums[kMaxThreads];
};
static void read_part(Team& team, void* arg) {
  ReadArgs& a = *(ReadArgs*)arg;
  const int64_t begin = a.count * team.rank / team.size / 64 * 64, end = a.count * (team.rank + 1) / team.size / 64 * 64;
  f32x16 s0 = zero16(), s1 = zero16(), s2 = zero16(), s3 = zero16();
  for (int64_t i = begin; i < end; i += 64) {
    s0 = s0 + load(a.data + i);
    s1 = s1 + load(a.data + i + 16);
    s2 = s2 + load(a.data + i + 32);
    s3 = s3 + load(a.data + i + 48);
    __builtin_prefetch(a.data + i + 512);
  }
  a.sums[team.rank] = reduce_add((s0 + s1) + (s2 + s3));
}
CLLM_EXPORT float cllm_read(int threads, const float* data, int64_t count) {
  static ReadArgs args;
  args.data = data;
  args.count = count;
  run_team(threads, read_part, &args);
  float sum = 0;
  for (int i = 0; i < threads; i++) sum += args.sums[i];
  return sum;
}
