// Mixture of experts: items (a token with one of its experts) sorted by expert, two grouped linears, a weighted sum.
// Reads the weights of the experts that have items, once each; 2 * items * (2F + F) * K flops. Also top-k and argmax.
#pragma once

#include <string.h>

#include "linear.h"

namespace cllm {

struct ExpertShape {
  int experts, per_token, K, F;  // x is [T, K], an expert's hidden width F
  float limit, alpha;            // gpt_oss's clamp and slope
};

template <class A>
struct PlainAct {
  template <class XT>
  static void run(Team& team, const XT* gu, XT* h, int items, const ExpertShape& s) {
    gated_act<A>(team, gu, 2 * s.F, gu + s.F, 2 * s.F, h, s.F, items, s.F);
  }
};
struct ClampedAct {
  template <class XT>
  static void run(Team& team, const XT* gu, XT* h, int items, const ExpertShape& s) {
    clamped_swiglu(team, gu, 2 * s.F, h, s.F, items, s.F, s.limit, s.alpha);
  }
};

// y = round(round(v + bias) * weight of the item)
template <class OT, class WT>
struct WeightedStore {
  static constexpr bool gated = false;
  OT* y;
  int ldy;
  const OT* bias;
  const WT* weight;  // by item
  CLLM_INLINE void operator()(int t, int n, f32x16 v, int lanes) const {
    v = Round<OT>::apply(add_bias(v, bias, n, lanes)) * set1(to_f32(weight[t]));
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

// gate_up [E, 2F, K] and down [E, K, F], each expert packed on its own; gate_up_bias [E, 2F], down_bias [E, K] or null.
template <class W, class Activation, class XT, class WT>
void experts(Team& team, const XT* x, int ldx, const int64_t* ids, const WT* weights, const void* gate_up, const void* down,
             const XT* gate_up_bias, const XT* down_bias, XT* y, int T, const ExpertShape s) {
  const int items = T * s.per_token;
  const size_t ints = size_t(s.experts + 1) + 2 * size_t(items);
  const size_t at_weight = (ints * 4 + 63) / 64 * 64, at_gu = (at_weight + items * sizeof(WT) + 63) / 64 * 64;
  const size_t at_h = at_gu + size_t(items) * 2 * s.F * sizeof(XT), at_y = at_h + size_t(items) * s.F * sizeof(XT);
  char* memory = (char*)team.common(0, at_y + size_t(items) * s.K * sizeof(XT));
  int* start = (int*)memory;
  int* rows = start + s.experts + 1;
  int* slot = rows + items;
  WT* item_weight = (WT*)(memory + at_weight);
  XT* gu = (XT*)(memory + at_gu);
  XT* h = (XT*)(memory + at_h);
  XT* out = (XT*)(memory + at_y);
  if (team.rank == 0) {
    memset(start, 0, (s.experts + 1) * 4);
    for (int i = 0; i < items; i++) start[ids[i] + 1]++;
    for (int e = 0; e < s.experts; e++) start[e + 1] += start[e];
    for (int i = 0; i < items; i++) {  // start[e] walks to the next expert's start, then is moved back
      const int at = start[ids[i]]++;
      rows[at] = i / s.per_token;
      slot[i] = at;
      item_weight[at] = weights[i];
    }
    for (int e = s.experts; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;
  }
  team.sync();
  const size_t gu_bytes = packed_bytes(W::layout, 2 * s.F, s.K), down_bytes = packed_bytes(W::layout, s.K, s.F);
  linear_experts<W>(team, x, ldx, rows, start, s.experts, gate_up, gu_bytes, 2 * s.F, s.K, [&](int e) {
    return Store<XT>{gu, 2 * s.F, gate_up_bias ? gate_up_bias + size_t(e) * 2 * s.F : nullptr};
  });
  team.sync();
  Activation::run(team, gu, h, items, s);
  team.sync();
  linear_experts<W>(team, h, s.F, nullptr, start, s.experts, down, down_bytes, s.K, s.F, [&](int e) {
    return WeightedStore<XT, WT>{out, s.K, down_bias ? down_bias + size_t(e) * s.K : nullptr, item_weight};
  });
  team.sync();
  combine_experts(team, out, s.K, slot, s.per_token, y, s.K, T, s.K);
}

// The k largest of each row in descending order, ties to the lower index: k passes over a row, k is small.
template <class XT>
void topk(Team& team, const XT* x, int ldx, XT* values, int64_t* indices, int T, int N, int k) {
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    const XT* row = x + size_t(t) * ldx;
    XT* v = values + size_t(t) * k;
    int64_t* at = indices + size_t(t) * k;
    for (int j = 0; j < k; j++) {
      int best = -1;
      for (int n = 0; n < N; n++) {
        bool taken = false;
        for (int i = 0; i < j; i++) taken |= at[i] == n;
        if (!taken && (best < 0 || to_f32(row[n]) > to_f32(row[best]))) best = n;
      }
      v[j] = row[best];
      at[j] = best;
    }
  }
}

template <class XT>
void argmax_rows(Team& team, const XT* x, int ldx, int64_t* out, int T, int N) {
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    const XT* row = x + size_t(t) * ldx;
    int best = 0;
    for (int n = 1; n < N; n++) {
      const float top = to_f32(row[best]), x = to_f32(row[n]);
      if (x > top || (x != x && top == top)) best = n;
    }
    out[t] = best;
  }
}

}  // namespace cllm
