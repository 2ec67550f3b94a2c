// Descriptors for the bulk tensor copy engine, made on the host for each launch.
//
// defines: spark::tensor_map_encoder, spark::matrix_map
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace spark {

// The driver's encoder; null where there is none.
inline auto tensor_map_encoder() {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
    }();
    return encode;
}

// A matrix of 16-bit elements [rows, columns]; a box is `box_rows` rows of 64 columns, rows past the end are zeros.
inline bool matrix_map(CUtensorMap& map, const void* matrix, int64_t rows, int64_t columns, int box_rows, bool is_bf16) {
    const auto encode = tensor_map_encoder();
    if (encode == nullptr || columns % 64 != 0 || rows >= INT32_MAX || columns >= INT32_MAX) return false;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
    const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
    return encode(&map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                  const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace spark
