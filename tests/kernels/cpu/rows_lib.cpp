// C entry points over norms, rotary, embedding, activations, vector math and sampling, for tests.
#include "embed.h"
#include "norm.h"
#include "rope.h"
#include "sample.h"
#include "act.h"

using namespace cllm;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct NormCall {
  int kind;  // 0 rms, 1 add + rms, 2 layer, 3 add + layer
  const void *x, *residual, *w, *b;
  void *sum, *y;
  int ld, T, K;
  float eps, offset;
  int round_first;
};

template <class XT>
void run_norm(Team& team, void* raw) {
  const NormCall& c = *(const NormCall*)raw;
  const XT *x = (const XT*)c.x, *res = (const XT*)c.residual, *w = (const XT*)c.w, *b = (const XT*)c.b;
  XT *sum = (XT*)c.sum, *y = (XT*)c.y;
  const NormParams p{c.eps, c.offset, c.round_first != 0};
  if (c.kind == 0) rms_norm(team, x, c.ld, y, c.ld, c.T, c.K, w, p);
  if (c.kind == 1) add_rms_norm(team, x, c.ld, res, c.ld, sum, c.ld, y, c.ld, c.T, c.K, w, p);
  if (c.kind == 2) layer_norm(team, x, c.ld, y, c.ld, c.T, c.K, w, b, p);
  if (c.kind == 3) add_layer_norm(team, x, c.ld, res, c.ld, sum, c.ld, y, c.ld, c.T, c.K, w, b, p);
}

struct QkvCall {
  const void* qkv;
  void* q_out;
  void* kv;
  int ldqkv, ldq, T, H, Hk, D, rot_dim, style;
  const void *q_norm, *k_norm;
  int full_row;
  const float* inv_freq;
  float* cos;
  float* sin;
  const int* positions;
  const int* query_start;
  const int* block_tables;
  int S, max_blocks;
};

template <class XT>
void run_qkv(Team& team, void* raw) {
  const QkvCall& c = *(const QkvCall*)raw;
  rope_table(team, c.cos, c.sin, c.positions, c.T, c.inv_freq, c.rot_dim / 2, 1.0f, sizeof(XT) == 2);
  team.sync();
  QkvParams<XT> p{c.H, c.Hk, c.D, c.rot_dim, RopeStyle(c.style), (const XT*)c.q_norm, (const XT*)c.k_norm};
  p.norm_full_row = c.full_row != 0;
  const AttnMeta meta{c.S, c.query_start, nullptr, c.block_tables, c.max_blocks};
  qkv_rope_write(team, (const XT*)c.qkv, c.ldqkv, (XT*)c.q_out, c.ldq, c.T, c.kv, p, c.cos, c.sin, c.positions, meta);
}

struct EmbedCall {
  int layout;  // -1: row-major
  const void* table;
  const int* ids;
  void* y;
  int T, K;
  float scale;
};

template <class XT>
void run_embed(Team& team, void* raw) {
  const EmbedCall& c = *(const EmbedCall*)raw;
  XT* y = (XT*)c.y;
  switch (c.layout) {
    case n16k2: return embed_packed<Bf16W>(team, c.table, c.ids, y, c.K, c.T, c.K, c.scale);
    case n16: return embed_packed<F32W>(team, c.table, c.ids, y, c.K, c.T, c.K, c.scale);
    case q4_1_n16: return embed_packed<Q4_1W>(team, c.table, c.ids, y, c.K, c.T, c.K, c.scale);
    case q4_0_n16: return embed_packed<Q4_0W>(team, c.table, c.ids, y, c.K, c.T, c.K, c.scale);
    case q8_0_n16: return embed_packed<Q8_0W>(team, c.table, c.ids, y, c.K, c.T, c.K, c.scale);
    default: return embed(team, (const XT*)c.table, c.ids, y, c.K, c.T, c.K, c.scale);
  }
}

struct SampleCall {
  const float* logits;
  int R, V;
  const SampleRow* rows;
  SampleResult* results;
};

struct ActCall {
  const void *gate, *up;
  void* y;
  int T, F;
  int clamped;
};
template <class XT>
void run_act(Team& team, void* raw) {
  const ActCall& c = *(const ActCall*)raw;
  if (c.clamped)
    clamped_swiglu(team, (const XT*)c.gate, 2 * c.F, (XT*)c.y, c.F, c.T, c.F, 7.0f, 1.702f);
  else
    gated_act<Silu>(team, (const XT*)c.gate, c.F, (const XT*)c.up, c.F, (XT*)c.y, c.F, c.T, c.F);
}

template <f32x16 (*fn)(f32x16)>
void map(const float* x, float* y, int n) {
  for (int i = 0; i < n; i += 16) store_part(y + i, fn(load_part(x + i, min_int(16, n - i))), min_int(16, n - i));
}

}  // namespace

EXPORT void norm(int threads, int is_bf16, NormCall* c) { run_team(threads, is_bf16 ? &run_norm<bf16> : &run_norm<float>, c); }
EXPORT void qkv(int threads, int is_bf16, QkvCall* c) { run_team(threads, is_bf16 ? &run_qkv<bf16> : &run_qkv<float>, c); }
EXPORT void embed_rows(int threads, int is_bf16, EmbedCall* c) {
  run_team(threads, is_bf16 ? &run_embed<bf16> : &run_embed<float>, c);
}
EXPORT void activate(int threads, int is_bf16, ActCall* c) { run_team(threads, is_bf16 ? &run_act<bf16> : &run_act<float>, c); }
EXPORT void sample_rows(int threads, SampleCall* c) {
  run_team(threads, [](Team& team, void* raw) {
    SampleCall& c = *(SampleCall*)raw;
    sample(team, c.logits, c.V, c.R, c.V, c.rows, c.results);
  }, c);
}
EXPORT size_t cache_bytes(int is_bf16, int Hk, int D) {
  return is_bf16 ? kv_block_bytes<bf16>(Hk, D) : kv_block_bytes<float>(Hk, D);
}
EXPORT void round_to_bf16(const float* x, float* y, int n) { map<round_bf16>(x, y, n); }
EXPORT void math(int fn, const float* x, float* y, int n) {
  switch (fn) {
    case 0: return map<vexp>(x, y, n);
    case 1: return map<vlog>(x, y, n);
    case 2: return map<vtanh>(x, y, n);
    case 3: return map<vsigmoid>(x, y, n);
    case 4: return map<verf>(x, y, n);
    case 5: return map<vgelu_erf>(x, y, n);
    case 6: return map<vgelu_tanh>(x, y, n);
    case 7: return map<vsin>(x, y, n);
    case 8: return map<vcos>(x, y, n);
    case 9: return map<vrsqrt>(x, y, n);
    case 10: return map<vlog1p>(x, y, n);
    case 11: return map<vfloor>(x, y, n);
    case 12: return map<vround>(x, y, n);
    default: return map<vexp2>(x, y, n);
  }
}
EXPORT void widen_f16(const uint16_t* x, float* y, int n) {
  for (int i = 0; i + 16 <= n; i += 16) store(y + i, load_f16(x + i));
}
EXPORT double uniform(uint64_t seed, uint64_t position) { return philox_uniform(seed, position); }
EXPORT size_t sample_row_bytes() { return sizeof(SampleRow); }
EXPORT int team_sums(int threads, int rounds) {  // the barrier: every rank sees what all wrote in the round before
  struct Call {
    int rounds, wrong;
    int cell[kMaxThreads];
  } c{rounds, 0, {}};
  run_team(threads, [](Team& team, void* raw) {
    Call& c = *(Call*)raw;
    for (int i = 1; i <= c.rounds; i++) {
      c.cell[team.rank] = i;
      team.sync();
      for (int r = 0; r < team.size; r++)
        if (c.cell[r] != i) c.wrong = 1;
      team.sync();
    }
  }, &c);
  return c.wrong;
}
