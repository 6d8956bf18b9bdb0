// C entry points over the linear templates, for tests and the micro benchmark.
#include "linear.h"

using namespace cllm;

namespace {

struct LinearCall {
  int epilogue;  // 0 store, 1 add residual, 2 gated silu, 3 gelu tanh, 4 float logits with cap, 5 float
  const void* x;
  int ldx, T;
  const void* w;
  int N, K;
  void* y;
  int ldy;
  const void* bias;
  const void* residual;
  int ldr;
  const int* rows;
  const int* start;  // experts, with E > 0
  int E;
  size_t expert_bytes;
  int repeats;
  size_t w_stride;  // repeats walk through weights, as the layers of a model do
};

template <class W, class XT, class Ep>
void dispatch(Team& team, const LinearCall& c, Ep ep) {
  for (int i = 0; i < c.repeats; i++) {
    const void* w = (const char*)c.w + i * c.w_stride;
    if constexpr (std::is_same_v<Ep, Store<XT>> && !W::quantized)
      if (c.E > 0) {
        linear_experts<W>(team, (const XT*)c.x, c.ldx, c.rows, c.start, c.E, w, c.expert_bytes, c.N, c.K, [=](int) { return ep; });
        return;
      }
    linear_rows<W>(team, (const XT*)c.x, c.ldx, c.rows, c.T, w, c.N, c.K, ep);
    team.sync();
  }
}

template <class W, class XT>
void run_call(Team& team, void* raw) {
  const LinearCall& c = *(const LinearCall*)raw;
  const XT *bias = (const XT*)c.bias, *residual = (const XT*)c.residual;
  XT* y = (XT*)c.y;
  if (c.epilogue == 0) return dispatch<W, XT>(team, c, Store<XT>{y, c.ldy, bias});
#ifdef ALL_EPILOGUES  // for the machine's best target only: each is instantiated for every layout
  if constexpr (W::quantized && std::is_same_v<XT, float>) return;
  switch (c.epilogue) {
    case 1: return dispatch<W, XT>(team, c, AddResidual<XT>{y, c.ldy, residual, c.ldr, bias});
    case 2: return dispatch<W, XT>(team, c, Gated<Silu, XT>{y, c.ldy, bias});
    case 3: return dispatch<W, XT>(team, c, Act<GeluTanh, XT>{y, c.ldy, bias});
    case 4: return dispatch<W, XT>(team, c, StoreF32<XT>{(float*)c.y, c.ldy, bias, 1.0f, 30.0f});
    default: return dispatch<W, XT>(team, c, StoreF32<float>{(float*)c.y, c.ldy});
  }
#else
  (void)residual;
#endif
}

template <class W>
TeamFn of_type(int x_is_bf16) {
  return x_is_bf16 ? &run_call<W, bf16> : &run_call<W, float>;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void linear_call(int threads, int layout, int x_is_bf16, LinearCall* call) {
  TeamFn fn = layout == n16k2      ? of_type<Bf16W>(x_is_bf16)
              : layout == n16      ? of_type<F32W>(x_is_bf16)
              : layout == q4_1_n16 ? of_type<Q4_1W>(x_is_bf16)
              : layout == q4_0_n16 ? of_type<Q4_0W>(x_is_bf16)
                                   : of_type<Q8_0W>(x_is_bf16);
  run_team(threads, fn, call);
}

EXPORT size_t weight_bytes(int layout, int64_t N, int64_t K) { return packed_bytes(layout, N, K); }
EXPORT void pack(int layout, int source, void* dst, const void* src, int64_t rows, int64_t K, int64_t row, int64_t stride) {
  pack_rows(layout, source, dst, src, rows, K, row, stride);
}

// Reads `bytes` with all threads, four streams of loads each: what the memory gives.
namespace {
struct ReadCall {
  const char* data;
  size_t bytes;
  int sink;
};
}  // namespace
EXPORT int read_memory(int threads, const char* data, size_t bytes) {
  ReadCall call{data, bytes, 0};
  run_team(threads, [](Team& team, void* raw) {
    ReadCall& c = *(ReadCall*)raw;
    const size_t part = c.bytes / team.size / 64 * 64;
    const char* p = c.data + part * team.rank;
    i32x16 sum[4] = {set1_i32(0), set1_i32(0), set1_i32(0), set1_i32(0)};
    for (size_t i = 0; i + 256 <= part; i += 256)
      for (int j = 0; j < 4; j++) {
        __builtin_prefetch(p + i + 64 * j + 4096);
        sum[j] = sum[j] ^ load_i32(p + i + 64 * j);
      }
    int out[16];
    store_i32(out, (sum[0] ^ sum[1]) ^ (sum[2] ^ sum[3]));
    if (out[0] == 12345) c.sink = 1;
  }, &call);
  return call.sink;
}
