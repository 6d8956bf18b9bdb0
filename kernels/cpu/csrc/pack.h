// Packed weight layouts and the packers that make them, once, at load.
//
// A packed matrix is a sequence of panels of 16 output rows; a panel is contiguous, so that a matrix-vector product
// reads memory as one stream. K is padded with zeros to Kp, a multiple of 32; missing rows of the last panel are zero.
//
//   layout      panel                                                              bytes per weight (K % 32 == 0)
//   n16k2       [Kp/2][16 rows][2 k] bf16: an AMX B tile and a vdpbf16ps operand   2
//   n16         [Kp][16 rows] f32                                                  4
//   q4_1_n16    [Kp/32]{ f16 scale[16], f16 min[16], codes[256] }                  0.625
//   q4_0_n16    [Kp/32]{ f16 scale[16], codes[256] }                               0.5625
//   q8_0_n16    [Kp/32]{ f16 scale[16], low nibbles[256], high nibbles[256] }      1.0625
//
// Codes of 32 k by 16 rows: four vectors of 16 dwords; vector v, dword r (the row) holds k = 8v..8v+7, even k in the low
// half word and odd k in the high one, nibble j of a half belonging to k = 8v + 2j (+ 1). So one shift brings the pair
// (2i, 2i+1) of all rows to the bottom of each half word, where a 32-entry word permute turns it into a pair of bf16.
// q8_0 stores a byte as two such planes: value = 16 * signed(high) + low.
#pragma once

#include "vec.h"

namespace cllm {

enum Layout { n16k2 = 0, n16 = 1, q4_1_n16 = 2, q4_0_n16 = 3, q8_0_n16 = 4 };
enum Source { src_f32 = 0, src_bf16 = 1, src_gguf = 2, src_f16 = 3 };

struct Bf16W {
  static constexpr Layout layout = n16k2;
  static constexpr int block_bytes = 1024;  // of 32 k by 16 rows
  static constexpr bool quantized = false;
};
struct F32W {
  static constexpr Layout layout = n16;
  static constexpr int block_bytes = 2048;
  static constexpr bool quantized = false;
};
struct Q4_1W {
  static constexpr Layout layout = q4_1_n16;
  static constexpr int block_bytes = 320, codes_at = 64;
  static constexpr bool quantized = true;
};
struct Q4_0W {
  static constexpr Layout layout = q4_0_n16;
  static constexpr int block_bytes = 288, codes_at = 32;
  static constexpr bool quantized = true;
};
struct Q8_0W {
  static constexpr Layout layout = q8_0_n16;
  static constexpr int block_bytes = 544, codes_at = 32;
  static constexpr bool quantized = true;
};

inline size_t layout_block_bytes(int layout) {
  switch (layout) {
    case n16k2: return Bf16W::block_bytes;
    case n16: return F32W::block_bytes;
    case q4_1_n16: return Q4_1W::block_bytes;
    case q4_0_n16: return Q4_0W::block_bytes;
    default: return Q8_0W::block_bytes;
  }
}
inline size_t panel_bytes(int layout, int64_t K) { return layout_block_bytes(layout) * size_t((K + 31) / 32); }
inline size_t packed_bytes(int layout, int64_t N, int64_t K) { return panel_bytes(layout, K) * size_t((N + 15) / 16); }

// Bytes of one dense source row.
inline size_t source_row_bytes(int layout, int source, int64_t K) {
  if (source == src_f32) return size_t(K) * 4;
  if (source == src_bf16 || source == src_f16) return size_t(K) * 2;
  return size_t(K / 32) * (layout == q4_1_n16 ? 20 : layout == q4_0_n16 ? 18 : 34);
}

CLLM_INLINE float f16_to_f32(uint16_t h) {
  uint16_t t[16] = {h};
  float f[16];
  store(f, load_f16(t));
  return f[0];
}

// Where the nibble of (k in 0..31, row) lies in a plane of 256 bytes: the dword and the bit.
CLLM_INLINE void put_nibble(uint8_t* plane, int k, int row, unsigned nibble) {
  const int bit = 4 * (k % 8 / 2) + 16 * (k & 1);
  uint8_t* p = plane + (k / 8 * 16 + row) * 4 + bit / 8;
  *p = uint8_t(*p | (nibble << (bit % 8)));
}

inline float source_value(int source, const uint8_t* row, int64_t k) {
  if (source == src_f32) return ((const float*)row)[k];
  if (source == src_bf16) return to_f32(((const bf16*)row)[k]);
  return f16_to_f32(((const uint16_t*)row)[k]);
}

// One row of one GGUF block into row `r` of a packed block. GGUF: f16 scale, (f16 min,) then 16 bytes whose low
// nibbles are k = 0..15 and high nibbles 16..31, or 32 signed bytes.
inline void pack_gguf_block(int layout, uint8_t* block, const uint8_t* src, int r) {
  memcpy(block + 2 * r, src, 2);
  if (layout == q8_0_n16) {
    for (int k = 0; k < 32; k++) {
      put_nibble(block + Q8_0W::codes_at, k, r, src[2 + k] & 15u);
      put_nibble(block + Q8_0W::codes_at + 256, k, r, src[2 + k] >> 4);
    }
    return;
  }
  const bool has_min = layout == q4_1_n16;
  if (has_min) memcpy(block + 32 + 2 * r, src + 2, 2);
  const uint8_t* codes = src + (has_min ? 4 : 2);
  uint8_t* plane = block + (has_min ? int(Q4_1W::codes_at) : int(Q4_0W::codes_at));
  for (int k = 0; k < 32; k++) put_nibble(plane, k, r, k < 16 ? codes[k] & 15u : codes[k - 16] >> 4);
}

// Packs `rows` row-major source rows as rows [dst_row, dst_row + rows) of the packed matrix; dst_row % 16 == 0.
// Source panel i goes to panel dst_row / 16 + i * panel_stride: stride 1 is plain, stride 2 is one half of gu16
// (gate at dst_row 0, up at dst_row 16). A quantized layout takes src_gguf blocks of its own type only.
// src_ld_bytes: bytes between source rows, 0 for dense ones.
inline void pack_rows(int layout, int source, void* dst, const void* src, int64_t rows, int64_t K, int64_t dst_row,
                      int64_t panel_stride, int64_t src_ld_bytes = 0) {
  const size_t ld = src_ld_bytes ? size_t(src_ld_bytes) : source_row_bytes(layout, source, K);
  const size_t bytes = panel_bytes(layout, K), block_bytes = layout_block_bytes(layout);
  for (int64_t p = 0; p * 16 < rows; p++) {
    uint8_t* panel = (uint8_t*)dst + size_t(dst_row / 16 + p * panel_stride) * bytes;
    memset(panel, 0, bytes);
    const int valid = int(rows - p * 16 < 16 ? rows - p * 16 : 16);
    for (int r = 0; r < valid; r++) {
      const uint8_t* row = (const uint8_t*)src + size_t(p * 16 + r) * ld;
      if (source == src_gguf) {
        const size_t step = source_row_bytes(layout, source, 32);
        for (int64_t b = 0; b < K / 32; b++) pack_gguf_block(layout, panel + b * block_bytes, row + b * step, r);
      } else if (layout == n16) {
        for (int64_t k = 0; k < K; k++) ((float*)panel)[k * 16 + r] = source_value(source, row, k);
      } else if (source == src_bf16) {
        for (int64_t k = 0; k < K; k++) ((bf16*)panel)[(k / 2 * 16 + r) * 2 + k % 2] = ((const bf16*)row)[k];
      } else {
        for (int64_t k = 0; k < K; k++)
          ((bf16*)panel)[(k / 2 * 16 + r) * 2 + k % 2] = to_bf16(source_value(source, row, k));
      }
    }
  }
}

// One weight of a packed matrix as float: k of `row` within its panel. For embedding rows, not for products.
template <class W>
CLLM_INLINE float packed_value(const uint8_t* panel, int k, int row) {
  const uint8_t* block = panel + size_t(k / 32) * W::block_bytes;
  const int i = k % 32;
  if constexpr (W::layout == n16k2) return to_f32(((const bf16*)block)[(i / 2 * 16 + row) * 2 + i % 2]);
  if constexpr (W::layout == n16) return ((const float*)block)[i * 16 + row];
  if constexpr (W::quantized) {
    const int bit = 4 * (i % 8 / 2) + 16 * (i & 1), at = (i / 8 * 16 + row) * 4 + bit / 8;
    const float scale = f16_to_f32(((const uint16_t*)block)[row]);
    const int low = (block[W::codes_at + at] >> (bit % 8)) & 15;
    if constexpr (W::layout == q4_1_n16) return low * scale + f16_to_f32(((const uint16_t*)block)[16 + row]);
    if constexpr (W::layout == q4_0_n16) return (low - 8) * scale;
    const int high = (block[W::codes_at + 256 + at] >> (bit % 8)) & 15;
    return (low + 16 * (high < 8 ? high : high - 16)) * scale;
  }
}

}  // namespace cllm
