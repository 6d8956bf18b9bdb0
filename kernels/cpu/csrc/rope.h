// Rotary embedding, and the stage between the packed qkv projection and attention: norms of q and k, rotation, and the
// writes of k and v into the cache, in one pass over a row.
#pragma once

#include "kv_cache.h"
#include "norm.h"

namespace cllm {

enum RopeStyle { kHalf = 0, kInterleaved = 1 };  // pairs (i, i + rot_dim/2), or (2i, 2i + 1)

// cos, sin [T, half] of position * inv_freq (rounded to float, as the models do), times `scaling`; rounded to bf16 where a
// bf16 model casts its tables.
inline void rope_table(Team& team, float* cos, float* sin, const int* positions, int T, const float* inv_freq, int half,
                       float scaling, bool round_to_bf16) {
  Range r = split(T, team);
  for (int t = r.begin; t < r.end; t++) {
    const f32x16 position = set1(float(positions[t]));
    for (int i = 0; i < half; i += kLanes) {
      const int lanes = min_int(kLanes, half - i);
      const f32x16 angle = position * load_part(inv_freq + i, lanes);
      f32x16 c = vcos(angle) * set1(scaling), s = vsin(angle) * set1(scaling);
      if (round_to_bf16) c = round_bf16(c), s = round_bf16(s);
      store_part(cos + size_t(t) * half + i, c, lanes);
      store_part(sin + size_t(t) * half + i, s, lanes);
    }
  }
}

// Rotates one head in place: x holds values of type XT as floats; every product and sum is rounded as XT.
template <class XT>
CLLM_INLINE void rotate_head(float* x, int rot_dim, RopeStyle style, const float* cos, const float* sin) {
  using R = Round<XT>;
  const int half = rot_dim / 2;
  if (style == kHalf) {
    for (int i = 0; i < half; i += kLanes) {
      const int lanes = min_int(kLanes, half - i);
      const f32x16 a = load_part(x + i, lanes), b = load_part(x + half + i, lanes);
      const f32x16 c = load_part(cos + i, lanes), s = load_part(sin + i, lanes);
      store_part(x + i, R::apply(R::apply(a * c) - R::apply(b * s)), lanes);
      store_part(x + half + i, R::apply(R::apply(b * c) + R::apply(a * s)), lanes);
    }
    return;
  }
  for (int i = 0; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = R::one(R::one(a * cos[i]) - R::one(b * sin[i]));
    x[2 * i + 1] = R::one(R::one(b * cos[i]) + R::one(a * sin[i]));
  }
}

template <class XT>
CLLM_INLINE void narrow_row(const float* x, int K, XT* to) {
  for (int k = 0; k < K; k += kLanes) {
    const int lanes = min_int(kLanes, K - k);
    store_part(to + k, load_part(x + k, lanes), lanes);
  }
}

// x, y [T, heads, D] (rows ldx, ldy apart, may be the same memory): the first rot_dim of each head rotate.
template <class XT>
void rope(Team& team, const XT* x, int ldx, XT* y, int ldy, int T, int heads, int D, int rot_dim, RopeStyle style,
          const float* cos, const float* sin) {
  float* row = team.scratch<float>(0, size_t(D));
  Range r = split(T * heads, team);
  for (int i = r.begin; i < r.end; i++) {
    const int t = i / heads, h = i % heads;
    widen_row(x + size_t(t) * ldx + size_t(h) * D, D, row);
    rotate_head<XT>(row, rot_dim, style, cos + size_t(t) * (rot_dim / 2), sin + size_t(t) * (rot_dim / 2));
    narrow_row(row, D, y + size_t(t) * ldy + size_t(h) * D);
  }
}

template <class XT>
struct QkvParams {
  int H, Hk, D, rot_dim;
  RopeStyle style = kHalf;
  const XT* q_norm = nullptr;  // [D], or [H * D] with norm_full_row
  const XT* k_norm = nullptr;
  NormParams norm{1e-6f};
  bool norm_full_row = false;  // olmo2: one norm over all heads
};

// qkv [T, (H + 2 Hk) * D] -> q_out [T, H * D] and the cache. cos == nullptr: no rotation. q_out may be qkv itself.
template <class XT>
void qkv_rope_write(Team& team, const XT* qkv, int ldqkv, XT* q_out, int ldq, int T, void* kv, const QkvParams<XT>& p,
                    const float* cos, const float* sin, const int* positions, const AttnMeta& meta) {
  const int D = p.D, half = p.rot_dim / 2;
  float* row = team.scratch<float>(0, size_t(p.H + p.Hk) * D);
  XT* narrow = team.scratch<XT>(1, size_t(D));
  Range r = split(T, team);
  SequenceWalk walk{meta};
  const auto prepare = [&](float* x, int heads, const XT* w, int t) {
    if (w && p.norm_full_row) normalize_row(x, heads * D, w, p.norm, x);
    for (int h = 0; h < heads; h++) {
      if (w && !p.norm_full_row) normalize_row(x + h * D, D, w, p.norm, x + h * D);
      if (cos) rotate_head<XT>(x + h * D, p.rot_dim, p.style, cos + size_t(t) * half, sin + size_t(t) * half);
    }
  };
  for (int t = r.begin; t < r.end; t++) {
    const XT* from = qkv + size_t(t) * ldqkv;
    widen_row(from, (p.H + p.Hk) * D, row);
    prepare(row, p.H, p.q_norm, t);
    prepare(row + size_t(p.H) * D, p.Hk, p.k_norm, t);
    const int position = positions[t], s = walk.at(t), token = position % kKvBlock;
    auto block = kv_block<XT>(kv, meta.block_tables[size_t(s) * meta.max_blocks + position / kKvBlock], p.Hk, D);
    for (int h = 0; h < p.Hk; h++) {
      narrow_row(row + size_t(p.H + h) * D, D, narrow);
      write_k(block.k_head(h), token, narrow, D, block.Dp);
      write_v(block.v_head(h), token, from + size_t(p.H + p.Hk + h) * D, D, block.Dp);
    }
    narrow_row(row, p.H * D, q_out + size_t(t) * ldq);
  }
}

}  // namespace cllm
