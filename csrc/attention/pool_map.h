// How the bulk tensor copy engine sees a pool of keys or values.
//
// defines: spark::attn::{kBoxRows, pool_map}
#pragma once

#include "common/tensor_map.h"

namespace spark::attn {

constexpr int kBoxRows = 16;  // the largest run of keys that every page size keeps together

// A pool of 16-bit elements [rows, dim], `dim` a multiple of 64, seen as [rows / 8][dim / 64][8][64]; a box is kBoxRows rows, all
// columns. False where the driver does not take it.
inline bool pool_map(CUtensorMap& map, const void* pool, int64_t rows, int dim, bool is_bf16) {
    const auto encode = tensor_map_encoder();
    if (encode == nullptr || rows % 8 != 0 || rows >= INT32_MAX) return false;
    const auto row_bytes = static_cast<cuuint64_t>(dim) * 2;
    const cuuint64_t sizes[4] = {64, 8, static_cast<cuuint64_t>(dim / 64), static_cast<cuuint64_t>(rows / 8)};
    const cuuint64_t strides[3] = {row_bytes, 128, 8 * row_bytes};
    const cuuint32_t box[4] = {64, 8, static_cast<cuuint32_t>(dim / 64), kBoxRows / 8}, steps[4] = {1, 1, 1, 1};
    return encode(&map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<void*>(pool),
                  sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace spark::attn
