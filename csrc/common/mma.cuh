// Tensor-core products of every architecture (mma.sync m16n8k16) and the way to their operands: swizzled tiles, ldmatrix.
//
// A tile's rows are panels of 64 two-byte elements, 128 bytes, whose 16-byte chunk c lies at c ^ (row % 8): eight rows of one
// chunk, which is what ldmatrix reads at a time, then lie in different banks. With g = lane / 4 and t = lane % 4, a lane holds
//   A [16 x 16]: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right neighbour;
//   B [16 x 8]: (2t, g), (2t + 8, g), each with the one below;    D [16 x 8]: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
// So two D tiles side by side are an A fragment once packed, and a product's result is the next one's operand in registers.
// Shared memory is addressed by its 32-bit window addresses.
//
// defines: spark::swizzled, pack_pair, unpack_pair, pack_fragment, ldmatrix, ldmatrix_trans, transpose_8x8, mma
#pragma once

#include "common/copy.cuh"

namespace spark {

// Byte of a 128-byte row's 16-byte chunk.
__device__ __forceinline__ constexpr int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Two values rounded to T, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<f16>(float low, float high) {
    const __half2 x = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
}

template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t x);
template <>
__device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t x) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
}
template <>
__device__ __forceinline__ float2 unpack_pair<f16>(uint32_t x) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

// D tiles of columns 0-7 and 8-15 as an A fragment.
template <typename T>
__device__ __forceinline__ void pack_fragment(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
    a[0] = pack_pair<T>(left[0], left[1]), a[1] = pack_pair<T>(left[2], left[3]);
    a[2] = pack_pair<T>(right[0], right[1]), a[3] = pack_pair<T>(right[2], right[3]);
}

// Four 8 x 8 matrices of two-byte elements: lanes 8i to 8i + 7 give the addresses of the rows of matrix i, r[i] is its share of
// it: elements (g, 2t) and (g, 2t + 1), or, transposed, (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// An 8 x 8 matrix held as ldmatrix gives it, transposed.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// d += a b, operands of type T.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace spark
