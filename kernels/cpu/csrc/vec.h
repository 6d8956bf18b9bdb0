// Sixteen-lane vectors: the only layer that knows which instruction set the target has.
//
// Two implementations of one interface:
//  * AVX-512: one zmm register.
//  * otherwise: an array of GCC vectors as wide as the target's registers (8 floats with AVX2, 4 without).
//
// Macros come from the -m flags of the target, never from the building machine.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define CLLM_AMX 1
#else
#define CLLM_AMX 0
#endif

#define CLLM_INLINE inline __attribute__((always_inline))
#define CLLM_NOINLINE __attribute__((noinline))

namespace cllm {

constexpr int kLanes = 16;
constexpr int kKvBlock = 32;  // tokens in a block of the KV cache

struct bf16 {
  uint16_t bits;
};

CLLM_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
CLLM_INLINE int ceil_div(int n, int divisor) { return (n + divisor - 1) / divisor; }
CLLM_INLINE int min_int(int a, int b) { return a < b ? a : b; }
CLLM_INLINE int max_int(int a, int b) { return a > b ? a : b; }

CLLM_INLINE float to_f32(float x) { return x; }
CLLM_INLINE float to_f32(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; a NaN stays a (quiet) NaN.
CLLM_INLINE bf16 to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return bf16{uint16_t((u >> 16) | 0x40)};
  return bf16{uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
CLLM_INLINE void put(float* p, float x) { *p = x; }
CLLM_INLINE void put(bf16* p, float x) { *p = to_bf16(x); }
CLLM_INLINE void put(int32_t* p, int64_t x) { *p = int32_t(x); }  // ids, which fit

#if defined(__AVX512F__)

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};
struct mask16 {
  __mmask16 m;
};

CLLM_INLINE __mmask16 lane_mask(int lanes) { return __mmask16((1u << lanes) - 1); }
CLLM_INLINE f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
CLLM_INLINE f32x16 zero16() { return {_mm512_setzero_ps()}; }
CLLM_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
CLLM_INLINE f32x16 load(const float* p, int lanes) { return {_mm512_maskz_loadu_ps(lane_mask(lanes), p)}; }
CLLM_INLINE f32x16 widen_bf16(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
CLLM_INLINE f32x16 load(const bf16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
CLLM_INLINE f32x16 load(const bf16* p, int lanes) {
  return widen_bf16(_mm256_maskz_loadu_epi16(lane_mask(lanes), p));
}
CLLM_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

CLLM_INLINE __m256i narrow_bf16(f32x16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(r, nan, _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40)));
  return _mm512_cvtepi32_epi16(r);
#endif
}
CLLM_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
CLLM_INLINE void store(float* p, f32x16 a, int lanes) { _mm512_mask_storeu_ps(p, lane_mask(lanes), a.v); }
CLLM_INLINE void store(bf16* p, f32x16 a) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(a)); }
CLLM_INLINE void store(bf16* p, f32x16 a, int lanes) {
  _mm256_mask_storeu_epi16(p, lane_mask(lanes), narrow_bf16(a));
}
CLLM_INLINE f32x16 round_bf16(f32x16 a) { return widen_bf16(narrow_bf16(a)); }

CLLM_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
CLLM_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
CLLM_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
CLLM_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
CLLM_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CLLM_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }  // b if either is NaN
CLLM_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
CLLM_INLINE f32x16 vsqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
CLLM_INLINE float reduce_add(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
CLLM_INLINE float reduce_max(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
CLLM_INLINE float reduce_min(f32x16 a) { return _mm512_reduce_min_ps(a.v); }

CLLM_INLINE mask16 lt(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
CLLM_INLINE mask16 le(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
CLLM_INLINE mask16 eq(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
CLLM_INLINE mask16 ne(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
CLLM_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }
CLLM_INLINE mask16 first_lanes(int lanes) {
  return {lanes >= 16 ? __mmask16(0xffff) : lanes <= 0 ? __mmask16(0) : lane_mask(lanes)};
}
CLLM_INLINE int any(mask16 m) { return m.m != 0; }
CLLM_INLINE int mask_bits(mask16 m) { return m.m; }
CLLM_INLINE mask16 operator&(mask16 a, mask16 b) { return {__mmask16(a.m & b.m)}; }
CLLM_INLINE mask16 operator|(mask16 a, mask16 b) { return {__mmask16(a.m | b.m)}; }
CLLM_INLINE mask16 operator~(mask16 a) { return {__mmask16(~a.m)}; }

CLLM_INLINE i32x16 set1_i32(int x) { return {_mm512_set1_epi32(x)}; }
CLLM_INLINE i32x16 load_i32(const void* p) { return {_mm512_loadu_si512(p)}; }
CLLM_INLINE void store_i32(void* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
CLLM_INLINE i32x16 bits(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
CLLM_INLINE f32x16 from_bits(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
CLLM_INLINE i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
CLLM_INLINE i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
CLLM_INLINE i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
CLLM_INLINE i32x16 operator|(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
CLLM_INLINE i32x16 operator^(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
CLLM_INLINE i32x16 shl(i32x16 a, int n) { return {_mm512_slli_epi32(a.v, (unsigned)n)}; }
CLLM_INLINE i32x16 shr(i32x16 a, int n) { return {_mm512_srli_epi32(a.v, (unsigned)n)}; }  // logical
CLLM_INLINE i32x16 sar(i32x16 a, int n) { return {_mm512_srai_epi32(a.v, (unsigned)n)}; }  // arithmetic
CLLM_INLINE i32x16 truncate_i32(f32x16 a) { return {_mm512_cvttps_epi32(a.v)}; }
CLLM_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

#else  // chunks of the target's own register width

#if defined(__AVX2__)
constexpr int kChunk = 8;
#else
constexpr int kChunk = 4;
#endif
constexpr int kChunks = kLanes / kChunk;
typedef float vf __attribute__((vector_size(kChunk * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(kChunk * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(kChunk * 4), may_alias));
typedef uint16_t vh __attribute__((vector_size(kChunk * 2), may_alias));

struct f32x16 {
  vf c[kChunks];
};
struct i32x16 {
  vi c[kChunks];
};
struct mask16 {
  vi c[kChunks];
};

#define CLLM_EACH for (int i_ = 0; i_ < kChunks; i_++)
#define CLLM_MAP(T, expr) \
  {                       \
    T r_;                 \
    CLLM_EACH r_.c[i_] = (expr); \
    return r_;            \
  }

CLLM_INLINE f32x16 set1(float x) CLLM_MAP(f32x16, x - vf{})
CLLM_INLINE f32x16 zero16() CLLM_MAP(f32x16, vf{})
// Copied chunk by chunk: all at once goes through the stack in halves of a register, which the load from there must wait
// for, some fifteen cycles each time.
CLLM_INLINE f32x16 load(const float* p) {
  f32x16 r;
  CLLM_EACH memcpy(&r.c[i_], p + i_ * kChunk, sizeof(vf));
  return r;
}
CLLM_INLINE f32x16 load(const float* p, int lanes) {
  float t[16] = {};
  for (int i = 0; i < lanes; i++) t[i] = p[i];
  return load(t);
}
CLLM_INLINE f32x16 load(const bf16* p) {
  f32x16 r;
  CLLM_EACH {
    vh h;
    memcpy(&h, p + i_ * kChunk, sizeof h);
    r.c[i_] = (vf)(__builtin_convertvector(h, vu) << 16);
  }
  return r;
}
CLLM_INLINE f32x16 load(const bf16* p, int lanes) {
  bf16 t[16] = {};
  for (int i = 0; i < lanes; i++) t[i] = p[i];
  return load(t);
}
CLLM_INLINE f32x16 load_f16(const uint16_t* p) {
  f32x16 r;
  CLLM_EACH {
    vh h;
    memcpy(&h, p + i_ * kChunk, sizeof h);
    vu u = __builtin_convertvector(h, vu), m = u & 0x7fff;
    // A multiplication by 2^112 moves the exponent's bias and makes half's denormals normal; inf and NaN apart.
    vf f = (vf)(m << 13) * 0x1p112f;
    vi special = (vi)m >= 0x7c00;
    vu bits = ((vu)f & ~(vu)special) | ((vu)special & ((m << 13) | 0x7f800000u));
    r.c[i_] = (vf)(bits | ((u & 0x8000u) << 16));
  }
  return r;
}
CLLM_INLINE void store(float* p, f32x16 a) { CLLM_EACH memcpy(p + i_ * kChunk, &a.c[i_], sizeof(vf)); }
CLLM_INLINE void store(float* p, f32x16 a, int lanes) {
  float t[16];
  store(t, a);
  for (int i = 0; i < lanes; i++) p[i] = t[i];
}
CLLM_INLINE vu narrow_chunk(vf a) {
  vu u = (vu)a;
  vu r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vu nan = (vu)(a != a);
  return (r & ~nan) | (nan & ((u >> 16) | 0x40));
}
CLLM_INLINE void store(bf16* p, f32x16 a) {
  CLLM_EACH {
    vh h = __builtin_convertvector(narrow_chunk(a.c[i_]), vh);
    memcpy(p + i_ * kChunk, &h, sizeof h);
  }
}
CLLM_INLINE void store(bf16* p, f32x16 a, int lanes) {
  bf16 t[16];
  store(t, a);
  for (int i = 0; i < lanes; i++) p[i] = t[i];
}
CLLM_INLINE f32x16 round_bf16(f32x16 a) CLLM_MAP(f32x16, (vf)(narrow_chunk(a.c[i_]) << 16))

CLLM_INLINE f32x16 operator+(f32x16 a, f32x16 b) CLLM_MAP(f32x16, a.c[i_] + b.c[i_])
CLLM_INLINE f32x16 operator-(f32x16 a, f32x16 b) CLLM_MAP(f32x16, a.c[i_] - b.c[i_])
CLLM_INLINE f32x16 operator*(f32x16 a, f32x16 b) CLLM_MAP(f32x16, a.c[i_] * b.c[i_])
CLLM_INLINE f32x16 operator/(f32x16 a, f32x16 b) CLLM_MAP(f32x16, a.c[i_] / b.c[i_])
CLLM_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) CLLM_MAP(f32x16, a.c[i_] * b.c[i_] + c.c[i_])
CLLM_INLINE vf pick(vi m, vf a, vf b) { return (vf)((m & (vi)a) | (~m & (vi)b)); }
CLLM_INLINE f32x16 vmin(f32x16 a, f32x16 b) CLLM_MAP(f32x16, pick(a.c[i_] < b.c[i_], a.c[i_], b.c[i_]))
CLLM_INLINE f32x16 vmax(f32x16 a, f32x16 b) CLLM_MAP(f32x16, pick(a.c[i_] > b.c[i_], a.c[i_], b.c[i_]))
CLLM_INLINE f32x16 vsqrt(f32x16 a) {
  float t[16];
  store(t, a);
  for (int i = 0; i < 16; i++) t[i] = __builtin_sqrtf(t[i]);
  return load(t);
}
CLLM_INLINE float reduce_add(f32x16 a) {
  vf s = a.c[0];
  for (int i = 1; i < kChunks; i++) s += a.c[i];
  float r = 0;
  for (int i = 0; i < kChunk; i++) r += s[i];
  return r;
}
CLLM_INLINE float reduce_max(f32x16 a) {
  vf s = a.c[0];
  for (int i = 1; i < kChunks; i++) s = pick(s > a.c[i], s, a.c[i]);
  float r = s[0];
  for (int i = 1; i < kChunk; i++) r = r > s[i] ? r : s[i];
  return r;
}
CLLM_INLINE float reduce_min(f32x16 a) {
  f32x16 n = zero16() - a;
  return -reduce_max(n);
}

CLLM_INLINE mask16 lt(f32x16 a, f32x16 b) CLLM_MAP(mask16, a.c[i_] < b.c[i_])
CLLM_INLINE mask16 le(f32x16 a, f32x16 b) CLLM_MAP(mask16, a.c[i_] <= b.c[i_])
CLLM_INLINE mask16 eq(f32x16 a, f32x16 b) CLLM_MAP(mask16, a.c[i_] == b.c[i_])
CLLM_INLINE mask16 ne(f32x16 a, f32x16 b) CLLM_MAP(mask16, a.c[i_] != b.c[i_])
CLLM_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) CLLM_MAP(f32x16, pick(m.c[i_], a.c[i_], b.c[i_]))
CLLM_INLINE mask16 first_lanes(int lanes) {
  mask16 r;
  CLLM_EACH {
    vi lane;
    for (int i = 0; i < kChunk; i++) lane[i] = i_ * kChunk + i;
    r.c[i_] = lane < lanes;
  }
  return r;
}
CLLM_INLINE int mask_bits(mask16 m) {
  int r = 0;
  CLLM_EACH for (int i = 0; i < kChunk; i++) r |= (m.c[i_][i] & 1) << (i_ * kChunk + i);
  return r;
}
CLLM_INLINE int any(mask16 m) {
  vi s = m.c[0];
  for (int i = 1; i < kChunks; i++) s |= m.c[i];
  int r = 0;
  for (int i = 0; i < kChunk; i++) r |= s[i];
  return r;
}
CLLM_INLINE mask16 operator&(mask16 a, mask16 b) CLLM_MAP(mask16, a.c[i_] & b.c[i_])
CLLM_INLINE mask16 operator|(mask16 a, mask16 b) CLLM_MAP(mask16, a.c[i_] | b.c[i_])
CLLM_INLINE mask16 operator~(mask16 a) CLLM_MAP(mask16, ~a.c[i_])

CLLM_INLINE i32x16 set1_i32(int x) CLLM_MAP(i32x16, x - vi{})
CLLM_INLINE i32x16 load_i32(const void* p) {
  i32x16 r;
  CLLM_EACH memcpy(&r.c[i_], (const char*)p + i_ * sizeof(vi), sizeof(vi));
  return r;
}
CLLM_INLINE void store_i32(void* p, i32x16 a) { CLLM_EACH memcpy((char*)p + i_ * sizeof(vi), &a.c[i_], sizeof(vi)); }
CLLM_INLINE i32x16 bits(f32x16 a) CLLM_MAP(i32x16, (vi)a.c[i_])
CLLM_INLINE f32x16 from_bits(i32x16 a) CLLM_MAP(f32x16, (vf)a.c[i_])
CLLM_INLINE i32x16 operator+(i32x16 a, i32x16 b) CLLM_MAP(i32x16, a.c[i_] + b.c[i_])
CLLM_INLINE i32x16 operator-(i32x16 a, i32x16 b) CLLM_MAP(i32x16, a.c[i_] - b.c[i_])
CLLM_INLINE i32x16 operator&(i32x16 a, i32x16 b) CLLM_MAP(i32x16, a.c[i_] & b.c[i_])
CLLM_INLINE i32x16 operator|(i32x16 a, i32x16 b) CLLM_MAP(i32x16, a.c[i_] | b.c[i_])
CLLM_INLINE i32x16 operator^(i32x16 a, i32x16 b) CLLM_MAP(i32x16, a.c[i_] ^ b.c[i_])
CLLM_INLINE i32x16 shl(i32x16 a, int n) CLLM_MAP(i32x16, a.c[i_] << n)
CLLM_INLINE i32x16 shr(i32x16 a, int n) CLLM_MAP(i32x16, (vi)((vu)a.c[i_] >> n))
CLLM_INLINE i32x16 sar(i32x16 a, int n) CLLM_MAP(i32x16, a.c[i_] >> n)
CLLM_INLINE i32x16 truncate_i32(f32x16 a) CLLM_MAP(i32x16, __builtin_convertvector(a.c[i_], vi))
CLLM_INLINE f32x16 to_f32(i32x16 a) CLLM_MAP(f32x16, __builtin_convertvector(a.c[i_], vf))

#undef CLLM_MAP
#undef CLLM_EACH

#endif

CLLM_INLINE mask16 gt(f32x16 a, f32x16 b) { return lt(b, a); }
CLLM_INLINE mask16 ge(f32x16 a, f32x16 b) { return le(b, a); }
CLLM_INLINE f32x16 vabs(f32x16 a) { return from_bits(bits(a) & set1_i32(0x7fffffff)); }
CLLM_INLINE f32x16 vneg(f32x16 a) { return from_bits(bits(a) ^ set1_i32(int(0x80000000u))); }
CLLM_INLINE f32x16 copysign16(f32x16 size, f32x16 sign) {
  return from_bits((bits(size) & set1_i32(0x7fffffff)) | (bits(sign) & set1_i32(int(0x80000000u))));
}

// The rounding that storing an intermediate as T would do: nothing for float.
template <class T>
struct Round;
template <>
struct Round<float> {
  static CLLM_INLINE f32x16 apply(f32x16 a) { return a; }
  static CLLM_INLINE float one(float a) { return a; }
};
template <>
struct Round<bf16> {
  static CLLM_INLINE f32x16 apply(f32x16 a) { return round_bf16(a); }
  static CLLM_INLINE float one(float a) { return to_f32(to_bf16(a)); }
};

// Loads and stores of a tail: `lanes` in 1..16; the common full vector takes the unmasked path.
template <class T>
CLLM_INLINE f32x16 load_part(const T* p, int lanes) {
  return lanes == kLanes ? load(p) : load(p, lanes);
}
template <class T>
CLLM_INLINE void store_part(T* p, f32x16 a, int lanes) {
  if (lanes == kLanes)
    store(p, a);
  else
    store(p, a, lanes);
}

}  // namespace cllm
