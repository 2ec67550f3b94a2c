// What launchers ask of the current device.
//
// defines: spark::Gpu, spark::current_gpu, spark::allow_shared
#pragma once

#include <cuda_runtime.h>

namespace spark {

struct Gpu {
    int device, multiprocessors;
    bool clusters;
};

inline Gpu current_gpu() {
    int device = 0, multiprocessors = 1, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return {device, multiprocessors, major >= 9};
}

// Lets `kernel` have more dynamic shared memory than the 48 KB that need no asking for. Legal while a stream is captured.
template <typename Kernel>
inline cudaError_t allow_shared(Kernel* kernel, int bytes) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) cudaGetLastError();
    return status;
}

}  // namespace spark
