// What only sm_90a has: the bulk tensor copy engine completing on mbarriers, and wgmma.
//
// Shared tiles are blocks of 8 rows: 64 columns of each (128 bytes a row, 1 KB), then the next 64, then the next 8 rows; inside a
// KB, the 16-byte chunk c of row r lies at c ^ r (the 128-byte swizzle). The copy engine writes that from a 4-D view of the pool
// (tensor_map.h); wgmma reads it along the columns (K-major: Q, K) or across (MN-major: V).
//
// defines: spark::attn::{kHopper, init_barrier, fence_barriers, expect_bytes, arrive, wait_barrier, load_tile, prefetch_map,
// fence_async_proxy,
//          less_registers, more_registers, descriptor, wgmma_fence, wgmma_commit, wgmma_wait, wgmma_ss, wgmma_rs}
#pragma once

#include <cuda.h>

#include "attention/ptx.cuh"

namespace spark::attn {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopper = true;

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized barriers known to the copy engine; __syncthreads after it makes them known to the CTA.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of that parity (0 for the first) is over; of a fresh barrier, the phase before the first is.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, int parity) {
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
}

// The box whose rows start at 8 * `rows8` of the pool, all columns, to `to` (a multiple of 1 KB).
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, int rows8, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(0), "r"(rows8), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Ordinary writes to shared memory before it are seen by wgmma and the copy engine after the next barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void less_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A swizzled operand at `at`. `stride`: bytes from 8 rows to the next 8; `leading`: from 64 columns to the next 64, read across.
__device__ __forceinline__ uint64_t descriptor(uint32_t at, int leading, int stride) {
    return static_cast<uint64_t>((at & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | uint64_t{1} << 62;
}

// Before wgmma reads registers that were written otherwise; closing a group; waiting for all but the newest groups.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define SPARK_WGMMA_D40                                                                \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39}, "
#define SPARK_WGMMA_D64                                                                \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define SPARK_WGMMA_D128                                                                           \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
#define SPARK_ACC(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SPARK_ACC5(j) SPARK_ACC(j), SPARK_ACC(j + 1), SPARK_ACC(j + 2), SPARK_ACC(j + 3), SPARK_ACC(j + 4)
#define SPARK_ACC8(j) SPARK_ACC5(j), SPARK_ACC(j + 5), SPARK_ACC(j + 6), SPARK_ACC(j + 7)

// d = a b^T (+ d if `add`), both from shared memory, along the columns: 64 rows by 8 * kBlocks.
template <typename T, int kBlocks>
__device__ __forceinline__ void wgmma_ss(float (&d)[kBlocks][4], uint64_t a, uint64_t b, int add);
// d += a b: a from registers (fragments of m16n8k16), b from shared memory, across the columns.
template <typename T, int kBlocks>
__device__ __forceinline__ void wgmma_rs(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b);

template <>
__device__ __forceinline__ void wgmma_ss<bf16, 10>(float (&d)[10][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %42, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " SPARK_WGMMA_D40 "%40, %41, p, 1, 1, 0, 0;\n\t}"
        : SPARK_ACC5(0), SPARK_ACC5(5)
        : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void wgmma_ss<bf16, 16>(float (&d)[16][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SPARK_WGMMA_D64 "%64, %65, p, 1, 1, 0, 0;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8)
        : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void wgmma_rs<bf16, 16>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SPARK_WGMMA_D64
        "{%64, %65, %66, %67}, %68, "
        "p, 1, 1, 1;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
__device__ __forceinline__ void wgmma_rs<bf16, 32>(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " SPARK_WGMMA_D128
        "{%128, %129, %130, %131}, %132, "
        "p, 1, 1, 1;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8), SPARK_ACC8(16), SPARK_ACC8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
__device__ __forceinline__ void wgmma_ss<f16, 10>(float (&d)[10][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %42, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 " SPARK_WGMMA_D40 "%40, %41, p, 1, 1, 0, 0;\n\t}"
        : SPARK_ACC5(0), SPARK_ACC5(5)
        : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void wgmma_ss<f16, 16>(float (&d)[16][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " SPARK_WGMMA_D64 "%64, %65, p, 1, 1, 0, 0;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8)
        : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void wgmma_rs<f16, 16>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " SPARK_WGMMA_D64
        "{%64, %65, %66, %67}, %68, "
        "p, 1, 1, 1;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
__device__ __forceinline__ void wgmma_rs<f16, 32>(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " SPARK_WGMMA_D128
        "{%128, %129, %130, %131}, %132, "
        "p, 1, 1, 1;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8), SPARK_ACC8(16), SPARK_ACC8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef SPARK_ACC
#undef SPARK_ACC5
#undef SPARK_ACC8
#undef SPARK_WGMMA_D40
#undef SPARK_WGMMA_D64
#undef SPARK_WGMMA_D128
#else
constexpr bool kHopper = false;
#endif

}  // namespace spark::attn
