// The experts' products on sm_90a for many tokens: a persistent grouped product by wgmma.
//
// A tile is up to 128 pairs of one expert by 256 rows of its weights (gate_up: 128 gate rows and the 128 up rows that go with
// them, so that silu(gate) * up is a matter of one thread), all of k in one chain of sums. Two warpgroups of 64 pairs compute; a
// third fills a ring of four stages of 64 columns: weights by the copy engine; the pairs' rows, which lie scattered in x, by
// cp.async, those of the activations in between, which are sorted, by the copy engine too. CTAs stay and draw tiles,
// so that the next tile's operands come while a tile is stored, and that tiles which follow each other, those of a segment and of
// an expert, run at the same time and find each other's rows and weights in L2 (dealt out in turn they drifted apart, and weights
// came from memory twice). The copy engine brings 32 rows of weights in the order (8t + 2j + b) -> (8j + 2t + b), so that a lane
// has 8 neighbouring outputs and a quad stores 64 bytes.
//
// 128 x 256 x 64 are 4.2 MFLOP, 1024 cycles of the tensor cores, against 48 KB from L2, whose throughput bounds it (85 %, ncu). A
// third warpgroup of pairs would leave 128 registers a thread, what its sums alone take.
//
// defines: spark::{HopperTile, grouped_kernel}
#pragma once

#include "common/bulk.cuh"
#include "common/tensor_map.h"
#include "common/wgmma.cuh"
#include "moe/experts.cuh"

namespace spark {

struct HopperTile {
    static constexpr int kGroups = 2, kGroupThreads = 128, kThreads = (kGroups + 1) * kGroupThreads;
    static constexpr int kPairs = kGroups * 64, kRows = 256, kK = 64, kStages = 4;
    static constexpr int kLag = 2;  // stages whose cp.async may be under way when the next begins
    static constexpr int kPairBytes = kPairs * kK * 2, kRowBytes = kRows * kK * 2, kStageBytes = kPairBytes + kRowBytes;
    static constexpr int kWarps = kGroupThreads / kWarp;
    static constexpr int kBarriers = kStages * kStageBytes;
    static constexpr int kDrawn = kBarriers + 2 * kStages * 8;  // which tile a stage begins; the next, for those who fetch, twice
    static constexpr int kBytes = kDrawn + (kStages + 2) * 4;
};
static_assert(HopperTile::kBytes <= 227 * 1024, "shared memory of a CTA");

// Weights [rows, k] of 16-bit elements as boxes of half a tile's rows and 64 columns; false where the driver does not take it.
inline bool weight_map(CUtensorMap& map, const void* weights, int64_t rows, int64_t k, bool is_bf16) {
    const auto encode = tensor_map_encoder();
    if (encode == nullptr || rows % 32 != 0 || k % HopperTile::kK != 0) return false;
    const auto row = static_cast<cuuint64_t>(k) * 2;
    const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(k), 2, 4, 4, static_cast<cuuint64_t>(rows) / 32};
    const cuuint64_t strides[4] = {row, 8 * row, 2 * row, 32 * row};
    const cuuint32_t box[5] = {HopperTile::kK, 2, 4, 4, HopperTile::kRows / 2 / 32}, steps[5] = {1, 1, 1, 1, 1};
    return encode(&map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
                  const_cast<void*>(weights), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// `row`, a multiple of 32, is the first of the box.
__device__ __forceinline__ void load_weights(uint32_t to, const CUtensorMap* map, int row, int k, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(map), "r"(k), "r"(0), "r"(row / 32), "r"(barrier)
        : "memory");
}

template <typename T, bool kUp>
struct HopperProduct : HopperTile {
    const Sorted& sorted;
    const Sizes& n;
    uint8_t* const ring;
    const uint32_t base;
    const int k, steps, across, tiles;

    __device__ HopperProduct(const Sorted& s, const Sizes& sizes, uint8_t* shared)
        : sorted(s),
          n(sizes),
          ring(shared),
          base(shared_address(shared)),
          k(kUp ? sizes.hidden : sizes.width),
          steps(k / kK),
          across((kUp ? sizes.width * 2 : sizes.hidden) / kRows),
          tiles(across * *s.segments) {}

    __device__ uint32_t pairs_of(int stage) const { return base + stage * kStageBytes; }
    __device__ uint32_t rows_of(int stage) const { return pairs_of(stage) + kPairBytes; }
    __device__ int& begun(int stage) const { return reinterpret_cast<int*>(ring + kDrawn)[stage]; }
    __device__ int& next(int turn) const { return begun(kStages + turn % 2); }
    __device__ uint32_t full(int stage) const { return base + kBarriers + stage * 8; }
    __device__ uint32_t empty(int stage) const { return base + kBarriers + (kStages + stage) * 8; }

    __device__ void init() const {
        if (threadIdx.x != 0) return;
        for (int stage = 0; stage < kStages; ++stage) {
            init_barrier(full(stage), kUp ? kWarps + 1 : 1);
            init_barrier(empty(stage), kGroups * kWarps);
        }
        fence_barriers();
    }

    // The warpgroup that fetches, for `down` its first thread alone. Whoever waits for a barrier must also be waited for by it:
    // one that fell behind by two phases would take the second for none and wait for ever.
    __device__ void fetch(const CUtensorMap* weights, const CUtensorMap* inputs, const T* x) const {
        constexpr int kAtOnce = kGroupThreads / 8, kMine = kPairs / kAtOnce;  // rows of 128 bytes
        const int thread = threadIdx.x % kGroupThreads, first = thread / 8, chunk = thread % 8;
        if (!kUp && thread != 0) return;
        const auto arrived = [&](int index) {
            fence_async_proxy();
            __syncwarp();
            if (thread % kWarp == 0) arrive(full(index % kStages));
        };
        int index = 0, drawn = 0;  // of stages over all tiles; the tile after this one
        for (int tile = blockIdx.x, turn = 0; tile < tiles; ++turn) {
            if (thread == 0) drawn = gridDim.x + atomicAdd(sorted.segments + (kUp ? 1 : 2), 1);
            const int4 segment = sorted.segment[tile / across];
            const int output = tile % across * (kUp ? kRows / 2 : kRows), boxes = (segment.z + 63) / 64;
            const int row = segment.x * (kUp ? 2 * n.width : n.hidden) + output;
            uint32_t from[kMine];  // this thread's rows, in vectors of 8 elements
            if constexpr (kUp) {
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    const int row = first + i * kAtOnce;
                    if (row < segment.z)
                        from[i] = static_cast<uint32_t>(sorted.pair[segment.y + row] / n.top_k) * (n.hidden / 8) + chunk;
                }
            }
            for (int step = 0; step < steps; ++step, ++index) {
                const int stage = index % kStages;
                wait_barrier(empty(stage), (index / kStages & 1) ^ 1);
                if (thread == 0) {
                    if (step == 0) begun(stage) = tile;
                    expect_bytes(full(stage), kUp ? kRowBytes : kRowBytes + boxes * 64 * kK * 2);
                    load_weights(rows_of(stage), weights, row, step * kK, full(stage));
                    load_weights(rows_of(stage) + kRowBytes / 2, weights, row + (kUp ? n.width : kRows / 2), step * kK,
                                 full(stage));
                    if constexpr (!kUp)
                        for (int box = 0; box < boxes; ++box)
                            load_box(pairs_of(stage) + box * 64 * kK * 2, inputs, segment.y + box * 64, step * kK, full(stage));
                }
                if constexpr (kUp) {
                    const T* block = x + step * kK;
#pragma unroll
                    for (int i = 0; i < kMine; ++i) {
                        const int row = first + i * kAtOnce;
                        if (row < segment.z)
                            copy_async(pairs_of(stage) + row * 128 + ((chunk ^ row % 8) << 4), block + int64_t{from[i]} * 8);
                    }
                    copy_async_commit();
                    if (index >= kLag) {
                        copy_async_wait<kLag>();
                        arrived(index - kLag);
                    }
                }
            }
            if constexpr (kUp) {
                if (thread == 0) next(turn) = drawn;
                asm volatile("bar.sync 1, %0;" ::"n"(kGroupThreads) : "memory");
                tile = next(turn);
            } else {
                tile = drawn;
            }
        }
        if constexpr (kUp) {
            copy_async_wait<0>();
            for (int late = max(index - kLag, 0); late < index; ++late) arrived(late);
        }
        wait_barrier(empty(index % kStages), (index / kStages & 1) ^ 1);
        if (thread == 0) {
            begun(index % kStages) = tiles;
            arrive(full(index % kStages));
        }
        if constexpr (kUp) arrived(index);
    }

    // A warpgroup that computes.
    __device__ void compute(T* out) const {
        const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % kWarp;
        int index = 0;
        const auto done = [&] {  // with the stage before this one
            __syncwarp();
            if (lane == 0) arrive(empty((index - 1) % kStages));
        };
        float sums[kRows / 8][4];
        while (true) {
            wait_barrier(full(index % kStages), index / kStages & 1);
            const int tile = begun(index % kStages);
            if (tile == tiles) break;
            const int4 segment = sorted.segment[tile / across];
            const bool needed = group * 64 < segment.z;
            for (int step = 0; step < steps; ++step, ++index) {
                const int stage = index % kStages;
                wait_barrier(full(stage), index / kStages & 1);
                if (needed) {
                    const uint64_t pairs = descriptor(pairs_of(stage) + group * 64 * 128, 16, 1024);
                    const uint64_t rows = descriptor(rows_of(stage), 16, 1024);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < kK / 16; ++i) wgmma_ss<T>(sums, pairs + 2 * i, rows + 2 * i, step + i > 0);
                    wgmma_commit();
                    wgmma_wait<1>();
                }
                if (step > 0) done();
            }
            wgmma_wait<0>();
            done();
            if (needed)
                store(sums, out, segment, tile % across, group * 64 + threadIdx.x % kGroupThreads / kWarp * 16 + lane / 4);
        }
    }

    // Eight neighbouring outputs of a pair at a time.
    __device__ void store(const float (&sums)[kRows / 8][4], T* out, const int4& segment, int column, int first) const {
        constexpr int kOutputs = kUp ? kRows / 2 : kRows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + half * 8;
            if (row >= segment.z) continue;
            const int64_t at = kUp ? segment.y + row : sorted.pair[segment.y + row];
            T* to = out + at * (kUp ? n.width : n.hidden) + column * kOutputs + threadIdx.x % 4 * 8;
#pragma unroll
            for (int group = 0; group < kOutputs / 32; ++group) {
                uint32_t pack[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float (&sum)[4] = sums[group * 4 + j];
                    float a = sum[2 * half], b = sum[2 * half + 1];
                    if constexpr (kUp) {
                        const float (&up)[4] = sums[kRows / 16 + group * 4 + j];
                        a = silu(a) * up[2 * half], b = silu(b) * up[2 * half + 1];
                    }
                    pack[j] = pack_pair<T>(a, b);
                }
                *reinterpret_cast<uint4*>(to + group * 32) = make_uint4(pack[0], pack[1], pack[2], pack[3]);
            }
        }
    }
};
#endif

// gate_up: act[place] of every sorted pair from rows of x; down: y[pair] from act, which `inputs` maps.
template <typename T, bool kUp>
__global__ void __launch_bounds__(HopperTile::kThreads, 1)
    grouped_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap inputs, T* out, const T* x,
                   const Sorted sorted, const Sizes n) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t ring[];
    grid_dependency_wait();
    grid_dependency_launch();
    const HopperProduct<T, kUp> product(sorted, n, ring);
    product.init();
    __syncthreads();
    if (threadIdx.x / HopperTile::kGroupThreads == HopperTile::kGroups) {
        less_registers<56>();
        product.fetch(&weights, &inputs, x);
    } else {
        more_registers<224>();
        product.compute(out);
    }
#else
    __trap();
#endif
}

}  // namespace spark
