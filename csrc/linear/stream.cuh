// Products of few rows: weights go from memory to the tensor cores' registers, once, and nothing else is on their way.
//
// A work item is 16 rows of weights times up to 8 * kTiles rows of activations. The product is taken as w x^T, so that the 16
// rows fill the tensor core whatever the number of activations. Along k, 32 columns are a block and two mma: lane t of a quad
// loads the 16 bytes at columns 8t..8t+7 of a row and gives the first two pairs of them to the first mma, the others to the
// second; the activations do the same, so the order of columns inside a block is the same on both sides and no fragment needs
// rearranging. Each lane keeps kSteps blocks of two rows (32 * kSteps bytes) on the way: a block is loaded right after its place
// in the ring was consumed, also across items. 16 warps a multiprocessor have 64 to 128 KB under way, Little's law asks for
// about 40.
//
// stream_split: the 8 warps of a CTA take one part of k each (kParts), parts are added in order through shared memory. For long k
// and few items. stream_alone: a warp works for itself; its unit is one of kHalves parts of an item's k. For short k.
// A row's sum depends on k alone: within a part in ascending order, parts added in ascending order, starting from zero. The tiled
// kernel (tile.cuh) keeps this order, so that both give the same bits.
//
// defines: spark::kBlock, kParts, kHalves, kStreamThreads, part_of, Span, stream_split, stream_alone, sum_parts, Deal, with_steps
#pragma once

#include <type_traits>

#include "common/mma.cuh"

namespace spark {

constexpr int kBlock = 32;  // columns of a block
constexpr int kParts = 8;   // parts of a long k
constexpr int kHalves = 2;  // parts of a short one
constexpr int kStreamThreads = kParts * kWarp;

// Blocks [first, last) of k.
struct Span {
    int first, last;
};

__host__ __device__ inline Span part_of(int blocks, int part, int parts) {
    return {static_cast<int>(static_cast<int64_t>(blocks) * part / parts),
            static_cast<int>(static_cast<int64_t>(blocks) * (part + 1) / parts)};
}

// Deals `items` in runs of kRun to `workers` in turn: items that take longer lie together and must not all be one worker's.
template <int kRun>
struct Deal {
    int worker, workers, items;

    __device__ __forceinline__ int count() const {
        const int runs = (items + kRun - 1) / kRun, mine = (runs + workers - 1 - worker) / workers;
        const bool short_one = mine > 0 && worker + (mine - 1) * workers == runs - 1;
        return mine * kRun - (short_one ? runs * kRun - items : 0);
    }
    __device__ __forceinline__ int operator()(int i) const { return (i / kRun * workers + worker) * kRun + i % kRun; }
};

// Calls launch(steps), steps a compile-time number: how many blocks a lane keeps on the way, at most kMost, so that parts of
// `blocks` / `parts` blocks leave few places of the last round empty.
template <int kMost, typename Launch>
int with_steps(int blocks, int parts, Launch launch) {
    const int longest = (blocks + parts - 1) / parts;
    const auto places = [&](int steps) { return (longest + steps - 1) / steps * steps; };
    if constexpr (kMost >= 8) {
        if (longest > 4 && places(8) <= places(6)) return launch(std::integral_constant<int, 8>());
    }
    if constexpr (kMost >= 6) {
        if (longest > 4 && (kMost >= 8 || 8 * places(6) <= 9 * places(4))) return launch(std::integral_constant<int, 6>());
    }
    return launch(std::integral_constant<int, 4>());
}

// A lane's rows g and g + 8 of the 16, kSteps blocks ahead. `left` is the number of columns from a chunk's first to the end of
// what the lane may read there: beyond it a block is zero, and so are the activations, which makes it add nothing.
template <typename T, int kSteps>
struct Ring {
    uint4 rows[kSteps][2];

    __device__ __forceinline__ void fetch(int step, const T* low, const T* high, int left) {
        rows[step][0] = rows[step][1] = uint4{};
        if (left > step * kBlock) {
            rows[step][0] = load_weights(low + step * kBlock);
            rows[step][1] = load_weights(high + step * kBlock);
        }
    }
    template <int kTiles>
    __device__ __forceinline__ void multiply(int step, float (&sum)[kTiles][4], const uint4 (&x)[kTiles], int tiles) const {
        const uint4 low = rows[step][0], high = rows[step][1];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            if (i < tiles) {
                mma<T>(sum[i], {low.x, high.x, low.y, high.y}, x[i].x, x[i].y);
                mma<T>(sum[i], {low.z, high.z, low.w, high.w}, x[i].z, x[i].w);
            }
        }
    }
};

// One warp's part of the work: units first, first + stride, ... below last. Work gives for a unit
//   span(unit)               the blocks of k
//   rows(unit, low, high)    the lane's two rows of weights
//   columns(unit, x, tiles)  the lane's rows of activations, 8 i + g for i < kTiles (any valid ones where there are none), and
//                            how many of the tiles hold something; both still hold what the unit before left there
//   finish(unit, sum)        takes the fragments of the result
// and ready(), called once between the first loads of weights and the first of activations. Every unit has `chunks` chunks.
template <typename T, int kTiles, int kSteps, typename Work>
__device__ __forceinline__ void stream_units(Work& work, int first, int last, int stride, int k, int chunks) {
    constexpr int kAhead = kTiles <= 2 ? 3 : 2;  // blocks of activations, from L1 or L2, in registers
    const int quad = threadIdx.x % 4 * 8;
    Ring<T, kSteps> ring;
    const T *low = nullptr, *high = nullptr;
    int at = 0, end = 0;
    const auto open = [&](int unit) {
        const Span span = work.span(unit);
        at = span.first * kBlock + quad;
        end = min(span.last * kBlock, k);
        work.rows(unit, low, high);
    };
    if (first < last) {
        open(first);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) ring.fetch(step, low + at, high + at, end - at);
    }
    work.ready();
    const T* x[kTiles] = {};
    int tiles = 0;
    for (int unit = first; unit < last; unit += stride) {
        work.columns(unit, x, tiles);
        float sum[kTiles][4] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int here = at, left = end - at;
            uint4 v[kAhead][kTiles];
            const auto load = [&](int step) {
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    v[step % kAhead][i] = uint4{};
                    if (i < tiles && left > step * kBlock)
                        v[step % kAhead][i] = *reinterpret_cast<const uint4*>(x[i] + here + step * kBlock);
                }
            };
#pragma unroll
            for (int step = 0; step < kAhead - 1; ++step) load(step);
            if (chunk + 1 < chunks) {
                at += kSteps * kBlock;
            } else if (unit + stride < last) {
                open(unit + stride);
            } else {
                at = end;  // nothing follows
            }
            const T *next_low = low + at, *next_high = high + at;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (step + kAhead - 1 < kSteps) load(step + kAhead - 1);
                ring.multiply(step, sum, v[step % kAhead], tiles);
                ring.fetch(step, next_low, next_high, end - at);
            }
        }
        work.finish(unit, sum);
    }
}

template <typename T, int kTiles, int kSteps, typename Work>
__device__ __forceinline__ void stream_alone(Work& work, int first, int last, int stride, int k) {
    const int blocks = (k + kBlock - 1) / kBlock, longest = (blocks + kHalves - 1) / kHalves;
    stream_units<T, kTiles, kSteps>(work, first, last, stride, k, (longest + kSteps - 1) / kSteps);
}

// Fragments of one item from all parts, twice, so that one barrier an item is enough.
template <int kTiles>
struct alignas(16) SplitShared {
    float sums[2][kParts][kTiles][16][8];
};

// Element (row, column) of an item's product: the parts in order.
template <int kTiles>
__device__ __forceinline__ float sum_parts(const float (&sums)[kParts][kTiles][16][8], int row, int column) {
    float total = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) total += sums[part][column / 8][row][column % 8];
    return total;
}

// Adds to `Item` (rows, columns, ready as above, and finish(item, sums), which all threads of the CTA call together) what
// stream_units needs of it.
template <int kTiles, typename Item>
struct SplitWork {
    Item& item;
    SplitShared<kTiles>& shared;
    int blocks, turn = 0;

    __device__ SplitWork(Item& i, SplitShared<kTiles>& s, int b) : item(i), shared(s), blocks(b) {}
    __device__ __forceinline__ Span span(int) const { return part_of(blocks, threadIdx.x / kWarp, kParts); }
    template <typename T>
    __device__ __forceinline__ void rows(int unit, const T*& low, const T*& high) {
        item.rows(unit, low, high);
    }
    template <typename T>
    __device__ __forceinline__ void columns(int unit, const T* (&x)[kTiles], int& tiles) {
        item.columns(unit, x, tiles);
    }
    __device__ __forceinline__ void ready() { item.ready(); }
    __device__ __forceinline__ void finish(int unit, const float (&sum)[kTiles][4]) {
        const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
        auto& mine = shared.sums[turn][threadIdx.x / kWarp];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            *reinterpret_cast<float2*>(&mine[i][g][2 * t]) = make_float2(sum[i][0], sum[i][1]);
            *reinterpret_cast<float2*>(&mine[i][g + 8][2 * t]) = make_float2(sum[i][2], sum[i][3]);
        }
        __syncthreads();
        item.finish(unit, shared.sums[turn]);
        turn ^= 1;
    }
};

template <typename T, int kTiles, int kSteps, typename Item>
__device__ __forceinline__ void stream_split(Item& item, SplitShared<kTiles>& shared, int first, int last, int stride, int k) {
    const int blocks = (k + kBlock - 1) / kBlock, longest = (blocks + kParts - 1) / kParts;
    SplitWork<kTiles, Item> work(item, shared, blocks);
    stream_units<T, kTiles, kSteps>(work, first, last, stride, k, (longest + kSteps - 1) / kSteps);
}

}  // namespace spark
