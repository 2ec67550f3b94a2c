// Shared memory: its addresses, copies into it that no thread waits for, named barriers.
//
// defines: spark::dynamic_shared, shared_address, copy_async, copy_async_commit, copy_async_wait, barrier_arrive, barrier_sync
#pragma once

#include "common/device.cuh"

namespace spark {

__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(1024) unsigned char spark_dynamic_shared[];
    return spark_dynamic_shared;
}

// The 32-bit address that instructions on shared memory take.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory without a register between; zeros if not `present`, which reads nothing (the address must
// be good all the same). With kLine the L2 fetches the whole line of 128 bytes, of which the neighbours' copies want the rest.
template <bool kLine = true>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool present = true) {
    const int bytes = present ? 16 : 0;
    if constexpr (kLine)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool present) {
    copy_async(shared_address(to), from, present);
}
// A thread's copies up to here are one group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the thread's last kPending groups are on their way. A barrier then shows their data to other threads.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Named barriers (1 ... 15; 0 is __syncthreads) of `threads` threads, of which some only announce that they were here.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace spark
