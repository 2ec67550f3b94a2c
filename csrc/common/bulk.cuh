// The bulk tensor copy engine (sm_90 and up; nothing is done on others), completing on mbarriers.
//
// It writes shared tiles as blocks of 8 rows: 64 columns of each (128 bytes a row, 1 KB), then the next 64, then the next 8 rows;
// inside a KB, the 16-byte chunk c of row r lies at c ^ r (the 128-byte swizzle): no two of 8 rows' chunks meet in a bank.
//
// defines: spark::{tile_chunk, init_barrier, fence_barriers, expect_bytes, arrive, wait_barrier, load_tile, load_box,
//          prefetch_map, fence_async_proxy}
#pragma once

#include <cuda.h>

#include "common/mma.cuh"

namespace spark {

// Where chunk c of row r of a tile of D columns of 16 bits lies, in bytes.
template <int D>
__device__ __forceinline__ uint32_t tile_chunk(int r, int c) {
    return r / 8 * (16 * D) + c / 8 * 1024 + r % 8 * 128 + (((c % 8) ^ (r % 8)) << 4);
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
// Makes initialized barriers known to the copy engine; __syncthreads after it makes them known to the CTA.
__device__ __forceinline__ void fence_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Waits until the phase of that parity (0 for the first) is over; of a fresh barrier, the phase before the first is.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, int parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra over;\n\t"
        "bra again;\n\t"
        "over:\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// The box whose rows start at 8 * `rows8` of the pool, all columns, to `to` (a multiple of 1 KB).
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, int rows8, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(0), "r"(rows8), "r"(barrier)
        : "memory");
#endif
}
// The box of a plain matrix whose first element is (row, column).
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int row, int column, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
#endif
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Ordinary writes to shared memory before it are seen by wgmma and the copy engine after the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace spark
