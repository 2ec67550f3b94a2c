// Launches with programmatic dependent launch, so that a kernel's prologue overlaps the tail of the one before.
//
// defines: spark::launch_pdl, spark::launch_pdl_cluster
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace spark {

// The kernel must call grid_dependency_wait() before it touches anything an earlier kernel writes. `cluster` CTAs (along x) share
// a cluster; 1 is none, for devices that have none.
template <typename... Params, typename... Values>
inline cudaError_t launch_pdl_cluster(void (*kernel)(Params...), dim3 grid, dim3 block, unsigned cluster, size_t shared,
                                      cudaStream_t stream, Values&&... values) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Values>(values))...);
    if (status != cudaSuccess) cudaGetLastError();  // told here: the next launch must not tell it again
    return status;
}

template <typename... Params, typename... Values>
inline cudaError_t launch_pdl(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                              Values&&... values) {
    return launch_pdl_cluster(kernel, grid, block, 1, shared, stream, std::forward<Values>(values)...);
}

}  // namespace spark
