// Elementary functions on sixteen lanes. Polynomials are our own minimax fits (iterated weighted least squares);
// relative error below 1e-6 in float32 unless a function says otherwise. NaN in, NaN out.
#pragma once

#include "vec.h"

namespace cllm {

template <int N>
CLLM_INLINE f32x16 horner(f32x16 x, const float (&c)[N]) {  // highest power first
  f32x16 r = set1(c[0]);
#pragma GCC unroll 16
  for (int i = 1; i < N; i++) r = fma(r, x, set1(c[i]));
  return r;
}

// Nearest integer, ties to even.
CLLM_INLINE f32x16 vround(f32x16 x) {
#if defined(__AVX512F__)
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#else
  // Adding 2^23 drops the fraction; values of at least 2^23 have none.
  f32x16 big = copysign16(set1(8388608.0f), x);
  f32x16 r = (x + big) - big;
  return select(lt(vabs(x), set1(8388608.0f)), copysign16(r, x), x);
#endif
}
CLLM_INLINE f32x16 vfloor(f32x16 x) {
  f32x16 r = vround(x);
  return select(gt(r, x), r - set1(1), r);
}

// a * 2^n for integral n in [-252, 252].
CLLM_INLINE f32x16 scale_exp2(f32x16 a, f32x16 n) {
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(a.v, n.v)};
#else
  i32x16 k = truncate_i32(n), half = sar(k, 1);
  f32x16 low = from_bits(shl(half + set1_i32(127), 23)), high = from_bits(shl(k - half + set1_i32(127), 23));
  return a * low * high;
#endif
}

CLLM_INLINE f32x16 vexp(f32x16 x) {
  x = vmin(set1(89.0f), vmax(set1(-104.0f), x));
  f32x16 n = vround(x * set1(1.44269504f));
  f32x16 r = fma(n, set1(-0.693359375f), x);  // ln 2 in two parts: the first is exact in few bits
  r = fma(n, set1(2.12194440e-4f), r);
  const float c[] = {0.00139505986f, 0.0083689539f, 0.0416662042f, 0.166665183f, 0.50000001f};
  f32x16 p = fma(horner(r, c), r * r, r) + set1(1);
  return scale_exp2(p, n);
}
CLLM_INLINE f32x16 vexp2(f32x16 x) {
  x = vmin(set1(129.0f), vmax(set1(-151.0f), x));
  f32x16 n = vround(x), r = x - n;
  const float c[] = {0.000154753656f, 0.00134005445f, 0.00961800755f, 0.0555032709f, 0.240226513f, 0.693147207f, 1.0f};
  return scale_exp2(horner(r, c), n);
}
CLLM_INLINE f32x16 vlog(f32x16 x) {
  mask16 tiny = lt(x, set1(1.17549435e-38f));
  f32x16 y = select(tiny, x * set1(8388608.0f), x);
  i32x16 b = bits(y);
  // Split y = 2^e * m with m in [sqrt(1/2), sqrt(2)).
  i32x16 e = sar(b - set1_i32(0x3f3504f3), 23);
  f32x16 f = from_bits(b - shl(e, 23)) - set1(1);
  f32x16 n = to_f32(e) - select(tiny, set1(23), zero16());
  const float c[] = {0.0691531377f,  -0.11789781f, 0.118729866f,  -0.123843537f, 0.142186574f,
                     -0.166692505f, 0.200022266f, -0.249999866f, 0.333333104f};
  f32x16 f2 = f * f;
  f32x16 r = fma(horner(f, c), f2 * f, fma(f2, set1(-0.5f), n * set1(-2.12194440e-4f)));
  r = fma(n, set1(0.693359375f), r + f);
  const float inf = __builtin_inff();
  r = select(eq(x, set1(inf)), x, r);
  r = select(eq(x, zero16()), set1(-inf), r);
  return select(ge(x, zero16()), r, set1(__builtin_nanf("")));
}

// 1/x for normal x with a normal reciprocal, within 2 units in the last place.
CLLM_INLINE f32x16 reciprocal(f32x16 x) {
#if defined(__AVX512F__)
  f32x16 r = {_mm512_rcp14_ps(x.v)};
  return fma(r, fma(vneg(x), r, set1(1)), r);
#else
  return set1(1) / x;
#endif
}
CLLM_INLINE f32x16 vrsqrt(f32x16 x) { return set1(1) / vsqrt(x); }
CLLM_INLINE f32x16 vsigmoid(f32x16 x) {
  return reciprocal(set1(1) + vexp(vmin(set1(87.0f), vneg(x))));
}
CLLM_INLINE f32x16 vsilu(f32x16 x) { return x * vsigmoid(x); }

CLLM_INLINE f32x16 vtanh(f32x16 x) {
  f32x16 a = vabs(x), z = x * x;
  const float c[] = {-0.00571702854f, 0.0206505711f, -0.0537434926f, 0.133314912f, -0.333332839f};
  f32x16 small = fma(horner(z, c) * z, x, x);
  f32x16 large = fma(set1(-2), reciprocal(vexp(vmin(set1(40.0f), a + a)) + set1(1)), set1(1));
  return select(lt(a, set1(0.625f)), small, copysign16(large, x));
}

CLLM_INLINE f32x16 verf(f32x16 x) {
  f32x16 a = vabs(x), z = x * x;
  const float near[] = {7.88911633e-05f, -0.000802084032f, 0.00518953523f, -0.0268544445f,
                        0.112836002f,    -0.376126271f,    1.12837917f};
  // Beyond 1: erfc(a) = exp(polynomial of a).
  const float far[] = {-5.55600279e-08f, 2.86505351e-06f, -5.78281593e-05f, 0.000660921375f, -0.00497795633f,
                       0.0269025339f,    -0.110766128f,   -0.631217263f,    -1.1305385f,     0.000385903675f};
  f32x16 small = horner(z, near) * x;
  f32x16 large = set1(1) - vexp(horner(vmin(set1(4.0f), a), far));
  return select(lt(a, set1(1)), small, copysign16(large, x));
}
CLLM_INLINE f32x16 vgelu_erf(f32x16 x) {
  return set1(0.5f) * x * (set1(1) + verf(x * set1(0.707106781f)));
}
CLLM_INLINE f32x16 vgelu_tanh(f32x16 x) {  // 0.5 x (1 + tanh u) = x sigmoid(2u)
  f32x16 u2 = x * fma(x * x, set1(2 * 0.7978845608f * 0.044715f), set1(2 * 0.7978845608f));
  return x * vsigmoid(u2);
}

CLLM_INLINE f32x16 vlog1p(f32x16 x) {
  // log(u) * x / (u - 1) with u = 1 + x mends the rounding of u.
  f32x16 u = set1(1) + x, d = u - set1(1);
  f32x16 r = vlog(u) * (x / d);
  r = select(eq(d, zero16()), x, r);
  return select(eq(x, set1(__builtin_inff())), x, r);
}

// sin or cos by reduction to [-pi/4, pi/4]; absolute error below 2e-7 up to |x| = 1e5, libm beyond.
template <bool cosine>
CLLM_INLINE f32x16 sincos(f32x16 x) {
  if (__builtin_expect(any(ge(vabs(x), set1(1e5f))), 0)) {
    float t[16];
    store(t, x);
    for (int i = 0; i < 16; i++) t[i] = cosine ? cosf(t[i]) : sinf(t[i]);
    return load(t);
  }
  f32x16 n = vround(x * set1(0.636619772f));
#if defined(__FMA__)
  f32x16 r = fma(n, set1(-1.57079637f), x);  // pi/2 in three floats: fma keeps each product exact
  r = fma(n, set1(4.37113883e-8f), r);
  r = fma(n, set1(1.71512451e-15f), r);
#else
  float t[16], k[16];
  store(t, x);
  store(k, n);
  for (int i = 0; i < 16; i++) t[i] = float(double(t[i]) - double(k[i]) * 1.5707963267948966);
  f32x16 r = load(t);
#endif
  i32x16 q = truncate_i32(n) + set1_i32(cosine ? 1 : 0);
  f32x16 z = r * r;
  const float s[] = {2.71823709e-06f, -0.000198393271f, 0.00833332936f, -0.166666666f};
  const float c[] = {2.44377264e-05f, -0.00138873614f, 0.0416666467f};
  f32x16 sine = fma(horner(z, s) * z, r, r);
  f32x16 cosi = fma(horner(z, c) * z, z, fma(z, set1(-0.5f), set1(1)));
  f32x16 odd = to_f32(q & set1_i32(1));
  f32x16 v = select(eq(odd, zero16()), sine, cosi);
  return from_bits(bits(v) ^ shl(q & set1_i32(2), 30));
}
CLLM_INLINE f32x16 vsin(f32x16 x) { return sincos<false>(x); }
CLLM_INLINE f32x16 vcos(f32x16 x) { return sincos<true>(x); }

// Rare and hard to do well in float alone (the error grows with y log x): libm, lane by lane.
CLLM_INLINE f32x16 vpow(f32x16 x, f32x16 y) {
  float a[16], b[16];
  store(a, x);
  store(b, y);
  for (int i = 0; i < 16; i++) a[i] = powf(a[i], b[i]);
  return load(a);
}

}  // namespace cllm
