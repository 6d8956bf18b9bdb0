// Helpers of generated loops: partial loads and stores by dtype, and scalar forms for dtypes without vector lanes.
#pragma once

#include <math.h>
#include <stdint.h>

#include "act.h"
#include "vec_math.h"

namespace cllm {

// Booleans are bytes in memory and 0.0 or 1.0 in lanes.
CLLM_INLINE f32x16 load_bool(const uint8_t* p, int lanes) {
  float tmp[16];
  for (int i = 0; i < 16; i++) tmp[i] = i < lanes && p[i] ? 1.0f : 0.0f;
  return load(tmp);
}
CLLM_INLINE void store_bool(uint8_t* p, f32x16 v, int lanes) {
  float tmp[16];
  store(tmp, v);
  for (int i = 0; i < lanes; i++) p[i] = tmp[i] != 0.0f;
}
CLLM_INLINE f32x16 flag(mask16 m) { return select(m, set1(1.0f), zero16()); }
CLLM_INLINE mask16 holds(f32x16 v) { return ne(v, zero16()); }
// NaN where either is NaN, which vmax and vmin are only for the second.
CLLM_INLINE f32x16 larger(f32x16 a, f32x16 b) { return select(ne(a, a), a, vmax(a, b)); }
CLLM_INLINE f32x16 smaller(f32x16 a, f32x16 b) { return select(ne(a, a), a, vmin(a, b)); }
// Lanes past the end of a row take the reduction's neutral value.
CLLM_INLINE f32x16 keep(f32x16 v, int lanes, float neutral) {
  return lanes == 16 ? v : select(first_lanes(lanes), v, set1(neutral));
}
CLLM_INLINE float reduce_larger(f32x16 v) {
  float tmp[16], found = -INFINITY;
  store(tmp, v);
  for (float x : tmp) found = found > x || found != found ? found : x;
  return found;
}
CLLM_INLINE float reduce_smaller(f32x16 v) { return -reduce_larger(zero16() - v); }
CLLM_INLINE float reduce_mul(f32x16 v) {
  float tmp[16], product = 1;
  store(tmp, v);
  for (float x : tmp) product *= x;
  return product;
}

// Work units of a row-wise loop without reductions: whole rows, or pieces of long ones.
constexpr int64_t kColumnChunk = 2048;
struct Units {
  int64_t begin, end, per_row;
};
CLLM_INLINE Units split_units(int64_t rows, int64_t columns, bool cut, const Team& team) {
  int64_t per_row = cut && columns > kColumnChunk ? (columns + kColumnChunk - 1) / kColumnChunk : 1;
  int64_t total = rows * per_row;
  return {total * team.rank / team.size, total * (team.rank + 1) / team.size, per_row};
}

template <class T>
CLLM_INLINE T floor_divide(T a, T b) {
  T q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}
CLLM_INLINE double floor_divide(double a, double b) { return floor(a / b); }
CLLM_INLINE int64_t modulo(int64_t a, int64_t b) {
  int64_t r = a % b;
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}
CLLM_INLINE double modulo(double a, double b) {
  double r = fmod(a, b);
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}
CLLM_INLINE double rounded(double x, float) { return float(x); }
CLLM_INLINE double rounded(double x, bf16) { return to_f32(to_bf16(float(x))); }
CLLM_INLINE double rounded(double x, double) { return x; }
CLLM_INLINE double number(bf16 x) { return to_f32(x); }
template <class T>
CLLM_INLINE T number(T x) {
  return x;
}

}  // namespace cllm
