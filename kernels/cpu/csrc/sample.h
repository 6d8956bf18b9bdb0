// Choosing tokens from float32 logits: greedy, or temperature with min-p, top-k and top-p; penalties, biases, bans,
// grammar masks; log probabilities.
//
// The scheme, exactly (an oracle can follow it):
//  1. Penalties on a copy x of the logits. repetition r, for tokens of prompt or output: x > 0 ? x / r : x * r. Then
//     x -= frequency * count + presence * (count > 0) over output counts. Then += biases; bans and tokens outside the
//     grammar mask become -inf.
//  2. temperature == 0: the largest x, lowest id on ties.
//  3. z = x / temperature. Kept: z >= max z + log(min_p); of these, z >= the k-th largest (ties kept); of these, with
//     p = softmax(z) over what is kept, z >= the z at which p summed from the largest down first reaches top_p (ties kept).
//  4. u in [0, 1) = the top 53 bits of (x1 << 32 | x0) / 2^53, x = Philox4x32-10 with counter (position low, position
//     high, 0, 0) and key (seed low, seed high). The token is the first kept id at which the running sum of exp(z - max z),
//     in id order, exceeds u times the whole sum. Terms in float32, sums in float64.
// Log probabilities are of the logits as given (before step 1).
#pragma once

#include <algorithm>
#include <functional>

#include "team.h"
#include "vec_math.h"

namespace cllm {

struct SampleRow {
  float temperature = 0;  // 0: greedy
  int top_k = 0;          // <= 0: off
  float top_p = 1;        // >= 1: off
  float min_p = 0;        // <= 0: off
  float repetition = 1, presence = 0, frequency = 0;
  uint64_t seed = 0, position = 0;
  const int* output_counts = nullptr;     // [V], needed by penalties
  const uint8_t* prompt_tokens = nullptr;  // [V] 0 or 1, for repetition
  const int* bias_ids = nullptr;
  const float* biases = nullptr;
  int bias_count = 0;
  const int* banned = nullptr;
  int banned_count = 0;
  const uint32_t* mask = nullptr;  // [ceil(V/32)], bit set: allowed
  int target = -1;                 // >= 0: the token to report on, in place of choosing one
  int logprobs = -1;               // -1: none; else how many of the most likely to report
  int* top_ids = nullptr;          // [logprobs]
  float* top_logprobs = nullptr;   // [logprobs]
};

struct SampleResult {
  int token;
  float logprob;  // of the token; with logprobs >= 0 only
  int rank;       // 1 for the most likely; with logprobs >= 0 only
};

inline void philox4x32(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = uint32_t(b >> 32) ^ c1 ^ k0;
    c[1] = uint32_t(b);
    c[2] = uint32_t(a >> 32) ^ c3 ^ k1;
    c[3] = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

inline double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  philox4x32(c, uint32_t(seed), uint32_t(seed >> 32));
  return double(((uint64_t(c[1]) << 32) | c[0]) >> 11) * 0x1p-53;
}

// x[0, V) padded with -inf to a multiple of 16.
CLLM_INLINE f32x16 logits_at(const float* x, int i, int V) {
  if (i + kLanes <= V) return load(x + i);
  return select(first_lanes(V - i), load(x + i, V - i), set1(-__builtin_inff()));
}
inline float max_logit(const float* x, int V) {
  f32x16 top = set1(-__builtin_inff());
  for (int i = 0; i < V; i += kLanes) top = vmax(logits_at(x, i, V), top);
  return reduce_max(top);
}
// The lowest id of the largest value; 0 when nothing compares (all NaN).
inline int argmax(const float* x, int V) {
  const f32x16 top = set1(max_logit(x, V));
  for (int i = 0; i < V; i += kLanes) {
    const int hit = mask_bits(ge(logits_at(x, i, V), top));
    if (hit) return i + __builtin_ctz(unsigned(hit));
  }
  return 0;
}

// The k-th largest of values: through the maxima of groups of 16, whose k-th largest is a lower bound. work holds V floats.
inline float kth_largest(const float* x, int V, int k, float* work) {
  if (k >= V) return -__builtin_inff();
  const int groups = ceil_div(V, kLanes);
  float bound = -__builtin_inff();
  if (k < groups) {
    for (int g = 0; g < groups; g++) work[g] = reduce_max(logits_at(x, g * kLanes, V));
    std::nth_element(work, work + k - 1, work + groups, std::greater<float>());
    bound = work[k - 1];
  }
  int n = 0;
  const f32x16 low = set1(bound);
  for (int i = 0; i < V; i += kLanes)
    for (int hit = mask_bits(ge(logits_at(x, i, V), low)); hit; hit &= hit - 1) {
      const int at = i + __builtin_ctz(unsigned(hit));
      if (at < V) work[n++] = x[at];
    }
  std::nth_element(work, work + k - 1, work + n, std::greater<float>());
  return work[k - 1];
}

// The z where the mass of values >= low, from the largest down, first reaches top_p. Sorts only a head of the
// distribution, twice as deep whenever that head does not hold enough.
inline float nucleus(const float* z, int V, float top, float low, float top_p, float* work) {
  double total = 0;
  const f32x16 minus_top = set1(-top), bound = set1(low);
  for (int i = 0; i < V; i += kLanes) {
    const f32x16 v = logits_at(z, i, V);
    total += reduce_add(select(ge(v, bound), vexp(v + minus_top), zero16()));
  }
  for (float depth = 4;; depth *= 2) {
    const float floor = top - depth > low ? top - depth : low;
    int n = 0;
    for (int i = 0; i < V; i += kLanes)
      for (int hit = mask_bits(ge(logits_at(z, i, V), set1(floor))); hit; hit &= hit - 1) {
        const int at = i + __builtin_ctz(unsigned(hit));
        if (at < V) work[n++] = z[at];
      }
    std::sort(work, work + n, std::greater<float>());
    double sum = 0;
    for (int i = 0; i < n; i++) {
      sum += expf(work[i] - top);
      if (sum >= top_p * total) return work[i];
    }
    if (floor == low || depth > 1e4f) return low;
  }
}

// x = -inf wherever the mask's bit is not set. Grammars allow nearly everything or nearly nothing: whole words are the
// rule, and single bits are met only where they are clear.
inline void forbid(float* x, int V, const uint32_t* mask) {
  for (int i = 0; i < V; i += 32) {
    const int count = min_int(32, V - i);
    uint32_t off = ~mask[i / 32];
    if (off == ~0u) {
      std::fill_n(x + i, count, -__builtin_inff());
      continue;
    }
    if (count < 32) off &= (1u << count) - 1;
    for (; off; off &= off - 1) x[i + __builtin_ctz(off)] = -__builtin_inff();
  }
}

inline void apply_penalties(float* x, int V, const SampleRow& row) {
  const bool penal = row.repetition != 1 || row.presence != 0 || row.frequency != 0;
  if (penal && (row.output_counts || row.prompt_tokens))
    for (int i = 0; i < V; i++) {
      const int count = row.output_counts ? row.output_counts[i] : 0;
      if (count > 0 || (row.prompt_tokens && row.prompt_tokens[i])) {
        x[i] = x[i] > 0 ? x[i] / row.repetition : x[i] * row.repetition;
        if (count > 0) x[i] -= row.frequency * float(count) + row.presence;
      }
    }
  for (int i = 0; i < row.bias_count; i++)
    if (unsigned(row.bias_ids[i]) < unsigned(V)) x[row.bias_ids[i]] += row.biases[i];
  for (int i = 0; i < row.banned_count; i++)
    if (unsigned(row.banned[i]) < unsigned(V)) x[row.banned[i]] = -__builtin_inff();
  if (row.mask) forbid(x, V, row.mask);
}

// Step 4: the id in proportion to exp(z - top) among z >= low. sums holds ceil(V/16) doubles.
inline int draw(const float* z, int V, float top, float low, double u, double* sums) {
  const f32x16 minus_top = set1(-top), bound = set1(low);
  const auto weights = [&](int i) {
    const f32x16 v = logits_at(z, i, V);
    return select(ge(v, bound), vexp(v + minus_top), zero16());
  };
  double total = 0;
  for (int i = 0; i < V; i += kLanes) total += sums[i / kLanes] = reduce_add(weights(i));
  const double target = u * total;
  double sum = 0;
  int last = argmax(z, V);  // should rounding leave the target unreached, the most likely token
  for (int i = 0; i < V; i += kLanes) {
    if (sum + sums[i / kLanes] <= target) {
      sum += sums[i / kLanes];
      continue;
    }
    float w[kLanes];
    store(w, weights(i));
    for (int j = 0; j < kLanes && i + j < V; j++) {
      sum += w[j];
      if (w[j] > 0 && sum > target) return i + j;
    }
  }
  return last;
}

inline void report_logprobs(const float* x, int V, const SampleRow& row, SampleResult* result, float* work, int* order) {
  const float top = max_logit(x, V);
  double total = 0;
  int above = 0;
  const f32x16 minus_top = set1(-top), chosen = set1(x[result->token]);
  for (int i = 0; i < V; i += kLanes) {
    const f32x16 v = logits_at(x, i, V);
    total += reduce_add(vexp(v + minus_top));
    above += __builtin_popcount(unsigned(mask_bits(gt(v, chosen))));
  }
  const float log_total = top + float(log(total));
  result->logprob = x[result->token] - log_total;
  result->rank = above + 1;
  const int n = min_int(row.logprobs, V);
  if (n <= 0) return;
  const float bound = n < V ? kth_largest(x, V, n, work) : -__builtin_inff();
  int count = 0;
  for (int i = 0; i < V; i++)
    if (x[i] >= bound) order[count++] = i;
  std::partial_sort(order, order + n, order + count, [x](int a, int b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  for (int i = 0; i < n; i++) {
    row.top_ids[i] = order[i];
    row.top_logprobs[i] = x[order[i]] - log_total;
  }
}

// logits [R, V] (rows ldl apart, not changed) -> results [R]. Rows are split over the team.
inline void sample(Team& team, const float* logits, int ldl, int R, int V, const SampleRow* rows, SampleResult* results) {
  const size_t padded = size_t(round_up(V, kLanes));
  Range mine = split(R, team);
  for (int r = mine.begin; r < mine.end; r++) {
    const SampleRow& row = rows[r];
    const float* raw = logits + size_t(r) * ldl;
    float* memory = team.scratch<float>(0, padded * 4);
    float *x = memory, *work = memory + padded;
    double* sums = (double*)(memory + 2 * padded);
    int* order = (int*)(memory + 3 * padded);
    const float* use = raw;
    const bool changed = row.repetition != 1 || row.presence != 0 || row.frequency != 0 || row.bias_count || row.banned_count ||
                         row.mask;
    if (changed) {
      memcpy(x, raw, size_t(V) * 4);
      apply_penalties(x, V, row);
      use = x;
    }
    SampleResult result{0, 0, 0};
    if (row.target >= 0) {
      result.token = row.target;
    } else if (row.temperature <= 0) {
      result.token = argmax(use, V);
    } else {
      const f32x16 scale = set1(row.temperature);
      for (int i = 0; i < V; i += kLanes) store_part(x + i, logits_at(use, i, V) / scale, min_int(kLanes, V - i));
      const float top = max_logit(x, V);
      float low = -__builtin_inff();
      if (row.min_p > 0) low = top + logf(row.min_p);
      if (row.top_k > 0 && row.top_k < V) low = std::max(low, kth_largest(x, V, row.top_k, work));
      if (row.top_p < 1) low = nucleus(x, V, top, low, row.top_p, work);
      result.token = draw(x, V, top, low, philox_uniform(row.seed, row.position), sums);
    }
    if (row.logprobs >= 0) report_logprobs(raw, V, row, &result, work, order);
    results[r] = result;
  }
}

}  // namespace cllm
