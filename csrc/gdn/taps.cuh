// The causal convolution of four taps and SiLU at one position of a few channels, over a ring of past inputs.
//
// Taps are added from the newest to the oldest, so that a step and a prefill give the same bits.
//
// defines: spark::kTaps, kBack, quick_silu, load_taps, convolve, zero_pack, load_past
#pragma once

#include "common/device.cuh"

namespace spark {

constexpr int kTaps = 4;
constexpr int kBack = kTaps - 1;

// silu(x) to 2 ulp or so, at a third of the instructions of expf and an exact division; 0 where exp overflows.
__device__ __forceinline__ float quick_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// taps[j][i] of N channels from `w` on, channel-major in memory.
template <typename T, int N>
__device__ __forceinline__ void load_taps(const T* w, float (&taps)[kTaps][N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Pack<T, kTaps> channel = load_pack<T, kTaps>(w + i * kTaps);
#pragma unroll
        for (int j = 0; j < kTaps; ++j) taps[j][i] = to_float(channel.v[j]);
    }
}

// past[j] is the input j + 1 tokens back.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> convolve(const float (&taps)[kTaps][N], const Pack<T, N>& now,
                                               const Pack<T, N> (&past)[kBack]) {
    Pack<T, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float sum = to_float(now.v[i]) * taps[kBack][i];
#pragma unroll
        for (int j = 0; j < kBack; ++j) sum = fmaf(to_float(past[j].v[i]), taps[kBack - 1 - j][i], sum);
        y.v[i] = from_float<T>(quick_silu(sum));
    }
    return y;
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> zero_pack() {
    Pack<T, N> x;
#pragma unroll
    for (int i = 0; i < N; ++i) x.v[i] = from_float<T>(0.f);
    return x;
}

// The inputs of positions `position` - 1, - 2, - 3; zeros before position 0.
template <typename T, int N>
__device__ __forceinline__ void load_past(const T* ring, int position, int length, int channels, Pack<T, N> (&past)[kBack]) {
#pragma unroll
    for (int j = 0; j < kBack; ++j) {
        const int p = position - 1 - j;
        past[j] = p < 0 ? zero_pack<T, N>() : load_pack<T, N>(ring + static_cast<int64_t>(p % length) * channels);
    }
}

}  // namespace spark
