// Elementwise kernels over rows: how threads are laid out, whether vectors tile the rows, and the launch.
//
// defines: spark::for_packs, spark::launch_rows
#pragma once

#include "common/dispatch.h"
#include "common/pdl.h"

namespace spark {

constexpr int kElementwiseThreads = 256;

// Calls body(row, pack) for this thread's share of `rows` rows of `packs` packs. Threads run along a row (x) and over rows (y).
template <typename Body>
__device__ __forceinline__ void for_packs(int64_t rows, int64_t packs, Body body) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t pack = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
    if (row < rows && pack < packs) body(row, pack);
}

// Launches `kernel`, written with for_packs, over `rows` rows of `packs` packs.
template <typename... Params, typename... Values>
inline int launch_rows(void (*kernel)(Params...), int64_t rows, int64_t packs, cudaStream_t stream, Values... values) {
    if (rows == 0 || packs == 0) return cudaSuccess;
    int along = 8;
    while (along < packs && along < kElementwiseThreads) along *= 2;
    const int over = kElementwiseThreads / along;
    const int64_t x = (rows + over - 1) / over, y = (packs + along - 1) / along;
    SPARK_CHECK(x < (int64_t(1) << 31) && y < (1 << 16));
    return launch_pdl(kernel, dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)), dim3(along, over), 0, stream, values...);
}

}  // namespace spark
