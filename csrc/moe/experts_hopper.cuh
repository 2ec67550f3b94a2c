// The experts' products on sm_90a for many tokens: a persistent grouped product by wgmma.
//
// A tile is 128 pairs of one expert by 256 rows of its weights (gate_up: 128 gate rows and the 128 up rows that go with them, so
// that silu(gate) * up is a matter of one thread), all of k in one chain of sums. Two warpgroups of 64 pairs compute; a third
// fills a ring of four stages of 64 columns: weights by the copy engine; the pairs' rows, which lie scattered in x, by cp.async,
// those of the activations in between, which are sorted, by the copy engine too. CTAs stay and take tiles in turn, so that the
// next tile's operands come while a tile is stored. Tiles of a segment follow each other: its rows and its weights stay in L2.
//
// 128 x 256 x 64 are 4.2 MFLOP, 1024 cycles of the tensor cores, against 48 KB from L2. 8192 tokens, 8 of 256 experts: 640 tiles
// of pairs where 512 would be full, so of 520 us at 793 TFLOP/s become 650.
//
// defines: spark::{HopperTile, grouped_kernel}
#pragma once

#include "attention/bulk.cuh"
#include "attention/hopper.cuh"
#include "attention/tensor_map.h"
#include "moe/experts.cuh"

namespace spark {

struct HopperTile {
    static constexpr int kGroups = 2, kGroupThreads = 128, kThreads = (kGroups + 1) * kGroupThreads;
    static constexpr int kPairs = kGroups * 64, kRows = 256, kK = 64, kStages = 4;
    static constexpr int kLag = 2;  // stages whose cp.async may be under way when the next begins
    static constexpr int kPairBytes = kPairs * kK * 2, kRowBytes = kRows * kK * 2, kStageBytes = kPairBytes + kRowBytes;
    static constexpr int kBarriers = kStages * kStageBytes;
    static constexpr int kBytes = kBarriers + 2 * kStages * 8;
};
static_assert(HopperTile::kBytes <= 227 * 1024, "shared memory of a CTA");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T, bool kUp>
struct HopperProduct : HopperTile {
    const Sorted& sorted;
    const Sizes& n;
    const uint32_t base;
    const int k, steps, across, tiles;

    __device__ HopperProduct(const Sorted& s, const Sizes& sizes, uint32_t shared)
        : sorted(s),
          n(sizes),
          base(shared),
          k(kUp ? sizes.hidden : sizes.width),
          steps(k / kK),
          across((kUp ? sizes.width * 2 : sizes.hidden) / kRows),
          tiles(across * *s.segments) {}

    __device__ uint32_t pairs_of(int stage) const { return base + stage * kStageBytes; }
    __device__ uint32_t rows_of(int stage) const { return pairs_of(stage) + kPairBytes; }
    __device__ uint32_t full(int stage) const { return base + kBarriers + stage * 8; }
    __device__ uint32_t empty(int stage) const { return base + kBarriers + (kStages + stage) * 8; }

    __device__ void init() const {
        if (threadIdx.x != 0) return;
        for (int stage = 0; stage < kStages; ++stage) {
            attn::init_barrier(full(stage), kUp ? kGroupThreads + 1 : 1);
            attn::init_barrier(empty(stage), kGroups * kGroupThreads / kWarp);
        }
        attn::fence_barriers();
    }

    // The warpgroup that fetches, for `down` its first thread alone. Whoever waits for a barrier must also be waited for by it:
    // one that fell behind by two phases would take the second for none and wait for ever.
    __device__ void fetch(const CUtensorMap* weights, const CUtensorMap* inputs, const T* x) const {
        const int thread = threadIdx.x % kGroupThreads, chunk = thread % 8;
        constexpr int kMine = kPairs / (kGroupThreads / 8);
        if (!kUp && thread != 0) return;
        int index = 0;  // of stages, over all tiles
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int4 segment = sorted.segment[tile / across];
            const int output = tile % across * (kUp ? kRows / 2 : kRows);
            const int row = segment.x * (kUp ? 2 * n.width : n.hidden) + output;
            const T* from[kMine];
            if constexpr (kUp) {
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    const int pair = sorted.pair[segment.y + min(thread / 8 + i * 16, segment.z - 1)];
                    from[i] = x + static_cast<int64_t>(pair / n.top_k) * n.hidden + chunk * 8;
                }
            }
            for (int step = 0; step < steps; ++step, ++index) {
                const int stage = index % kStages;
                attn::wait_barrier(empty(stage), (index / kStages & 1) ^ 1);
                if (thread == 0) {
                    attn::expect_bytes(full(stage), kUp ? kRowBytes : kStageBytes);
                    attn::load_box(rows_of(stage), weights, row, step * kK, full(stage));
                    attn::load_box(rows_of(stage) + kRowBytes / 2, weights, row + (kUp ? n.width : kRows / 2), step * kK,
                                   full(stage));
                    if constexpr (!kUp) attn::load_box(pairs_of(stage), inputs, segment.y, step * kK, full(stage));
                }
                if constexpr (kUp) {
                    const uint32_t to = pairs_of(stage) + thread / 8 * 128 + ((chunk ^ (thread / 8 % 8)) << 4);
#pragma unroll
                    for (int i = 0; i < kMine; ++i) attn::copy_async(to + i * 16 * 128, from[i] + step * kK, 16);
                    attn::commit_copies();
                    if (index >= kLag) {
                        attn::wait_copies<kLag>();
                        attn::fence_async_proxy();
                        attn::arrive(full((index - kLag) % kStages));
                    }
                }
            }
        }
        if constexpr (kUp) {
            attn::wait_copies<0>();
            attn::fence_async_proxy();
            for (int late = max(index - kLag, 0); late < index; ++late) attn::arrive(full(late % kStages));
        }
    }

    // A warpgroup that computes.
    __device__ void compute(T* out) const {
        const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % kWarp;
        int index = 0;
        const auto done = [&] {  // with the stage before this one
            __syncwarp();
            if (lane == 0) attn::arrive(empty((index - 1) % kStages));
        };
        float sums[kRows / 8][4];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int4 segment = sorted.segment[tile / across];
            const bool needed = group * 64 < segment.z;
            for (int step = 0; step < steps; ++step, ++index) {
                const int stage = index % kStages;
                attn::wait_barrier(full(stage), index / kStages & 1);
                if (needed) {
                    const uint64_t pairs = attn::descriptor(pairs_of(stage) + group * 64 * 128, 16, 1024);
                    const uint64_t rows = attn::descriptor(rows_of(stage), 16, 1024);
                    attn::wgmma_fence();
#pragma unroll
                    for (int i = 0; i < kK / 16; ++i) attn::wgmma_ss<T>(sums, pairs + 2 * i, rows + 2 * i, step + i > 0);
                    attn::wgmma_commit();
                    attn::wgmma_wait<1>();
                }
                if (step > 0) done();
            }
            attn::wgmma_wait<0>();
            done();
            if (needed)
                store(sums, out, segment, tile % across, group * 64 + threadIdx.x % kGroupThreads / kWarp * 16 + lane / 4);
        }
    }

    // Two neighbouring outputs of a pair at a time.
    __device__ void store(const float (&sums)[kRows / 8][4], T* out, const int4& segment, int column, int first) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + half * 8;
            if (row >= segment.z) continue;
            const int at = segment.y + row;
            if constexpr (kUp) {
                T* to = out + static_cast<int64_t>(at) * n.width + column * (kRows / 2) + threadIdx.x % 4 * 2;
#pragma unroll
                for (int j = 0; j < kRows / 16; ++j) {
                    const float (&gate)[4] = sums[j];
                    const float (&up)[4] = sums[j + kRows / 16];
                    *reinterpret_cast<uint32_t*>(to + j * 8) =
                        attn::pack2<T>(silu(gate[2 * half]) * up[2 * half], silu(gate[2 * half + 1]) * up[2 * half + 1]);
                }
            } else {
                T* to = out + static_cast<int64_t>(sorted.pair[at]) * n.hidden + column * kRows + threadIdx.x % 4 * 2;
#pragma unroll
                for (int j = 0; j < kRows / 8; ++j)
                    *reinterpret_cast<uint32_t*>(to + j * 8) = attn::pack2<T>(sums[j][2 * half], sums[j][2 * half + 1]);
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
    const HopperProduct<T, kUp> product(sorted, n, attn::smem_address(ring));
    product.init();
    __syncthreads();
    if (threadIdx.x / HopperTile::kGroupThreads == HopperTile::kGroups) {
        attn::less_registers<56>();
        product.fetch(&weights, &inputs, x);
    } else {
        attn::more_registers<224>();
        product.compute(out);
    }
#else
    __trap();
#endif
}

}  // namespace spark
