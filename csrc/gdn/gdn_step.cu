// GDN_STEP: everything between a gated delta net's projections for one token per decode row: causal convolution and SiLU of q, k
// and v, decay and write strength, the delta rule on float32 states held in slots, gated norm.
//
// Bound by the states: each is read once, 16 bytes a lane, kept in registers and written once, a warp four rows of 512 bytes at a
// time, 8 lanes a row. Few rows: a head is a cluster's work, 16 rows of its state a CTA, so that all multiprocessors have some;
// the CTAs convolve q and k each for itself (256 channels, 4 KB) and push their outputs to each other for the norm. More: a
// head is one CTA's, 32 rows at a time (27 us at 8 rows by clusters, 12.3 so). A row of a state has the same bits either way, and
// so has the norm, which takes all outputs in one order. A ring column that a step writes is none that it reads, and one CTA
// writes it: no CTA meets another's write. Rows in the last slot, the dummy of padding rows, leave the state alone and answer
// zeros: they would only cost bandwidth. Before it waits for the kernels in front, a CTA asks for its states to be brought to L2.
// That is a hint: it changes no value even if somebody writes them meanwhile, and slots are read again after the wait. H200, 32
// heads of 128 x 128: 4.2 MB a row, 1 us at 4.29 TB/s; 8, 32, 128 rows: 7.8, 31, 125 us. Measured 4.8, 12.3, 40.6, 151.
#include <cooperative_groups.h>

#include "common/dispatch.h"
#include "common/gpu.h"
#include "common/pdl.h"
#include "gdn/state_row.cuh"
#include "gdn/taps.cuh"

namespace {

using namespace spark;

constexpr int kClusterHeads = 64;  // heads of all rows, up to which a head is a cluster's work
constexpr int kMostDim = 256;      // of keys, and of values: a thread of a CTA has one at most

struct Params {
    void* out;
    float* state;
    void* ring;
    const void *proj, *conv;
    const float *a_log, *dt_bias, *norm;
    const int *slots, *positions;
    int64_t stride;  // of proj
    int heads, k_heads, v_dim, k_dim, slot_count, ring_length, channels;
    float scale, eps;
};

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Stores to the place of the shared memory of CTA `rank` of the cluster that `p` is in ours.
__device__ __forceinline__ void store_cluster(float* p, int rank, float x) {
#if __CUDA_ARCH__ >= 900
    *cooperative_groups::this_cluster().map_shared_rank(p, rank) = x;
#endif
}

// A CTA has a gridDim.x-th of a head: kThreads / kWarp * L::kRows * kBatches rows of DV, or as often as it takes as many. A
// thread convolves N channels at a time.
template <typename T, typename L, int kThreads, int kBatches, int N, bool kCluster>
__global__ void __launch_bounds__(kThreads, kThreads == 256 ? 2 : 4) gdn_step_kernel(const Params p) {
    constexpr int kStride = kThreads / kWarp * L::kRows, kShare = kStride * kBatches;
    __shared__ __align__(16) T keys_of[2][kMostDim], values[kMostDim];
    __shared__ float outputs[kMostDim];
    const int head = blockIdx.y, row = blockIdx.z, group = p.heads / p.k_heads, k_head = head / group;
    const int share = kCluster ? kShare : p.v_dim, v0 = blockIdx.x * share;  // this CTA's rows of DV
    const int first = v0 + threadIdx.x / L::kLanes;
    const int64_t head_size = static_cast<int64_t>(p.v_dim) * p.k_dim;
    const volatile int* slots = p.slots;  // volatile: two reads, not one

    // What nobody writes, and hints, before the wait: this thread's first taps, and the states.
    const int key_packs = p.k_dim / N, packs = 2 * key_packs + share / N;
    const auto channel_of = [&](int i) {
        if (i >= 2 * key_packs) return 2 * p.k_heads * p.k_dim + head * p.v_dim + v0 + (i - 2 * key_packs) * N;
        return (i < key_packs ? k_head : p.k_heads + k_head) * p.k_dim + i % key_packs * N;
    };
    float taps[kTaps][N];
    const auto read_taps = [&](int i) {
        load_taps<T, N>(static_cast<const T*>(p.conv) + static_cast<int64_t>(channel_of(i)) * kTaps, taps);
    };
    if (threadIdx.x < packs) read_taps(threadIdx.x);
    const float rate = expf(p.a_log[head]), bias = p.dt_bias[head];
    const bool writes = threadIdx.x < share;  // an output, v0 + threadIdx.x
    const float weight = writes ? p.norm[v0 + threadIdx.x] : 0.f;
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
#if __CUDA_ARCH__ >= 900
    if (kCluster) cooperative_groups::this_cluster().sync();  // all are there before one stores to another
#endif
    grid_dependency_wait();
    grid_dependency_launch();

    const int slot = slots[row], position = max(p.positions[row], 0);
    T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(row) * p.heads + head) * p.v_dim;
    if (slot < 0 || slot >= p.slot_count - 1) {
        if (writes) out[v0 + threadIdx.x] = from_float<T>(0.f);
        return;
    }
    float* state = p.state + (static_cast<int64_t>(slot) * p.heads + head) * head_size;
    RowState<L> s[kBatches];
    const auto load_rows = [&](int base) {
#pragma unroll
        for (int b = 0; b < kBatches; ++b) {
            const int v = base + b * kStride;
            s[b] = load_state<L>(state + static_cast<int64_t>(v) * p.k_dim, p.k_dim, v < p.v_dim);
        }
    };
    load_rows(first);

    const T* x = static_cast<const T*>(p.proj) + row * p.stride;
    const float z = writes ? to_float(x[p.channels + head * p.v_dim + v0 + threadIdx.x]) : 0.f;
    const float b = to_float(x[p.channels + p.heads * p.v_dim + head]);
    const float a = to_float(x[p.channels + p.heads * p.v_dim + p.heads + head]);
    for (int i = threadIdx.x; i < packs; i += kThreads) {
        if (i != threadIdx.x) read_taps(i);
        const int c = channel_of(i);
        T* column = static_cast<T*>(p.ring) + static_cast<int64_t>(slot) * p.ring_length * p.channels + c;
        const Pack<T, N> now = load_pack<T, N>(x + c);
        Pack<T, N> past[kBack];
        load_past<T, N>(column, position, p.ring_length, p.channels, past);
        const bool ours = i >= 2 * key_packs || (blockIdx.x == 0 && head % group == 0);
        if (ours) store_pack(column + static_cast<int64_t>(position % p.ring_length) * p.channels, now);
        T* to = i >= 2 * key_packs ? values + (i - 2 * key_packs) * N : keys_of[i >= key_packs] + i % key_packs * N;
        store_pack(to, convolve<T, N>(taps, now, past));
    }
    const float decay = expf(-rate * softplus(a + bias)), beta = sigmoid(b);
    __syncthreads();
    const KeyPair<L> keys = load_keys<L, T>(keys_of[0], keys_of[1], p.k_dim, p.scale);
    for (int base = first; base < v0 + share; base += kShare) {
        if (base != first) load_rows(base);
#pragma unroll
        for (int b = 0; b < kBatches; ++b) {
            const int v = base + b * kStride;
            const bool live = v < p.v_dim;
            const float o = advance<L>(s[b], keys, decay, beta, live ? to_float(values[v - v0]) : 0.f);
            store_state<L>(state + static_cast<int64_t>(v) * p.k_dim, p.k_dim, live, s[b]);
            if (kCluster) {
                if (live && L::lane() < static_cast<int>(gridDim.x)) store_cluster(outputs + v, L::lane(), o);
            } else if (live && L::lane() == 0) {
                outputs[v] = o;
            }
        }
    }
#if __CUDA_ARCH__ >= 900
    if (kCluster) cooperative_groups::this_cluster().sync();
#endif
    if (!kCluster) __syncthreads();
    float sum = 0.f;
    for (int v = threadIdx.x % kWarp; v < p.v_dim; v += kWarp) sum = fmaf(outputs[v], outputs[v], sum);
    const float norm = rsqrtf(warp_sum(sum) / static_cast<float>(p.v_dim) + p.eps);
    if (writes) out[v0 + threadIdx.x] = from_float<T>(outputs[v0 + threadIdx.x] * norm * weight * silu(z));
}

template <typename T, typename L, int kThreads, int kBatches, int N, bool kCluster>
int launch(const Params& p, int rows, cudaStream_t stream) {
    const unsigned parts = kCluster ? p.v_dim / (kThreads / kWarp * L::kRows * kBatches) : 1;
    return launch_pdl_cluster(gdn_step_kernel<T, L, kThreads, kBatches, N, kCluster>, dim3(parts, p.heads, rows), dim3(kThreads),
                              parts, 0, stream, p);
}

template <typename T>
int run(const Args& a, const Params& p, cudaStream_t stream) {
    constexpr int kPack = 4, kSlice = 16;
    const int rows = static_cast<int>(a.dim(0, 0));
    bool packs = p.k_dim == 128 && p.v_dim % kSlice == 0 && p.v_dim <= 8 * kSlice && sizeof(T) == 2;
    packs = packs && a.vectors(1, 0, 4) && a.vectors(2, p.channels, sizeof(T)) && a.vectors(3, p.stride, sizeof(T)) &&
            a.vectors(4, 0, 4);
    if constexpr (sizeof(T) == 2) {
        if (packs && rows * p.heads <= kClusterHeads && current_gpu().clusters)
            return launch<T, Row128, 128, 1, kPack, true>(p, rows, stream);
        if (packs) return launch<T, Row128, 128, 2, kPack, false>(p, rows, stream);
    }
    return launch<T, RowAny, 256, 4, 1, false>(p, rows, stream);
}

}  // namespace

// (out[B,HV*DV], state[slots,HV,DV,DK] in/out, ring[slots,R,C] in/out, proj[B,N], conv[C,4], a_log[HV], dt_bias[HV], norm[DV],
// slots[B], positions[B], k_heads, eps)
SPARK_LAUNCHER(spark_gdn_step) {
    using spark::DType;
    const spark::Args a(args, count);
    const auto t = a.dtype(0);
    SPARK_CHECK(count == 12 && a.given(0) && a.ndim(0) == 2 && a.is(1, DType::f32, 4) && a.is(2, t, 3) && a.is(3, t, 2));
    SPARK_CHECK(a.is(4, t, 2) && a.is(5, DType::f32, 1) && a.is(6, DType::f32, 1) && a.is(7, DType::f32, 1));
    SPARK_CHECK(a.is(8, DType::i32, 1) && a.is(9, DType::i32, 1));
    const int64_t rows = a.dim(0, 0), slots = a.dim(1, 0), heads = a.dim(1, 1), v_dim = a.dim(1, 2), k_dim = a.dim(1, 3);
    const int64_t k_heads = a.integer(10), channels = a.dim(2, 2), width = heads * v_dim;
    SPARK_CHECK(k_heads > 0 && heads % k_heads == 0 && v_dim > 0 && k_dim > 0 && a.dim(0, 1) == width);
    SPARK_CHECK(channels == 2 * k_heads * k_dim + width && a.dim(2, 0) == slots && a.dim(2, 1) >= spark::kTaps);
    SPARK_CHECK(a.dim(3, 0) == rows && a.dim(3, 1) >= channels + width + 2 * heads);
    SPARK_CHECK(a.dim(4, 0) == channels && a.dim(4, 1) == spark::kTaps);
    SPARK_CHECK(reinterpret_cast<uintptr_t>(a.ptr<void>(4)) % (spark::kTaps * (t == DType::f32 ? 4 : 2)) == 0);
    SPARK_CHECK(a.dim(5, 0) == heads && a.dim(6, 0) == heads && a.dim(7, 0) == v_dim && a.dim(8, 0) == rows &&
                a.dim(9, 0) == rows);
    SPARK_CHECK(rows < (1 << 16) && heads < (1 << 16));
    if (rows == 0 || heads == 0) return cudaSuccess;
    if (k_dim > kMostDim || v_dim > kMostDim) return spark::kUnsupported;
    Params p{};
    p.out = a.ptr<void>(0), p.state = a.ptr<float>(1), p.ring = a.ptr<void>(2), p.proj = a.ptr<void>(3), p.conv = a.ptr<void>(4);
    p.a_log = a.ptr<float>(5), p.dt_bias = a.ptr<float>(6), p.norm = a.ptr<float>(7);
    p.slots = a.ptr<int>(8), p.positions = a.ptr<int>(9), p.stride = a.dim(3, 1);
    p.heads = static_cast<int>(heads), p.k_heads = static_cast<int>(k_heads), p.v_dim = static_cast<int>(v_dim);
    p.k_dim = static_cast<int>(k_dim), p.slot_count = static_cast<int>(slots), p.ring_length = static_cast<int>(a.dim(2, 1));
    p.channels = static_cast<int>(channels), p.scale = 1.f / sqrtf(static_cast<float>(k_dim)), p.eps = a.real(11);
    SPARK_DISPATCH_ACTIVATION(t, return run<T>(a, p, stream))
    return spark::kUnsupported;
}
