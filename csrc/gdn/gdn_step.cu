// GDN_STEP: one token of the gated delta rule per decode row, on float32 states held in slots.
//
// Bound by the states: each is read once, 16 bytes a lane, kept in registers and written once. CTA = (row, value head, slice of
// 16 or 32 rows of DV), a warp four rows of 512 bytes at a time, 8 lanes a row; norms of q and k are taken again by every warp.
// A row of the state has the same bits whatever the slices. Rows in the last slot, the dummy of padding rows, leave the state
// alone and answer zeros: they would only cost bandwidth.
// Before it waits for the kernels in front, a CTA asks for its states to be brought to L2. That is a hint: it changes no value
// even if somebody writes them meanwhile, and slots are read again after the wait.
// H200, 32 heads of 128 x 128: 4.2 MB a row, 1 us at 4.29 TB/s; 8, 32, 128 rows: 7.8, 31, 125 us.
#include "common/dispatch.h"
#include "common/pdl.h"
#include "gdn/state_row.cuh"

namespace {

using namespace spark;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

struct Params {
    void* out;
    float* state;
    const void* qkv;
    const float *g, *beta;
    const int* slots;
    int64_t stride;  // of qkv
    int heads, k_heads, v_dim, k_dim, slot_count;
    float scale;
};

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

template <typename T, typename L, int kBatches>
__global__ void __launch_bounds__(kThreads) gdn_step_kernel(const Params p) {
    constexpr int kStride = kWarps * L::kRows;  // rows of DV a CTA moves at a time
    const int head = blockIdx.y, row = blockIdx.z;
    const int first = blockIdx.x * kStride * kBatches + threadIdx.x / L::kLanes;
    const int64_t head_size = static_cast<int64_t>(p.v_dim) * p.k_dim;
    const volatile int* slots = p.slots;  // volatile: two reads, not one
    if constexpr (L::kFull) {
        const int slot = slots[row];
        const float* s = p.state + (static_cast<int64_t>(slot) * p.heads + head) * head_size;
        constexpr int kLine = 32;  // floats
        if (slot >= 0 && slot < p.slot_count - 1 && L::lane() * kLine < p.k_dim) {
#pragma unroll
            for (int b = 0; b < kBatches; ++b) {
                const int v = first + b * kStride;
                if (v < p.v_dim) prefetch_l2(s + v * p.k_dim + L::lane() * kLine);
            }
        }
    }
    grid_dependency_wait();
    grid_dependency_launch();

    const int slot = slots[row];
    T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(row) * p.heads + head) * p.v_dim;
    if (slot < 0 || slot >= p.slot_count - 1) {
#pragma unroll
        for (int b = 0; b < kBatches; ++b) {
            const int v = first + b * kStride;
            if (L::lane() == 0 && v < p.v_dim) out[v] = from_float<T>(0.f);
        }
        return;
    }
    float* state = p.state + (static_cast<int64_t>(slot) * p.heads + head) * head_size;
    RowState<L> s[kBatches];
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
        const int v = first + b * kStride;
        s[b] = load_state<L>(state + static_cast<int64_t>(v) * p.k_dim, p.k_dim, v < p.v_dim);
    }
    const int k_head = head / (p.heads / p.k_heads);
    const T* x = static_cast<const T*>(p.qkv) + row * p.stride;
    const T* values = x + 2 * p.k_heads * p.k_dim + head * p.v_dim;
    float v_of[kBatches];
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
        const int v = first + b * kStride;
        v_of[b] = v < p.v_dim ? to_float(values[v]) : 0.f;
    }
    const int gate = row * p.heads + head;
    const float decay = expf(p.g[gate]), beta = p.beta[gate];
    const KeyPair<L> keys = load_keys<L, T>(x + k_head * p.k_dim, x + (p.k_heads + k_head) * p.k_dim, p.k_dim, p.scale);
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
        const int v = first + b * kStride;
        const float o = advance<L>(s[b], keys, decay, beta, v_of[b]);
        store_state<L>(state + static_cast<int64_t>(v) * p.k_dim, p.k_dim, v < p.v_dim, s[b]);
        if (L::lane() == 0 && v < p.v_dim) out[v] = from_float<T>(o);
    }
}

template <typename T, typename L, int kBatches>
int launch(const Params& p, int rows, cudaStream_t stream) {
    constexpr int kSlice = kWarps * L::kRows * kBatches;
    return launch_pdl(gdn_step_kernel<T, L, kBatches>, dim3((p.v_dim + kSlice - 1) / kSlice, p.heads, rows), dim3(kThreads), 0,
                      stream, p);
}

template <typename T>
int run(const Args& a, const Params& p, cudaStream_t stream) {
    const int rows = static_cast<int>(a.dim(0, 0));
    if (p.k_dim == 128 && a.vectors(1, 0, 4) && a.vectors(2, p.stride, sizeof(T)))
        // Few rows: many small CTAs, to have all SMs at work; many: fewer norms of q and k.
        return rows * p.heads <= 512 ? launch<T, Row128, 1>(p, rows, stream) : launch<T, Row128, 2>(p, rows, stream);
    return p.k_dim <= RowAny::kLanes * RowAny::kItems ? launch<T, RowAny, 4>(p, rows, stream) : kUnsupported;
}

}  // namespace

// (out[B,HV,DV], state[slots,HV,DV,DK] in/out, qkv[B,C], g[B,HV], beta[B,HV], slots[B], k_heads)
SPARK_LAUNCHER(spark_gdn_step) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK(count == 7 && a.given(0) && a.ndim(0) == 3 && a.is(1, DType::f32, 4) && a.is(2, a.dtype(0), 2));
    SPARK_CHECK(a.is(3, DType::f32, 2) && a.is(4, DType::f32, 2) && a.is(5, DType::i32, 1));
    const int64_t rows = a.dim(0, 0), heads = a.dim(1, 1), v_dim = a.dim(1, 2), k_dim = a.dim(1, 3), k_heads = a.integer(6);
    SPARK_CHECK(a.dim(0, 1) == heads && a.dim(0, 2) == v_dim && k_heads > 0 && heads % k_heads == 0 && v_dim > 0 && k_dim > 0);
    SPARK_CHECK(a.dim(2, 0) == rows && a.dim(2, 1) >= 2 * k_heads * k_dim + heads * v_dim && a.dim(5, 0) == rows);
    for (int i : {3, 4}) SPARK_CHECK(a.dim(i, 0) == rows && a.dim(i, 1) == heads);
    SPARK_CHECK(rows < (1 << 16) && heads < (1 << 16));
    if (rows == 0 || heads == 0) return cudaSuccess;
    Params p{};
    p.out = a.ptr<void>(0), p.state = a.ptr<float>(1), p.qkv = a.ptr<void>(2), p.g = a.ptr<float>(3), p.beta = a.ptr<float>(4);
    p.slots = a.ptr<int>(5), p.stride = a.dim(2, 1), p.heads = static_cast<int>(heads), p.k_heads = static_cast<int>(k_heads);
    p.v_dim = static_cast<int>(v_dim), p.k_dim = static_cast<int>(k_dim), p.slot_count = static_cast<int>(a.dim(1, 0));
    p.scale = 1.f / sqrtf(static_cast<float>(k_dim));
    SPARK_DISPATCH_ACTIVATION(a.dtype(0), return run<T>(a, p, stream))
    return spark::kUnsupported;
}
