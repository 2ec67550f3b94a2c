// The experts for what tensor cores do not take: float32, widths that are no multiples of 8. Right, not fast: a warp a number.
//
// defines: spark::generic_gate_up_kernel, generic_down_kernel, kGenericWarps
#pragma once

#include "common/device.cuh"

namespace spark {

constexpr int kGenericWarps = 8;

// act[pair][f] = silu(gate) * up of the pair's token
template <typename T>
__global__ void __launch_bounds__(kGenericWarps* kWarp)
    generic_gate_up_kernel(T* act, const T* x, const T* gate_up, const int* ids, int top_k, int experts, int64_t hidden,
                           int64_t width) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int64_t pair = blockIdx.x, f = static_cast<int64_t>(blockIdx.y) * kGenericWarps + threadIdx.x / kWarp;
    if (f >= width) return;
    const int64_t expert = min(max(ids[pair], 0), experts - 1);
    const T *row = x + pair / top_k * hidden, *gate = gate_up + (expert * 2 * width + f) * hidden, *up = gate + width * hidden;
    float a = 0.f, b = 0.f;
    for (int64_t i = threadIdx.x % kWarp; i < hidden; i += kWarp) {
        const float v = to_float(row[i]);
        a = fmaf(to_float(gate[i]), v, a), b = fmaf(to_float(up[i]), v, b);
    }
    a = warp_sum(a), b = warp_sum(b);
    if (threadIdx.x % kWarp == 0) act[pair * width + f] = from_float<T>(silu(a) * b);
}

// out[token][h] += sum_j weight_j * (down act_j)
template <typename T>
__global__ void __launch_bounds__(kGenericWarps* kWarp)
    generic_down_kernel(T* out, const T* act, const T* down, const int* ids, const float* weights, int top_k, int experts,
                        int64_t hidden, int64_t width) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int64_t token = blockIdx.x, h = static_cast<int64_t>(blockIdx.y) * kGenericWarps + threadIdx.x / kWarp;
    if (h >= hidden) return;
    float total = 0.f;
    for (int j = 0; j < top_k; ++j) {
        const int64_t pair = token * top_k + j, expert = min(max(ids[pair], 0), experts - 1);
        const T *row = down + (expert * hidden + h) * width, *v = act + pair * width;
        float y = 0.f;
        for (int64_t i = threadIdx.x % kWarp; i < width; i += kWarp) y = fmaf(to_float(row[i]), to_float(v[i]), y);
        total = fmaf(weights[pair], warp_sum(y), total);
    }
    if (threadIdx.x % kWarp == 0) out[token * hidden + h] = from_float<T>(to_float(out[token * hidden + h]) + total);
}

}  // namespace spark
