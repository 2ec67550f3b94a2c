// MOE_EXPERTS: out[t] += sum_j weight_tj down_e (silu(gate_e x_t) * (up_e x_t)), e = ids_tj; gate_up[E,2F,H], down[E,H,F].
//
// By pairs (tokens * k): up to 8 tokens two kernels, each listing the pairs by expert itself; up to 16 pairs an expert on average
// a sort, the two streaming kernels and the sum over choices; above that the same with tiles of 64 pairs. A token has the same
// bits on all three ways; not on the fourth, for more than 256 tokens on sm_90a, which `invariant` excludes. Floors on an H200
// for 256 experts of 512 x 2048, 8 a token, at 4.2 TB/s: 1 token 50 MB 12.0 us, 8 tokens 361 MB (57 experts) 86, 128 tokens 1.58
// GB 377; 8192 tokens 412 GFLOP, 520 us at 793 TFLOP/s, and 335 MB of results in between, written and read, 160. Weights of an
// expert are read once unless it has more than 32 (in tiles: 64) pairs.
#include "common/dispatch.h"
#include "common/gpu.h"
#include "common/pdl.h"
#include "moe/experts.cuh"
#include "moe/experts_hopper.cuh"
#include "moe/generic.cuh"

namespace {

using namespace spark;

constexpr int kFewTokens = 8;
constexpr int kTileColumns = 64;
constexpr int kStreamAverage = 16;  // pairs an expert, up to which the streaming kernels run
constexpr int kManyTokens = 256;    // from which on a row may have other bits than alone

int64_t whole(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The workspace: how many segments there are, the segments, the sorted pairs, activations in between, results of pairs.
// sparkrt.ops.moe.experts_workspace computes the same size.
struct Layout {
    int64_t segment, pair, act, y, bytes;

    Layout(const Sizes& n, int64_t itemsize) {
        const int64_t pairs = static_cast<int64_t>(n.tokens) * n.top_k;
        const int64_t segments = pairs / ManyColumns::kColumns + (pairs < n.experts ? pairs : n.experts);
        segment = 256;
        pair = segment + whole(segments * 16);
        act = pair + whole(pairs * 4);
        y = act + whole(pairs * n.width * itemsize);
        bytes = y + whole(pairs * n.hidden * itemsize);
    }
};

template <typename T>
struct Call {
    T* out;
    const T *x, *gate_up, *down;
    const int* ids;
    const float* shares;
    unsigned char* workspace;
    Sizes n;
    bool invariant;
    cudaStream_t stream;

    int pairs() const { return n.tokens * n.top_k; }
};

template <typename T>
int run_few(const Call<T>& c, const Layout& layout) {
    T* act = reinterpret_cast<T*>(c.workspace + layout.act);
    const int64_t items = static_cast<int64_t>(c.pairs()) * (c.n.width / 8), most = 2 * current_gpu().multiprocessors;
    const int up = with_steps<8>((c.n.hidden + kBlock - 1) / kBlock, kParts, [&](auto steps) {
        return launch_pdl(gate_up_few_kernel<T, steps>, dim3(static_cast<unsigned>(items < most ? items : most)),
                          dim3(kStreamThreads), 0, c.stream, act, c.x, c.gate_up, c.ids, c.n);
    });
    if (up != cudaSuccess) return up;
    return with_steps<8>((c.n.width + kBlock - 1) / kBlock, kHalves, [&](auto steps) {
        return launch_pdl(down_few_kernel<T, steps>, dim3(static_cast<unsigned>(c.n.hidden + 15) / 16), dim3(kStreamThreads), 0,
                          c.stream, c.out, act, c.down, c.ids, c.shares, c.n);
    });
}

template <typename T>
int stream_products(const Call<T>& c, const Sorted& sorted, T* act, T* y) {
    const dim3 grid(2 * current_gpu().multiprocessors);
    const int up = with_steps<4>((c.n.hidden + kBlock - 1) / kBlock, kParts, [&](auto steps) {
        return launch_pdl(gate_up_many_kernel<T, steps>, grid, dim3(kStreamThreads), 0, c.stream, act, c.x, c.gate_up, sorted,
                          c.n);
    });
    if (up != cudaSuccess) return up;
    return with_steps<4>((c.n.width + kBlock - 1) / kBlock, kHalves, [&](auto steps) {
        return launch_pdl(down_many_kernel<T, steps>, grid, dim3(kStreamThreads), 0, c.stream, y, act, c.down, sorted, c.n);
    });
}

template <typename T>
int tile_products(const Call<T>& c, const Sorted& sorted, T* act, T* y) {
    using Shape = ExpertTile<T>;
    static_assert(Shape::kN == kTileColumns);
    const int64_t segments = c.pairs() / kTileColumns + (c.pairs() < c.n.experts ? c.pairs() : c.n.experts);
    if (segments >= 65536) return kUnsupported;
    const auto launch = [&](auto kernel, int rows, int rows_of_tile, T* out, const T* in, const T* weights) -> int {
        if (const cudaError_t status = allow_shared(kernel, Shape::kBytes)) return status;
        const dim3 grid(static_cast<unsigned>((rows + rows_of_tile - 1) / rows_of_tile), static_cast<unsigned>(segments));
        return launch_pdl(kernel, grid, dim3(Shape::kThreads), Shape::kBytes, c.stream, out, in, weights, sorted, c.n);
    };
    const int up = launch(gate_up_tile_kernel<T>, c.n.width, Shape::kM / 2, act, c.x, c.gate_up);
    return up != cudaSuccess ? up : launch(down_tile_kernel<T>, c.n.hidden, Shape::kM, y, act, c.down);
}

// Whether the grouped product by wgmma serves this call.
template <typename T>
bool by_wgmma(const Call<T>& c) {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9 && !c.invariant && c.n.tokens > kManyTokens && c.n.hidden % HopperTile::kRows == 0 &&
           c.n.width % (HopperTile::kRows / 2) == 0;
}

template <typename T>
int wgmma_products(const Call<T>& c, const Sorted& sorted, T* act, T* y) {
    constexpr bool kBf16 = std::is_same_v<T, bf16>;
    const int64_t experts = c.n.experts;
    CUtensorMap gate_up{}, down{}, inputs{};
    if (!weight_map(gate_up, c.gate_up, experts * 2 * c.n.width, c.n.hidden, kBf16) ||
        !weight_map(down, c.down, experts * c.n.hidden, c.n.width, kBf16) ||
        !matrix_map(inputs, act, c.pairs(), c.n.width, 64, kBf16))
        return kUnsupported;
    const dim3 grid(current_gpu().multiprocessors), block(HopperTile::kThreads);
    const auto up = grouped_kernel<T, true>, out = grouped_kernel<T, false>;
    if (const cudaError_t status = allow_shared(up, HopperTile::kBytes)) return status;
    if (const cudaError_t status = allow_shared(out, HopperTile::kBytes)) return status;
    const int status = launch_pdl(up, grid, block, HopperTile::kBytes, c.stream, gate_up, inputs, act, c.x, sorted, c.n);
    if (status != cudaSuccess) return status;
    return launch_pdl(out, grid, block, HopperTile::kBytes, c.stream, down, inputs, y, nullptr, sorted, c.n);
}

template <typename T>
int run_many(const Call<T>& c, const Layout& layout) {
    const bool tiles = c.pairs() > static_cast<int64_t>(kStreamAverage) * c.n.experts, wgmma = by_wgmma(c);
    T *act = reinterpret_cast<T*>(c.workspace + layout.act), *y = reinterpret_cast<T*>(c.workspace + layout.y);
    const Sorted sorted{reinterpret_cast<int*>(c.workspace), reinterpret_cast<int4*>(c.workspace + layout.segment),
                        reinterpret_cast<int*>(c.workspace + layout.pair)};
    const int columns = wgmma ? HopperTile::kPairs : tiles ? kTileColumns : ManyColumns::kColumns;
    int status = sort_pairs(sorted, c.ids, c.pairs(), c.n.experts, columns, c.stream);
    if (status != cudaSuccess) return status;
    status = wgmma   ? wgmma_products(c, sorted, act, y)
             : tiles ? tile_products(c, sorted, act, y)
                     : stream_products(c, sorted, act, y);
    if (status != cudaSuccess) return status;
    const int64_t threads = static_cast<int64_t>(c.n.tokens) * (c.n.hidden / 8);
    return launch_pdl(combine_kernel<T>, dim3(static_cast<unsigned>((threads + 255) / 256)), dim3(256), 0, c.stream, c.out, y,
                      c.shares, c.n);
}

template <typename T>
int run_generic(const Call<T>& c, const Layout& layout) {
    T* act = reinterpret_cast<T*>(c.workspace + layout.act);
    const auto rows = [](int n) { return static_cast<unsigned>((n + kGenericWarps - 1) / kGenericWarps); };
    if (rows(c.n.width) >= 65536 || rows(c.n.hidden) >= 65536) return kUnsupported;
    const int up = launch_pdl(generic_gate_up_kernel<T>, dim3(c.pairs(), rows(c.n.width)), dim3(kGenericWarps * kWarp), 0,
                              c.stream, act, c.x, c.gate_up, c.ids, c.n.top_k, c.n.experts, c.n.hidden, c.n.width);
    if (up != cudaSuccess) return up;
    return launch_pdl(generic_down_kernel<T>, dim3(c.n.tokens, rows(c.n.hidden)), dim3(kGenericWarps * kWarp), 0, c.stream, c.out,
                      act, c.down, c.ids, c.shares, c.n.top_k, c.n.experts, c.n.hidden, c.n.width);
}

template <typename T>
int run(const Args& a, const Sizes& n, bool invariant, cudaStream_t stream) {
    const Layout layout(n, sizeof(T));
    SPARK_CHECK(a.is(6, DType::u32, 1) && a.dim(6, 0) * 4 >= layout.bytes && a.vectors(6, 0, 1));
    const Call<T> c{a.ptr<T>(0), a.ptr<T>(1), a.ptr<T>(2), a.ptr<T>(3), a.ptr<int>(4), a.ptr<float>(5), a.ptr<unsigned char>(6),
                    n,           invariant,   stream};
    if constexpr (sizeof(T) == 2) {
        const bool vectors =
            a.vectors(0, n.hidden, 2) && a.vectors(1, n.hidden, 2) && a.vectors(2, n.hidden, 2) && a.vectors(3, n.width, 2);
        if (vectors && n.tokens <= kFewTokens && c.pairs() <= kFewPairs) return run_few(c, layout);
        if (vectors && n.experts <= kSortThreads) return run_many(c, layout);
    }
    return run_generic(c, layout);
}

}  // namespace

// (out[T,H] in/out, x[T,H], gate_up[E,2F,H], down[E,H,F], ids[T,k], weights[T,k], workspace, invariant = 0)
SPARK_LAUNCHER(spark_moe_experts) {
    const spark::Args a(args, count);
    SPARK_CHECK((count == 7 || count == 8) && a.given(0) && a.ndim(0) == 2 && a.is(1, a.dtype(0), 2));
    SPARK_CHECK(a.is(2, a.dtype(0), 3) && a.is(3, a.dtype(0), 3) && a.is(4, DType::i32, 2) && a.is(5, DType::f32, 2));
    const int64_t tokens = a.dim(0, 0), hidden = a.dim(0, 1), experts = a.dim(2, 0), width = a.dim(3, 2), k = a.dim(4, 1);
    SPARK_CHECK(a.dim(1, 0) == tokens && a.dim(1, 1) == hidden && a.dim(2, 1) == 2 * width && a.dim(2, 2) == hidden);
    SPARK_CHECK(a.dim(3, 0) == experts && a.dim(3, 1) == hidden && a.dim(4, 0) == tokens && a.dim(5, 0) == tokens);
    SPARK_CHECK(a.dim(5, 1) == k && k > 0 && experts > 0 && hidden > 0 && width > 0 && hidden < (1 << 24) && width < (1 << 24));
    SPARK_CHECK(tokens * k < (1 << 30) && experts < (1 << 24));
    if (tokens == 0) return cudaSuccess;
    const Sizes n{static_cast<int>(tokens), static_cast<int>(k), static_cast<int>(experts), static_cast<int>(hidden),
                  static_cast<int>(width)};
    SPARK_DISPATCH_ACTIVATION(a.dtype(0), return run<T>(a, n, count == 8 && a.integer(7) != 0, stream))
    return kUnsupported;
}
