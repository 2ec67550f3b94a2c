// ROUTER_TOPK: softmax over all experts in fp32, the k largest (lowest index on exact ties), renormalized on request. Shared
// experts follow the routed ones in the table and in a row's choices: always taken, with the sigmoid of one more logit.
//
// A warp a token, the logits in registers as integers that sort like the floats. A round finds the largest of what is left with
// one warp-wide maximum and the lowest index that has it with one minimum (redux): k rounds of about 60 cycles and kItems
// comparisons, 8 of 256 experts in less than a microsecond. A row that holds NaN gets k different experts all the same. H200: 512
// x 256 moves 0.56 MB; latency is all there is.
#include "common/device.cuh"
#include "common/launch.h"
#include "common/pdl.h"

namespace {

using namespace spark;

constexpr int kTokens = 4;       // warps of a CTA
constexpr int kGateColumns = 8;  // how often the shared experts' logit stands in a row, so that rows are whole vectors

// Order of unsigned integers = order of floats; 0 is below all of them and marks what was taken.
__device__ __forceinline__ uint32_t sortable(float x) {
    const uint32_t bits = __float_as_uint(x + 0.f);  // -0 and 0 tie
    return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}
__device__ __forceinline__ float unsorted(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// kItems logits a lane: expert 32 i + lane.
template <int kItems>
__global__ void __launch_bounds__(kTokens* kWarp) router_topk_kernel(float* weights, int* ids, const float* logits, int tokens,
                                                                     int experts, int k, int shared, bool renormalize) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int token = blockIdx.x * kTokens + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (token >= tokens) return;
    const float* row = logits + static_cast<int64_t>(token) * (experts + (shared > 0 ? kGateColumns : 0));
    const float gate = shared > 0 ? sigmoid(row[experts]) : 0.f;
    uint32_t keys[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) keys[i] = i * kWarp + lane < experts ? sortable(row[i * kWarp + lane]) : 0u;
    float top = 0.f, total = 0.f, mine = 0.f;
    int expert = 0;  // of lane j: the j-th choice
    for (int j = 0; j < k; ++j) {
        uint32_t best = keys[0];
#pragma unroll
        for (int i = 1; i < kItems; ++i) best = max(best, keys[i]);
        best = __reduce_max_sync(0xffffffffu, best);
        if (j == 0) {
            top = unsorted(best);
            if (!renormalize) {
#pragma unroll
                for (int i = 0; i < kItems; ++i) total += keys[i] != 0u ? expf(unsorted(keys[i]) - top) : 0.f;
                total = warp_sum(total);
            }
        }
        uint32_t index = 0xffffffffu;
#pragma unroll
        for (int i = kItems - 1; i >= 0; --i)
            if (keys[i] == best) index = i * kWarp + lane;
        index = __reduce_min_sync(0xffffffffu, index);
#pragma unroll
        for (int i = 0; i < kItems; ++i)
            if (index == static_cast<uint32_t>(i * kWarp + lane)) keys[i] = 0u;
        const float share = expf(unsorted(best) - top);
        if (renormalize) total += share;
        if (lane == j) mine = share, expert = static_cast<int>(index);
    }
    if (lane < k + shared) {
        const int64_t at = static_cast<int64_t>(token) * (k + shared) + lane;
        weights[at] = lane < k ? mine / total : gate;
        ids[at] = lane < k ? expert : experts + lane - k;
    }
}

}  // namespace

// (weights[T,k+S], ids[T,k+S], logits[T,E] or with S > 0 [T,E+8], k, renormalize)
SPARK_LAUNCHER(spark_router_topk) {
    const spark::Args a(args, count);
    SPARK_CHECK(count == 5 && a.is(0, DType::f32, 2) && a.is(1, DType::i32, 2) && a.is(2, DType::f32, 2));
    const int64_t tokens = a.dim(0, 0), k = a.integer(3), shared = a.dim(0, 1) - k,
                  experts = a.dim(2, 1) - (shared > 0 ? kGateColumns : 0);
    SPARK_CHECK(a.dim(1, 0) == tokens && a.dim(1, 1) == k + shared && a.dim(2, 0) == tokens && k <= experts && shared >= 0 &&
                tokens < (1 << 30));
    if (tokens == 0 || k + shared == 0) return cudaSuccess;
    if (k + shared > spark::kWarp || experts > 32 * spark::kWarp) return spark::kUnsupported;
    const auto launch = [&](auto kernel) {
        return spark::launch_pdl(kernel, dim3(static_cast<unsigned>((tokens + kTokens - 1) / kTokens)),
                                 dim3(kTokens * spark::kWarp), 0, stream, a.ptr<float>(0), a.ptr<int>(1), a.ptr<float>(2),
                                 static_cast<int>(tokens), static_cast<int>(experts), static_cast<int>(k),
                                 static_cast<int>(shared), a.integer(4) != 0);
    };
    const int64_t items = (experts + spark::kWarp - 1) / spark::kWarp;
    if (items <= 1) return launch(router_topk_kernel<1>);
    if (items <= 4) return launch(router_topk_kernel<4>);
    if (items <= 8) return launch(router_topk_kernel<8>);
    if (items <= 16) return launch(router_topk_kernel<16>);
    return launch(router_topk_kernel<32>);
}
