// What only sm_90a has: wgmma, and registers that move between warpgroups.
//
// Operands in shared memory are tiles as bulk.cuh has them, read along the columns (K-major: Q, K) or across (MN-major: V).
//
// defines: spark::{less_registers, more_registers, descriptor, anchor, wgmma_fence, wgmma_commit, wgmma_wait, wgmma_ss,
//          wgmma_rs}
#pragma once

#include "common/mma.cuh"

namespace spark {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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

// Keeps the assembler from moving the next wait in front of what computes `x`: a store that depends on it and, since it is never
// negative, is never made.
__device__ __forceinline__ void anchor(float x, uint32_t at) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.lt.f32 p, %0, 0f00000000;\n\t@p st.shared.f32 [%1], %0;\n\t}" ::"f"(x), "r"(at)
                 : "memory");
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
__device__ __forceinline__ void wgmma_ss<bf16, 32>(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " SPARK_WGMMA_D128 "%128, %129, p, 1, 1, 0, 0;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8), SPARK_ACC8(16), SPARK_ACC8(24)
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
__device__ __forceinline__ void wgmma_ss<f16, 32>(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " SPARK_WGMMA_D128 "%128, %129, p, 1, 1, 0, 0;\n\t}"
        : SPARK_ACC8(0), SPARK_ACC8(8), SPARK_ACC8(16), SPARK_ACC8(24)
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
#endif

}  // namespace spark
