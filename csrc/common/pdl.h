// Launches with programmatic dependent launch, so that a kernel's prologue overlaps the tail of the one before.
//
// defines: spark::launch_pdl
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace spark {

// The kernel must call grid_dependency_wait() before it touches anything an earlier kernel writes.
template <typename... Params, typename... Values>
inline cudaError_t launch_pdl(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                              Values&&... values) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Values>(values))...);
    if (status != cudaSuccess) cudaGetLastError();  // told here: the next launch must not tell it again
    return status;
}

}  // namespace spark
