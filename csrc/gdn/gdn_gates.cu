// GDN_GATES: the decay g = -exp(a_log) softplus(a + dt_bias) and the write strength beta = sigmoid(b) of each value head.
//
// One thread a value; b and a are columns of the layer's projection. Everything in float, with expf and log1pf: g multiplies over
// thousands of tokens. H200: 4096 tokens x 32 heads move 1.6 MB, half a microsecond: a launch, and no more.
#include "common/dispatch.h"
#include "common/pdl.h"

namespace {

using namespace spark;

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gdn_gates_kernel(float* __restrict__ g, float* __restrict__ beta, const T* __restrict__ proj, const float* __restrict__ a_log,
                     const float* __restrict__ dt_bias, uint32_t values, uint32_t heads, int64_t stride, int b_col) {
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    const bool live = i < values;
    const uint32_t token = live ? i / heads : 0, head = live ? i - token * heads : 0;
    const float rate = expf(a_log[head]), bias = dt_bias[head];
    grid_dependency_wait();
    grid_dependency_launch();
    if (!live) return;
    const T* row = proj + token * stride + b_col;
    const float b = to_float(row[head]), a = to_float(row[heads + head]);
    g[i] = -rate * softplus(a + bias);
    beta[i] = sigmoid(b);
}

template <typename T>
int run(const Args& a, cudaStream_t stream) {
    const int64_t values = a.size(0);
    return launch_pdl(gdn_gates_kernel<T>, dim3(static_cast<unsigned>((values + kThreads - 1) / kThreads)), dim3(kThreads), 0,
                      stream, a.ptr<float>(0), a.ptr<float>(1), a.ptr<T>(2), a.ptr<float>(3), a.ptr<float>(4),
                      static_cast<uint32_t>(values), static_cast<uint32_t>(a.dim(0, 1)), a.dim(2, 1), a.integer(5));
}

}  // namespace

// (g[T,HV], beta[T,HV], proj[T,N], a_log[HV], dt_bias[HV], b_col)
SPARK_LAUNCHER(spark_gdn_gates) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK(count == 6 && a.is(0, DType::f32, 2) && a.is(1, DType::f32, 2) && a.given(2) && a.ndim(2) == 2);
    SPARK_CHECK(a.is(3, DType::f32, 1) && a.is(4, DType::f32, 1));
    const int64_t tokens = a.dim(0, 0), heads = a.dim(0, 1), b_col = a.integer(5);
    SPARK_CHECK(a.dim(1, 0) == tokens && a.dim(1, 1) == heads && a.dim(2, 0) == tokens && a.dim(3, 0) == heads);
    SPARK_CHECK(a.dim(4, 0) == heads && b_col >= 0 && b_col + 2 * heads <= a.dim(2, 1) && a.size(0) < (int64_t(1) << 31));
    if (a.size(0) == 0) return cudaSuccess;
    SPARK_DISPATCH_ACTIVATION(a.dtype(2), return run<T>(a, stream))
    return spark::kUnsupported;
}
