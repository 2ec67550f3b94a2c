// PAGED_ATTENTION_PREFILL: ragged slices of queries over their pages, causal or full, with window and bias.
//
// Three ways. On sm_90a, bf16 and f16 with head_dim 128 or 256 and no bias: TMA and wgmma (prefill_hopper.cuh). Elsewhere, and
// for head_dim 64 or a bias: the kernel below. Anything else (float32, odd dims): plain.cuh.
//
// Below: a CTA does a tile of 16 rows a warp (slices.cuh: the query heads of a kv head packed with the queries), Q in shared
// memory (in registers up to 128 dims), keys and values in a ring of cp.async buffers (K, V, K, ...), scores and outputs in
// registers by m16n8k16. Two barriers a tile of keys: before QK^T (K is there, and all are done with the V before) and before PV.
// Masks are applied on edge tiles only. 16/2 heads x 256, 4096 tokens: 137 GFLOP, 174 us at 790 TFLOP/s; mma.sync reaches about
// half of that.
#include "attention/prefill_hopper.cuh"
#include "attention/slices.cuh"
#include "common/dispatch.h"
#include "common/mma.cuh"
#include "common/pdl.h"

namespace {

using namespace spark;
using namespace spark::attn;

template <typename T, int D, int kWarps, int kKeys, int kRing, bool kBias>
struct Prefill {
    static constexpr int kThreads = kWarps * kWarp, kRows = kWarps * 16;
    static constexpr int kChunks = D / 8, kRowBytes = D * 2;  // 16-byte chunks of a row
    static constexpr int kTileBytes = kKeys * kRowBytes;
    static constexpr int kSteps = D / 16;
    static constexpr int kUnits = kKeys / 16;         // runs of 16 keys, each in one page
    static constexpr int kPass = kThreads / kChunks;  // rows that one copy of all threads moves
    static constexpr bool kHoldQ = D <= 128;
    static constexpr int kBytes = kRows * kRowBytes + kRing * kTileBytes;
    static_assert(kPass <= 16 && 16 % kPass == 0 && kKeys % kPass == 0, "a copy stays in one page");

    const Slices& p;
    const Tile& tile;
    const uint32_t q_base, ring_base;
    const int lane, warp;
    const T *k, *v;
    const int* table;
    int first_key, end_key, tiles;  // the tile's range of keys, from a multiple of kKeys
    int page[kUnits], next_page[kUnits];

    __device__ Prefill(const Slices& slices, const Tile& work, const uint8_t* shared)
        : p(slices),
          tile(work),
          q_base(shared_address(shared)),
          ring_base(q_base + kRows * kRowBytes),
          lane(threadIdx.x % kWarp),
          warp(threadIdx.x / kWarp) {
        const int64_t head_offset = (static_cast<int64_t>(tile.kv_head) << p.page_shift) * D;
        k = static_cast<const T*>(p.k_pool) + head_offset;
        v = static_cast<const T*>(p.v_pool) + head_offset;
        table = p.tables + static_cast<int64_t>(tile.slot) * p.table_width;
        const Span low = tile.sees(p, tile.first_row / p.group);
        const Span high = tile.sees(p, (tile.first_row + tile.rows - 1) / p.group);
        first_key = low.first / kKeys * kKeys, end_key = high.last;
        tiles = max(end_key - first_key + kKeys - 1, 0) / kKeys;
        find_pages(0);
    }

    __device__ void find_pages(int index) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const int at = first_key + index * kKeys + u * 16;
            next_page[u] = at < end_key ? table[at >> p.page_shift] : 0;
        }
    }

    __device__ void load_q() const {
#pragma unroll
        for (int i = 0; i < kRows / kPass; ++i) {
            const int r = i * kPass + threadIdx.x / kChunks, c = threadIdx.x % kChunks;
            const bool present = r < tile.rows;
            copy_async(q_base + r * kRowBytes + ((c ^ (r & 7)) << 4),
                       static_cast<const T*>(p.q) + (present ? tile.offset(p, r) : 0) + c * 8, present);
        }
        copy_async_commit();
    }

    // Starts the copy of element e (K of key tile e / 2, then its V) into its buffer. Rows past the end become zeros.
    __device__ void issue(int e) {
        const int index = e >> 1;
        if (index < tiles) {
            const bool is_v = (e & 1) != 0;
            if (!is_v) {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) page[u] = next_page[u];
                find_pages(index + 1);
            }
            const int base = first_key + index * kKeys, r0 = threadIdx.x / kChunks, c = threadIdx.x % kChunks;
            const int within = (1 << p.page_shift) - 1;
            const T* from = (is_v ? v : k) + c * 8;
            const uint32_t to = ring_base + (e % kRing) * kTileBytes;
#pragma unroll
            for (int i = 0; i < kKeys / kPass; ++i) {
                const int r = i * kPass + r0;
                copy_async(to + r * kRowBytes + ((c ^ (r & 7)) << 4),
                           from + page[i * kPass / 16] * p.page_elements + static_cast<int64_t>((base + r) & within) * D,
                           base + r < end_key);
            }
        }
        copy_async_commit();
    }

    __device__ void load_fragment(uint32_t (&a)[4], int step) const {
        const int r = warp * 16 + lane % 16;
        ldmatrix(a, q_base + r * kRowBytes + ((((lane / 16) ^ (r & 7)) << 4) ^ (step << 5)));
    }

    __device__ void run() {
        load_q();
        for (int e = 0; e < kRing; ++e) issue(e);
        const int upper = warp * 16 + lane / 4;  // this lane's first row; the other is 8 below
        Span sees[2];
        const float* bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = tile.first_row + min(upper + i * 8, tile.rows - 1), query = r / p.group;
            sees[i] = tile.sees(p, query);
            if constexpr (kBias) {
                const int head = tile.kv_head * p.group + r - query * p.group;
                bias[i] = p.bias + (head * p.queries + tile.first_query + query) * p.bias_width;
            }
        }
        // keys that every row sees: no mask
        const Span all = {tile.sees(p, (tile.first_row + tile.rows - 1) / p.group).first,
                          tile.sees(p, tile.first_row / p.group).last};
        const float scale = kBias ? kLog2E : p.scale * kLog2E;  // of scores as the softmax gets them
        uint32_t held[kHoldQ ? kSteps : 1][4];
        float o[D / 8][4] = {};
        Softmax softmax;
        for (int index = 0; index < tiles; ++index) {
            const int e = 2 * index, key = first_key + index * kKeys;
            if (index == 0)
                copy_async_wait<kRing - 1>();
            else
                copy_async_wait<kRing - 2>();
            __syncthreads();  // K is there; all are done with the V before
            if (index > 0) issue(e - 1 + kRing);
            if constexpr (kHoldQ) {
                if (index == 0) {
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) load_fragment(held[step], step);
                }
            }
            float s[kKeys / 8][4] = {};
            const uint32_t k_tile = ring_base + (e % kRing) * kTileBytes;
            const int kr = lane % 8 + lane / 16 * 8;
            const uint32_t k_row = k_tile + kr * kRowBytes, k_column = ((lane / 8 % 2) ^ (kr & 7)) << 4;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t a[4];
                if constexpr (!kHoldQ) load_fragment(a, step);
#pragma unroll
                for (int j = 0; j < kKeys / 16; ++j) {
                    uint32_t b[4];
                    ldmatrix(b, k_row + j * 16 * kRowBytes + (k_column ^ (step << 5)));
                    mma<T>(s[2 * j], kHoldQ ? held[kHoldQ ? step : 0] : a, b[0], b[1]);
                    mma<T>(s[2 * j + 1], kHoldQ ? held[kHoldQ ? step : 0] : a, b[2], b[3]);
                }
            }
            const int column = key + 2 * (lane % 4);
            if constexpr (kBias) {
#pragma unroll
                for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int at = column + 8 * j + (i & 1);
                        const bool seen = at >= sees[i >> 1].first && at < sees[i >> 1].last;
                        s[j][i] = __fmaf_rn(s[j][i], p.scale, seen ? bias[i >> 1][at] : 0.f);
                    }
                }
            }
            if (key < all.first || key + kKeys > all.last) hide(s, sees, column);
            float fade[2];
            softmax.step(s, scale, fade);
#pragma unroll
            for (int j = 0; j < D / 8; ++j) o[j][0] *= fade[0], o[j][1] *= fade[0], o[j][2] *= fade[1], o[j][3] *= fade[1];
            copy_async_wait<kRing - 2>();
            __syncthreads();  // V is there; all are done with K
            issue(e + kRing);
            const uint32_t v_tile = ring_base + ((e + 1) % kRing) * kTileBytes;
            const int vr = lane % 16;
            const uint32_t v_row = v_tile + vr * kRowBytes, v_column = ((lane / 16) ^ (vr & 7)) << 4;
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) {
                const float (&x)[4] = s[2 * step], (&y)[4] = s[2 * step + 1];
                const uint32_t a[4] = {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(y[0], y[1]),
                                       pack_pair<T>(y[2], y[3])};
#pragma unroll
                for (int j = 0; j < D / 16; ++j) {
                    uint32_t b[4];
                    ldmatrix_trans(b, v_row + step * 16 * kRowBytes + (v_column ^ (j << 5)));
                    mma<T>(o[2 * j], a, b[0], b[1]);
                    mma<T>(o[2 * j + 1], a, b[2], b[3]);
                }
            }
        }
        copy_async_wait<0>();
        softmax.finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = upper + i * 8;
            if (r >= tile.rows) continue;
            const int64_t at = tile.offset(p, r);
            const float share = softmax.share(i);
            T* out = static_cast<T*>(p.out) + at + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<uint32_t*>(out + 8 * j) = pack_pair<T>(o[j][2 * i] * share, o[j][2 * i + 1] * share);
            if (p.lse != nullptr && lane % 4 == 0) p.lse[at / D] = softmax.lse(i, scale);
        }
    }
};

template <typename T, int D, int kWarps, int kKeys, int kRing, bool kBias>
__global__ void __launch_bounds__(kWarps* kWarp, D == 256 ? 1 : 2) paged_prefill_kernel(const __grid_constant__ Slices p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    using Work = Prefill<T, D, kWarps, kKeys, kRing, kBias>;
    grid_dependency_wait();
    grid_dependency_launch();
    const Tile tile = find_tile<Work::kRows>(p, blockIdx.x);
    if (tile.rows == 0) return;
    Work(p, tile, shared).run();
}

template <typename T, int D, int kWarps, int kKeys, int kRing, bool kBias>
int launch(const Slices& p, cudaStream_t stream) {
    using Work = Prefill<T, D, kWarps, kKeys, kRing, kBias>;
    const auto kernel = paged_prefill_kernel<T, D, kWarps, kKeys, kRing, kBias>;
    static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Work::kBytes);
    if (allowed != cudaSuccess) return static_cast<int>(allowed);
    const int64_t tiles = most_tiles<Work::kRows>(p);
    if (tiles > INT32_MAX) return kUnsupported;
    return launch_pdl(kernel, dim3(static_cast<unsigned>(tiles)), dim3(Work::kThreads), Work::kBytes, stream, p);
}

template <typename T, bool kBias>
int by_dim(const Slices& p, const Device& device, cudaStream_t stream) {
    if (p.dim == 64) return launch<T, 64, 4, 64, 4, kBias>(p, stream);
    if (p.dim == 128) return launch<T, 128, 4, 64, 4, kBias>(p, stream);
    if (device.shared >= 160 * 1024) return launch<T, 256, 8, 64, 3, kBias>(p, stream);
    return launch<T, 256, 4, 64, 2, kBias>(p, stream);
}

template <typename T>
int run(const Slices& p, int64_t pool_rows, bool aligned, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
        const Device device;
        const bool fast = aligned && p.page_shift >= 4 && p.scale > 0.f;
        if (fast && device.major == 9 && p.bias == nullptr && (p.dim == 128 || p.dim == 256)) {
            const int status = p.dim == 128 ? launch_prefill_hopper<T, 128>(p, pool_rows, stream)
                                            : launch_prefill_hopper<T, 256>(p, pool_rows, stream);
            if (status != kUnsupported) return status;
        }
        if (fast && (p.dim == 64 || p.dim == 128 || p.dim == 256))
            return p.bias == nullptr ? by_dim<T, false>(p, device, stream) : by_dim<T, true>(p, device, stream);
    }
    Plain plain{};
    plain.out = p.out, plain.lse = p.lse, plain.q = p.q, plain.k_pool = p.k_pool, plain.v_pool = p.v_pool;
    plain.tables = p.tables, plain.slots = p.slots, plain.cu_q = p.cu_q, plain.kv_len = p.kv_len;
    plain.bias = p.bias, plain.queries = p.queries, plain.bias_width = p.bias_width;
    plain.sequences = p.sequences, plain.heads = p.heads, plain.kv_heads = p.kv_heads, plain.dim = p.dim;
    plain.page = 1 << p.page_shift, plain.table_width = p.table_width;
    plain.full = p.full, plain.window = p.window, plain.scale = p.scale;
    return launch_plain<T>(plain, stream);
}

}  // namespace

// (out[T,Hq,D], lse|None[T,Hq], q[T,Hq,D], k_pool[P,Hkv,page,D], v_pool, tables[slots,maxb], slots[S], cu_q[S+1], kv_len[S],
// scale, mask, window, bias|None[Hq,T,>=L])
SPARK_LAUNCHER(spark_paged_attention_prefill) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK(count == 13 && a.given(0));
    const DType t = a.dtype(0);
    SPARK_CHECK(a.is(0, t, 3) && (!a.given(1) || a.is(1, DType::f32, 2)) && a.is(2, t, 3) && a.is(3, t, 4) && a.is(4, t, 4));
    SPARK_CHECK(a.is(5, DType::i32, 2) && a.is(6, DType::i32, 1) && a.is(7, DType::i32, 1) && a.is(8, DType::i32, 1));
    const int64_t queries = a.dim(0, 0), heads = a.dim(0, 1), dim = a.dim(0, 2), kv_heads = a.dim(3, 1), page = a.dim(3, 2);
    const int64_t sequences = a.dim(6, 0);
    for (int axis = 0; axis < 3; ++axis) SPARK_CHECK(a.dim(0, axis) == a.dim(2, axis));
    for (int axis = 0; axis < 4; ++axis) SPARK_CHECK(a.dim(3, axis) == a.dim(4, axis));
    SPARK_CHECK(!a.given(1) || (a.dim(1, 0) == queries && a.dim(1, 1) == heads));
    SPARK_CHECK(a.dim(3, 3) == dim && kv_heads > 0 && heads % kv_heads == 0 && page > 0 && (page & (page - 1)) == 0);
    SPARK_CHECK(a.dim(7, 0) == sequences + 1 && a.dim(8, 0) == sequences && a.dim(5, 1) * page < INT32_MAX);
    SPARK_CHECK(!a.given(12) || (a.is(12, DType::f32, 3) && a.dim(12, 0) == heads && a.dim(12, 1) == queries));
    SPARK_CHECK((a.integer(10) == 0 || a.integer(10) == 1) && a.integer(11) >= 0);
    if (a.size(0) == 0 || sequences == 0) return cudaSuccess;
    Slices p{};
    p.out = a.ptr<void>(0), p.lse = a.ptr<float>(1), p.q = a.ptr<void>(2), p.k_pool = a.ptr<void>(3), p.v_pool = a.ptr<void>(4);
    p.tables = a.ptr<int>(5), p.slots = a.ptr<int>(6), p.cu_q = a.ptr<int>(7), p.kv_len = a.ptr<int>(8);
    p.bias = a.ptr<float>(12), p.bias_width = a.given(12) ? a.dim(12, 2) : 0;
    p.queries = queries, p.page_elements = kv_heads * page * dim;
    p.sequences = static_cast<int>(sequences), p.heads = static_cast<int>(heads), p.kv_heads = static_cast<int>(kv_heads);
    p.group = static_cast<int>(heads / kv_heads), p.dim = static_cast<int>(dim), p.table_width = static_cast<int>(a.dim(5, 1));
    while ((int64_t{1} << p.page_shift) < page) ++p.page_shift;
    p.scale = a.real(9), p.full = a.integer(10), p.window = a.integer(11);
    const bool aligned = a.vectors(0, dim, 2) && a.vectors(2, dim, 2) && a.vectors(3, dim, 2) && a.vectors(4, dim, 2);
    SPARK_DISPATCH_ACTIVATION(t, return run<T>(p, a.dim(3, 0) * kv_heads * page, aligned, stream))
    return spark::kUnsupported;
}
