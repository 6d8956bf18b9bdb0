// C entry points over the attention templates, for tests and the micro benchmark.
#include "attention.h"

using namespace cllm;

namespace {

struct AttentionCall {
  const void *q, *k, *v;
  void* out;
  void* kv;
  int ldq, ldk, ldv, ldo;
  int T, H, Hk, D;
  float scale;
  int window;
  float softcap;
  int causal;
  const float* sinks;
  int S;
  const int *query_start, *seq_lens, *block_tables;
  int max_blocks;
  const int* positions;
  int repeats;
};

AttnParams params_of(const AttentionCall& c) {
  return {c.H, c.Hk, c.D, c.scale, c.window, c.softcap, c.causal != 0, c.sinks};
}
AttnMeta meta_of(const AttentionCall& c) { return {c.S, c.query_start, c.seq_lens, c.block_tables, c.max_blocks}; }

template <class XT>
void run_paged(Team& team, void* raw) {
  const AttentionCall& c = *(const AttentionCall*)raw;
  for (int i = 0; i < c.repeats; i++) {
    paged_attention<XT>(team, (const XT*)c.q, c.ldq, (XT*)c.out, c.ldo, c.kv, params_of(c), meta_of(c));
    team.sync();
  }
}
template <class XT>
void run_write(Team& team, void* raw) {
  const AttentionCall& c = *(const AttentionCall*)raw;
  kv_write<XT>(team, (const XT*)c.k, c.ldk, (const XT*)c.v, c.ldv, c.T, c.kv, c.Hk, c.D, c.positions, meta_of(c));
}
template <class XT>
void run_dense(Team& team, void* raw) {
  const AttentionCall& c = *(const AttentionCall*)raw;
  dense_attention<XT>(team, (const XT*)c.q, c.ldq, (const XT*)c.k, c.ldk, (const XT*)c.v, c.ldv, (XT*)c.out, c.ldo,
                      params_of(c), c.S, c.query_start);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void attention(int threads, int bf16_type, AttentionCall* c) {
  run_team(threads, bf16_type ? &run_paged<bf16> : &run_paged<float>, c);
}
EXPORT void write_cache(int threads, int bf16_type, AttentionCall* c) {
  run_team(threads, bf16_type ? &run_write<bf16> : &run_write<float>, c);
}
EXPORT void dense(int threads, int bf16_type, AttentionCall* c) {
  run_team(threads, bf16_type ? &run_dense<bf16> : &run_dense<float>, c);
}
EXPORT size_t block_bytes(int bf16_type, int Hk, int D) {
  return bf16_type ? kv_block_bytes<bf16>(Hk, D) : kv_block_bytes<float>(Hk, D);
}
EXPORT int block_dim(int bf16_type, int D) { return bf16_type ? kv_dim<bf16>(D) : kv_dim<float>(D); }
