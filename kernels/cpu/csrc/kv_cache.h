// The paged key-value cache's layout, and writing rows into it.
//
// A block holds 32 tokens: its K part, then its V part. Dp is the head size padded to 32 (padding is written as zero).
//   bf16  K [Hk][2 tiles][Dp/2][16 tokens][2 d]   V [Hk][16 token pairs][Dp/16][16 d][2 tokens]
//   f32   K [Hk][2 tiles][Dp][16 tokens]          V [Hk][32 tokens][Dp]
// So a tile of 16 tokens of K is a weight panel (n16k2 or n16) whose K is the head size, and V is the B operand of P V:
// attention is two products with no transposition.
#pragma once

#include "team.h"

namespace cllm {

// One step's sequences. Query rows of sequence s are query_start[s] .. query_start[s+1]; seq_lens counts all its tokens
// after this step; token j lies in block block_tables[s * max_blocks + j / 32] at j % 32.
struct AttnMeta {
  int S;
  const int* query_start;
  const int* seq_lens;
  const int* block_tables;
  int max_blocks;
};

template <class XT>
CLLM_INLINE int kv_dim(int D) {
  return round_up(D, 32);
}
template <class XT>
CLLM_INLINE size_t kv_block_bytes(int Hk, int D) {
  return size_t(2) * Hk * kKvBlock * kv_dim<XT>(D) * sizeof(XT);
}

// Addresses inside one block.
template <class XT>
struct KvBlock {
  XT* base;
  int Hk, Dp;
  CLLM_INLINE XT* k_head(int h) const { return base + size_t(h) * kKvBlock * Dp; }
  CLLM_INLINE XT* v_head(int h) const { return base + size_t(Hk + h) * kKvBlock * Dp; }
};
template <class XT>
CLLM_INLINE KvBlock<XT> kv_block(const void* kv, int block, int Hk, int D) {
  return {(XT*)((char*)kv + size_t(block) * kv_block_bytes<XT>(Hk, D)), Hk, kv_dim<XT>(D)};
}

CLLM_INLINE void write_k(bf16* head, int token, const bf16* row, int D, int Dp) {
  uint32_t* to = (uint32_t*)(head + size_t(token / 16) * 16 * Dp) + token % 16;
  for (int d = 0; d < D; d += 2) memcpy(to + d / 2 * 16, row + d, 4);
  for (int d = D; d < Dp; d += 2) to[d / 2 * 16] = 0;
}
CLLM_INLINE void write_k(float* head, int token, const float* row, int D, int Dp) {
  float* to = head + size_t(token / 16) * 16 * Dp + token % 16;
  for (int d = 0; d < Dp; d++) to[d * 16] = d < D ? row[d] : 0.0f;
}
CLLM_INLINE void write_v(bf16* head, int token, const bf16* row, int D, int Dp) {
  bf16* to = head + size_t(token / 2) * 2 * Dp + token % 2;
  for (int d = 0; d < D; d++) to[2 * d] = row[d];
  for (int d = D; d < Dp; d++) to[2 * d] = bf16{0};
}
CLLM_INLINE void write_v(float* head, int token, const float* row, int D, int Dp) {
  float* to = head + size_t(token) * Dp;
  memcpy(to, row, size_t(D) * 4);
  memset(to + D, 0, size_t(Dp - D) * 4);
}

// Walks rows in order and tells each row's sequence.
struct SequenceWalk {
  const AttnMeta& meta;
  int s = 0;
  CLLM_INLINE int at(int t) {
    while (s + 1 < meta.S && meta.query_start[s + 1] <= t) s++;
    return s;
  }
};

// Rows k, v [T, Hk * D] (row strides ldk, ldv) to their slots: positions[t] of the row's sequence.
template <class XT>
void kv_write(Team& team, const XT* k, int ldk, const XT* v, int ldv, int T, void* kv, int Hk, int D,
              const int* positions, const AttnMeta& meta) {
  Range r = split(T, team);
  SequenceWalk walk{meta};
  for (int t = r.begin; t < r.end; t++) {
    const int p = positions[t], s = walk.at(t), token = p % kKvBlock;
    auto block = kv_block<XT>(kv, meta.block_tables[size_t(s) * meta.max_blocks + p / kKvBlock], Hk, D);
    for (int h = 0; h < Hk; h++) {
      write_k(block.k_head(h), token, k + size_t(t) * ldk + h * D, D, block.Dp);
      write_v(block.v_head(h), token, v + size_t(t) * ldv + h * D, D, block.Dp);
    }
  }
}

}  // namespace cllm
