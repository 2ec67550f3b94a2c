// Where a streaming product of up to eight rows takes its activations from: memory as they are, or a norm of them that every CTA
// takes for itself in shared memory while its weights are on their way, which spares a launch. A row has the bits that RMS_NORM
// gives it.
//
// defines: spark::PlainInput, spark::NormInput, spark::kInputRows
#pragma once

#include "linear/stream.cuh"

namespace spark {

constexpr int kInputRows = 8;

template <typename T>
struct PlainInput {
    const T* x;
    int rows, k;

    static constexpr int bytes() { return 0; }
    __device__ __forceinline__ void prepare(unsigned char*) const {}
    __device__ __forceinline__ void fill(unsigned char*) const {}
    __device__ __forceinline__ const T* row(const unsigned char*, int i) const {
        return x + static_cast<int64_t>(min(i, rows - 1)) * k;
    }
};

// normed = x / rms(x) * (offset + weight), also written to memory, by the first CTA. k is a multiple of 8.
template <typename T>
struct NormInput {
    const T* x;
    int rows, k;
    const float* weight;
    T* normed;
    float eps, offset;

    // Rows begin 64 bytes apart modulo 128, so that the two rows that a quarter warp reads meet different banks.
    __host__ __device__ __forceinline__ int pitch() const { return (k + 63) / 64 * 64 + 32; }
    int bytes() const { return k * 4 + rows * pitch() * static_cast<int>(sizeof(T)); }
    __device__ __forceinline__ T* kept(unsigned char* shared) const { return reinterpret_cast<T*>(shared + k * 4); }
    __device__ __forceinline__ const T* row(unsigned char* shared, int i) const {
        return kept(shared) + min(i, rows - 1) * pitch();
    }

    // What nobody writes, before the wait.
    __device__ __forceinline__ void prepare(unsigned char* shared) const {
        float4* to = reinterpret_cast<float4*>(shared);
        for (int i = threadIdx.x; i < k / 4; i += kStreamThreads) to[i] = reinterpret_cast<const float4*>(weight)[i];
    }
    __device__ __forceinline__ void fill(unsigned char* shared) const {
        __shared__ float sums[kInputRows][kParts], scales[kInputRows];
        constexpr int kAtOnce = 4;  // rows whose loads are under way
        static_assert(Vec<T>::n == 8);
        const int packs = k / 8, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
        T* to = kept(shared);
        for (int first = 0; first < rows; first += kAtOnce) {
            float sum[kAtOnce] = {};
            for (int at = threadIdx.x; at < packs; at += kStreamThreads) {
                uint4 raw[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    if (first + i < rows)
                        raw[i] = __ldcg(reinterpret_cast<const uint4*>(x + static_cast<int64_t>(first + i) * k + at * 8));
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (first + i >= rows) continue;
                    *reinterpret_cast<uint4*>(to + (first + i) * pitch() + at * 8) = raw[i];
                    const Vec<T> v = *reinterpret_cast<const Vec<T>*>(&raw[i]);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[i] += to_float(v.v[j]) * to_float(v.v[j]);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i >= rows) continue;
                const float total = warp_sum(sum[i]);
                if (lane == 0) sums[first + i][warp] = total;
            }
        }
        __syncthreads();
        if (warp < rows) {
            const float total = warp_sum(lane < kParts ? sums[warp][lane] : 0.f);
            if (lane == 0) scales[warp] = rsqrtf(total / static_cast<float>(k) + eps);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < packs; at += kStreamThreads) {
            float w[8];
            load_floats<8>(reinterpret_cast<const float*>(shared) + at * 8, w);
            for (int i = 0; i < rows; ++i) {
                T* here = to + i * pitch() + at * 8;
                Vec<T> v = load_vec(here);
#pragma unroll
                for (int j = 0; j < 8; ++j) v.v[j] = from_float<T>(to_float(v.v[j]) * scales[i] * (offset + w[j]));
                store_vec(here, v);
                if (blockIdx.x == 0) store_vec(normed + static_cast<int64_t>(i) * k + at * 8, v);
            }
        }
        __syncthreads();
    }
};

}  // namespace spark
