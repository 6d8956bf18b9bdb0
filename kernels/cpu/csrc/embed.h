// Embedding rows, from a row-major table or from a packed lm_head (tied weights are stored once).
#pragma once

#include "pack.h"
#include "team.h"

namespace cllm {

// y[t] = round(table[ids[t]] * scale). Reads and writes T * K elements.
template <class XT>
void embed(Team& team, const XT* table, const int* ids, XT* y, int ldy, int T, int K, float scale = 1) {
  const int blocks = ceil_div(K, kLanes);
  Range r = split(T * blocks, team);
  for (int i = r.begin; i < r.end; i++) {
    const int t = i / blocks, k = i % blocks * kLanes, lanes = min_int(kLanes, K - k);
    f32x16 v = load_part(table + size_t(ids[t]) * K + k, lanes);
    store_part(y + size_t(t) * ldy + k, scale == 1 ? v : v * set1(scale), lanes);
  }
}

// The same from a packed matrix: a row is one column of lanes of its panel, so 32 values touch a block's cache lines.
// Dequantized values are rounded as XT before they are scaled.
template <class W, class XT>
void embed_packed(Team& team, const void* w, const int* ids, XT* y, int ldy, int T, int K, float scale = 1) {
  const int blocks = ceil_div(K, 32);
  const size_t panel = size_t(blocks) * W::block_bytes;
  Range r = split(T * blocks, team);
  for (int i = r.begin; i < r.end; i++) {
    const int t = i / blocks, b = i % blocks, id = ids[t];
    const uint8_t* block = (const uint8_t*)w + size_t(id / 16) * panel + size_t(b) * W::block_bytes;
    XT* to = y + size_t(t) * ldy + b * 32;
    for (int k = 0; k < min_int(32, K - b * 32); k++)
      put(to + k, Round<XT>::one(packed_value<W>(block, k, id % 16)) * scale);
  }
}

}  // namespace cllm
