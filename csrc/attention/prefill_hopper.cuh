// Prefill attention on sm_90a: bf16 or f16, head_dim 128 or 256, no bias.
//
// A CTA does 128 rows (slices.cuh): two warpgroups of 64 by wgmma, and a warp that has the copy engine fetch keys and values, a
// box of 16 keys (what every page size keeps together) and all dims at a time, two stages of each. A warpgroup issues the scores
// of the next tile of keys, then the outputs of the last one, and does the softmax of the first while the second runs; weights go
// from accumulators to the A operand in registers. At 256 dims: outputs 128 registers a thread, scores of 80 keys 40, weights 20;
// shared memory 64 KB of Q + 4 x 40 KB. Values past the cache's end are zeroed before use: 0 times what a page holds there may be
// NaN. 128 rows by 80 keys by 256 dims is 10.5 MFLOP, 2560 cycles of the tensor cores, against 80 KB from L2.
//
// defines: spark::attn::{launch_prefill_hopper}
#pragma once

#include <type_traits>

#include "attention/pool_map.h"
#include "attention/slices.cuh"
#include "common/bulk.cuh"
#include "common/pdl.h"
#include "common/wgmma.cuh"

namespace spark::attn {

template <typename T, int D>
struct PrefillHopper {
    static constexpr int kGroups = 2, kGroupThreads = 128;  // warpgroups that compute; one more fetches
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static constexpr int kRows = kGroups * 64, kKeys = D == 256 ? 80 : 128, kStages = 2;
    static constexpr int kBoxes = kKeys / kBoxRows;
    static constexpr int kRowBytes = D * 2, kBlock = 8 * kRowBytes;  // kBlock: 8 rows
    static constexpr int kTile = kKeys * kRowBytes;
    static constexpr int kChunks = D / 8;  // 16-byte chunks of a row
    // shared memory: Q, then K and V by stage, then barriers
    static constexpr int kK = kRows * kRowBytes, kV = kK + kStages * kTile, kBarriers = kV + kStages * kTile;
    static constexpr int kBytes = kBarriers + 4 * kStages * 8;
    static constexpr int kQueue = 1;  // named barriers: kQueue + warpgroup, and one of both
    static constexpr int kBoth = 3;
};
static_assert(PrefillHopper<bf16, 256>::kBytes <= 227 * 1024, "shared memory of a CTA");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T, int D>
struct PrefillHopperCta : PrefillHopper<T, D> {
    using Shape = PrefillHopper<T, D>;
    using Shape::kBlock, Shape::kBoth, Shape::kBoxes, Shape::kChunks, Shape::kGroups, Shape::kGroupThreads, Shape::kKeys,
        Shape::kQueue, Shape::kRowBytes, Shape::kStages, Shape::kTile;

    const Slices& p;
    const Tile tile;
    const uint32_t base;
    int first_key, tiles;

    __device__ PrefillHopperCta(const Slices& slices, const Tile& work, uint32_t shared) : p(slices), tile(work), base(shared) {
        const Span low = tile.sees(p, tile.first_row / p.group);
        const Span high = tile.sees(p, (tile.first_row + tile.rows - 1) / p.group);
        first_key = low.first / kKeys * kKeys;
        tiles = max(high.last - first_key + kKeys - 1, 0) / kKeys;
    }

    // Barriers of a stage: K is full, V is full, K is free, V is free.
    __device__ uint32_t full(int v, int stage) const { return base + Shape::kBarriers + (v * kStages + stage) * 8; }
    __device__ uint32_t empty(int v, int stage) const { return base + Shape::kBarriers + ((2 + v) * kStages + stage) * 8; }
    __device__ uint32_t stage_of(int v, int index) const { return base + (v ? Shape::kV : Shape::kK) + index % kStages * kTile; }
    static __device__ int parity(int index) { return index / kStages & 1; }

    // One warp: keeps the stages filled.
    __device__ void fetch(const CUtensorMap* k_map, const CUtensorMap* v_map) const {
        const int lane = threadIdx.x % kWarp;
        const int* table = p.tables + static_cast<int64_t>(tile.slot) * p.table_width;
        const auto page_of = [&](int index) {
            const int at = first_key + index * kKeys + lane * kBoxRows;
            return lane < kBoxes && at < tile.tokens ? table[at >> p.page_shift] : -1;
        };
        int next = page_of(0);
        for (int index = 0; index < tiles; ++index) {
            const int page = next;
            next = index + 1 < tiles ? page_of(index + 1) : -1;
            const int stage = index % kStages, within = (1 << p.page_shift) - 1;
            const int at = first_key + index * kKeys + lane * kBoxRows;
            const int row = ((page * p.kv_heads + tile.kv_head) << p.page_shift) + (at & within);
            const int boxes = __popc(__ballot_sync(0xffffffffu, page >= 0));
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                wait_barrier(empty(v, stage), parity(index) ^ 1);
                if (lane == 0) expect_bytes(full(v, stage), boxes * kBoxRows * kRowBytes);
                __syncwarp();
                if (page >= 0) load_tile(stage_of(v, index) + lane * 2 * kBlock, v ? v_map : k_map, row / 8, full(v, stage));
            }
        }
    }

    // A warpgroup: 64 rows.
    __device__ void compute(int group, uint8_t* shared) const {
        const int thread = threadIdx.x % kGroupThreads, lane = threadIdx.x % kWarp, warp = thread / kWarp;
        const int row0 = group * 64, upper = row0 + warp * 16 + lane / 4;  // this lane's first row; the other is 8 below
        const uint32_t q = base + row0 * kRowBytes;
#pragma unroll
        for (int i = 0; i < 64 * kChunks / kGroupThreads; ++i) {
            const int x = i * kGroupThreads + thread, r = x / kChunks, c = x % kChunks;
            const bool present = row0 + r < tile.rows;
            copy_async(q + tile_chunk<D>(r, c), static_cast<const T*>(p.q) + (present ? tile.offset(p, row0 + r) : 0) + c * 8,
                       present);
        }
        copy_async_commit();
        Span sees[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) sees[i] = tile.sees(p, (tile.first_row + min(upper + i * 8, tile.rows - 1)) / p.group);
        // keys that every row sees: no mask
        const Span all = {tile.sees(p, (tile.first_row + tile.rows - 1) / p.group).first,
                          tile.sees(p, tile.first_row / p.group).last};
        const float scale = p.scale * kLog2E;
        float o[D / 8][4] = {}, s[kKeys / 8][4], fade[2];
        uint32_t weights[kKeys / 16][4];
        Softmax softmax;

        const uint64_t q_rows = descriptor(q, 16, kBlock);
        const auto score = [&](int index) {
            const uint64_t k_rows = descriptor(stage_of(0, index), 16, kBlock);
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                const int along = (step / 4 * 1024 + step % 4 * 32) >> 4;
                wgmma_ss<T>(s, q_rows + along, k_rows + along, step > 0);
            }
            wgmma_commit();
        };
        const auto gather = [&](int index) {
            const uint64_t v_rows = descriptor(stage_of(1, index), 1024, kBlock);
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) wgmma_rs<T>(o, weights[step], v_rows + (step * 2 * kBlock >> 4));
            wgmma_commit();
        };
        const auto soften = [&](int index) {
            const int key = first_key + index * kKeys;
            if (key < all.first || key + kKeys > all.last) hide(s, sees, key + 2 * (lane % 4));
            softmax.step(s, scale, fade);
        };
        const auto pack = [&] {
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) {
                const float (&x)[4] = s[2 * step], (&y)[4] = s[2 * step + 1];
                weights[step][0] = pack_pair<T>(x[0], x[1]), weights[step][1] = pack_pair<T>(x[2], x[3]);
                weights[step][2] = pack_pair<T>(y[0], y[1]), weights[step][3] = pack_pair<T>(y[2], y[3]);
            }
        };
        const auto release = [&](int v, int index) {
            if (lane == 0) arrive(empty(v, index % kStages));
        };

        copy_async_wait<0>();
        fence_async_proxy();
        barrier_sync(kQueue + group, kGroupThreads);
        if (tiles > 0) {
            wait_barrier(full(0, 0), 0);
            wgmma_fence();
            score(0);
            wgmma_wait<0>();
            release(0, 0);
            soften(0);
            pack();
            for (int index = 1; index < tiles; ++index) {
                wait_barrier(full(0, index % kStages), parity(index));
                wgmma_fence();
                score(index);
                wait_barrier(full(1, (index - 1) % kStages), parity(index - 1));
                gather(index - 1);
                wgmma_wait<1>();
                release(0, index);
                soften(index);
                wgmma_wait<0>();
                release(1, index - 1);
#pragma unroll
                for (int j = 0; j < D / 8; ++j) o[j][0] *= fade[0], o[j][1] *= fade[0], o[j][2] *= fade[1], o[j][3] *= fade[1];
                pack();
            }
            const int last = tiles - 1, valid = tile.tokens - (first_key + last * kKeys);
            wait_barrier(full(1, last % kStages), parity(last));
            if (valid < kKeys) {
                const int from = stage_of(1, last) - base;
                for (int x = threadIdx.x; x < (kKeys - valid) * kChunks; x += kGroups * kGroupThreads)
                    *reinterpret_cast<uint4*>(shared + from + tile_chunk<D>(valid + x / kChunks, x % kChunks)) =
                        make_uint4(0, 0, 0, 0);
                fence_async_proxy();
                barrier_sync(kBoth, kGroups * kGroupThreads);
            }
            wgmma_fence();
            gather(last);
            wgmma_wait<0>();
        }
        softmax.finish();

        // rows go out through where Q was, 16 bytes a lane
        barrier_sync(kQueue + group, kGroupThreads);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float share = softmax.share(i);
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<uint32_t*>(shared + (q - base) + tile_chunk<D>(warp * 16 + lane / 4 + i * 8, j) +
                                             lane % 4 * 4) = pack_pair<T>(o[j][2 * i] * share, o[j][2 * i + 1] * share);
            const int r = upper + i * 8;
            if (p.lse != nullptr && lane % 4 == 0 && r < tile.rows) p.lse[tile.offset(p, r) / D] = softmax.lse(i, scale);
        }
        __syncwarp();
#pragma unroll 4
        for (int i = 0; i < 16 * kChunks / kWarp; ++i) {
            const int x = i * kWarp + lane, r = warp * 16 + x / kChunks, c = x % kChunks;
            if (row0 + r < tile.rows)
                *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + tile.offset(p, row0 + r) + c * 8) =
                    *reinterpret_cast<const uint4*>(shared + (q - base) + tile_chunk<D>(r, c));
        }
    }
};
#endif

template <typename T, int D>
__global__ void __launch_bounds__(PrefillHopper<T, D>::kThreads, 1)
    prefill_hopper_kernel(const __grid_constant__ Slices p, const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t shared[];
    using Cta = PrefillHopperCta<T, D>;
    grid_dependency_wait();
    grid_dependency_launch();
    const Tile tile = find_tile<Cta::kRows>(p, blockIdx.x);
    if (tile.rows == 0) return;
    const Cta cta(p, tile, shared_address(shared));
    if (threadIdx.x == 0) {
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        for (int stage = 0; stage < Cta::kStages; ++stage) {
            for (int v = 0; v < 2; ++v) {
                init_barrier(cta.full(v, stage), 1);
                init_barrier(cta.empty(v, stage), Cta::kGroups * Cta::kGroupThreads / kWarp);
            }
        }
        fence_barriers();
    }
    __syncthreads();
    const int group =
        __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / Cta::kGroupThreads, 0);  // uniform, and known to be
    if (group == Cta::kGroups) {
        less_registers<24>();
        if (threadIdx.x % Cta::kGroupThreads < kWarp) cta.fetch(&k_map, &v_map);
    } else {
        more_registers<240>();
        cta.compute(group, shared);
    }
#else
    __trap();  // not launched on other architectures
#endif
}

// kUnsupported where descriptors cannot be made.
template <typename T, int D>
int launch_prefill_hopper(const Slices& p, int64_t pool_rows, cudaStream_t stream) {
    using Shape = PrefillHopper<T, D>;
    const auto kernel = prefill_hopper_kernel<T, D>;
    static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
    if (allowed != cudaSuccess) return static_cast<int>(allowed);
    constexpr bool kBf16 = std::is_same_v<T, bf16>;
    CUtensorMap k_map, v_map;
    const int64_t tiles = most_tiles<Shape::kRows>(p);
    if (tiles > INT32_MAX || !pool_map(k_map, p.k_pool, pool_rows, D, kBf16) || !pool_map(v_map, p.v_pool, pool_rows, D, kBf16))
        return kUnsupported;
    return launch_pdl(kernel, dim3(static_cast<unsigned>(tiles)), dim3(Shape::kThreads), Shape::kBytes, stream, p, k_map, v_map);
}

}  // namespace spark::attn
