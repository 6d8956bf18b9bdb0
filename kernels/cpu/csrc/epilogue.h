// What happens to sixteen columns of one row of a linear's float32 result before they are stored.
//
// Plain epilogues get (row t, first column n, values, valid lanes); gated ones get the gate's and the up
// projection's sixteen columns, from weights packed as gu16. OT is the activation type: wherever the unfused graph
// would have stored an intermediate as OT, the value is rounded to OT here too, so fusing changes no bit.
#pragma once

#include "act.h"

namespace cllm {

template <class BT>
CLLM_INLINE f32x16 add_bias(f32x16 v, const BT* bias, int n, int lanes) {
  return bias ? v + load_part(bias + n, lanes) : v;
}
template <class R>
CLLM_INLINE f32x16 scale_and_cap(f32x16 v, float scale, float softcap) {
  if (scale != 1.0f) v = R::apply(v * set1(scale));
  if (softcap != 0.0f) v = R::apply(R::apply(vtanh(R::apply(v * set1(1.0f / softcap)))) * set1(softcap));
  return v;
}

// y = softcap(scale * (x W^T + bias))
template <class OT>
struct Store {
  static constexpr bool gated = false;
  OT* y;
  int ldy;
  const OT* bias = nullptr;
  float scale = 1, softcap = 0;
  CLLM_INLINE void operator()(int t, int n, f32x16 v, int lanes) const {
    using R = Round<OT>;
    v = scale_and_cap<R>(R::apply(add_bias(v, bias, n, lanes)), scale, softcap);
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

// Logits: float output. RT = bf16 rounds as a bf16 model's head would, RT = float keeps every bit. The bias is of type BT.
template <class RT, class BT = RT>
struct StoreF32 {
  static constexpr bool gated = false;
  float* y;
  int ldy;
  const BT* bias = nullptr;
  float scale = 1, softcap = 0;
  CLLM_INLINE void operator()(int t, int n, f32x16 v, int lanes) const {
    using R = Round<RT>;
    v = scale_and_cap<R>(R::apply(add_bias(v, bias, n, lanes)), scale, softcap);
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

// y = residual + scale * (x W^T + bias); y may be the residual itself.
template <class OT>
struct AddResidual {
  static constexpr bool gated = false;
  OT* y;
  int ldy;
  const OT* residual;
  int ldr;
  const OT* bias = nullptr;
  float scale = 1;
  CLLM_INLINE void operator()(int t, int n, f32x16 v, int lanes) const {
    using R = Round<OT>;
    v = scale_and_cap<R>(R::apply(add_bias(v, bias, n, lanes)), scale, 0.0f);
    store_part(y + size_t(t) * ldy + n, v + load_part(residual + size_t(t) * ldr + n, lanes), lanes);
  }
};

// y = act(x W^T + bias)
template <class A, class OT>
struct Act {
  static constexpr bool gated = false;
  OT* y;
  int ldy;
  const OT* bias = nullptr;
  CLLM_INLINE void operator()(int t, int n, f32x16 v, int lanes) const {
    v = A::apply(Round<OT>::apply(add_bias(v, bias, n, lanes)));
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

// y = act(gate) * up; bias in packed (gu16) order, 2F long.
template <class A, class OT>
struct Gated {
  static constexpr bool gated = true;
  OT* y;
  int ldy;
  const OT* bias = nullptr;
  CLLM_INLINE void operator()(int t, int n, f32x16 gate, f32x16 up, int lanes) const {
    using R = Round<OT>;
    if (bias) {
      gate = gate + load_part(bias + 2 * n, lanes);
      up = up + load_part(bias + 2 * n + kLanes, lanes);
    }
    f32x16 v = R::apply(A::apply(R::apply(gate))) * R::apply(up);
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

// gpt_oss's gated activation on gu16 weights.
template <class OT>
struct ClampedSwiglu {
  static constexpr bool gated = true;
  OT* y;
  int ldy;
  const OT* bias = nullptr;
  float limit = 7, alpha = 1.702f;
  CLLM_INLINE void operator()(int t, int n, f32x16 gate, f32x16 up, int lanes) const {
    using R = Round<OT>;
    if (bias) {
      gate = gate + load_part(bias + 2 * n, lanes);
      up = up + load_part(bias + 2 * n + kLanes, lanes);
    }
    f32x16 v = clamped_swiglu_lanes<OT>(R::apply(gate), R::apply(up), limit, alpha);
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

// Experts' down projection: row t of the sorted items is scaled by its routing weight. Rows stay sorted; the
// scatter over a token's experts is combine_experts, so that the order of the sum does not depend on threads.
template <class OT>
struct ScaledStore {
  static constexpr bool gated = false;
  OT* y;
  int ldy;
  const float* weight;  // [items]
  const OT* bias = nullptr;
  CLLM_INLINE void operator()(int t, int n, f32x16 v, int lanes) const {
    using R = Round<OT>;
    v = R::apply(add_bias(v, bias, n, lanes)) * set1(weight[t]);
    store_part(y + size_t(t) * ldy + n, v, lanes);
  }
};

}  // namespace cllm
