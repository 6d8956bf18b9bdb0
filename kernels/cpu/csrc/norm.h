// Root-mean-square and layer norms, alone or after a residual addition. Statistics in float32.
// Reads and writes each element once (the row stays in L1 between the passes); flops about 4 per element.
#pragma once

#include "team.h"
#include "vec_math.h"

namespace cllm {

struct NormParams {
  float eps;
  float offset = 0;         // added to the weight (gemma: 1)
  bool round_first = true;  // true: each step is rounded, w * round(x_hat), as llama; false: round(x_hat * w), as gemma
};

// y = x_hat * (w + offset) for one row of K floats. The output may be the input.
template <class XT, class OT>
CLLM_NOINLINE void normalize_row(const float* x, int K, const XT* w, NormParams p, OT* y) {
  f32x16 sum0 = zero16(), sum1 = zero16();
  int k = 0;
  for (; k + 2 * kLanes <= K; k += 2 * kLanes) {
    const f32x16 a = load(x + k), b = load(x + k + kLanes);
    sum0 = fma(a, a, sum0);
    sum1 = fma(b, b, sum1);
  }
  for (; k < K; k += kLanes) {
    const f32x16 a = load_part(x + k, min_int(kLanes, K - k));
    sum0 = fma(a, a, sum0);
  }
  const f32x16 inverse = set1(1.0f / __builtin_sqrtf(reduce_add(sum0 + sum1) / float(K) + p.eps));
  for (k = 0; k < K; k += kLanes) {
    const int lanes = min_int(kLanes, K - k);
    f32x16 v = load_part(x + k, lanes) * inverse;
    if (p.round_first) v = Round<XT>::apply(v);
    if (w) {
      const f32x16 factor = load_part(w + k, lanes) + set1(p.offset);
      v = v * (p.round_first ? Round<XT>::apply(factor) : factor);
    }
    store_part(y + k, Round<XT>::apply(v), lanes);
  }
}

template <class XT>
CLLM_INLINE void widen_row(const XT* x, int K, float* to) {
  for (int k = 0; k < K; k += kLanes) {
    const int lanes = min_int(kLanes, K - k);
    store_part(to + k, load_part(x + k, lanes), lanes);
  }
}
// to = sum = round(x + residual); `sum` may be either operand.
template <class XT>
CLLM_INLINE void add_row(const XT* x, const XT* residual, XT* sum, int K, float* to) {
  for (int k = 0; k < K; k += kLanes) {
    const int lanes = min_int(kLanes, K - k);
    const f32x16 v = Round<XT>::apply(load_part(x + k, lanes) + load_part(residual + k, lanes));
    store_part(sum + k, v, lanes);
    store_part(to + k, v, lanes);
  }
}

// x, y [T, K]; w [K] or null.
template <class XT>
void rms_norm(Team& team, const XT* x, int ldx, XT* y, int ldy, int T, int K, const XT* w, NormParams p) {
  float* row = team.scratch<float>(0, size_t(K));
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    widen_row(x + size_t(t) * ldx, K, row);
    normalize_row(row, K, w, p, y + size_t(t) * ldy);
  }
}

// sum = x + residual, y = norm(sum).
template <class XT>
void add_rms_norm(Team& team, const XT* x, int ldx, const XT* residual, int ldr, XT* sum, int lds, XT* y, int ldy, int T,
                  int K, const XT* w, NormParams p) {
  float* row = team.scratch<float>(0, size_t(K));
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    add_row(x + size_t(t) * ldx, residual + size_t(t) * ldr, sum + size_t(t) * lds, K, row);
    normalize_row(row, K, w, p, y + size_t(t) * ldy);
  }
}

// y = (x - mean) / sqrt(var + eps) * w + b; w and b may be null. The params' offset is not added.
template <class XT>
CLLM_NOINLINE void layer_norm_row(const float* x, int K, const XT* w, const XT* b, NormParams p, XT* y) {
  f32x16 sum = zero16(), square = zero16();
  for (int k = 0; k < K; k += kLanes) sum = sum + load_part(x + k, min_int(kLanes, K - k));
  const f32x16 mean = set1(reduce_add(sum) / float(K));
  for (int k = 0; k < K; k += kLanes) {
    const int lanes = min_int(kLanes, K - k);
    f32x16 d = load_part(x + k, lanes) - mean;
    if (lanes < kLanes) d = select(first_lanes(lanes), d, zero16());
    square = fma(d, d, square);
  }
  const f32x16 inverse = set1(1.0f / __builtin_sqrtf(reduce_add(square) / float(K) + p.eps));
  for (int k = 0; k < K; k += kLanes) {
    const int lanes = min_int(kLanes, K - k);
    f32x16 v = (load_part(x + k, lanes) - mean) * inverse;
    if (p.round_first) v = Round<XT>::apply(v);
    if (w) v = v * load_part(w + k, lanes);
    if (w && p.round_first) v = Round<XT>::apply(v);
    if (b) v = v + load_part(b + k, lanes);
    store_part(y + k, v, lanes);
  }
}

template <class XT>
void layer_norm(Team& team, const XT* x, int ldx, XT* y, int ldy, int T, int K, const XT* w, const XT* b, NormParams p) {
  float* row = team.scratch<float>(0, size_t(K));
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    widen_row(x + size_t(t) * ldx, K, row);
    layer_norm_row(row, K, w, b, p, y + size_t(t) * ldy);
  }
}

template <class XT>
void add_layer_norm(Team& team, const XT* x, int ldx, const XT* residual, int ldr, XT* sum, int lds, XT* y, int ldy, int T,
                    int K, const XT* w, const XT* b, NormParams p) {
  float* row = team.scratch<float>(0, size_t(K));
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    add_row(x + size_t(t) * ldx, residual + size_t(t) * ldr, sum + size_t(t) * lds, K, row);
    layer_norm_row(row, K, w, b, p, y + size_t(t) * ldy);
  }
}

}  // namespace cllm
