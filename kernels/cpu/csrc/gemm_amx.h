// bf16 products of AMX targets: vdpbf16ps for one row, tiles for more. float32 accumulation.
//
// Tiles: C0..C3 = tmm0..3 (row tile, column tile), A0, A1 = tmm4, 5 (16 rows by 32 k of x, straight from memory),
// B0, B1 = tmm6, 7 (32 k by 16 rows of the weights: 1 KB of a panel). Measured on the development machine: 3.8 TFLOP/s
// a core from L1, so that everything here is a matter of bringing bytes near.
#pragma once

#include "gemm_fma.h"

#if CLLM_AMX

namespace cllm {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Row tiles 0 and 1 have rows0 and rows1 rows (1..16; rows1 may be 0), so that rows past T are not touched.
CLLM_INLINE void configure_tiles(int rows0, int rows1) {
  TileConfig c;
  const int r1 = rows1 ? rows1 : 16;
  const uint8_t rows[8] = {uint8_t(rows0), uint8_t(rows0), uint8_t(r1), uint8_t(r1), uint8_t(rows0), uint8_t(r1), 16, 16};
  for (int i = 0; i < 8; i++) {
    c.row_bytes[i] = 64;
    c.rows[i] = rows[i];
  }
  _tile_loadconfig(&c);
}

// What to prefetch while tiles are multiplied: bytes [begin, end) of every kilobyte, `distance` further on.
struct Ahead {
  size_t distance = 0;
  int begin = 0, end = 0;
};

// c[32][32] (row stride ldc floats) = up to 32 rows of a, Kp long, times panels b0, b1.
template <int MT, int NT>
CLLM_NOINLINE void amx_tiles(const bf16* a, size_t lda, const uint8_t* b0, const uint8_t* b1, int Kp, Ahead ahead,
                            float* c, int ldc) {
  _tile_zero(0);
  if (NT > 1) _tile_zero(1);
  if (MT > 1) _tile_zero(2);
  if (MT > 1 && NT > 1) _tile_zero(3);
  const size_t stride = lda * 2;
  const bf16* a1 = a + 16 * lda;
  for (int k = 0; k < Kp; k += 32) {
    const uint8_t *p0 = b0 + size_t(k) * 32, *p1 = b1 + size_t(k) * 32;
    for (int i = ahead.begin; i < ahead.end; i += 64) {
      __builtin_prefetch(p0 + ahead.distance + i);
      if (NT > 1) __builtin_prefetch(p1 + ahead.distance + i);
    }
    _tile_loadd(6, p0, 64);
    _tile_loadd(4, a + k, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (NT > 1) {
      _tile_loadd(7, p1, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (MT > 1) {
      _tile_loadd(5, a1 + k, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (NT > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  const size_t ld_bytes = size_t(ldc) * 4;
  _tile_stored(0, c, ld_bytes);
  if (NT > 1) _tile_stored(1, c + 16, ld_bytes);
  if (MT > 1) _tile_stored(2, c + 16 * ldc, ld_bytes);
  if (MT > 1 && NT > 1) _tile_stored(3, c + 16 * ldc + 16, ld_bytes);
}

// One row of x times an n16k2 panel.
CLLM_NOINLINE inline f32x16 dot_panel_bf16(const bf16* x, const uint8_t* panel, int Kp) {
  __m512 acc[4] = {};
  for (int k = 0; k < Kp; k += 32, panel += 1024) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      prefetch_stream(panel + 64 * i);
      int pair;
      memcpy(&pair, x + k + 2 * i, 4);
      acc[i % 4] = _mm512_dpbf16_ps(acc[i % 4], (__m512bh)_mm512_loadu_si512(panel + 64 * i), (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  return {_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3]))};
}

// The bf16 values of nibbles 0..15, twice (a word permute looks at five bits): code, code - 8, or 16 * signed(code).
enum class Codes { plain, minus8, high };
template <Codes codes>
CLLM_INLINE __m512i code_table() {
  alignas(64) uint16_t t[32];
  for (int i = 0; i < 32; i++) {
    const int c = i % 16;
    const int v = codes == Codes::plain ? c : codes == Codes::minus8 ? c - 8 : 16 * (c < 8 ? c : c - 16);
    t[i] = to_bf16(float(v)).bits;
  }
  return _mm512_load_si512(t);
}

// One row of x times a quantized panel. Codes are exact in bf16, so a block is 16 dot products of codes with x, scaled
// once; the q4_1 minimum multiplies the block's sum of x. sums[Kp/32], for q4_1 only.
template <class W>
CLLM_NOINLINE f32x16 dot_panel_quantized(const bf16* x, const float* sums, const uint8_t* panel, int Kp) {
  const __m512i table = W::layout == q4_0_n16 ? code_table<Codes::minus8>() : code_table<Codes::plain>();
  const __m512i high = code_table<Codes::high>();
  f32x16 total = zero16(), low = zero16();
  for (int kb = 0; kb < Kp / 32; kb++, panel += W::block_bytes) {
    for (int i = 0; i < W::block_bytes; i += 64) prefetch_stream(panel + i);
    __m512 acc[4] = {};
    const bf16* xb = x + kb * 32;
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      __m512i codes = _mm512_loadu_si512(panel + W::codes_at + 64 * v), hi = codes;
      if constexpr (W::layout == q8_0_n16) hi = _mm512_loadu_si512(panel + W::codes_at + 256 + 64 * v);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        int pair;
        memcpy(&pair, xb + 8 * v + 2 * j, 4);
        const __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
        __m512i index = j ? _mm512_srli_epi16(codes, 4 * j) : codes;
        acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)_mm512_permutexvar_epi16(index, table), xs);
        if constexpr (W::layout == q8_0_n16) {
          __m512i index_hi = j ? _mm512_srli_epi16(hi, 4 * j) : hi;
          acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)_mm512_permutexvar_epi16(index_hi, high), xs);
        }
      }
    }
    f32x16 block = {_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3]))};
    total = fma(block, load_f16((const uint16_t*)panel), total);
    if constexpr (W::layout == q4_1_n16) low = fma(load_f16((const uint16_t*)panel + 16), set1(sums[kb]), low);
  }
  return total + low;
}

template <class W>
CLLM_INLINE f32x16 dot_panel(const bf16* x, const float* sums, const uint8_t* panel, int Kp) {
  if constexpr (W::quantized)
    return dot_panel_quantized<W>(x, sums, panel, Kp);
  else
    return dot_panel_bf16(x, panel, Kp);
}

// A panel as bf16 n16k2 (rounded to nearest even), 32 * Kp bytes.
template <class W>
CLLM_NOINLINE void dequantize_panel(const uint8_t* panel, int Kp, uint8_t* to) {
  alignas(64) uint16_t order[32];  // interleaves sixteen even and sixteen odd values
  for (int i = 0; i < 32; i++) order[i] = uint16_t(i / 2 + 16 * (i % 2));
  const __m512i interleave = _mm512_load_si512(order);
  Decode<W> w;
  for (int kb = 0; kb < Kp; kb += 32, panel += W::block_bytes, to += 1024) {
    w.block(panel);
    for (int i = 0; i < W::block_bytes; i += 64) prefetch_stream(panel + i);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      f32x16 even, odd;
      w.pair(i, even, odd);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);  // evens in the low half
      _mm512_store_si512(to + 64 * i, _mm512_permutexvar_epi16(interleave, both));
    }
  }
}

// Rows of x as [T][lda] bf16 with K a multiple of 32: x itself where possible, else a padded, gathered copy.
inline const bf16* amx_rows(Team& team, const bf16* x, int ldx, const int* rows, int T, int K, int Kp, size_t* lda) {
  *lda = size_t(ldx);
  if (!rows && K == Kp) return x;
  *lda = size_t(Kp);
  bf16* copy = team.scratch<bf16>(0, size_t(T) * Kp);
  for (int t = 0; t < T; t++) {
    bf16* to = copy + size_t(t) * Kp;
    memcpy(to, x + size_t(rows ? rows[t] : t) * ldx, size_t(K) * 2);
    memset((void*)(to + K), 0, size_t(Kp - K) * 2);
  }
  return copy;
}

template <class W, class Ep>
void linear_dot(Team& team, const bf16* x, const uint8_t* w, int u0, int u1, int N, int K, const Ep& ep) {
  constexpr int kPanels = Ep::gated ? 2 : 1;
  const int Kp = round_up(K, 32), columns = N / kPanels;
  const size_t panel = size_t(Kp / 32) * W::block_bytes;
  size_t lda;
  x = amx_rows(team, x, 0, nullptr, 1, K, Kp, &lda);
  float* sums = nullptr;
  if constexpr (W::layout == q4_1_n16) {
    sums = team.scratch<float>(1, size_t(Kp / 32));
    for (int k = 0; k < Kp; k += 32) sums[k / 32] = reduce_add(load(x + k) + load(x + k + 16));
  }
  for (int u = u0; u < u1; u++) {
    const int n = u * kLanes, lanes = min_int(kLanes, columns - n);
    const uint8_t* p = w + size_t(u) * kPanels * panel;
    f32x16 v = dot_panel<W>(x, sums, p, Kp);
    if constexpr (Ep::gated)
      ep(0, n, v, dot_panel<W>(x, sums, p + panel, Kp), lanes);
    else
      ep(0, n, v, lanes);
  }
}

// Columns of two neighbouring panels for `valid` rows, from c[32][32].
template <class Ep>
CLLM_INLINE void finish_tiles(const float* c, int t0, int valid, int panel, int panels, int N, const Ep& ep) {
  if constexpr (Ep::gated) {
    const int n = panel / 2 * kLanes, lanes = min_int(kLanes, N / 2 - n);
    for (int r = 0; r < valid; r++) ep(t0 + r, n, load(c + 32 * r), load(c + 32 * r + 16), lanes);
  } else {
    const int n = panel * kLanes;
    for (int r = 0; r < valid; r++) {
      ep(t0 + r, n, load(c + 32 * r), min_int(kLanes, N - n));
      if (panels > 1) ep(t0 + r, n + kLanes, load(c + 32 * r + 16), min_int(kLanes, N - n - kLanes));
    }
  }
}

// T >= 2 rows. Panels are taken in chunks that stay in L2 while all rows pass (for few rows a chunk is one pair of
// panels, which makes it a single pass over the weights); quantized panels are made bf16 once per chunk.
// flops 2 * T * N * K.
template <class W, class Ep>
void linear_amx(Team& team, const bf16* x, int ldx, const int* rows, int T, const uint8_t* w, int u0, int u1, int N, int K,
                const Ep& ep) {
  constexpr int kPanels = Ep::gated ? 2 : 1;
  constexpr int kFewRows = 64;
  constexpr size_t kChunkBytes = 768 << 10;
  const int Kp = round_up(K, 32), p0 = u0 * kPanels, p1 = u1 * kPanels;
  const size_t stored = size_t(Kp / 32) * W::block_bytes, panel = size_t(Kp) * 32;
  size_t lda;
  const bf16* a = amx_rows(team, x, ldx, rows, T, K, Kp, &lda);
  const int chunk = T <= kFewRows ? 2 : max_int(1, int(kChunkBytes / (2 * panel))) * 2;
  uint8_t* unpacked = W::quantized ? team.scratch<uint8_t>(1, size_t(chunk) * panel) : nullptr;
  alignas(64) float c[32 * 32];
  int rows0 = 0, rows1 = 0;
  for (int c0 = p0; c0 < p1; c0 += chunk) {
    const int c1 = min_int(c0 + chunk, p1);
    const uint8_t* b = w + size_t(c0) * stored;
    if constexpr (W::quantized) {
      for (int p = c0; p < c1; p++) dequantize_panel<W>(w + size_t(p) * stored, Kp, unpacked + size_t(p - c0) * panel);
      b = unpacked;
    }
    for (int t0 = 0; t0 < T; t0 += 32) {
      const int valid = min_int(32, T - t0), r0 = min_int(16, valid), r1 = valid - r0;
      if (r0 != rows0 || r1 != rows1) {
        configure_tiles(r0, r1);
        rows0 = r0;
        rows1 = r1;
      }
      const bf16* at = a + size_t(t0) * lda;
      // Few rows wait for memory: each block of rows brings its share of the next pair of panels.
      Ahead ahead;
      if (!W::quantized && T <= kFewRows) ahead = {2 * panel, t0 * 1024 / T / 64 * 64, min_int(1024, (t0 + 32) * 1024 / T / 64 * 64)};
      for (int p = c0; p < c1; p += 2) {
        const uint8_t *b0 = b + size_t(p - c0) * panel, *b1 = b0 + panel;
        const int count = min_int(2, c1 - p);
        if (count == 2)
          r1 ? amx_tiles<2, 2>(at, lda, b0, b1, Kp, ahead, c, 32) : amx_tiles<1, 2>(at, lda, b0, b1, Kp, ahead, c, 32);
        else
          r1 ? amx_tiles<2, 1>(at, lda, b0, b1, Kp, ahead, c, 32) : amx_tiles<1, 1>(at, lda, b0, b1, Kp, ahead, c, 32);
        finish_tiles(c, t0, valid, p, count, N, ep);
      }
    }
  }
}

}  // namespace cllm

#endif
