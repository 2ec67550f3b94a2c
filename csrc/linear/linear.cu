// LINEAR and LINEAR_INVARIANT: out[T,N] = x[T,K] w[N,K]^T + bias, fp32 sums, out in the type of x or in float32.
//
// By rows: up to 32 stream (stream.cuh, weights from memory to tensor cores), above that cuBLASLt (12288 x 2048 at 128 rows 22
// us, own tiles 34). LINEAR_INVARIANT, and LINEAR where cuBLASLt is not or does not want a shape, go on with own tiles
// (tile.cuh): 64 x 64 up to 128 rows, where those are too few for the card with k split over a cluster of eight, then 128 x 128.
// All of it but cuBLASLt gives a row the same bits, so that LINEAR changes its order once, above 32 rows, and LINEAR_INVARIANT
// never. ADD_LINEAR adds to what out holds, NORM_LINEAR norms x first: by itself where that is quicker (input.cuh), else in a
// kernel in front. What tensor cores do not take (generic.cuh) is one path for all.
//
// H200, bf16, floors at 4.2 TB/s read: 12288 x 2048 (50 MB) 12.0 us, 2048 x 4096 (16.8 MB) 4.0, lm_head 248320 x 2048 (1017 MB)
// 242, 6144 x 1024 (12.6 MB) 3.0. The streaming kernel has two CTAs of 8 warps a multiprocessor with 64 to 128 KB under way. Its
// weights are fetched before the wait for the kernel in front. Products of 4096 rows: 12288 x 2048 206 GFLOP, 260 us at 793
// TFLOP/s; own tiles (mma.sync) reach about 60 % of that.
#include "common/cluster.cuh"
#include "common/dispatch.h"
#include "common/gpu.h"
#include "common/pdl.h"
#include "linear/cublaslt.h"
#include "linear/generic.cuh"
#include "linear/input.cuh"
#include "linear/stream.cuh"
#include "linear/tile.cuh"

namespace {

using namespace spark;

constexpr int kStreamRows = 32, kTileRows = 128;

template <typename T>
struct Problem {
    void* out;
    const T *x, *w, *bias;
    int rows, n, k;
    bool wide;     // out is float32
    bool vectors;  // rows of out are 16-byte vectors
    bool add;      // to what out holds, in float32 before the one rounding

    __device__ __forceinline__ float biased(float y, int column) const {
        return bias == nullptr ? y : y + to_float(bias[column]);
    }
    // What is added to an output: a load that may begin long before the sum is there.
    __device__ __forceinline__ float before(int row, int column) const {
        const int64_t at = static_cast<int64_t>(row) * n + column;
        return !add ? 0.f : wide ? static_cast<const float*>(out)[at] : to_float(static_cast<const T*>(out)[at]);
    }
    __device__ __forceinline__ void store(int row, int column, float y, float before) const {
        const int64_t at = static_cast<int64_t>(row) * n + column;
        const float sum = add ? before + biased(y, column) : biased(y, column);
        if (wide)
            static_cast<float*>(out)[at] = sum;
        else
            static_cast<T*>(out)[at] = from_float<T>(sum);
    }
    // Eight neighbouring columns, the first a multiple of eight.
    __device__ __forceinline__ void store_eight(int row, int column, const float (&y)[8]) const {
        if (!vectors || add) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (column + j < n) store(row, column + j, y[j], before(row, column + j));
            return;
        }
        if (column >= n) return;
        const int64_t at = static_cast<int64_t>(row) * n + column;
        if (wide) {
            float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
            to[0] = {biased(y[0], column), biased(y[1], column + 1), biased(y[2], column + 2), biased(y[3], column + 3)};
            to[1] = {biased(y[4], column + 4), biased(y[5], column + 5), biased(y[6], column + 6), biased(y[7], column + 7)};
        } else {
            Vec<T> v;
#pragma unroll
            for (int j = 0; j < 8; ++j) v.v[j] = from_float<T>(biased(y[j], column + j));
            store_vec(static_cast<T*>(out) + at, v);
        }
    }
};

// An item: 16 outputs of all rows.
template <typename T, int kTiles, typename Input>
struct Outputs {
    static constexpr int kPasses = (kTiles * 8 + kStreamThreads / 16 - 1) / (kStreamThreads / 16);
    const Problem<T>& p;
    const Input& input;
    unsigned char* kept;  // the input's shared memory
    float before[kPasses] = {};

    __device__ __forceinline__ Outputs(const Problem<T>& problem, const Input& in, unsigned char* shared)
        : p(problem), input(in), kept(shared) {}
    __device__ __forceinline__ void rows(int item, const T*& low, const T*& high) const {
        const int row = item * 16 + threadIdx.x % kWarp / 4;
        low = p.w + static_cast<int64_t>(min(row, p.n - 1)) * p.k;
        high = p.w + static_cast<int64_t>(min(row + 8, p.n - 1)) * p.k;
    }
    __device__ __forceinline__ void columns(int item, const T* (&x)[kTiles], int& tiles) {
        tiles = kTiles == 1 ? 1 : (p.rows + 7) / 8;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) x[i] = input.row(kept, i * 8 + static_cast<int>(threadIdx.x) % kWarp / 4);
        if (!p.add) return;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int row = i * (kStreamThreads / 16) + threadIdx.x / 16, output = item * 16 + threadIdx.x % 16;
            if (row < p.rows && output < p.n) before[i] = p.before(row, output);
        }
    }
    __device__ __forceinline__ void ready() const {
        input.prepare(kept);
        grid_dependency_wait();
        grid_dependency_launch();
        input.fill(kept);
    }
    __device__ __forceinline__ void finish(int item, const float (&sums)[kParts][kTiles][16][8]) const {
        const int output = threadIdx.x % 16;
        if (item * 16 + output >= p.n) return;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int row = i * (kStreamThreads / 16) + threadIdx.x / 16;
            if (row < min(p.rows, kTiles * 8)) p.store(row, item * 16 + output, sum_parts(sums, output, row), before[i]);
        }
    }
};

template <typename T, int kTiles, int kSteps, typename Input>
__global__ void __launch_bounds__(kStreamThreads, 2) stream_kernel(const Problem<T> p, const Input input) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ SplitShared<kTiles> shared;
    Outputs<T, kTiles, Input> outputs(p, input, memory);
    stream_split<T, kTiles, kSteps>(outputs, shared, blockIdx.x, (p.n + 15) / 16, gridDim.x, p.k);
}

// Tiles in bands of kBand tiles of weights, in a band all tiles of rows after another: the weights of a band stay in L2. With
// kCluster, CTA r of a cluster has part r of k, and of the result every eighth row.
template <typename Shape, bool kCluster>
__global__ void __launch_bounds__(Shape::kThreads) tile_kernel(const Problem<typename Shape::T> p) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int kBand = 8;
    const int rank = kCluster ? blockIdx.x % kParts : 0, tile = kCluster ? blockIdx.x / kParts : blockIdx.x;
    const int tiles_n = (p.n + Shape::kM - 1) / Shape::kM, tiles_rows = (p.rows + Shape::kN - 1) / Shape::kN;
    const int band = tile / (kBand * tiles_rows), inside = tile - band * kBand * tiles_rows;
    const int height = min(kBand, tiles_n - band * kBand);
    const int n0 = (band * kBand + inside % height) * Shape::kM, row0 = inside / height * Shape::kN;

    Shape t;
    t.weights = p.w, t.inputs = p.x, t.k = p.k, t.shared = reinterpret_cast<uint4*>(memory);
#pragma unroll
    for (int i = 0; i < Shape::kWeightCopies; ++i) t.weight_row[i] = min(n0 + Shape::row_of(i), p.n - 1);
#pragma unroll
    for (int i = 0; i < Shape::kInputCopies; ++i) t.input_row[i] = min(row0 + Shape::row_of(i), p.rows - 1);
    const int blocks = (p.k + kBlock - 1) / kBlock;
    typename Shape::Sum total = {};
    t.template run<!kCluster>(total, kCluster ? part_of(blocks, rank, kParts) : Span{0, blocks}, kParts, [] {
        grid_dependency_wait();
        grid_dependency_launch();
    });
    t.keep(total);
    if (kCluster)
        cluster_sync();
    else
        __syncthreads();
    float* kept = reinterpret_cast<float*>(memory);
    constexpr int kVectors = Shape::kM / 8, kRows = kCluster ? Shape::kN / kParts : Shape::kN;
    for (int i = threadIdx.x; i < kRows * kVectors; i += Shape::kThreads) {
        const int column = i % kVectors * 8, row = kCluster ? i / kVectors * kParts + rank : i / kVectors;
        float* from = kept + row * Shape::kPitch + column;
        float y[8] = {};
        if (kCluster) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const float4 a = load_peer(from, part), b = load_peer(from + 4, part);
                y[0] += a.x, y[1] += a.y, y[2] += a.z, y[3] += a.w, y[4] += b.x, y[5] += b.y, y[6] += b.z, y[7] += b.w;
            }
        } else {
            const float4 a = *reinterpret_cast<float4*>(from), b = *reinterpret_cast<float4*>(from + 4);
            y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w, y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
        }
        if (row0 + row < p.rows) p.store_eight(row0 + row, n0 + column, y);
    }
    if (kCluster) cluster_sync();  // nobody leaves while another reads what it kept
}

template <typename T, int kTiles, typename Input>
int launch_stream(const Problem<T>& p, const Input& input, const Gpu& gpu, cudaStream_t stream) {
    const int items = (p.n + 15) / 16, ctas = items < 2 * gpu.multiprocessors ? items : 2 * gpu.multiprocessors;
    // more activations leave fewer registers for weights
    return with_steps<kTiles == 1   ? 8
                      : kTiles == 2 ? 6
                                    : 4>((p.k + kBlock - 1) / kBlock, kParts, [&](auto steps) -> int {
        const auto kernel = stream_kernel<T, kTiles, steps, Input>;
        const int shared = input.bytes();
        if (shared > 0) {
            if (const cudaError_t status = allow_shared(kernel, shared)) return status;
        }
        return launch_pdl(kernel, dim3(ctas), dim3(kStreamThreads), shared, stream, p, input);
    });
}

template <typename T, int kTiles>
int launch_stream(const Problem<T>& p, const Gpu& gpu, cudaStream_t stream) {
    return launch_stream<T, kTiles>(p, PlainInput<T>{p.x, p.rows, p.k}, gpu, stream);
}

template <typename Shape, bool kCluster>
int launch_tiles(const Problem<typename Shape::T>& p, int64_t ctas, cudaStream_t stream) {
    SPARK_CHECK(ctas < (int64_t(1) << 31));
    const auto kernel = tile_kernel<Shape, kCluster>;
    if (const cudaError_t status = allow_shared(kernel, Shape::kBytes)) return status;
    return launch_pdl_cluster(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Shape::kThreads), kCluster ? kParts : 1,
                              Shape::kBytes, stream, p);
}

template <typename Shape>
int launch_tile(const Problem<typename Shape::T>& p, const Gpu& gpu, cudaStream_t stream) {
    const int64_t tiles = static_cast<int64_t>((p.n + Shape::kM - 1) / Shape::kM) * ((p.rows + Shape::kN - 1) / Shape::kN);
    // with fewer tiles than half the card a split fills it; a part should have two blocks at least
    if (gpu.clusters && 2 * tiles <= gpu.multiprocessors && p.k >= 2 * kParts * kBlock)
        return launch_tiles<Shape, true>(p, tiles * kParts, stream);
    return launch_tiles<Shape, false>(p, tiles, stream);
}

template <typename T>
int run_tensor(const Problem<T>& p, DType type, bool invariant, cudaStream_t stream) {
    const Gpu gpu = current_gpu();
    if (p.rows <= 8) return launch_stream<T, 1>(p, gpu, stream);
    if (p.rows <= 16) return launch_stream<T, 2>(p, gpu, stream);
    if (p.rows <= kStreamRows) return launch_stream<T, 4>(p, gpu, stream);
    if (!invariant && p.vectors && !(p.wide && p.bias != nullptr)) {
        const int status =
            cublaslt_linear(p.out, p.wide ? DType::f32 : type, p.x, p.w, p.bias, type, p.rows, p.n, p.k, p.add, stream);
        if (status != kUnsupported) return status;
    }
    // the small tile also where large ones leave multiprocessors idle: a router's 257 columns of 4096 rows are 96 of them
    const int64_t large = static_cast<int64_t>((p.rows + 127) / 128) * ((p.n + 127) / 128);
    if (p.rows <= kTileRows || large < gpu.multiprocessors) return launch_tile<Tile<T, 64, 64, 32, 32, 4>>(p, gpu, stream);
    return launch_tile<Tile<T, 128, 128, 64, 32, 3>>(p, gpu, stream);
}

template <typename T, typename O>
int run_generic(const Args& a, bool add, cudaStream_t stream) {
    const int64_t rows = a.dim(0, 0), n = a.dim(0, 1), k = a.dim(1, 1);
    const int64_t across = (n + kGenericTile - 1) / kGenericTile, down = (rows + kGenericTile - 1) / kGenericTile;
    SPARK_CHECK(down < 65536);
    return launch_pdl(generic_linear_kernel<T, O>, dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), dim3(256), 0,
                      stream, a.ptr<O>(0), a.ptr<T>(1), a.ptr<T>(2), a.ptr<T>(3), rows, n, k, add);
}

template <typename T>
Problem<T> problem_of(const Args& a, bool add) {
    const int64_t rows = a.dim(0, 0), n = a.dim(0, 1), k = a.dim(1, 1);
    return {a.ptr<void>(0),
            a.ptr<T>(1),
            a.ptr<T>(2),
            a.ptr<T>(3),
            static_cast<int>(rows),
            static_cast<int>(n),
            static_cast<int>(k),
            a.dtype(0) == DType::f32,
            n % 8 == 0 && a.vectors(0, 8, 2),
            add};
}

template <typename T>
bool on_tensor_cores(const Args& a) {
    return sizeof(T) == 2 && a.vectors(1, a.dim(1, 1), sizeof(T)) && a.vectors(2, a.dim(1, 1), sizeof(T));
}

// (out, x, w, bias): what all of the launchers have in common.
int check(const Args& a) {
    SPARK_CHECK(a.given(0) && a.ndim(0) == 2 && a.given(1) && a.ndim(1) == 2 && a.is(2, a.dtype(1), 2));
    SPARK_CHECK(a.dtype(0) == a.dtype(1) || a.dtype(0) == DType::f32);
    SPARK_CHECK(a.dim(1, 0) == a.dim(0, 0) && a.dim(2, 0) == a.dim(0, 1) && a.dim(2, 1) == a.dim(1, 1) && a.dim(1, 1) > 0);
    SPARK_CHECK(!a.given(3) || (a.is(3, a.dtype(1), 1) && a.dim(3, 0) == a.dim(0, 1)));
    SPARK_CHECK(a.dim(0, 0) < (1 << 30) && a.dim(0, 1) < (1 << 30) && a.dim(1, 1) < (1 << 30));
    return cudaSuccess;
}

template <typename T>
int run(const Args& a, bool add, bool invariant, cudaStream_t stream) {
    if (a.size(0) == 0) return cudaSuccess;
    if constexpr (sizeof(T) == 2) {
        if (on_tensor_cores<T>(a)) return run_tensor(problem_of<T>(a, add), a.dtype(1), invariant, stream);
    }
    return a.dtype(0) == DType::f32 ? run_generic<T, float>(a, add, stream) : run_generic<T, T>(a, add, stream);
}

int linear(const Args& a, bool add, bool invariant, cudaStream_t stream) {
    if (const int status = check(a)) return status;
    SPARK_DISPATCH_ACTIVATION(a.dtype(1), return run<T>(a, add, invariant, stream))
    return kUnsupported;
}

constexpr int kMostShared = 100 << 10;  // of a CTA, so that two fit on a multiprocessor
// Where a norm inside the product is quicker than in front of it: an eight-layer 35B step (2048 wide) takes 705 against 720 us at
// one row, 1035 against 1048 at four, 1423 against 1413 at eight; 0.6B (1024 wide) loses 13 us of 863 at one row, 95 at eight.
constexpr int kNormRows = 4, kNormWidth = 2048;

// kUnsupported: nothing was enqueued. `a` are (out, normed, w, bias), so that what they have in common with a plain product is
// so.
template <typename T>
int run_normed(const Args& a, const Args& norm, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
        const Problem<T> p = problem_of<T>(a, false);
        const NormInput<T> input{norm.ptr<T>(1), p.rows, p.k, norm.ptr<float>(2), norm.ptr<T>(0), norm.real(3), norm.real(4)};
        if (p.rows <= kNormRows && p.k >= kNormWidth && on_tensor_cores<T>(a) && norm.vectors(1, p.k, 2) &&
            norm.vectors(2, 0, 4) && input.bytes() <= kMostShared)
            return launch_stream<T, 1>(p, input, current_gpu(), stream);
    }
    return kUnsupported;
}

}  // namespace

SPARK_LAUNCHER(spark_rms_norm);

// (out[T,N], x[T,K], w[N,K], bias[N] or none); out of x's type or float32
SPARK_LAUNCHER(spark_linear) { return count == 4 ? linear(spark::Args(args, 4), false, false, stream) : spark::kBadArgument; }
SPARK_LAUNCHER(spark_linear_invariant) {
    return count == 4 ? linear(spark::Args(args, 4), false, true, stream) : spark::kBadArgument;
}

// (out[T,N] in/out, x[T,K], w[N,K], bias[N] or none, invariant)
SPARK_LAUNCHER(spark_add_linear) {
    SPARK_CHECK(count == 5);
    return linear(spark::Args(args, 4), true, args[4].integer != 0, stream);
}

// (out[T,N], normed[T,K], x[T,K], norm[K], w[N,K], bias[N] or none, eps, offset, invariant)
SPARK_LAUNCHER(spark_norm_linear) {
    SPARK_CHECK(count == 9);
    const spark::Arg norm[5] = {args[1], args[2], args[3], args[6], args[7]}, product[4] = {args[0], args[1], args[4], args[5]};
    const spark::Args n(norm, 5), a(product, 4);
    if (const int status = check(a)) return status;
    SPARK_CHECK(n.is(1, a.dtype(1), 2) && n.dim(1, 0) == a.dim(1, 0) && n.dim(1, 1) == a.dim(1, 1));
    SPARK_CHECK(n.is(2, spark::DType::f32, 1) && n.dim(2, 0) == a.dim(1, 1));
    if (a.size(0) != 0) {
        const auto fused = [&]() -> int {
            SPARK_DISPATCH_ACTIVATION(a.dtype(1), return run_normed<T>(a, n, stream))
            return spark::kUnsupported;
        };
        const int status = fused();
        if (status != spark::kUnsupported) return status;
    }
    const int status = spark_rms_norm(norm, 5, stream);
    return status != cudaSuccess ? status : linear(a, false, args[8].integer != 0, stream);
}
