// A row of logits spread over the CTAs of a cluster: order of logits, exact weights, and exchange between the CTAs.
//
// A CTA owns a run of ids. Weights are exp((z - top) / temperature) as integers of 2^-44: their sums are the same in any order,
// so a row's token depends on nothing but the row.
//
// defines: spark::Row, ordered, composite, fixed, for_logits, for_held, launch_row_kernel
#pragma once

#include <cooperative_groups.h>

#include <cmath>

#include "common/device.cuh"
#include "common/launch.h"
#include "common/pdl.h"

namespace spark {

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kClusterSize = 8;           // what every device with clusters can schedule
constexpr int64_t kMaxVocab = 1 << 19;    // so that 2^44 times as many fits 64 bits
constexpr float kOne = 17592186044416.f;  // 2^44

// Bits of a float whose unsigned order is the float's order; -0 counts as 0 (callers add 0.f).
__device__ __forceinline__ uint32_t ordered(float z) {
    const uint32_t bits = __float_as_uint(z);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float unordered(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// Larger for a better logit, and for a lower id among equals.
__device__ __forceinline__ uint64_t composite(float z, int id) {
    return static_cast<uint64_t>(ordered(z)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ int composite_id(uint64_t c) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(c)); }
__device__ __forceinline__ float composite_value(uint64_t c) { return unordered(static_cast<uint32_t>(c >> 32)); }

// NaN counts as -inf, -0 as 0.
__device__ __forceinline__ float settled(float z) { return z == z ? z + 0.f : -INFINITY; }

__device__ __forceinline__ uint64_t fixed(float w) { return __float2ull_rn(w * kOne); }

__device__ __forceinline__ uint64_t warp_sum_u64(uint64_t x) {
#pragma unroll
    for (int o = kWarp / 2; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

__device__ __forceinline__ uint64_t warp_scan_u64(uint64_t x) {  // inclusive
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int o = 1; o < kWarp; o <<= 1) {
        const uint64_t below = __shfl_up_sync(0xffffffffu, x, o);
        if (lane >= o) x += below;
    }
    return x;
}

// Shared memory of a row kernel.
struct RowShared {
    uint64_t warp[kRowWarps];
    uint64_t exchange[16][2];  // what this CTA tells the others, each entry once
};

// The CTA's place in its row. kCluster 1 is for devices without clusters.
template <int kCluster>
struct Row {
    RowShared* shared;
    int rank, lo, hi, valid;  // ids [lo, hi) of [0, valid)
    int exchanges = 0;

    __device__ Row(RowShared* memory, int valid_vocab) : shared(memory), valid(valid_vocab) {
        rank = static_cast<int>(blockIdx.x) % kCluster;
        const int chunk = chunk_of(valid_vocab);
        lo = min(rank * chunk, valid_vocab);
        hi = min(lo + chunk, valid_vocab);
    }
    // Ids per CTA, a multiple of four so that every run starts on a vector.
    __host__ __device__ static int chunk_of(int valid_vocab) { return ((valid_vocab + kCluster - 1) / kCluster + 3) / 4 * 4; }
    __device__ static int64_t index() { return blockIdx.x / kCluster; }

    __device__ __forceinline__ void sync() const {
        if constexpr (kCluster == 1) {
            __syncthreads();
        } else {
#if __CUDA_ARCH__ >= 900
            cooperative_groups::this_cluster().sync();
#endif
        }
    }
    template <typename T>
    __device__ __forceinline__ const T* of(const T* mine, int other) const {
        if constexpr (kCluster == 1) {
            return mine;
        } else {
#if __CUDA_ARCH__ >= 900
            return cooperative_groups::this_cluster().map_shared_rank(mine, other);
#else
            return mine;
#endif
        }
    }

    // Both sums over the row, exact, on every thread.
    __device__ void sum(uint64_t& a, uint64_t& b) {
        uint64_t* mine = shared->exchange[exchanges++];
        a = block_sum_u64(a);
        b = block_sum_u64(b);
        if (threadIdx.x == 0) mine[0] = a, mine[1] = b;
        sync();
        a = b = 0;
        for (int r = 0; r < kCluster; ++r) {
            const uint64_t* theirs = of(mine, r);
            a += theirs[0], b += theirs[1];
        }
    }

    __device__ uint64_t max(uint64_t x) {
        uint64_t* mine = shared->exchange[exchanges++];
#pragma unroll
        for (int o = kWarp / 2; o > 0; o >>= 1) {
            const uint64_t y = __shfl_xor_sync(0xffffffffu, x, o);
            x = x > y ? x : y;
        }
        __syncthreads();
        if (threadIdx.x % kWarp == 0) shared->warp[threadIdx.x / kWarp] = x;
        __syncthreads();
        for (int w = 0; w < kRowWarps; ++w) x = x > shared->warp[w] ? x : shared->warp[w];
        if (threadIdx.x == 0) mine[0] = x;
        sync();
        for (int r = 0; r < kCluster; ++r) {
            const uint64_t y = of(mine, r)[0];
            x = x > y ? x : y;
        }
        return x;
    }

    __device__ uint64_t block_sum_u64(uint64_t x) const {
        x = warp_sum_u64(x);
        __syncthreads();
        if (threadIdx.x % kWarp == 0) shared->warp[threadIdx.x / kWarp] = x;
        __syncthreads();
        uint64_t total = 0;
        for (int w = 0; w < kRowWarps; ++w) total += shared->warp[w];
        return total;
    }

    // The sum of the threads before this one, and of all the CTA's.
    __device__ uint64_t scan(uint64_t own, uint64_t& total) const {
        const uint64_t through = warp_scan_u64(own);
        __syncthreads();
        if (threadIdx.x % kWarp == kWarp - 1) shared->warp[threadIdx.x / kWarp] = through;
        __syncthreads();
        uint64_t front = through - own;
        total = 0;
        for (int w = 0; w < kRowWarps; ++w) {
            if (w < static_cast<int>(threadIdx.x / kWarp)) front += shared->warp[w];
            total += shared->warp[w];
        }
        return front;
    }
};

// body(id, logit) for this thread's ids of the CTA's run, four at a time where the row starts on a vector.
template <int kCluster, typename Body>
__device__ __forceinline__ void for_logits(const Row<kCluster>& row, const float* logits, Body body) {
    constexpr int kBatch = 4;
    int from = row.lo;
    if (reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
        const int packs = (row.hi - row.lo) / 4;
        const float4* p = reinterpret_cast<const float4*>(logits + row.lo);
        for (int first = threadIdx.x; first < packs; first += kBatch * kRowThreads) {
            float4 x[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (first + i * kRowThreads < packs) x[i] = __ldg(p + first + i * kRowThreads);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int id = row.lo + 4 * (first + i * kRowThreads);
                if (first + i * kRowThreads < packs)
                    body(id, x[i].x), body(id + 1, x[i].y), body(id + 2, x[i].z), body(id + 3, x[i].w);
            }
        }
        from += packs * 4;
    }
    for (int id = from + threadIdx.x; id < row.hi; id += kRowThreads) body(id, __ldg(logits + id));
}

// body(id, z) for this thread's ids of a CTA's run that lies in shared memory from `held` on, four at a time.
template <int kCluster, typename Body>
__device__ __forceinline__ void for_held(const Row<kCluster>& row, const float* held, Body body) {
    const int packs = (row.hi - row.lo) / 4;
#pragma unroll 2
    for (int pack = threadIdx.x; pack < packs; pack += kRowThreads) {
        const float4 z = reinterpret_cast<const float4*>(held)[pack];
        const int id = row.lo + 4 * pack;
        body(id, z.x), body(id + 1, z.y), body(id + 2, z.z), body(id + 3, z.w);
    }
    for (int id = row.lo + 4 * packs + threadIdx.x; id < row.hi; id += kRowThreads) body(id, held[id - row.lo]);
}

// What the device can do for a row: CTAs of a cluster, and shared memory a CTA may have.
struct RowDevice {
    int cluster;
    int shared;
};

inline RowDevice row_device() {
    int device = 0, major = 0, shared = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return {major >= 9 ? kClusterSize : 1, shared};
}

template <typename... Params, typename... Values>
inline int launch_row_kernel(void (*kernel)(Params...), int cluster, int64_t rows, size_t shared, cudaStream_t stream,
                             Values... values) {
    if (shared > 48 * 1024) {
        const cudaError_t status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
        if (status != cudaSuccess) return cudaGetLastError();
    }
    return launch_pdl_cluster(kernel, dim3(static_cast<unsigned>(rows * cluster)), dim3(kRowThreads),
                              static_cast<unsigned>(cluster), shared, stream, values...);
}

}  // namespace spark
