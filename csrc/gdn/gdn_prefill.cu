// GDN_PREFILL: the gated delta rule over prompt slices, in chunks of 64 on absolute positions.
//
// Heads of 128 x 128 in bf16 or f16, with a workspace: two kernels on tensor cores. gdn_prepare does for all chunks at once what
// the state does not decide, gdn_advance walks each slice's chunks with the state in registers. Anything else goes token after
// token (gdn_recurrent): right, and slow.
// The workspace holds a record of 17,408 bytes for each value head of tokens / 64 + 2 slices chunks, more than there can be.
// A slice cut on the grid of 64 gives the same bits as the whole: a chunk's work depends on its tokens and the float32 state.
#include "common/dispatch.h"
#include "common/pdl.h"
#include "gdn/gdn_advance.cuh"
#include "gdn/gdn_prepare.cuh"
#include "gdn/gdn_recurrent.cuh"

namespace {

using namespace spark;

int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
    return value;
}

// Beyond 48 KB a kernel must be allowed its shared memory; legal while a graph is captured.
template <typename... Params>
int launch_large(void (*kernel)(Params...), dim3 grid, int threads, size_t shared, cudaStream_t stream, const Prefill& p) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (status != cudaSuccess) return static_cast<int>(status);
    return launch_pdl(kernel, grid, dim3(threads), shared, stream, p);
}

template <typename T, int kPairs, int kStages>
int advance(const Prefill& p, cudaStream_t stream) {
    return launch_large(gdn_advance_kernel<T, kPairs, kStages>, dim3(kDim / (16 * kPairs), p.heads, p.slices),
                        Advance<T, kPairs, kStages>::kThreads, sizeof(AdvanceShared<kPairs, kStages>), stream, p);
}

template <typename T>
int by_chunks(const Prefill& p, int64_t tokens, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(tokens / kChunk + 2 * p.slices), p.k_heads);
    const int status = launch_large(gdn_prepare_kernel<T>, grid, kPrepareThreads, sizeof(PrepareShared), stream, p);
    if (status != cudaSuccess) return status;
    // Columns of DV a CTA: 64, or 32 while that many CTAs find an SM each; as many stages as fit. Neither changes a bit.
    const bool narrow = int64_t(p.slices) * p.heads * (kDim / 32) <= device_attribute(cudaDevAttrMultiProcessorCount);
    const size_t room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (!narrow && room >= sizeof(AdvanceShared<4, 3>)) return advance<T, 4, 3>(p, stream);
    if (room >= sizeof(AdvanceShared<2, 3>)) return advance<T, 2, 3>(p, stream);
    if (room >= sizeof(AdvanceShared<2, 2>)) return advance<T, 2, 2>(p, stream);
    return advance<T, 2, 1>(p, stream);
}

template <typename T>
int by_tokens(const Prefill& p, bool vectors, cudaStream_t stream) {
    const auto grid = [&](int rows) { return dim3((p.v_dim + rows - 1) / rows, p.heads, p.slices); };
    constexpr int kWarps = kRecurrentThreads / kWarp;
    if (p.k_dim == 128 && vectors)
        return launch_pdl(gdn_recurrent_kernel<T, Row128>, grid(kWarps * Row128::kRows), dim3(kRecurrentThreads), 0, stream, p);
    if (p.k_dim <= RowAny::kLanes * RowAny::kItems)
        return launch_pdl(gdn_recurrent_kernel<T, RowAny>, grid(kWarps * RowAny::kRows), dim3(kRecurrentThreads), 0, stream, p);
    return kUnsupported;
}

template <typename T>
int run(const Args& a, const Prefill& p, cudaStream_t stream) {
    bool vectors = a.vectors(3, p.stride, sizeof(T));
    for (int i : {0, 1, 2}) vectors = vectors && a.vectors(i, 0, 1);
    if constexpr (sizeof(T) == 2) {
        if (p.k_dim == kDim && p.v_dim == kDim && vectors && p.workspace != nullptr) {
            const int64_t records = (a.dim(0, 0) / kChunk + 2 * int64_t(p.slices)) * p.heads;
            SPARK_CHECK(a.vectors(11, 0, 1) && a.size(11) * 4 >= records * Record::kBytes);
            return by_chunks<T>(p, a.dim(0, 0), stream);
        }
    }
    return by_tokens<T>(p, vectors, stream);
}

}  // namespace

// (out[T,HV,DV], state[slots,HV,DV,DK] in/out, snapshots[n,HV,DV,DK]|None, qkv[T,C], g[T,HV], beta[T,HV], slots[S], cu[S+1],
// starts[S], snap_rows[n,2]|None, k_heads, workspace u32|None)
SPARK_LAUNCHER(spark_gdn_prefill) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK((count == 11 || count == 12) && a.given(0) && a.ndim(0) == 3 && a.is(1, DType::f32, 4) && a.is(3, a.dtype(0), 2));
    SPARK_CHECK(a.is(4, DType::f32, 2) && a.is(5, DType::f32, 2) && a.is(6, DType::i32, 1) && a.is(7, DType::i32, 1));
    SPARK_CHECK(a.is(8, DType::i32, 1) && a.given(2) == a.given(9));
    const bool workspace = count == 12 && a.given(11);
    SPARK_CHECK(!workspace || a.dtype(11) == DType::u32);
    const int64_t tokens = a.dim(0, 0), heads = a.dim(1, 1), v_dim = a.dim(1, 2), k_dim = a.dim(1, 3), k_heads = a.integer(10);
    const int64_t slices = a.dim(6, 0);
    SPARK_CHECK(a.dim(0, 1) == heads && a.dim(0, 2) == v_dim && k_heads > 0 && heads % k_heads == 0 && v_dim > 0 && k_dim > 0);
    SPARK_CHECK(a.dim(3, 0) == tokens && a.dim(3, 1) >= 2 * k_heads * k_dim + heads * v_dim);
    for (int i : {4, 5}) SPARK_CHECK(a.dim(i, 0) == tokens && a.dim(i, 1) == heads);
    SPARK_CHECK(a.dim(7, 0) == slices + 1 && a.dim(8, 0) == slices && tokens < (int64_t(1) << 31));
    SPARK_CHECK(slices < (1 << 16) && heads < (1 << 16));
    Prefill p{};
    if (a.given(2)) {
        SPARK_CHECK(a.is(2, DType::f32, 4) && a.is(9, DType::i32, 2) && a.dim(9, 0) == a.dim(2, 0) && a.dim(9, 1) == 2);
        for (int axis = 1; axis < 4; ++axis) SPARK_CHECK(a.dim(2, axis) == a.dim(1, axis));
        p.snapshot_count = static_cast<int>(a.dim(2, 0));
    }
    if (slices == 0 || heads == 0) return cudaSuccess;
    p.out = a.ptr<void>(0), p.state = a.ptr<float>(1), p.snapshots = a.ptr<float>(2), p.qkv = a.ptr<void>(3);
    p.g = a.ptr<float>(4), p.beta = a.ptr<float>(5), p.slots = a.ptr<int>(6), p.cu = a.ptr<int>(7), p.starts = a.ptr<int>(8);
    p.snap_rows = a.ptr<int>(9), p.workspace = workspace ? a.ptr<unsigned char>(11) : nullptr, p.stride = a.dim(3, 1);
    p.slices = static_cast<int>(slices), p.heads = static_cast<int>(heads), p.k_heads = static_cast<int>(k_heads);
    p.k_dim = static_cast<int>(k_dim), p.v_dim = static_cast<int>(v_dim), p.slot_count = static_cast<int>(a.dim(1, 0));
    p.scale = 1.f / sqrtf(static_cast<float>(k_dim));
    SPARK_DISPATCH_ACTIVATION(a.dtype(0), return run<T>(a, p, stream))
    return spark::kUnsupported;
}
