// LINEAR and LINEAR_INVARIANT: out[T,N] = x[T,K] w[N,K]^T + bias, fp32 sums, out in the type of x or in float32.
//
// By rows: up to 32 stream (stream.cuh, weights from memory to tensor cores), above that cuBLASLt (12288 x 2048 at 128 rows 22
// us, own tiles 34). LINEAR_INVARIANT, and LINEAR where cuBLASLt is not or does not want a shape, go on with own tiles
// (tile.cuh): 64 x 64 up to 128 rows, where those are too few for the card with k split over a cluster of eight, then 128 x 128.
// All of it but cuBLASLt gives a row the same bits, so that LINEAR changes its order once, above 32 rows, and LINEAR_INVARIANT
// never. What tensor cores do not take (generic.cuh) is one path for all.
//
// H200, bf16, floors at 4.2 TB/s read: 12288 x 2048 (50 MB) 12.0 us, 2048 x 4096 (16.8 MB) 4.0, lm_head 248320 x 2048 (1017 MB)
// 242, 6144 x 1024 (12.6 MB) 3.0. The streaming kernel has two CTAs of 8 warps a multiprocessor with 64 to 128 KB under way. Its
// weights are fetched before the wait for the kernel in front. Products of 4096 rows: 12288 x 2048 206 GFLOP, 260 us at 793
// TFLOP/s; own tiles (mma.sync) reach about 60 % of that.
#include "common/dispatch.h"
#include "common/pdl.h"
#include "linear/cublaslt.h"
#include "linear/generic.cuh"
#include "linear/gpu.h"
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

    __device__ __forceinline__ float biased(float y, int column) const {
        return bias == nullptr ? y : y + to_float(bias[column]);
    }
    __device__ __forceinline__ void store(int row, int column, float y) const {
        const int64_t at = static_cast<int64_t>(row) * n + column;
        if (wide)
            static_cast<float*>(out)[at] = biased(y, column);
        else
            static_cast<T*>(out)[at] = from_float<T>(biased(y, column));
    }
    // Eight neighbouring columns, the first a multiple of eight.
    __device__ __forceinline__ void store_eight(int row, int column, const float (&y)[8]) const {
        if (!vectors) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (column + j < n) store(row, column + j, y[j]);
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
template <typename T, int kTiles>
struct Outputs {
    const Problem<T>& p;

    __device__ __forceinline__ void rows(int item, const T*& low, const T*& high) const {
        const int row = item * 16 + threadIdx.x % kWarp / 4;
        low = p.w + static_cast<int64_t>(min(row, p.n - 1)) * p.k;
        high = p.w + static_cast<int64_t>(min(row + 8, p.n - 1)) * p.k;
    }
    __device__ __forceinline__ void columns(int, const T* (&x)[kTiles], int& tiles) const {
        tiles = kTiles == 1 ? 1 : (p.rows + 7) / 8;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
            x[i] = p.x + static_cast<int64_t>(min(i * 8 + static_cast<int>(threadIdx.x) % kWarp / 4, p.rows - 1)) * p.k;
    }
    __device__ __forceinline__ void ready() const {
        grid_dependency_wait();
        grid_dependency_launch();
    }
    __device__ __forceinline__ void finish(int item, const float (&sums)[kParts][kTiles][16][8]) const {
        const int output = threadIdx.x % 16;
        if (item * 16 + output >= p.n) return;
#pragma unroll
        for (int i = 0; i < kTiles * 8; i += kStreamThreads / 16) {
            const int row = i + threadIdx.x / 16;
            if (row < min(p.rows, kTiles * 8)) p.store(row, item * 16 + output, sum_parts(sums, output, row));
        }
    }
};

template <typename T, int kTiles, int kSteps>
__global__ void __launch_bounds__(kStreamThreads, 2) stream_kernel(const Problem<T> p) {
    __shared__ SplitShared<kTiles> shared;
    Outputs<T, kTiles> outputs{p};
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
                const float4 a = load_cluster(from, part), b = load_cluster(from + 4, part);
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

template <typename T, int kTiles>
int launch_stream(const Problem<T>& p, const Gpu& gpu, cudaStream_t stream) {
    const int items = (p.n + 15) / 16, ctas = items < 2 * gpu.multiprocessors ? items : 2 * gpu.multiprocessors;
    // more activations leave fewer registers for weights
    return with_steps<kTiles == 1   ? 8
                      : kTiles == 2 ? 6
                                    : 4>((p.k + kBlock - 1) / kBlock, kParts, [&](auto steps) {
        return launch_pdl(stream_kernel<T, kTiles, steps>, dim3(ctas), dim3(kStreamThreads), 0, stream, p);
    });
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
        const int status = cublaslt_linear(p.out, p.wide ? DType::f32 : type, p.x, p.w, p.bias, type, p.rows, p.n, p.k, stream);
        if (status != kUnsupported) return status;
    }
    if (p.rows <= kTileRows) return launch_tile<Tile<T, 64, 64, 32, 32, 4>>(p, gpu, stream);
    return launch_tile<Tile<T, 128, 128, 64, 32, 3>>(p, gpu, stream);
}

template <typename T, typename O>
int run_generic(const Args& a, cudaStream_t stream) {
    const int64_t rows = a.dim(0, 0), n = a.dim(0, 1), k = a.dim(1, 1);
    const int64_t across = (n + kGenericTile - 1) / kGenericTile, down = (rows + kGenericTile - 1) / kGenericTile;
    SPARK_CHECK(down < 65536);
    return launch_pdl(generic_linear_kernel<T, O>, dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), dim3(256), 0,
                      stream, a.ptr<O>(0), a.ptr<T>(1), a.ptr<T>(2), a.ptr<T>(3), rows, n, k);
}

template <typename T>
int run(const Args& a, bool invariant, cudaStream_t stream) {
    const int64_t rows = a.dim(0, 0), n = a.dim(0, 1), k = a.dim(1, 1);
    const bool wide = a.dtype(0) == DType::f32;
    if (rows == 0 || n == 0) return cudaSuccess;
    if constexpr (sizeof(T) == 2) {
        if (a.vectors(1, k, sizeof(T)) && a.vectors(2, k, sizeof(T))) {
            const Problem<T> p{a.ptr<void>(0),
                               a.ptr<T>(1),
                               a.ptr<T>(2),
                               a.ptr<T>(3),
                               static_cast<int>(rows),
                               static_cast<int>(n),
                               static_cast<int>(k),
                               wide,
                               n % 8 == 0 && a.vectors(0, 8, 2)};
            return run_tensor(p, a.dtype(1), invariant, stream);
        }
    }
    return wide ? run_generic<T, float>(a, stream) : run_generic<T, T>(a, stream);
}

int linear(const Args& a, bool invariant, cudaStream_t stream) {
    SPARK_CHECK(a.count() == 4 && a.given(0) && a.ndim(0) == 2 && a.given(1) && a.ndim(1) == 2 && a.is(2, a.dtype(1), 2));
    SPARK_CHECK(a.dtype(0) == a.dtype(1) || a.dtype(0) == DType::f32);
    SPARK_CHECK(a.dim(1, 0) == a.dim(0, 0) && a.dim(2, 0) == a.dim(0, 1) && a.dim(2, 1) == a.dim(1, 1) && a.dim(1, 1) > 0);
    SPARK_CHECK(!a.given(3) || (a.is(3, a.dtype(1), 1) && a.dim(3, 0) == a.dim(0, 1)));
    SPARK_CHECK(a.dim(0, 0) < (1 << 30) && a.dim(0, 1) < (1 << 30) && a.dim(1, 1) < (1 << 30));
    SPARK_DISPATCH_ACTIVATION(a.dtype(1), return run<T>(a, invariant, stream))
    return kUnsupported;
}

}  // namespace

// (out[T,N], x[T,K], w[N,K], bias[N] or none); out of x's type or float32
SPARK_LAUNCHER(spark_linear) { return linear(spark::Args(args, count), false, stream); }
SPARK_LAUNCHER(spark_linear_invariant) { return linear(spark::Args(args, count), true, stream); }
