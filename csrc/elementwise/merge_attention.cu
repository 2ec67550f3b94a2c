// MERGE_ATTENTION: attention over two disjoint sets of keys, joined by their log-sum-exps.
//
// A warp a row (one head of one token), so that in place (out is out_a, lse is lse_a) is fine: every lane has read both
// log-sum-exps before the first writes one. -inf means that a part saw nothing; where neither saw anything the row is zero.
#include "common/dispatch.h"
#include "common/pdl.h"

namespace {

using namespace spark;

constexpr int kThreads = 256;
constexpr float kNothing = -1e30f;  // a maximum that no real score undercuts, and that is finite

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) merge_attention_kernel(T* out, float* lse, const T* out_a, const float* lse_a,
                                                                   const T* out_b, const float* lse_b, int64_t rows, int dim) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    if (row >= rows) return;
    const float la = lse_a[row], lb = lse_b[row], top = fmaxf(fmaxf(la, lb), kNothing);
    const float a = expf(la - top), b = expf(lb - top), total = a + b, share = total > 0.f ? 1.f / total : 0.f;
    for (int at = lane * N; at < dim; at += kWarp * N) {
        const Pack<T, N> pa = load_pack<T, N>(out_a + row * dim + at), pb = load_pack<T, N>(out_b + row * dim + at);
        Pack<T, N> y;
#pragma unroll
        for (int j = 0; j < N; ++j) y.v[j] = from_float<T>(to_float(pa.v[j]) * (a * share) + to_float(pb.v[j]) * (b * share));
        store_pack(out + row * dim + at, y);
    }
    __syncwarp();
    if (lane == 0) lse[row] = top + logf(total);
}

template <typename T, int N>
int launch(const Args& a, cudaStream_t stream) {
    const int64_t rows = a.dim(0, 0) * a.dim(0, 1), per_block = kThreads / kWarp;
    return launch_pdl(merge_attention_kernel<T, N>, dim3(static_cast<unsigned>((rows + per_block - 1) / per_block)),
                      dim3(kThreads), 0, stream, a.ptr<T>(0), a.ptr<float>(1), a.ptr<T>(2), a.ptr<float>(3), a.ptr<T>(4),
                      a.ptr<float>(5), rows, static_cast<int>(a.dim(0, 2)));
}

template <typename T>
int run(const Args& a, cudaStream_t stream) {
    bool vectors = true;
    for (int i : {0, 2, 4}) vectors = vectors && a.vectors(i, a.dim(0, 2), sizeof(T));
    return vectors ? launch<T, Vec<T>::n>(a, stream) : launch<T, 1>(a, stream);
}

}  // namespace

// (out[T,Hq,D], lse[T,Hq], out_a, lse_a, out_b, lse_b)
SPARK_LAUNCHER(spark_merge_attention) {
    const spark::Args a(args, count);
    SPARK_CHECK(count == 6 && a.given(0));
    for (int i : {0, 2, 4}) {
        SPARK_CHECK(a.is(i, a.dtype(0), 3) && a.dim(i, 0) == a.dim(0, 0) && a.dim(i, 1) == a.dim(0, 1) &&
                    a.dim(i, 2) == a.dim(0, 2));
        SPARK_CHECK(a.is(i + 1, spark::DType::f32, 2) && a.dim(i + 1, 0) == a.dim(0, 0) && a.dim(i + 1, 1) == a.dim(0, 1));
    }
    if (a.size(0) == 0) return cudaSuccess;
    SPARK_DISPATCH_ACTIVATION(a.dtype(0), return run<T>(a, stream))
    return spark::kUnsupported;
}
