// Which rows an expert works on. A pair is (token, j): the j-th choice of a token, pair number token * k + j. Pairs of one expert
// are cut into segments of at most so many columns of a product; a product's column is a pair of its segment.
//
// Few pairs: every CTA makes the list itself, in shared memory (FewColumns). Many: one CTA, or a cluster, sorts them for all
// (sort_pairs): it counts, adds up over experts, and places. Pairs of an expert come in any order, which no result depends on. A
// stable sort by one CTA took 200 us for 65,536 pairs: 1.5 us a round of __match_any_sync.
//
// defines: spark::kFewPairs, FewShared, FewColumns, list_pairs, ManyColumns, Sorted, sort_pairs, kSortThreads
#pragma once

#include <cooperative_groups.h>

#include "common/gpu.h"
#include "common/pdl.h"
#include "linear/stream.cuh"

namespace spark {

constexpr int kFewPairs = 128;
constexpr int kSortThreads = 1024;
constexpr int kSortAlone = 4096, kSortCtas = 8;  // pairs up to which one CTA sorts; above, a cluster

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
    int* segments;  // how many; after it two tickets at 0, for who hands out the tiles of each product
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

// The CTAs of a grid that is one cluster; experts <= kSortThreads. Segments have up to `columns` pairs.
template <int kCtas>
static __global__ void __launch_bounds__(kSortThreads)
    sort_pairs_kernel(Sorted out, const int* ids, int pairs, int experts, int columns) {
    __shared__ int counts[kSortThreads], next[kSortThreads], scratch[kWarp];
    const int expert = threadIdx.x, rank = blockIdx.x, stretch = (pairs + kCtas - 1) / kCtas;
    const int first = min(rank * stretch, pairs), last = min(first + stretch, pairs);
    const auto each = [&](auto body) {  // (pair, its expert)
#pragma unroll 8
        for (int pair = first + expert; pair < last; pair += kSortThreads) body(pair, min(max(ids[pair], 0), experts - 1));
    };
    const auto sync = [] {
        if constexpr (kCtas == 1) {
            __syncthreads();
        } else {
#if __CUDA_ARCH__ >= 900
            cooperative_groups::this_cluster().sync();
#endif
        }
    };
    counts[expert] = 0;
    __syncthreads();
    grid_dependency_wait();
    grid_dependency_launch();
    each([&](int, int e) { atomicAdd(&counts[e], 1); });
    sync();
    int total = 0, earlier = 0;  // pairs of this thread's expert, and of those in the CTAs before this one
    for (int r = 0; r < kCtas; ++r) {
        const int* theirs = counts;
#if __CUDA_ARCH__ >= 900
        if constexpr (kCtas > 1) theirs = cooperative_groups::this_cluster().map_shared_rank(counts, r);
#endif
        if (r < rank) earlier += theirs[expert];
        total += theirs[expert];
    }
    sync();  // nobody leaves while another reads here
    const int start = sum_before(total, scratch), cuts = (total + columns - 1) / columns, before = sum_before(cuts, scratch);
    next[expert] = start + earlier;
    if (rank == 0 && expert < experts) {
        for (int c = 0; c < cuts; ++c)
            out.segment[before + c] = make_int4(expert, start + c * columns, min(columns, total - c * columns), 0);
        if (expert == experts - 1) *out.segments = before + cuts;
        if (expert == 0) out.segments[1] = out.segments[2] = 0;
    }
    __syncthreads();
    each([&](int pair, int e) { out.pair[atomicAdd(&next[e], 1)] = pair; });
}

inline int sort_pairs(const Sorted& out, const int* ids, int pairs, int experts, int columns, cudaStream_t stream) {
    const auto sort = [&](auto kernel, int ctas) -> int {
        return launch_pdl_cluster(kernel, dim3(ctas), dim3(kSortThreads), ctas, 0, stream, out, ids, pairs, experts, columns);
    };
    if (pairs > kSortAlone && current_gpu().clusters) return sort(sort_pairs_kernel<kSortCtas>, kSortCtas);
    return sort(sort_pairs_kernel<1>, 1);
}

}  // namespace spark
