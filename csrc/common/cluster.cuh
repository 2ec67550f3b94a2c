// Clusters of CTAs, which see each other's shared memory (sm_90 and up; on others a CTA is alone).
//
// defines: spark::cluster_rank, cluster_sync, load_peer
#pragma once

#include <cooperative_groups.h>

#include "common/device.cuh"

namespace spark {

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#else
    return 0;
#endif
}

// A barrier over the cluster's threads, which also orders what they wrote to shared memory.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What lies in the shared memory of the CTA of `rank` where `at`, a shared address or a pointer, is in ours.
__device__ __forceinline__ float2 load_peer(uint32_t at, int rank) {
    float2 x = make_float2(0.f, 0.f);
#if __CUDA_ARCH__ >= 900
    uint32_t peer;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(peer) : "memory");
#endif
    return x;
}
__device__ __forceinline__ float4 load_peer(float* at, int rank) {
#if __CUDA_ARCH__ >= 900
    return *reinterpret_cast<const float4*>(cooperative_groups::this_cluster().map_shared_rank(at, rank));
#else
    return *reinterpret_cast<const float4*>(at);
#endif
}

}  // namespace spark
