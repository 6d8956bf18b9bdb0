// Products in float32 fused multiply-adds: every target and every layout. The bf16 path of AMX targets is gemm_amx.h.
#pragma once

#include "pack.h"
#include "team.h"

namespace cllm {

// Rows of x that share one pass over a panel; their accumulators must stay in registers.
#if defined(__AVX512F__)
constexpr int kFmaRows = 8;
#else
constexpr int kFmaRows = 4;
#endif

// Decoders: block(p) enters a block of 32 k by 16 rows; pair(i) gives the weights of k = 2i and 2i + 1.
template <class W>
struct Decode;

template <>
struct Decode<F32W> {
  const float* p;
  CLLM_INLINE void block(const uint8_t* b) { p = (const float*)b; }
  CLLM_INLINE void pair(int i, f32x16& even, f32x16& odd) const {
    even = load(p + 32 * i);
    odd = load(p + 32 * i + 16);
  }
};

template <>
struct Decode<Bf16W> {
  const uint8_t* p;
  CLLM_INLINE void block(const uint8_t* b) { p = b; }
  CLLM_INLINE void pair(int i, f32x16& even, f32x16& odd) const {
    i32x16 both = load_i32(p + 64 * i);
    even = from_bits(shl(both, 16));
    odd = from_bits(both & set1_i32(int(0xffff0000u)));
  }
};

template <class W>
struct DecodeQuantized {
  const uint8_t* codes;
  f32x16 scale, shift;
  CLLM_INLINE void block(const uint8_t* b) {
    codes = b + W::codes_at;
    scale = load_f16((const uint16_t*)b);
    if constexpr (W::layout == q4_1_n16) shift = load_f16((const uint16_t*)b + 16);
    if constexpr (W::layout == q4_0_n16) shift = scale * set1(-8);
    if constexpr (W::layout == q8_0_n16) shift = scale * set1(-128);  // the high nibble's sign as an offset
  }
  static CLLM_INLINE f32x16 nibble(i32x16 v, int bit) {
#if defined(__AVX512F__)
    // A permute of floats looks at four bits of its index: mask and conversion in one.
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(shr(v, bit).v, values)};
#else
    return to_f32(shr(v, bit) & set1_i32(15));
#endif
  }
  CLLM_INLINE f32x16 value(int i, int half) const {
    const int at = i / 4 * 64, bit = 4 * (i % 4) + half;
    i32x16 low = load_i32(codes + at);
    if constexpr (W::layout == q8_0_n16) {
      // high ^ 8 turns the signed nibble into high + 8.
      i32x16 high = (shr(load_i32(codes + 256 + at), bit) & set1_i32(15)) ^ set1_i32(8);
      return fma(to_f32((shr(low, bit) & set1_i32(15)) + shl(high, 4)), scale, shift);
    }
    return fma(nibble(low, bit), scale, shift);
  }
  CLLM_INLINE void pair(int i, f32x16& even, f32x16& odd) const {
    even = value(i, 0);
    odd = value(i, 16);
  }
};
template <>
struct Decode<Q4_1W> : DecodeQuantized<Q4_1W> {};
template <>
struct Decode<Q4_0W> : DecodeQuantized<Q4_0W> {};
template <>
struct Decode<Q8_0W> : DecodeQuantized<Q8_0W> {};

// Ahead of a stream of weights: far lines into L2, whose queue holds more misses than L1's, near ones on into L1. On a
// Sapphire Rapids core this pair streams at the rate of a plain read, 25% above one distance into L1.
constexpr int kFarBytes = 4096, kNearBytes = 512;
CLLM_INLINE void prefetch_stream(const uint8_t* p) {
  __builtin_prefetch(p + kFarBytes, 0, 2);
  __builtin_prefetch(p + kNearBytes, 0, 3);
}

// out[r] = sum over k of x[r][k] * panel[k], r < MR. `rows` valid rows: the others repeat the last one.
template <class W, int MR>
CLLM_NOINLINE void fma_panel(const float* const* x, const uint8_t* panel, int Kp, f32x16* out) {
  f32x16 acc[MR == 1 ? 4 : MR];
  for (auto& a : acc) a = zero16();
  Decode<W> w;
  for (int kb = 0; kb < Kp; kb += 32, panel += W::block_bytes) {
    w.block(panel);
    for (int b = 0; b < W::block_bytes; b += 64) prefetch_stream(panel + b);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      f32x16 even, odd;
      w.pair(i, even, odd);
      if constexpr (MR == 1) {  // several chains, since one would wait for the adder
        acc[i % 2] = fma(even, set1(x[0][kb + 2 * i]), acc[i % 2]);
        acc[i % 2 + 2] = fma(odd, set1(x[0][kb + 2 * i + 1]), acc[i % 2 + 2]);
      } else {
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) acc[r] = fma(even, set1(x[r][kb + 2 * i]), acc[r]);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) acc[r] = fma(odd, set1(x[r][kb + 2 * i + 1]), acc[r]);
      }
    }
  }
  if constexpr (MR == 1)
    out[0] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
  else
    for (int r = 0; r < MR; r++) out[r] = acc[r];
}

// Row `t` of x as Kp floats: x itself where it is already that, else a padded copy in `to`.
CLLM_INLINE const float* f32_row(const float* x, int K, int Kp, float* to) {
  if (K == Kp) return x;
  memcpy(to, x, size_t(K) * 4);
  memset(to + K, 0, size_t(Kp - K) * 4);
  return to;
}
CLLM_INLINE const float* f32_row(const bf16* x, int K, int Kp, float* to) {
  int k = 0;
  for (; k + kLanes <= K; k += kLanes) store(to + k, load(x + k));
  for (; k < Kp; k++) to[k] = k < K ? to_f32(x[k]) : 0.0f;
  return to;
}

// Units [u0, u1) of the output for T rows. A unit is one panel, or a gate panel and its up panel.
// flops 2 * T * N * K; bytes: weights once per 1 MB chunk (they stay in L2 over the rows), x once per chunk.
template <class W, int MR, class XT, class Ep>
void linear_fma_rows(Team& team, const XT* x, int ldx, const int* rows, int T, const uint8_t* w, int u0, int u1, int N,
                     int K, const Ep& ep) {
  constexpr int kPanels = Ep::gated ? 2 : 1;
  const int Kp = round_up(K, 32), columns = N / kPanels;
  const size_t panel = size_t(Kp / 32) * W::block_bytes;
  const int chunk = T <= MR ? u1 - u0 : max_int(1, int((size_t(1) << 20) / (panel * kPanels)));
  float* copies = team.scratch<float>(0, size_t(MR) * Kp);
  for (int c0 = u0; c0 < u1; c0 += chunk) {
    const int c1 = min_int(c0 + chunk, u1);
    for (int t0 = 0; t0 < T; t0 += MR) {
      const int valid = min_int(MR, T - t0);
      const float* xr[MR];
      for (int r = 0; r < MR; r++) {
        if (r >= valid) {
          xr[r] = xr[valid - 1];
          continue;
        }
        const int t = rows ? rows[t0 + r] : t0 + r;
        xr[r] = f32_row(x + size_t(t) * ldx, K, Kp, copies + size_t(r) * Kp);
      }
      for (int u = c0; u < c1; u++) {
        f32x16 out[kPanels][MR];
        for (int p = 0; p < kPanels; p++) fma_panel<W, MR>(xr, w + size_t(u * kPanels + p) * panel, Kp, out[p]);
        const int n = u * kLanes, lanes = min_int(kLanes, columns - n);
        for (int r = 0; r < valid; r++) {
          if constexpr (Ep::gated)
            ep(t0 + r, n, out[0][r], out[1][r], lanes);
          else
            ep(t0 + r, n, out[0][r], lanes);
        }
      }
    }
  }
}

}  // namespace cllm
