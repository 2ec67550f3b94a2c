// Attention over pages for what the tensor-core kernels do not take (float32, odd head dims or pages, groups beyond 16): one CTA
// a query and head, its 4 warps take keys in turn, lanes take dims. Right first; every key is read once by every query head.
//
// defines: spark::attn::{Device, kLog2E, kNothing, Plain, launch_plain}
#pragma once

#include "common/launch.h"
#include "common/mma.cuh"
#include "common/pdl.h"

namespace spark::attn {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNothing = -1e30f;  // a maximum that no real score undercuts, and that is finite

// What launchers ask of the current device.
struct Device {
    int sms = 1, shared = 0, major = 0;
    Device() {
        int id = 0;
        cudaGetDevice(&id);
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id);
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    }
};

struct Plain {
    void* out;
    float* lse;  // or null
    const void *q, *k_pool, *v_pool;
    const int *tables, *slots, *cu_q, *kv_len;  // cu_q null: one query a sequence, its newest
    const float* bias;                          // or null
    int64_t queries, bias_width;
    int sequences, heads, kv_heads, dim, page, table_width, full, window;
    float scale;
};

constexpr int kPlainWarps = 4, kPlainThreads = kPlainWarps * kWarp;
constexpr int kPlainDims = 16;  // dims a lane holds at most

template <typename T>
__global__ void __launch_bounds__(kPlainThreads) plain_attention_kernel(const __grid_constant__ Plain p) {
    __shared__ float merged[kPlainWarps][kPlainDims * kWarp], stats[kPlainWarps][2];
    grid_dependency_wait();
    grid_dependency_launch();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, head = blockIdx.y;
    const int64_t query = blockIdx.x;
    int s = static_cast<int>(query), from_end = 1;  // how many queries of the sequence are left, this one included
    if (p.cu_q != nullptr) {
        for (s = 0; s < p.sequences && p.cu_q[s + 1] <= query; ++s) continue;
        if (s == p.sequences) return;
        from_end = p.cu_q[s + 1] - static_cast<int>(query);
    }
    const int limit = p.table_width * p.page, tokens = min(max(p.kv_len[s], 0), limit), position = p.kv_len[s] - from_end;
    const int first = p.window > 0 ? max(position - p.window + 1, 0) : 0, last = p.full ? tokens : min(position + 1, tokens);
    const int* table = p.tables + static_cast<int64_t>(p.slots[s]) * p.table_width;
    const int64_t at_row = (query * p.heads + head) * p.dim;
    const int64_t at_head = static_cast<int64_t>(head / (p.heads / p.kv_heads)) * p.page * p.dim;
    const float* bias = p.bias == nullptr ? nullptr : p.bias + (head * p.queries + query) * p.bias_width;
    float q[kPlainDims], acc[kPlainDims], top = kNothing, sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPlainDims; ++i) {
        const int d = lane + i * kWarp;
        q[i] = d < p.dim ? to_float(static_cast<const T*>(p.q)[at_row + d]) : 0.f;
        acc[i] = 0.f;
    }
    for (int t = first + warp; t < last; t += kPlainWarps) {
        const int64_t page = table[t / p.page], at = (page * p.kv_heads * p.page + t % p.page) * p.dim + at_head;
        float x = 0.f;
#pragma unroll
        for (int i = 0; i < kPlainDims; ++i) {
            const int d = lane + i * kWarp;
            if (d < p.dim) x += q[i] * to_float(static_cast<const T*>(p.k_pool)[at + d]);
        }
        x = warp_sum(x) * p.scale + (bias == nullptr ? 0.f : bias[t]);
        const float new_top = fmaxf(top, x), fade = expf(top - new_top), weight = expf(x - new_top);
        top = new_top, sum = sum * fade + weight;
#pragma unroll
        for (int i = 0; i < kPlainDims; ++i) {
            const int d = lane + i * kWarp;
            if (d < p.dim) acc[i] = acc[i] * fade + weight * to_float(static_cast<const T*>(p.v_pool)[at + d]);
        }
    }
    if (lane == 0) stats[warp][0] = top, stats[warp][1] = sum;
#pragma unroll
    for (int i = 0; i < kPlainDims; ++i) merged[warp][lane + i * kWarp] = acc[i];
    __syncthreads();
    float all_top = kNothing, all_sum = 0.f, factor[kPlainWarps];
#pragma unroll
    for (int w = 0; w < kPlainWarps; ++w) all_top = fmaxf(all_top, stats[w][0]);
#pragma unroll
    for (int w = 0; w < kPlainWarps; ++w) {
        factor[w] = expf(stats[w][0] - all_top);
        all_sum += stats[w][1] * factor[w];
    }
    for (int d = threadIdx.x; d < p.dim; d += kPlainThreads) {
        float x = 0.f;
#pragma unroll
        for (int w = 0; w < kPlainWarps; ++w) x += merged[w][d] * factor[w];
        static_cast<T*>(p.out)[at_row + d] = from_float<T>(all_sum > 0.f ? x / all_sum : 0.f);
    }
    if (p.lse != nullptr && threadIdx.x == 0) p.lse[query * p.heads + head] = all_sum > 0.f ? all_top + logf(all_sum) : -INFINITY;
}

template <typename T>
int launch_plain(const Plain& p, cudaStream_t stream) {
    if (p.dim > kPlainDims * kWarp || p.queries > INT32_MAX || p.heads > 65535) return kUnsupported;
    return launch_pdl(plain_attention_kernel<T>, dim3(static_cast<unsigned>(p.queries), p.heads), dim3(kPlainThreads), 0, stream,
                      p);
}

}  // namespace spark::attn
