// The softmax inside attention: a chunk of scores to probabilities, with running maxima and sums per row.
#pragma once

#include <type_traits>

#include "vec_math.h"

namespace cllm {

constexpr int kItemRows = 32;    // query rows of an item
constexpr int kChunkBlocks = 8;  // cache blocks that meet a softmax at once: 32 KB of scores
constexpr int kChunkTokens = kChunkBlocks * kKvBlock;

// Sixteen or thirty-two probabilities to memory; P in bf16 is rounded half up, which costs half of what the exact
// rounding does and is no worse for a probability.
CLLM_INLINE void store_pair(float* p, f32x16 a, f32x16 b) {
  store(p, a);
  store(p + kLanes, b);
}
CLLM_INLINE void store_pair(bf16* p, f32x16 a, f32x16 b) {
#if defined(__AVX512BW__)
  const __m512i half = _mm512_set1_epi32(0x8000);
  alignas(64) static const uint16_t high_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i x = _mm512_add_epi32(bits(a).v, half), y = _mm512_add_epi32(bits(b).v, half);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(x, _mm512_load_si512(high_halves), y));
#else
  store(p, a);
  store(p + kLanes, b);
#endif
}

// 2^x for x <= 0: coarse (8e-5) and with few instructions where the result becomes bf16.
template <class PT>
CLLM_INLINE f32x16 probability(f32x16 x) {
  if constexpr (std::is_same_v<PT, bf16>) {
    const f32x16 magic = set1(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the integer part
    x = vmax(set1(-126.0f), x);
    const f32x16 t = x + magic, r = x - (t - magic);
    const float c[] = {0.0551715843f, 0.242611116f, 0.693261001f, 0.999928074f};
    return from_bits(bits(horner(r, c)) + shl(bits(t), 23));
  } else {
    return vexp2(x);
  }
}

// The sum or maximum of each of sixteen vectors v[r][16], as the lanes of one: a tree of shuffles instead of sixteen
// horizontal reductions.
template <bool maximum>
CLLM_INLINE f32x16 reduce_rows(const float (*v)[kLanes]) {
#if defined(__AVX512F__)
  const auto op = [](__m512 a, __m512 b) { return maximum ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b); };
  __m512 u[8], w[4], x[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512 a = _mm512_load_ps(v[i]), b = _mm512_load_ps(v[i + 8]);
    u[i] = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    w[i] = op(_mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd));
  for (int i = 0; i < 2; i++) x[i] = op(_mm512_shuffle_ps(w[i], w[i + 2], 0x44), _mm512_shuffle_ps(w[i], w[i + 2], 0xee));
  const __m512 y = op(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_permutexvar_ps(order, y)};
#else
  float r[kLanes];
  for (int i = 0; i < kLanes; i++) r[i] = maximum ? reduce_max(load(v[i])) : reduce_add(load(v[i]));
  return load(r);
#endif
}

struct RowSpan {  // the visible tokens of a chunk, for one row
  int first, last;
};

// Softmax of a chunk of n tokens (a multiple of 32) for up to 32 rows: logits s[r][kChunkTokens] become probabilities in
// place (bf16 ones take the front half of the row's memory). max and sum go on; alpha[r] is the factor for what was
// summed before.
template <class PT>
CLLM_NOINLINE void softmax_chunk(float* s, int rows, int n, const RowSpan* spans, float scale, float softcap, float* max,
                                 float* sum, float* alpha) {
  constexpr float kLog2e = 1.44269504f;
  constexpr float inf = __builtin_inff();
  constexpr int kStep = 2 * kLanes;
  const float factor = (softcap != 0.0f ? softcap : scale) * kLog2e;
  alignas(64) float partial[kItemRows][kLanes];
  for (int r = 0; r < rows; r++) {
    float* row = s + size_t(r) * kChunkTokens;
    const int first = spans[r].first, last = spans[r].last, v0 = first / kStep * kStep, v1 = round_up(last, kStep);
    if (softcap != 0.0f)
      for (int j = v0; j < v1; j += kLanes) store(row + j, vtanh(load(row + j) * set1(scale / softcap)));
    const auto hide = [&](int j) {
      store(row + j, select(first_lanes(last - j) & ~first_lanes(first - j), load(row + j), set1(-inf)));
    };
    if (first < last && first > v0) hide(v0), hide(v0 + kLanes);
    if (first < last && last < v1) hide(v1 - kStep), hide(v1 - kLanes);
    f32x16 top0 = set1(-inf), top1 = top0;
    if (first < last)
      for (int j = v0; j < v1; j += kStep) {
        top0 = vmax(load(row + j), top0);
        top1 = vmax(load(row + j + kLanes), top1);
      }
    store(partial[r], vmax(top0, top1));
  }
  for (int r = rows; r < round_up(rows, kLanes); r++) store(partial[r], zero16());
  alignas(64) float offset[kItemRows];
  for (int r = 0; r < rows; r += kLanes) {
    const f32x16 before = load(max + r), now = vmax(reduce_rows<true>(partial + r) * set1(factor), before);
    const f32x16 finite = select(eq(now, set1(-inf)), zero16(), now);  // a row that has seen nothing yet
    store(alpha + r, vexp2(before - finite));
    store(max + r, now);
    store(offset + r, vneg(finite));
  }
  const f32x16 c = set1(factor);
  for (int r = 0; r < rows; r++) {
    const float* row = s + size_t(r) * kChunkTokens;
    PT* p = (PT*)(s + size_t(r) * kChunkTokens);
    const f32x16 shift = set1(offset[r]);
    const bool any = spans[r].first < spans[r].last;
    const int v0 = any ? spans[r].first / kStep * kStep : n, v1 = any ? round_up(spans[r].last, kStep) : n;
    f32x16 total0 = zero16(), total1 = zero16();
    for (int j = v0; j < v1; j += kStep) {
      const f32x16 a = probability<PT>(fma(load(row + j), c, shift)), b = probability<PT>(fma(load(row + j + kLanes), c, shift));
      total0 = total0 + a;
      total1 = total1 + b;
      store_pair(p + j, a, b);
    }
    for (int j = 0; j < v0; j += kStep) store_pair(p + j, zero16(), zero16());
    for (int j = v1; j < n; j += kStep) store_pair(p + j, zero16(), zero16());
    store(partial[r], total0 + total1);
  }
  for (int r = 0; r < rows; r += kLanes) store(sum + r, fma(load(sum + r), load(alpha + r), reduce_rows<false>(partial + r)));
}

}  // namespace cllm
