// The two products of the experts, in the streaming form (few rows an expert) and in tiles (many).
//
// gate_up: a fragment of 16 rows of weights is 8 gate rows and the 8 up rows that go with them, so that silu(gate) * up is a
// matter of one thread. k (the hidden width) in kParts parts, as in a projection. down: k (the experts' width) in kHalves parts.
// A pair's result is rounded to the activation type, then weighted and added over a token's choices in fp32, in their order. All
// of it is the same for every number of tokens, so that a token has the same bits in any company.
//
// defines: spark::Sizes, gate_up_few_kernel, down_few_kernel, gate_up_many_kernel, down_many_kernel, gate_up_tile_kernel,
//          down_tile_kernel, combine_kernel, GateUpTile, DownTile
#pragma once

#include "linear/tile.cuh"
#include "moe/route.cuh"

namespace spark {

struct Sizes {
    int tokens, top_k, experts, hidden, width;
};

template <typename T>
__device__ __forceinline__ const T* expert_at(const T* weights, int expert, int rows, int columns) {
    return weights + static_cast<int64_t>(expert) * rows * columns;
}

// An item: 8 outputs of a segment's pairs. A unit is whichever item `item_of` says.
template <typename T, typename Columns, typename Order>
struct GateUp {
    static constexpr int kTiles = Columns::kTiles;
    Columns columns_of;
    Sizes n;
    const T *x, *weights;
    T* act;
    Order item_of;
    int weights_segment = -1, x_segment = -1;
    const T* expert = nullptr;

    __device__ __forceinline__ void rows(int unit, const T*& low, const T*& high) {
        const int item = item_of(unit), groups = n.width / 8, segment = item / groups;
        if (segment != weights_segment) {
            weights_segment = segment;
            expert = expert_at(weights, columns_of.expert(segment), 2 * n.width, n.hidden);
        }
        low = expert + static_cast<int64_t>(item % groups * 8 + threadIdx.x % kWarp / 4) * n.hidden;
        high = low + static_cast<int64_t>(n.width) * n.hidden;
    }
    __device__ __forceinline__ void columns(int unit, const T* (&from)[kTiles], int& tiles) {
        const int segment = item_of(unit) / (n.width / 8);
        if (segment == x_segment) return;
        x_segment = segment;
        tiles = columns_of.tiles(segment);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const int row = columns_of.row(segment, i * 8 + threadIdx.x % kWarp / 4);
            const int pair = columns_of.pair(row >= 0 ? row : columns_of.row(segment, 0));
            from[i] = x + static_cast<int64_t>(pair / n.top_k) * n.hidden;
        }
    }
    __device__ __forceinline__ void ready() const {}
    __device__ __forceinline__ void finish(int unit, const float (&sums)[kParts][kTiles][16][8]) const {
        const int item = item_of(unit);
        static_assert(kStreamThreads / 8 >= 8 * kTiles, "a thread has one output");
        const int output = threadIdx.x % 8, column = threadIdx.x / 8, groups = n.width / 8;
        if (column >= 8 * kTiles) return;
        const int row = columns_of.row(item / groups, column);
        if (row < 0) return;
        const float gate = sum_parts(sums, output, column), up = sum_parts(sums, output + 8, column);
        act[static_cast<int64_t>(row) * n.width + item % groups * 8 + output] = from_float<T>(silu(gate) * up);
    }
};

struct InOrder {
    __device__ __forceinline__ int operator()(int unit) const { return unit; }
};

template <typename T, int kSteps>
__global__ void __launch_bounds__(kStreamThreads, 2)
    gate_up_few_kernel(T* act, const T* x, const T* weights, const int* ids, const Sizes n) {
    __shared__ SplitShared<1> shared;
    __shared__ FewShared few;
    grid_dependency_wait();
    grid_dependency_launch();
    list_pairs(few, ids, n.tokens * n.top_k, n.experts);
    GateUp<T, FewColumns, InOrder> work{FewColumns{few}, n, x, weights, act, {}};
    const int items = few.segments * (n.width / 8);  // neighbours have most often the same activations
    stream_split<T, 1, kSteps>(work, shared, static_cast<int>(static_cast<int64_t>(items) * blockIdx.x / gridDim.x),
                               static_cast<int>(static_cast<int64_t>(items) * (blockIdx.x + 1) / gridDim.x), 1, n.hidden);
}

template <typename T, int kSteps>
__global__ void __launch_bounds__(kStreamThreads, 2)
    gate_up_many_kernel(T* act, const T* x, const T* weights, const Sorted sorted, const Sizes n) {
    __shared__ SplitShared<ManyColumns::kTiles> shared;
    grid_dependency_wait();
    grid_dependency_launch();
    using Runs = Deal<8>;
    const Runs runs{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), *sorted.segments * (n.width / 8)};
    GateUp<T, ManyColumns, Runs> work{ManyColumns{sorted}, n, x, weights, act, runs};
    stream_split<T, ManyColumns::kTiles, kSteps>(work, shared, 0, runs.count(), 1, n.hidden);
}

// A unit: one half of k for 16 outputs of a segment's pairs. `outputs` is fixed for few pairs, for many it is part of the unit.
template <typename T, typename Columns>
struct Down {
    static constexpr int kTiles = Columns::kTiles;
    Columns columns_of;
    Sizes n;
    const T *act, *weights;
    int weights_segment = -1, act_segment = -1;
    const T* expert = nullptr;

    __device__ __forceinline__ Span span(int unit) const {
        return part_of((n.width + kBlock - 1) / kBlock, unit % kHalves, kHalves);
    }
    __device__ __forceinline__ void rows_of(int segment, int output, const T*& low, const T*& high) {
        if (segment != weights_segment) {
            weights_segment = segment;
            expert = expert_at(weights, columns_of.expert(segment), n.hidden, n.width);
        }
        const int row = output + threadIdx.x % kWarp / 4;
        low = expert + static_cast<int64_t>(min(row, n.hidden - 1)) * n.width;
        high = expert + static_cast<int64_t>(min(row + 8, n.hidden - 1)) * n.width;
    }
    __device__ __forceinline__ void columns_at(int segment, const T* (&from)[kTiles], int& tiles) {
        if (segment == act_segment) return;
        act_segment = segment;
        tiles = columns_of.tiles(segment);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const int row = columns_of.row(segment, i * 8 + threadIdx.x % kWarp / 4);
            from[i] = act + static_cast<int64_t>(row >= 0 ? row : columns_of.row(segment, 0)) * n.width;
        }
    }
    __device__ __forceinline__ void ready() const {
        grid_dependency_wait();
        grid_dependency_launch();
    }
};

// The CTA has 16 outputs of all segments: its warps leave every pair's halves in shared memory, then they are weighted and added.
template <typename T>
struct DownFew : Down<T, FewColumns> {
    using Base = Down<T, FewColumns>;
    float (&halves)[kHalves][kFewPairs][16];

    const T* sum_of;  // what this thread adds to in the end; nothing at nullptr
    float before = 0.f;

    __device__ DownFew(const Base& base, float (&h)[kHalves][kFewPairs][16], const T* to) : Base(base), halves(h), sum_of(to) {}
    __device__ __forceinline__ void ready() {
        Base::ready();
        if (sum_of != nullptr) before = to_float(*sum_of);
    }
    __device__ __forceinline__ void rows(int unit, const T*& low, const T*& high) {
        this->rows_of(unit / kHalves, blockIdx.x * 16, low, high);
    }
    __device__ __forceinline__ void columns(int unit, const T* (&from)[1], int& tiles) {
        this->columns_at(unit / kHalves, from, tiles);
    }
    __device__ __forceinline__ void finish(int unit, const float (&sum)[1][4]) {
        const int row = threadIdx.x % kWarp / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int pair = this->columns_of.row(unit / kHalves, column + c);
            if (pair < 0) continue;
            halves[unit % kHalves][pair][row] = sum[0][c];
            halves[unit % kHalves][pair][row + 8] = sum[0][c + 2];
        }
    }
};

// Comes right behind gate_up_few_kernel, which waits for the router before it lets this one start: ids may be read, and weights
// fetched, before the wait.
template <typename T, int kSteps>
__global__ void __launch_bounds__(kStreamThreads, 2)
    down_few_kernel(T* out, const T* act, const T* weights, const int* ids, const float* shares, const Sizes n) {
    __shared__ FewShared few;
    __shared__ float halves[kHalves][kFewPairs][16];
    list_pairs(few, ids, n.tokens * n.top_k, n.experts);
    const int row = threadIdx.x % 16, token = threadIdx.x / 16, output = blockIdx.x * 16 + row;
    T* sum = token < n.tokens && output < n.hidden ? out + static_cast<int64_t>(token) * n.hidden + output : nullptr;
    DownFew<T> work({FewColumns{few}, n, act, weights}, halves, sum);
    stream_alone<T, 1, kSteps>(work, threadIdx.x / kWarp, few.segments * kHalves, kParts, n.width);
    __syncthreads();
    if (sum == nullptr) return;
    float total = 0.f;
    for (int j = 0; j < n.top_k; ++j) {
        const int pair = token * n.top_k + j;
        const float y = 0.f + halves[0][pair][row] + halves[1][pair][row];
        total = fmaf(shares[pair], to_float(from_float<T>(y)), total);
    }
    *sum = from_float<T>(work.before + total);
}

// A warp has both halves of an item (16 outputs of a segment) one after the other.
template <typename T>
struct DownMany : Down<T, ManyColumns> {
    using Base = Down<T, ManyColumns>;
    static constexpr int kTiles = ManyColumns::kTiles;
    T* y;
    int groups;
    Deal<2> item_of;
    float total[kTiles][4] = {};

    __device__ DownMany(const Base& base, T* to, const Deal<2>& deal)
        : Base(base), y(to), groups((base.n.hidden + 15) / 16), item_of(deal) {}
    __device__ __forceinline__ void rows(int unit, const T*& low, const T*& high) {
        const int item = item_of(unit / kHalves);
        this->rows_of(item / groups, item % groups * 16, low, high);
    }
    __device__ __forceinline__ void columns(int unit, const T* (&from)[kTiles], int& filled) {
        this->columns_at(item_of(unit / kHalves) / groups, from, filled);
    }
    __device__ __forceinline__ void finish(int unit, const float (&sum)[kTiles][4]) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[i][e] = (unit % kHalves == 0 ? 0.f : total[i][e]) + sum[i][e];
        if (unit % kHalves != kHalves - 1) return;
        // Lanes 4 apart hold neighbouring outputs of the same two columns: they swap one column each and store two outputs.
        const int item = item_of(unit / kHalves), segment = item / groups, g = threadIdx.x % kWarp / 4, odd = g % 2;
        const int tiles = this->columns_of.tiles(segment);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            if (i >= tiles) break;
            const int row = this->columns_of.row(segment, i * 8 + threadIdx.x % 4 * 2 + odd);
            const int pair = row >= 0 ? this->columns_of.pair(row) : -1;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float a = total[i][2 * half], b = total[i][2 * half + 1];
                const float got = __shfl_xor_sync(0xffffffffu, odd ? a : b, 4);
                const int output = item % groups * 16 + half * 8 + g - odd;
                if (pair < 0 || output >= this->n.hidden) continue;
                Pack<T, 2> two;
                two.v[0] = from_float<T>(odd ? got : a), two.v[1] = from_float<T>(odd ? b : got);
                store_pack(y + static_cast<int64_t>(pair) * this->n.hidden + output, two);
            }
        }
    }
};

// Comes right behind gate_up_many_kernel: segments may be read before the wait.
template <typename T, int kSteps>
__global__ void __launch_bounds__(kStreamThreads, 2)
    down_many_kernel(T* y, const T* act, const T* weights, const Sorted sorted, const Sizes n) {
    const int items = __ldcg(sorted.segments) * ((n.hidden + 15) / 16);
    const Deal<2> deal{static_cast<int>(blockIdx.x * kParts + threadIdx.x / kWarp), static_cast<int>(gridDim.x * kParts), items};
    DownMany<T> work({ManyColumns{sorted}, n, act, weights}, y, deal);
    stream_alone<T, ManyColumns::kTiles, kSteps>(work, 0, deal.count() * kHalves, 1, n.width);
}

// 64 columns a segment. The tile of gate_up has 64 outputs.
template <typename T>
using ExpertTile = Tile<T, 128, 64, 64, 32, 4>;

// Zeroes nothing and fills nothing beyond a segment: columns past its end repeat the last one.
template <typename T>
__global__ void __launch_bounds__(ExpertTile<T>::kThreads)
    gate_up_tile_kernel(T* act, const T* x, const T* weights, const Sorted sorted, const Sizes n) {
    using Shape = ExpertTile<T>;
    constexpr int kOutputs = Shape::kM / 2, kPitch = kOutputs + 4;
    extern __shared__ __align__(128) unsigned char memory[];
    grid_dependency_wait();
    grid_dependency_launch();
    if (static_cast<int>(blockIdx.y) >= *sorted.segments) return;
    const int4 segment = sorted.segment[blockIdx.y];
    const int first = blockIdx.x * kOutputs;
    Shape t;
    t.weights = expert_at(weights, segment.x, 2 * n.width, n.hidden), t.inputs = x, t.k = n.hidden;
    t.shared = reinterpret_cast<uint4*>(memory);
#pragma unroll
    for (int i = 0; i < Shape::kWeightCopies; ++i) {
        const int row = Shape::row_of(i), output = min(first + row / 16 * 8 + row % 8, n.width - 1);
        t.weight_row[i] = row % 16 < 8 ? output : n.width + output;
    }
#pragma unroll
    for (int i = 0; i < Shape::kInputCopies; ++i)
        t.input_row[i] = sorted.pair[segment.y + min(Shape::row_of(i), segment.z - 1)] / n.top_k;
    typename Shape::Sum total = {};
    t.template run<true>(total, {0, (n.hidden + kBlock - 1) / kBlock}, kParts, [] {});
    float* kept = reinterpret_cast<float*>(memory);
    Shape::for_fragments(total, [&](int row, int column, const float (&v)[4]) {
        const int output = row / 16 * 8 + row % 8;
        kept[column * kPitch + output] = silu(v[0]) * v[2];
        kept[(column + 1) * kPitch + output] = silu(v[1]) * v[3];
    });
    __syncthreads();
    for (int i = threadIdx.x; i < Shape::kN * kOutputs / 8; i += Shape::kThreads) {
        const int column = i / (kOutputs / 8), output = i % (kOutputs / 8) * 8;
        if (column >= segment.z || first + output >= n.width) continue;
        Vec<T> v;
#pragma unroll
        for (int j = 0; j < 8; ++j) v.v[j] = from_float<T>(kept[column * kPitch + output + j]);
        store_vec(act + static_cast<int64_t>(segment.y + column) * n.width + first + output, v);
    }
}

// Comes right behind gate_up_tile_kernel: segments may be read, and weights fetched, before the wait.
template <typename T>
__global__ void __launch_bounds__(ExpertTile<T>::kThreads)
    down_tile_kernel(T* y, const T* act, const T* weights, const Sorted sorted, const Sizes n) {
    using Shape = ExpertTile<T>;
    extern __shared__ __align__(128) unsigned char memory[];
    if (static_cast<int>(blockIdx.y) >= __ldcg(sorted.segments)) {
        grid_dependency_wait();
        return;
    }
    const int4 segment = __ldcg(&sorted.segment[blockIdx.y]);
    const int first = blockIdx.x * Shape::kM;
    Shape t;
    t.weights = expert_at(weights, segment.x, n.hidden, n.width), t.k = n.width;
    t.inputs = act + static_cast<int64_t>(segment.y) * n.width;
    t.shared = reinterpret_cast<uint4*>(memory);
#pragma unroll
    for (int i = 0; i < Shape::kWeightCopies; ++i) t.weight_row[i] = min(first + Shape::row_of(i), n.hidden - 1);
#pragma unroll
    for (int i = 0; i < Shape::kInputCopies; ++i) t.input_row[i] = min(Shape::row_of(i), segment.z - 1);
    typename Shape::Sum total = {};
    t.template run<true>(total, {0, (n.width + kBlock - 1) / kBlock}, kHalves, [] {
        grid_dependency_wait();
        grid_dependency_launch();
    });
    t.keep(total);
    __syncthreads();
    const float* kept = reinterpret_cast<const float*>(memory);
    for (int i = threadIdx.x; i < Shape::kN * Shape::kM / 8; i += Shape::kThreads) {
        const int column = i / (Shape::kM / 8), output = i % (Shape::kM / 8) * 8;
        if (column >= segment.z || first + output >= n.hidden) continue;
        Vec<T> v;
#pragma unroll
        for (int j = 0; j < 8; ++j) v.v[j] = from_float<T>(kept[column * Shape::kPitch + output + j]);
        store_vec(y + static_cast<int64_t>(sorted.pair[segment.y + column]) * n.hidden + first + output, v);
    }
}

// out[token] += sum_j share_j y[token * k + j], eight columns a thread
template <typename T>
__global__ void __launch_bounds__(256) combine_kernel(T* out, const T* y, const float* shares, const Sizes n) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int packs = n.hidden / 8;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x, token = at / packs;
    if (token >= n.tokens) return;
    const int64_t column = at % packs * 8;
    const Vec<T> before = load_vec(out + token * n.hidden + column);
    float total[8] = {};
    for (int j = 0; j < n.top_k; ++j) {
        const int64_t pair = token * n.top_k + j;
        const float share = shares[pair];
        const Vec<T> v = load_vec(y + pair * n.hidden + column);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = fmaf(share, to_float(v.v[i]), total[i]);
    }
    Vec<T> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.v[i] = from_float<T>(to_float(before.v[i]) + total[i]);
    store_vec(out + token * n.hidden + column, v);
}

}  // namespace spark
