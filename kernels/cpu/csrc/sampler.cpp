// The sampling program: rows of logits to tokens, with per-request parameters in tables by slot (ir/step.py). It reads
// and advances the tables, so the next step's inputs and random numbers are there without the host.
#include <vector>

#include "program.h"
#include "sample.h"

using namespace cllm;

struct SampleTables {  // by slot; counts are [slots, V] or null
  const float *temperature, *top_p, *min_p, *repetition, *presence, *frequency;
  const int* top_k;
  const uint64_t* seed;
  int64_t* draws;
  int* last_token;
  const uint16_t* prompt_counts;
  uint16_t* output_counts;
};

struct SampleJob {
  const float* logits;
  int64_t ld;
  int rows, vocab;
  const int *slots, *bias_start, *bias_token;
  const float* bias_value;
  const uint32_t* mask;  // [rows, ceil(vocab / 32)] or null
  const int* target;     // [rows] or null
  int logprobs;   // -1: none
  int penalties;  // nonzero: some row's logits depend on counts
  int* token;
  float* logprob;
  int* rank;
  int* top_ids;         // [rows, max(logprobs, 0)]
  float* top_logprobs;  // likewise
};

struct Call {
  const SampleJob* job;
  const SampleRow* rows;
  SampleResult* results;
};

static void entry(Team& team, void* arg) {
  const Call& c = *(const Call*)arg;
  sample(team, c.job->logits, int(c.job->ld), c.job->rows, c.job->vocab, c.rows, c.results);
}

// Rows with counts get them as the templates read them: ints, and flags for the prompt.
static void widen_counts(const SampleJob& j, const SampleTables& t, std::vector<SampleRow>& rows, std::vector<int>& counts,
                         std::vector<uint8_t>& prompt) {
  const size_t V = size_t(j.vocab);
  counts.resize(V * j.rows);
  prompt.resize(V * j.rows);
  for (int r = 0; r < j.rows; r++) {
    const int slot = j.slots[r];
    if (slot < 0 || (rows[r].repetition == 1 && rows[r].presence == 0 && rows[r].frequency == 0)) continue;
    for (size_t i = 0; i < V; i++) {
      counts[r * V + i] = t.output_counts[slot * V + i];
      prompt[r * V + i] = t.prompt_counts[slot * V + i] > 0;
    }
    rows[r].output_counts = &counts[r * V];
    rows[r].prompt_tokens = &prompt[r * V];
  }
}

CLLM_EXPORT void cllm_sample(int threads, const SampleJob* job, const SampleTables* tables) {
  const SampleJob& j = *job;
  const SampleTables& t = *tables;
  std::vector<SampleRow> rows(j.rows);
  std::vector<SampleResult> results(j.rows);
  std::vector<int> counts;
  std::vector<uint8_t> prompt;
  for (int r = 0; r < j.rows; r++) {
    SampleRow& row = rows[r];
    const int slot = j.slots[r];
    if (slot >= 0) {
      row.temperature = t.temperature[slot] <= 1e-5f ? 0.0f : t.temperature[slot];
      row.top_k = t.top_k[slot];
      row.top_p = t.top_p[slot];
      row.min_p = t.min_p[slot];
      row.repetition = t.repetition[slot];
      row.presence = t.presence[slot];
      row.frequency = t.frequency[slot];
      row.seed = t.seed[slot];
      row.position = uint64_t(t.draws[slot]);
    }
    row.bias_ids = j.bias_token + j.bias_start[r];
    row.biases = j.bias_value + j.bias_start[r];
    row.bias_count = j.bias_start[r + 1] - j.bias_start[r];
    if (j.mask) row.mask = j.mask + size_t(r) * ceil_div(j.vocab, 32);
    if (j.target) row.target = j.target[r];
    row.logprobs = j.logprobs;
    if (j.logprobs > 0) {
      row.top_ids = j.top_ids + size_t(r) * j.logprobs;
      row.top_logprobs = j.top_logprobs + size_t(r) * j.logprobs;
    }
  }
  if (j.penalties && t.output_counts) {
    widen_counts(j, t, rows, counts, prompt);
  } else {
    for (SampleRow& row : rows) row.repetition = 1, row.presence = row.frequency = 0;
  }
  Call call{&j, rows.data(), results.data()};
  run_team(j.rows < threads ? j.rows : threads, entry, &call);
  for (int r = 0; r < j.rows; r++) {
    const int slot = j.slots[r], token = results[r].token;
    j.token[r] = token;
    if (j.logprobs >= 0) {
      j.logprob[r] = results[r].logprob;
      j.rank[r] = results[r].rank;
    }
    if (slot < 0) continue;
    t.last_token[slot] = token;
    t.draws[slot]++;
    if (t.output_counts) {
      uint16_t& count = t.output_counts[size_t(slot) * j.vocab + token];
      if (count < 65535) count++;
    }
  }
}
