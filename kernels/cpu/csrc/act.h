// Activation functors, and the elementwise gated activations that are not fused into a linear.
#pragma once

#include "team.h"
#include "vec_math.h"

namespace cllm {

struct Identity {
  static CLLM_INLINE f32x16 apply(f32x16 x) { return x; }
};
struct Silu {
  static CLLM_INLINE f32x16 apply(f32x16 x) { return vsilu(x); }
};
struct GeluTanh {
  static CLLM_INLINE f32x16 apply(f32x16 x) { return vgelu_tanh(x); }
};
struct GeluErf {
  static CLLM_INLINE f32x16 apply(f32x16 x) { return vgelu_erf(x); }
};
struct Relu {
  static CLLM_INLINE f32x16 apply(f32x16 x) { return vmax(zero16(), x); }  // NaN stays
};
struct Relu2 {
  static CLLM_INLINE f32x16 apply(f32x16 x) {
    f32x16 r = vmax(zero16(), x);
    return r * r;
  }
};
struct Sigmoid {
  static CLLM_INLINE f32x16 apply(f32x16 x) { return vsigmoid(x); }
};

// gpt_oss: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above, up from both sides.
template <class T>
CLLM_INLINE f32x16 clamped_swiglu_lanes(f32x16 gate, f32x16 up, float limit, float alpha) {
  using R = Round<T>;
  gate = vmin(set1(limit), gate);
  up = vmax(set1(-limit), vmin(set1(limit), up));
  f32x16 glu = R::apply(gate * R::apply(vsigmoid(R::apply(gate * set1(alpha)))));
  return R::apply(R::apply(up + set1(1)) * glu);
}

// y[t, f] = round(act(gate[t, f])) * up[t, f]. Reads 2, writes 1 element of T * F. For a concatenated [gate | up]
// row pass up = gate + F and the same stride.
template <class A, class XT>
void gated_act(Team& team, const XT* gate, int ldg, const XT* up, int ldu, XT* y, int ldy, int T, int F) {
  const int blocks = ceil_div(F, kLanes);
  Range r = split(T * blocks, team);
  for (int i = r.begin; i < r.end; i++) {
    const int t = i / blocks, f = i % blocks * kLanes, lanes = min_int(kLanes, F - f);
    f32x16 g = load_part(gate + size_t(t) * ldg + f, lanes), u = load_part(up + size_t(t) * ldu + f, lanes);
    store_part(y + size_t(t) * ldy + f, Round<XT>::apply(A::apply(g)) * u, lanes);
  }
}

// y[t, f] from interleaved columns g0 u0 g1 u1 ...: gu is [T, 2F].
template <class XT>
void clamped_swiglu(Team& team, const XT* gu, int ldgu, XT* y, int ldy, int T, int F, float limit, float alpha) {
  const int blocks = ceil_div(F, kLanes);
  Range r = split(T * blocks, team);
  for (int i = r.begin; i < r.end; i++) {
    const int t = i / blocks, f = i % blocks * kLanes, lanes = min_int(kLanes, F - f);
    const XT* row = gu + size_t(t) * ldgu + 2 * f;
    float g[kLanes] = {}, u[kLanes] = {};
    for (int j = 0; j < lanes; j++) {
      g[j] = to_f32(row[2 * j]);
      u[j] = to_f32(row[2 * j + 1]);
    }
    store_part(y + size_t(t) * ldy + f, clamped_swiglu_lanes<XT>(load(g), load(u), limit, alpha), lanes);
  }
}

}  // namespace cllm
