// The product for what tensor cores do not take: float32, k that is no multiple of 8, arrays off 16-byte bounds. Right, not fast.
//
// A CTA of 256 threads has 64 x 64 outputs, 16 columns of k at a time in shared memory as floats, 4 x 4 outputs a thread. An
// output's sum goes over k in ascending order, whatever the number of rows.
//
// defines: spark::generic_linear_kernel, spark::kGenericTile
#pragma once

#include "common/device.cuh"

namespace spark {

constexpr int kGenericTile = 64;

template <typename T, typename O>
__global__ void __launch_bounds__(256)
    generic_linear_kernel(O* out, const T* x, const T* w, const T* bias, int64_t rows, int64_t n, int64_t k, bool add) {
    constexpr int kDepth = 16, kPitch = kGenericTile + 4;
    __shared__ __align__(16) float xs[kDepth][kPitch], ws[kDepth][kPitch];
    grid_dependency_wait();
    grid_dependency_launch();
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * kGenericTile, n0 = static_cast<int64_t>(blockIdx.x) * kGenericTile;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;  // outputs: columns tx * 4 .., rows ty * 4 ..
    float sum[4][4] = {};
    for (int64_t at = 0; at < k; at += kDepth) {
        for (int i = threadIdx.x; i < kGenericTile * kDepth; i += 256) {
            const int depth = i % kDepth, line = i / kDepth;
            const int64_t column = at + depth, xr = row0 + line, wr = n0 + line;
            xs[depth][line] = column < k && xr < rows ? to_float(x[xr * k + column]) : 0.f;
            ws[depth][line] = column < k && wr < n ? to_float(w[wr * k + column]) : 0.f;
        }
        __syncthreads();
#pragma unroll
        for (int depth = 0; depth < kDepth; ++depth) {
            float a[4], b[4];
            load_floats<4>(&xs[depth][ty * 4], a);
            load_floats<4>(&ws[depth][tx * 4], b);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int64_t row = row0 + ty * 4 + i, column = n0 + tx * 4 + j;
            if (row < rows && column < n) {
                const float y = sum[i][j] + (bias != nullptr ? to_float(bias[column]) : 0.f);
                out[row * n + column] = from_float<O>(add ? to_float(out[row * n + column]) + y : y);
            }
        }
    }
}

}  // namespace spark
