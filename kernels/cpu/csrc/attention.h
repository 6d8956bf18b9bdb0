// Attention over the paged cache: decode, prefill and any mix of them in one step; and dense attention without a cache.
//
// An item is up to 32 query rows (tokens, or tokens by the heads of a group) of one sequence and one kv head, and the
// range of cache blocks they can see. All items' blocks laid end to end are split evenly over the team, so a thread's
// share may begin or end inside an item: that item's partial results meet after a sync (at most two a thread). One long
// sequence with one kv head is thus as balanced as a batch of prompts.
//
// Within an item, chunks of kChunkBlocks blocks: S = Q K^T, softmax with a running maximum, O = alpha O + P V.
// flops 4 * rows * tokens * Dp; bytes read: the visible K and V once per item.
#pragma once

#include <type_traits>

#include "gemm_amx.h"
#include "kv_cache.h"
#include "softmax.h"

namespace cllm {

struct AttnParams {
  int H, Hk, D;
  float scale;
  int window = 0;  // > 0: a query sees the last `window` keys, itself included
  float softcap = 0;
  bool causal = true;
  const float* sinks = nullptr;  // [H]: a logit per head that only adds to the denominator
};

struct AttnItem {
  int s, head, heads;     // query heads head .. head + heads, all of one kv head
  int row, tokens;        // query rows of x
  int position, context;  // of the first row's token; tokens of the sequence
  int block0, block1;     // visible cache blocks
  int rows() const { return heads * tokens; }
};

// Calls fn(item) for all items, in an order all ranks share.
template <class Fn>
void for_each_item(const AttnParams& p, const AttnMeta& m, const Fn& fn) {
  const int group = p.H / p.Hk;
  for (int s = 0; s < m.S; s++) {
    const int q0 = m.query_start[s], length = m.query_start[s + 1] - q0, context = m.seq_lens[s];
    if (length <= 0) continue;
    const int heads = length >= 16 ? 1 : min_int(group, kItemRows), tokens = kItemRows / heads;
    for (int kvh = 0; kvh < p.Hk; kvh++)
      for (int g = 0; g < group; g += heads)
        for (int t = 0; t < length; t += tokens) {
          AttnItem it;
          it.s = s;
          it.head = kvh * group + g;
          it.heads = min_int(heads, group - g);
          it.row = q0 + t;
          it.tokens = min_int(tokens, length - t);
          it.position = context - length + t;
          it.context = context;
          const int last = it.position + it.tokens - 1;
          int end = p.causal ? last + 1 : context, begin = 0;
          if (p.window > 0) {
            begin = max_int(0, it.position - p.window + 1);
            end = min_int(end, last + p.window);
          }
          it.block0 = begin / kKvBlock;
          it.block1 = ceil_div(end, kKvBlock);
          fn(it);
        }
  }
}

// Running softmax of an item: maximum (of logits in units of log2), denominator, unnormalised output. In one allocation.
struct AttnState {
  float *max, *sum, *out;  // [32], [32], [32][Dp]
  static size_t floats(int Dp) { return size_t(2 + Dp) * kItemRows; }
  static AttnState at(float* p) { return {p, p + kItemRows, p + 2 * kItemRows}; }
  void clear(int rows, int Dp) {
    for (int r = 0; r < kItemRows; r++) {
      max[r] = -__builtin_inff();
      sum[r] = 0;
    }
    memset(out, 0, size_t(rows) * Dp * 4);
  }
  void merge(const AttnState& other, int rows, int Dp) {
    for (int r = 0; r < rows; r++) {
      const float m = max[r] > other.max[r] ? max[r] : other.max[r];
      if (m == -__builtin_inff()) continue;
      const float a = exp2f(max[r] - m), b = exp2f(other.max[r] - m);
      sum[r] = sum[r] * a + other.sum[r] * b;
      max[r] = m;
      float *to = out + size_t(r) * Dp, *from = other.out + size_t(r) * Dp;
      for (int d = 0; d < Dp; d += kLanes) store(to + d, load(to + d) * set1(a) + load(from + d) * set1(b));
    }
  }
};

#if CLLM_AMX
// c[rows][32] = p[rows][32 * blocks] (rows as far apart as those of s) times 32 columns of V: v[b] points at the columns' first token pair in block b.
template <int MT>
CLLM_NOINLINE void amx_pv(const bf16* p, const bf16* const* v, int blocks, int column, int Dp, float* c) {
  _tile_zero(0);
  _tile_zero(1);
  if (MT > 1) _tile_zero(2);
  if (MT > 1) _tile_zero(3);
  const size_t pair_bytes = size_t(Dp) * 4, p_bytes = kChunkTokens * 4;
  for (int b = 0; b < blocks; b++) {
    const bf16* vb = v[b] + column * 2;
    if (b + 1 < blocks)
      for (int i = 0; i < 16; i++) {
        const bf16* next = v[b + 1] + column * 2 + size_t(i) * 2 * Dp;
        __builtin_prefetch(next);
        __builtin_prefetch(next + 32);
      }
    _tile_loadd(6, vb, pair_bytes);
    _tile_loadd(7, vb + 32, pair_bytes);
    _tile_loadd(4, p + b * kKvBlock, p_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (MT > 1) {
      _tile_loadd(5, p + 32 * kChunkTokens + b * kKvBlock, p_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 16, 128);
  if (MT > 1) _tile_stored(2, c + 512, 128);
  if (MT > 1) _tile_stored(3, c + 528, 128);
}
#endif

// out[r][16] += p[r] times 16 columns of V over a chunk, for MR rows.
template <class XT, int MR>
CLLM_NOINLINE void fma_pv(const float* const* p, const XT* const* v, int blocks, int column, int Dp, float* const* out) {
  f32x16 acc[MR];
  for (int r = 0; r < MR; r++) acc[r] = load(out[r] + column);
  for (int b = 0; b < blocks; b++)
    for (int j = 0; j < kKvBlock; j += 2) {
      f32x16 even, odd;
      const XT* at = v[b] + size_t(j) * Dp;
      if constexpr (std::is_same_v<XT, float>) {
        even = load(at + column);
        odd = load(at + Dp + column);
      } else {
        i32x16 both = load_i32(at + 2 * column);
        even = from_bits(shl(both, 16));
        odd = from_bits(both & set1_i32(int(0xffff0000u)));
      }
      const int t = b * kKvBlock + j;
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) acc[r] = fma(odd, set1(p[r][t + 1]), fma(even, set1(p[r][t]), acc[r]));
    }
  for (int r = 0; r < MR; r++) store(out[r] + column, acc[r]);
}

template <class XT>
struct AttnWorker {
  static constexpr bool amx = CLLM_AMX && std::is_same_v<XT, bf16>;
  using QT = std::conditional_t<amx, bf16, float>;  // of Q and P
  using KW = std::conditional_t<std::is_same_v<XT, bf16>, Bf16W, F32W>;

  const AttnParams& p;
  const AttnMeta& meta;
  const void* kv;
  int Dp;
  QT* q;             // [32][Dp]
  float* s;          // [32][kChunkTokens]: scores, then probabilities in place
  XT* v_tail;        // one head's V of one block

  AttnWorker(Team& team, const AttnParams& params, const AttnMeta& m, const void* cache)
      : p(params), meta(m), kv(cache), Dp(kv_dim<XT>(params.D)) {
    const size_t tokens = size_t(kItemRows) * kChunkTokens;
    const size_t q_bytes = size_t(kItemRows) * Dp * sizeof(QT), tail_bytes = size_t(kKvBlock) * Dp * sizeof(XT);
    char* at = team.scratch<char>(3, tokens * 4 + q_bytes + tail_bytes);
    s = (float*)at;
    q = (QT*)(at + tokens * 4);
    v_tail = (XT*)(at + tokens * 4 + q_bytes);
  }

  void load_queries(const AttnItem& it, const XT* x, int ldx) {
    for (int r = 0; r < it.rows(); r++) {
      const XT* from = x + size_t(it.row + r / it.heads) * ldx + size_t(it.head + r % it.heads) * p.D;
      QT* to = q + size_t(r) * Dp;
      if constexpr (amx) {
        memcpy((void*)to, from, size_t(p.D) * sizeof(XT));
        memset((void*)(to + p.D), 0, size_t(Dp - p.D) * sizeof(XT));
      } else {
        for (int d = 0; d < Dp; d += kLanes) {
          const int lanes = min_int(kLanes, p.D - d);
          store(to + d, lanes > 0 ? load_part(from + d, lanes) : zero16());
        }
      }
    }
  }

  // V of a block's head; a block that is not full is copied with zeros, since 0 * garbage could be NaN.
  const XT* values(const KvBlock<XT>& block, int head, int valid) {
    const XT* from = block.v_head(head);
    if (valid >= kKvBlock) return from;
    memset((void*)v_tail, 0, size_t(kKvBlock) * Dp * sizeof(XT));
    if constexpr (std::is_same_v<XT, float>) {
      memcpy(v_tail, from, size_t(valid) * Dp * sizeof(XT));
    } else {
      const size_t whole = size_t(valid / 2) * 2 * Dp;
      memcpy((void*)v_tail, from, whole * sizeof(XT));
      if (valid % 2)
        for (int d = 0; d < Dp; d++) v_tail[whole + 2 * d] = from[whole + 2 * d];
    }
    return v_tail;
  }

  // Blocks [b0, b1) of an item into `state`.
  void attend(const AttnItem& it, int b0, int b1, AttnState state) {
    const int rows = it.rows(), kvh = it.head / (p.H / p.Hk);
    state.clear(rows, Dp);
#if CLLM_AMX
    if constexpr (amx) configure_tiles(min_int(rows, 16), max_int(0, rows - 16));
#endif
    for (int c0 = b0; c0 < b1; c0 += kChunkBlocks) {
      const int blocks = min_int(kChunkBlocks, b1 - c0);
      const XT* v[kChunkBlocks];
      for (int b = 0; b < blocks; b++) {
        const int id = meta.block_tables[size_t(it.s) * meta.max_blocks + c0 + b];
        auto block = kv_block<XT>(kv, id, p.Hk, p.D);
        v[b] = values(block, kvh, it.context - (c0 + b) * kKvBlock);
        if (b + 1 < blocks) {  // K comes from L2 at best, and tile loads wait for it
          const int after = meta.block_tables[size_t(it.s) * meta.max_blocks + c0 + b + 1];
          const char* next = (const char*)kv_block<XT>(kv, after, p.Hk, p.D).k_head(kvh);
          for (int i = 0; i < int(kKvBlock * Dp * sizeof(XT)); i += 64) __builtin_prefetch(next + i);
        }
        scores(rows, block.k_head(kvh), s + b * kKvBlock);
      }
      RowSpan spans[kItemRows];
      const int start = c0 * kKvBlock, n = blocks * kKvBlock;
      for (int r = 0; r < rows; r++) {
        const int position = it.position + r / it.heads;
        int first = 0, last = p.causal ? position + 1 : it.context;
        if (p.window > 0) {
          first = position - p.window + 1;
          last = min_int(last, position + p.window);
        }
        first = max_int(0, first - start);
        last = max_int(0, min_int(min_int(last, it.context) - start, n));
        spans[r] = {first, last};
      }
      alignas(64) float alpha[kItemRows];
      softmax_chunk<QT>(s, rows, n, spans, p.scale, p.softcap, state.max, state.sum, alpha);
      accumulate(rows, v, blocks, alpha, state.out);
    }
  }

  // Rows by 32 tokens of Q K^T.
  void scores(int rows, const XT* k, float* to) {
    const uint8_t *k0 = (const uint8_t*)k, *k1 = (const uint8_t*)(k + size_t(16) * Dp);
#if CLLM_AMX
    if constexpr (amx) {
      if (rows > 16)
        amx_tiles<2, 2>(q, size_t(Dp), k0, k1, Dp, Ahead{}, to, kChunkTokens);
      else
        amx_tiles<1, 2>(q, size_t(Dp), k0, k1, Dp, Ahead{}, to, kChunkTokens);
      return;
    }
#endif
    if constexpr (!amx)
      for (int r0 = 0; r0 < rows; r0 += kFmaRows) {
        const float* qr[kFmaRows];
        for (int r = 0; r < kFmaRows; r++) qr[r] = q + size_t(min_int(r0 + r, rows - 1)) * Dp;
        for (int tile = 0; tile < 2; tile++) {
          f32x16 out[kFmaRows];
          fma_panel<KW, kFmaRows>(qr, tile ? k1 : k0, Dp, out);
          for (int r = 0; r < kFmaRows && r0 + r < rows; r++) store(to + size_t(r0 + r) * kChunkTokens + tile * 16, out[r]);
        }
      }
  }

  // out = alpha * out + P V.
  void accumulate(int rows, const XT* const* v, int blocks, const float* alpha, float* out) {
#if CLLM_AMX
    if constexpr (amx) {
      alignas(64) float c[32 * 32];
      for (int d = 0; d < Dp; d += 32) {
        if (rows > 16)
          amx_pv<2>((const bf16*)s, v, blocks, d, Dp, c);
        else
          amx_pv<1>((const bf16*)s, v, blocks, d, Dp, c);
        for (int r = 0; r < rows; r++) {
          float* to = out + size_t(r) * Dp + d;
          store(to, fma(load(to), set1(alpha[r]), load(c + 32 * r)));
          store(to + 16, fma(load(to + 16), set1(alpha[r]), load(c + 32 * r + 16)));
        }
      }
      return;
    }
#endif
    if constexpr (!amx) {
      for (int r = 0; r < rows; r++)
        for (int d = 0; d < Dp; d += kLanes) store(out + size_t(r) * Dp + d, load(out + size_t(r) * Dp + d) * set1(alpha[r]));
      alignas(64) float spare[kLanes];  // where the repeated rows of a last group go
      for (int r0 = 0; r0 < rows; r0 += kFmaRows) {
        const float* pr[kFmaRows];
        for (int r = 0; r < kFmaRows; r++) pr[r] = s + size_t(min_int(r0 + r, rows - 1)) * kChunkTokens;
        for (int d = 0; d < Dp; d += kLanes) {
          float* to[kFmaRows];
          for (int r = 0; r < kFmaRows; r++) to[r] = r0 + r < rows ? out + size_t(r0 + r) * Dp : spare - d;
          for (int i = 0; i < kLanes; i++) spare[i] = 0;
          fma_pv<XT, kFmaRows>(pr, v, blocks, d, Dp, to);
        }
      }
    }
  }

  void finish(const AttnItem& it, AttnState state, XT* y, int ldy) {
    constexpr float kLog2e = 1.44269504f;
    for (int r = 0; r < it.rows(); r++) {
      const int head = it.head + r % it.heads;
      float factor, total = state.sum[r];
      if (p.sinks) {
        const float sink = p.sinks[head] * kLog2e, m = sink > state.max[r] ? sink : state.max[r];
        factor = exp2f(state.max[r] - m);
        total = total * factor + exp2f(sink - m);
        factor /= total;
      } else {
        factor = total > 0 ? 1.0f / total : 0.0f;
      }
      const float* from = state.out + size_t(r) * Dp;
      XT* to = y + size_t(it.row + r / it.heads) * ldy + size_t(head) * p.D;
      for (int d = 0; d < p.D; d += kLanes) store_part(to + d, load(from + d) * set1(factor), min_int(kLanes, p.D - d));
    }
  }
};

// q [*, H, D] and out likewise, rows ldq and ldo elements apart; kv: this layer's cache. Syncs inside where an item is
// shared between ranks; needs a sync before its output is read.
template <class XT>
void paged_attention(Team& team, const XT* q, int ldq, XT* out, int ldo, const void* kv, const AttnParams& params,
                     const AttnMeta& meta) {
  AttnWorker<XT> worker(team, params, meta, kv);
  const size_t floats = AttnState::floats(worker.Dp);
  float* states = team.scratch<float>(2, 3 * floats);
  AttnState continued = AttnState::at(states), begun = AttnState::at(states + floats),
                  whole = AttnState::at(states + 2 * floats);
  int total = 0;
  for_each_item(params, meta, [&](const AttnItem& it) { total += it.block1 - it.block0; });
  const Range mine = split(total, team);
  int first = 0, next_rank = 1;  // first: where the item starts in the line of all blocks
  bool shared = false, open = false;
  AttnItem last_item{};
  int last_end = 0;
  for_each_item(params, meta, [&](const AttnItem& it) {
    const int cost = it.block1 - it.block0, end = first + cost;
    for (; next_rank < team.size; next_rank++) {  // does another rank's share begin inside this item?
      const int edge = int(int64_t(total) * next_rank / team.size);
      if (edge >= end) break;
      if (edge > first) shared = true;
    }
    const int a = max_int(mine.begin, first), b = min_int(mine.end, end);
    if (a < b) {
      worker.load_queries(it, q, ldq);
      const AttnState state = a > first ? continued : b < end ? begun : whole;
      worker.attend(it, it.block0 + a - first, it.block0 + b - first, state);
      if (a == first && b == end) worker.finish(it, state, out, ldo);
      if (a == first && b < end) {
        open = true;
        last_item = it;
        last_end = end;
      }
    }
    first = end;
  });
  if (!shared) return;
  team.sync();
  if (!open) return;
  for (int peer = team.rank + 1, from = mine.end; peer < team.size && from < last_end; peer++) {
    const int to = int(int64_t(total) * (peer + 1) / team.size);
    if (to > from) begun.merge(AttnState::at((float*)team.peer_scratch(peer, 2)), last_item.rows(), worker.Dp);
    from = to;
  }
  worker.finish(last_item, begun, out, ldo);
}

// Attention among the rows of each segment [segment_start[s], segment_start[s+1]), without a cache: k, v [*, Hk, D]. The
// rows are laid out as cache blocks in memory of the team first. Syncs inside.
template <class XT>
void dense_attention(Team& team, const XT* q, int ldq, const XT* k, int ldk, const XT* v, int ldv, XT* out, int ldo,
                     const AttnParams& params, int S, const int* segment_start) {
  int blocks = 0, most = 0;
  const int T = segment_start[S];
  for (int s = 0; s < S; s++) {
    const int n = ceil_div(segment_start[s + 1] - segment_start[s], kKvBlock);
    blocks += n;
    most = max_int(most, n);
  }
  const size_t kv_bytes = size_t(blocks) * kv_block_bytes<XT>(params.Hk, params.D);
  char* memory = (char*)team.common(0, kv_bytes + (size_t(S) * (most + 1) + T) * sizeof(int));
  int *lengths = (int*)(memory + kv_bytes), *positions = lengths + S, *tables = positions + T;
  if (team.rank == 0) {
    int next = 0;
    for (int s = 0; s < S; s++) {
      lengths[s] = segment_start[s + 1] - segment_start[s];
      for (int i = 0; i < lengths[s]; i++) positions[segment_start[s] + i] = i;
      for (int b = 0; b < ceil_div(lengths[s], kKvBlock); b++) tables[s * most + b] = next++;
    }
  }
  team.sync();
  const AttnMeta meta{S, segment_start, lengths, tables, most};
  kv_write(team, k, ldk, v, ldv, T, memory, params.Hk, params.D, positions, meta);
  team.sync();
  paged_attention(team, q, ldq, out, ldo, memory, params, meta);
}

}  // namespace cllm
