// y = epilogue(x W^T): x [T, K] bf16 or float, W packed [N, K] in any layout, float32 accumulation.
//
// One row reads every weight byte once (a matrix-vector product at memory speed), few rows likewise through tiles, many
// rows in chunks of weights that stay in L2. Epilogues: epilogue.h.
#pragma once

#include <type_traits>

#include "epilogue.h"
#include "gemm_amx.h"

namespace cllm {

// Units [u0, u1): single panels of 16 columns, or pairs of a gate and an up panel.
template <class W, class XT, class Ep>
void linear_units(Team& team, const XT* x, int ldx, const int* rows, int T, const void* w, int u0, int u1, int N, int K,
                  const Ep& ep) {
  if (u0 >= u1 || T <= 0) return;
  const uint8_t* bytes = (const uint8_t*)w;
#if CLLM_AMX
  if constexpr (std::is_same_v<XT, bf16> && !std::is_same_v<W, F32W>) {
    if (T == 1)
      linear_dot<W>(team, x + size_t(rows ? rows[0] : 0) * ldx, bytes, u0, u1, N, K, ep);
    else
      linear_amx<W>(team, x, ldx, rows, T, bytes, u0, u1, N, K, ep);
    return;
  }
#endif
  if (T == 1)
    linear_fma_rows<W, 1>(team, x, ldx, rows, T, bytes, u0, u1, N, K, ep);
  else
    linear_fma_rows<W, kFmaRows>(team, x, ldx, rows, T, bytes, u0, u1, N, K, ep);
}

template <class Ep>
CLLM_INLINE int linear_unit_count(int N) {
  return ceil_div(Ep::gated ? N / 2 : N, kLanes);
}

// x rows [T] with row stride ldx (elements); N counts packed rows (2F when gated). T is looked at when called.
template <class W, class XT, class Ep>
void linear(Team& team, const XT* x, int ldx, int T, const void* w, int N, int K, const Ep& ep) {
  Range r = split(linear_unit_count<Ep>(N), team);
  linear_units<W>(team, x, ldx, nullptr, T, w, r.begin, r.end, N, K, ep);
}

// One row; nothing else is instantiated.
template <class W, class XT, class Ep>
void linear_gemv(Team& team, const XT* x, const void* w, int N, int K, const Ep& ep) {
  Range r = split(linear_unit_count<Ep>(N), team);
#if CLLM_AMX
  if constexpr (std::is_same_v<XT, bf16> && !std::is_same_v<W, F32W>) {
    linear_dot<W>(team, x, (const uint8_t*)w, r.begin, r.end, N, K, ep);
    return;
  }
#endif
  linear_fma_rows<W, 1>(team, x, 0, nullptr, 1, (const uint8_t*)w, r.begin, r.end, N, K, ep);
}

// Item i reads row rows[i] of x (nullptr: i); the epilogue's t is i.
template <class W, class XT, class Ep>
void linear_rows(Team& team, const XT* x, int ldx, const int* rows, int count, const void* w, int N, int K, const Ep& ep) {
  Range r = split(linear_unit_count<Ep>(N), team);
  linear_units<W>(team, x, ldx, rows, count, w, r.begin, r.end, N, K, ep);
}

// An epilogue whose rows start at `base`.
template <class Ep>
struct OffsetRows {
  static constexpr bool gated = Ep::gated;
  Ep ep;
  int base;
  template <class... Args>
  CLLM_INLINE void operator()(int t, Args... args) const {
    ep(t + base, args...);
  }
};

// Mixture of experts: sorted items start[e] .. start[e + 1] meet expert e's weights at w + e * expert_bytes. The work is
// split over (active expert, unit), so experts without items are neither read nor waited for. make_ep(e) gives the
// epilogue of an expert (its bias, say); its t is the sorted item.
template <class W, class XT, class MakeEp>
void linear_experts(Team& team, const XT* x, int ldx, const int* rows, const int* start, int E, const void* w,
                    size_t expert_bytes, int N, int K, const MakeEp& make_ep) {
  using Ep = decltype(make_ep(0));
  const int units = linear_unit_count<Ep>(N);
  int active = 0;
  for (int e = 0; e < E; e++) active += start[e + 1] > start[e];
  Range r = split(active * units, team);
  int first = 0;  // the flat index of this expert's first unit
  for (int e = 0; e < E; e++) {
    const int s = start[e], count = start[e + 1] - s;
    if (count <= 0) continue;
    const int u0 = max_int(r.begin - first, 0), u1 = min_int(r.end - first, units);
    first += units;
    if (u0 >= u1) continue;
    OffsetRows<Ep> ep{make_ep(e), s};
    const XT* xe = rows ? x : x + size_t(s) * ldx;
    linear_units<W>(team, xe, ldx, rows ? rows + s : nullptr, count, (const uint8_t*)w + size_t(e) * expert_bytes, u0, u1, N, K,
                    ep);
  }
}

// y[t] = sum over a token's experts, in order, of items[slot[t * k + j]]: [T, K] from the sorted items. Rounds to OT after
// every addition, as index_add in OT would.
template <class OT>
void combine_experts(Team& team, const OT* items, int ldi, const int* slot, int per_token, OT* y, int ldy, int T, int K) {
  const int blocks = ceil_div(K, kLanes);
  Range r = split(T * blocks, team);
  for (int i = r.begin; i < r.end; i++) {
    const int t = i / blocks, k = i % blocks * kLanes, lanes = min_int(kLanes, K - k);
    f32x16 sum = zero16();
    for (int j = 0; j < per_token; j++)
      sum = Round<OT>::apply(sum + load_part(items + size_t(slot[t * per_token + j]) * ldi + k, lanes));
    store_part(y + size_t(t) * ldy + k, sum, lanes);
  }
}

}  // namespace cllm
