// Which rows an expert works on. A pair is (token, j): the j-th choice of a token, pair number token * k + j. Pairs of one expert
// are cut into segments of at most so many columns of a product; a product's column is a pair of its segment.
//
// Few pairs: every CTA makes the list itself, in shared memory (FewColumns). Many: one CTA sorts them for all
// (sort_pairs_kernel): a histogram per warp over its stretch of pairs, sums over warps and experts, and a second pass that places
// them: stable, without an atomic. 65,536 pairs are 64 rounds a warp and pass, about 6 us; 1024 pairs about 3 us, latency.
//
// defines: spark::kFewPairs, FewShared, FewColumns, list_pairs, ManyColumns, Sorted, sort_pairs_kernel, kSortThreads, sort_warps
#pragma once

#include "linear/stream.cuh"

namespace spark {

constexpr int kFewPairs = 128;
constexpr int kSortThreads = 1024;

// A segment has up to 8 pairs; -1 where there are fewer. Its rows of activations between the two products are the pairs.
struct FewShared {
    int key[kFewPairs], segment[kFewPairs], expert[kFewPairs], leaders[kParts];
    int pair[kFewPairs][8];
    int segments;
};

struct FewColumns {
    static constexpr int kTiles = 1;
    const FewShared& shared;

    __device__ __forceinline__ int expert(int segment) const { return shared.expert[segment]; }
    __device__ __forceinline__ int tiles(int) const { return 1; }
    // Row of the activations in between that belongs to a column, -1 for none; column 0 has one.
    __device__ __forceinline__ int row(int segment, int column) const { return shared.pair[segment][column]; }
    __device__ __forceinline__ int pair(int row) const { return row; }
};

// Fills `shared` from ids[pairs], with all threads of a CTA of kStreamThreads. Ids outside the table are clamped into it.
__device__ __forceinline__ void list_pairs(FewShared& shared, const int* ids, int pairs, int experts) {
    const int i = threadIdx.x, lane = i % kWarp, warp = i / kWarp;
    if (i < pairs) shared.key[i] = min(max(__ldcg(ids + i), 0), experts - 1);
    for (int j = i; j < kFewPairs * 8; j += kStreamThreads) shared.pair[j / 8][j % 8] = -1;
    __syncthreads();
    int leader = i, rank = 0;  // among the pairs of its expert; every eighth leads a segment
    if (i < pairs) {
        for (int j = 0; j < i; ++j) {
            if (shared.key[j] != shared.key[i]) continue;
            if (rank % 8 == 0) leader = j;
            ++rank;
        }
        if (rank % 8 == 0) leader = i;
    }
    const bool leads = i < pairs && leader == i;
    const uint32_t leading = __ballot_sync(0xffffffffu, leads);
    if (lane == 0) shared.leaders[warp] = __popc(leading);
    __syncthreads();
    int before = __popc(leading & ((1u << lane) - 1u)), all = 0;
#pragma unroll
    for (int w = 0; w < kParts; ++w) {
        if (w < warp) before += shared.leaders[w];
        all += shared.leaders[w];
    }
    if (leads) shared.segment[i] = before, shared.expert[before] = shared.key[i];
    if (i == 0) shared.segments = all;
    __syncthreads();
    if (i < pairs) shared.pair[shared.segment[leader]][rank % 8] = i;
    __syncthreads();
}

// What sort_pairs_kernel leaves: segments (expert, first place, pairs, -) and the pair at each place, experts in ascending order.
struct Sorted {
    int* segments;
    int4* segment;
    int* pair;
};

struct ManyColumns {
    static constexpr int kTiles = 4;
    static constexpr int kColumns = 8 * kTiles;
    Sorted sorted;

    __device__ __forceinline__ int expert(int segment) const { return __ldcg(&sorted.segment[segment].x); }
    __device__ __forceinline__ int tiles(int segment) const { return (sorted.segment[segment].z + 7) / 8; }
    __device__ __forceinline__ int row(int segment, int column) const {
        const int4 s = sorted.segment[segment];
        return column < s.z ? s.y + column : -1;
    }
    __device__ __forceinline__ int pair(int row) const { return sorted.pair[row]; }
};

// Warps that count; their histograms are the kernel's dynamic shared memory, [warps][experts] integers.
inline int sort_warps(int experts) { return experts <= 512 ? kSortThreads / kWarp : kSortThreads / kWarp / 2; }

// Exclusive sum over the block's threads; `scratch` holds one integer per warp.
__device__ __forceinline__ int sum_before(int x, int* scratch) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int sum = x;
#pragma unroll
    for (int o = 1; o < kWarp; o *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= o) sum += other;
    }
    __syncthreads();
    if (lane == kWarp - 1) scratch[warp] = sum;
    __syncthreads();
    int before = sum - x;
    for (int w = 0; w < warp; ++w) before += scratch[w];
    return before;
}

// One CTA of kSortThreads; experts <= kSortThreads. Segments have up to `columns` pairs.
static __global__ void __launch_bounds__(kSortThreads)
    sort_pairs_kernel(Sorted out, const int* ids, int pairs, int experts, int columns, int warps) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ int scratch[kWarp];
    int* counts = reinterpret_cast<int*>(memory);
    grid_dependency_wait();
    grid_dependency_launch();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int i = threadIdx.x; i < warps * experts; i += kSortThreads) counts[i] = 0;
    __syncthreads();
    const int stretch = (pairs + warps * kWarp - 1) / (warps * kWarp) * kWarp;
    const int first = min(warp * stretch, pairs), last = warp < warps ? min(first + stretch, pairs) : first;
    int* mine = counts + warp * experts;
    // The warp's pairs in rounds of 32: body(pair, expert, lanes with the same expert)
    const auto rounds = [&](auto body) {
        for (int at = first; at < last; at += kWarp) {
            const int pair = at + lane, expert = pair < last ? min(max(ids[pair], 0), experts - 1) : -1;
            const uint32_t same = __match_any_sync(0xffffffffu, static_cast<uint32_t>(expert));
            if (expert >= 0) body(pair, expert, same);
            __syncwarp();
            if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
            __syncwarp();
        }
    };
    rounds([](int, int, uint32_t) {});
    __syncthreads();
    const int expert = threadIdx.x;
    int total = 0;
    if (expert < experts) {
        for (int w = 0; w < warps; ++w) {
            const int count = counts[w * experts + expert];
            counts[w * experts + expert] = total;
            total += count;
        }
    }
    const int start = sum_before(total, scratch), cuts = (total + columns - 1) / columns, before = sum_before(cuts, scratch);
    if (expert < experts) {
        for (int w = 0; w < warps; ++w) counts[w * experts + expert] += start;
        for (int c = 0; c < cuts; ++c)
            out.segment[before + c] = make_int4(expert, start + c * columns, min(columns, total - c * columns), 0);
        if (expert == experts - 1) *out.segments = before + cuts;
    }
    __syncthreads();
    rounds([&](int pair, int e, uint32_t same) { out.pair[mine[e] + __popc(same & ((1u << lane) - 1u))] = pair; });
}

}  // namespace spark
