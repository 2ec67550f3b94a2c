// The instructions that matrix kernels need and C++ has no words for: streamed weight loads, tensor-core products, asynchronous
// copies, and a cluster's shared memory. All of them exist from sm_80 on; clusters from sm_90 on.
//
// defines: spark::load_weights, mma_16816, cp_async_16, cp_async_commit, cp_async_wait, cluster_sync, load_cluster
#pragma once

#include <cooperative_groups.h>

#include "common/device.cuh"

namespace spark {

// 16 bytes that are used once: fetched in pieces of 256 bytes, kept out of L1, the first to leave L2.
template <typename T>
__device__ __forceinline__ uint4 load_weights(const T* p) {
    uint4 v;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
}

// c[16x8] += a[16x16] b[16x8]. With g = lane / 4 and t = lane % 4, a thread holds of a the rows g and g + 8 at two neighbouring
// columns (a0, a1) and at the two 8 further on (a2, a3); of b, column g at the same two places (b0, b1); of c, rows g (c0, c1)
// and g + 8 (c2, c3) at columns 2t and 2t + 1.
__device__ __forceinline__ void mma_16816(bf16, float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16816(f16, float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory without a register between; zeros if `present` is false (the address must be valid all
// the same). A thread's copies up to a commit are one group.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool present) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(present ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A barrier over the cluster's threads, which also orders what they wrote to shared memory.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
}

// Four floats of the shared memory of CTA `rank` of the cluster, at the place that `p` is in ours.
__device__ __forceinline__ float4 load_cluster(float* p, int rank) {
#if __CUDA_ARCH__ >= 900
    return *reinterpret_cast<const float4*>(cooperative_groups::this_cluster().map_shared_rank(p, rank));
#else
    return *reinterpret_cast<const float4*>(p);
#endif
}

}  // namespace spark
