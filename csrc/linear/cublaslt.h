// The large products through cuBLASLt, where that library can be found.
//
// defines: spark::cublaslt_linear
#pragma once

#include "common/launch.h"

namespace spark {

// out[rows,n] (type or f32) = x[rows,k] w[n,k]^T + bias[n] (with `add`: + out), all contiguous and on 16-byte bounds, n and k
// multiples of 8; x, w and bias of one type, bf16 or f16; a bias asks for an output of that type. kUnsupported if the library is
// not there or has no algorithm without workspace: nothing was enqueued then.
int cublaslt_linear(void* out, DType out_type, const void* x, const void* w, const void* bias, DType type, int64_t rows,
                    int64_t n, int64_t k, bool add, cudaStream_t stream);

}  // namespace spark
