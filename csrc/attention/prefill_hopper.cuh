// Prefill attention on sm_90a: bf16 or f16, head_dim 128 or 256, no bias.
//
// A CTA a multiprocessor takes tiles of 128 rows (slices.cuh) in turn: two warpgroups of 64 rows compute by wgmma; a third brings
// data and runs ahead, into the next tile too: one warp has the copy engine fetch keys and values, a box of 16 keys (what every
// page size keeps together) and all dims at a time, two stages of each; the other three gather Q. A warpgroup issues the scores
// of the next keys, then the outputs of the last, and does the softmax of the first while the second runs; weights go from
// accumulators to the A operand in registers. Up to 128 dims, where softmax takes as long as a product, the warpgroups take turns
// at issuing.
//
// At 256 dims: outputs 128 registers a thread, scores of 80 keys 40, weights 20; shared memory 64 KB of Q + 4 x 40 KB. Values
// past the cache's end are zeroed before use: 0 times what a page holds there may be NaN. 128 rows by 80 keys by 256 dims is 10.5
// MFLOP, 2560 cycles of the tensor cores, against 80 KB from L2. 16/2 heads x 256, 4096 tokens: 137 GFLOP, 174 us at 790 TFLOP/s.
//
// defines: spark::attn::{launch_prefill_hopper}
#pragma once

#include <type_traits>

#include "attention/hopper.cuh"
#include "attention/slices.cuh"
#include "attention/tensor_map.h"
#include "common/pdl.h"

namespace spark::attn {

template <typename T, int D>
struct PrefillHopper {
    static constexpr int kGroups = 2, kGroupThreads = 128;  // warpgroups that compute; one more brings data
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static constexpr int kRows = kGroups * 64, kKeys = D == 256 ? 80 : 128, kStages = 2;
    static constexpr int kBoxes = kKeys / kBoxRows;
    static constexpr int kChunks = D / 8, kRowBytes = D * 2, kBlock = 8 * kRowBytes;  // 16-byte chunks of a row; 8 rows
    static constexpr int kTile = kKeys * kRowBytes;
    // shared memory: Q, then K and V by stage, then barriers
    static constexpr int kK = kRows * kRowBytes, kV = kK + kStages * kTile, kBarriers = kV + kStages * kTile;
    static constexpr int kBytes = kBarriers + (4 * kStages + 2) * 8;
    static constexpr int kBoth = 1, kTurn = 2;  // named barriers: of both warpgroups, and kTurn + warpgroup
    static constexpr bool kTurns = D <= 128;
};
static_assert(PrefillHopper<bf16, 256>::kBytes <= 227 * 1024, "shared memory of a CTA");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T, int D>
struct PrefillHopperCta : PrefillHopper<T, D> {
    using Shape = PrefillHopper<T, D>;
    using Shape::kBlock, Shape::kBoth, Shape::kBoxes, Shape::kChunks, Shape::kGroups, Shape::kGroupThreads, Shape::kKeys,
        Shape::kRows, Shape::kRowBytes, Shape::kStages, Shape::kTile, Shape::kTurn, Shape::kTurns;
    static constexpr int kBringers = kGroupThreads - kWarp;  // threads that gather Q

    const Slices& p;
    uint8_t* const shared;
    const uint32_t base;

    // The keys of a tile: from a multiple of kKeys, in `tiles` tiles.
    struct Range {
        int first, tiles;
        Span all;  // those that every row sees: no mask
        __device__ Range(const Slices& p, const Tile& tile) {
            const Span low = tile.sees(p, tile.first_row / p.group);
            const Span high = tile.sees(p, (tile.first_row + tile.rows - 1) / p.group);
            first = low.first / kKeys * kKeys;
            tiles = max(high.last - first + kKeys - 1, 0) / kKeys;
            all = {high.first, low.last};
        }
    };

    __device__ PrefillHopperCta(const Slices& slices, uint8_t* memory) : p(slices), shared(memory), base(smem_address(memory)) {}

    // The tile of a round: there and back over the CTAs, so that sums of lengths that fall from tile to tile are even.
    __device__ Tile tile_of(int round) const {
        const int at = blockIdx.x, last = gridDim.x - 1;
        return find_tile<kRows>(p, round * gridDim.x + (round % 2 == 0 ? at : last - at));
    }

    // Barriers: of K and V, by number of key tiles since the start (full, and free again); of Q, by round.
    __device__ uint32_t full(int v, int n) const { return base + Shape::kBarriers + (v * kStages + n % kStages) * 8; }
    __device__ uint32_t empty(int v, int n) const { return base + Shape::kBarriers + ((2 + v) * kStages + n % kStages) * 8; }
    __device__ uint32_t q_full() const { return base + Shape::kBarriers + 4 * kStages * 8; }
    __device__ uint32_t q_empty() const { return q_full() + 8; }
    __device__ uint32_t stage(int v, int n) const { return base + (v ? Shape::kV : Shape::kK) + n % kStages * kTile; }
    static __device__ int parity(int n) { return n / kStages & 1; }
    // Chunk c of a row of a shared tile.
    static __device__ uint32_t chunk(int r, int c) {
        return r / 8 * kBlock + c / 8 * 1024 + r % 8 * 128 + (((c % 8) ^ (r % 8)) << 4);
    }

    __device__ void init() const {
        for (int n = 0; n < kStages; ++n) {
            for (int v = 0; v < 2; ++v) {
                init_barrier(full(v, n), 1);
                init_barrier(empty(v, n), kGroups * kGroupThreads / kWarp);
            }
        }
        init_barrier(q_full(), kBringers);
        init_barrier(q_empty(), kGroups * kGroupThreads / kWarp);
        fence_barriers();
    }

    // One warp: keeps the stages filled.
    __device__ void fetch(const CUtensorMap* k_map, const CUtensorMap* v_map) const {
        const int lane = threadIdx.x % kWarp, within = (1 << p.page_shift) - 1;
        for (int round = 0, n = 0;; ++round) {
            const Tile tile = tile_of(round);
            if (tile.rows == 0) return;
            const Range keys(p, tile);
            const int* table = p.tables + static_cast<int64_t>(tile.slot) * p.table_width;
            const auto page_of = [&](int index) {
                const int at = keys.first + index * kKeys + lane * kBoxRows;
                return lane < kBoxes && index < keys.tiles && at < tile.tokens ? table[at >> p.page_shift] : -1;
            };
            int next = page_of(0);
            for (int index = 0; index < keys.tiles; ++index, ++n) {
                const int page = next, at = keys.first + index * kKeys + lane * kBoxRows;
                next = page_of(index + 1);
                const int row = ((page * p.kv_heads + tile.kv_head) << p.page_shift) + (at & within);
                const int bytes = __popc(__ballot_sync(0xffffffffu, page >= 0)) * kBoxRows * kRowBytes;
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    wait_barrier(empty(v, n), parity(n) ^ 1);
                    if (lane == 0) expect_bytes(full(v, n), bytes);
                    __syncwarp();
                    if (page >= 0) load_tile(stage(v, n) + lane * 2 * kBlock, v ? v_map : k_map, row / 8, full(v, n));
                }
            }
        }
    }

    // Three warps: Q of each tile, as soon as that of the tile before is done with.
    __device__ void bring(int thread) const {
        for (int round = 0;; ++round) {
            const Tile tile = tile_of(round);
            if (tile.rows == 0) return;
            wait_barrier(q_empty(), round & 1 ^ 1);
#pragma unroll 2
            for (int x = thread; x < kRows * kChunks; x += kBringers) {
                const int r = x / kChunks, c = x % kChunks;
                const bool present = r < tile.rows;
                copy_async(base + chunk(r, c), static_cast<const T*>(p.q) + (present ? tile.offset(p, r) : 0) + c * 8,
                           present ? 16 : 0);
            }
            commit_copies();
            wait_copies<0>();
            fence_async_proxy();
            arrive(q_full());
        }
    }

    // A warpgroup: 64 rows of each tile.
    __device__ void compute(int group) const {
        if (kTurns && group == 1) pass_turn(0);
        for (int round = 0, n = 0;; ++round) {
            const Tile tile = tile_of(round);
            if (tile.rows == 0) break;
            n += rows(tile, group, round, n);
        }
        if (kTurns && group == 0) await_turn(0);  // the last one that group 1 passed
    }
    __device__ void await_turn(int group) const {
        if constexpr (kTurns) cta_barrier(kTurn + group, kGroups * kGroupThreads);
    }
    __device__ void pass_turn(int to) const {
        if constexpr (kTurns) cta_arrive(kTurn + to, kGroups * kGroupThreads);
    }

    // Returns the number of key tiles it went through; n0 were gone through before.
    __device__ int rows(const Tile& tile, int group, int round, int n0) const {
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroupThreads / kWarp;
        const int upper = group * 64 + warp * 16 + lane / 4;  // this lane's first row; the other is 8 below
        const Range keys(p, tile);
        Span sees[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) sees[i] = tile.sees(p, (tile.first_row + min(upper + i * 8, tile.rows - 1)) / p.group);
        const float scale = p.scale * kLog2E;
        float o[D / 8][4] = {}, s[kKeys / 8][4], fade[2];
        uint32_t weights[kKeys / 16][4];
        Softmax softmax;

        const uint64_t q_rows = descriptor(base + group * 64 * kRowBytes, 16, kBlock);
        const auto score = [&](int index) {
            const uint64_t k_rows = descriptor(stage(0, n0 + index), 16, kBlock);
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                const int along = (step / 4 * 1024 + step % 4 * 32) >> 4;
                wgmma_ss<T>(s, q_rows + along, k_rows + along, step > 0);
            }
            wgmma_commit();
        };
        const auto gather = [&](int index) {
            const uint64_t v_rows = descriptor(stage(1, n0 + index), 1024, kBlock);
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) wgmma_rs<T>(o, weights[step], v_rows + (step * 2 * kBlock >> 4));
            wgmma_commit();
        };
        const auto soften = [&](int index) {
            const int key = keys.first + index * kKeys;
            if (key < keys.all.first || key + kKeys > keys.all.last) hide(s, sees, key + 2 * (lane % 4));
            softmax.step(s, scale, fade);
            anchor(softmax.sum[0] + softmax.sum[1], base);  // all this while the outputs before run
        };
        const auto pack = [&] {
#pragma unroll
            for (int step = 0; step < kKeys / 16; ++step) {
                const float (&x)[4] = s[2 * step], (&y)[4] = s[2 * step + 1];
                weights[step][0] = pack2<T>(x[0], x[1]), weights[step][1] = pack2<T>(x[2], x[3]);
                weights[step][2] = pack2<T>(y[0], y[1]), weights[step][3] = pack2<T>(y[2], y[3]);
            }
        };
        const auto await = [&](int v, int index) { wait_barrier(full(v, n0 + index), parity(n0 + index)); };
        const auto release = [&](uint32_t barrier) {
            if (lane == 0) arrive(barrier);
        };

        wait_barrier(q_full(), round & 1);
        if (keys.tiles > 0) {
            await(0, 0);
            await_turn(group);
            wgmma_fence();
            score(0);
            pass_turn(group ^ 1);
            wgmma_wait<0>();
            release(empty(0, n0));
            soften(0);
            pack();
            for (int index = 1; index < keys.tiles; ++index) {
                await(0, index);
                await_turn(group);
                wgmma_fence();
                score(index);
                await(1, index - 1);
                gather(index - 1);
                pass_turn(group ^ 1);
                wgmma_wait<1>();
                release(empty(0, n0 + index));
                soften(index);
                wgmma_wait<0>();
                release(empty(1, n0 + index - 1));
#pragma unroll
                for (int j = 0; j < D / 8; ++j) o[j][0] *= fade[0], o[j][1] *= fade[0], o[j][2] *= fade[1], o[j][3] *= fade[1];
                pack();
            }
        }
        release(q_empty());
        if (keys.tiles > 0) {
            const int last = keys.tiles - 1, valid = tile.tokens - (keys.first + last * kKeys);
            await(1, last);
            if (valid < kKeys) {
                uint8_t* values = shared + (stage(1, n0 + last) - base);
                for (int x = threadIdx.x; x < (kKeys - valid) * kChunks; x += kGroups * kGroupThreads)
                    *reinterpret_cast<uint4*>(values + chunk(valid + x / kChunks, x % kChunks)) = make_uint4(0, 0, 0, 0);
                fence_async_proxy();
                cta_barrier(kBoth, kGroups * kGroupThreads);
            }
            wgmma_fence();
            gather(last);
            wgmma_wait<0>();
            release(empty(1, n0 + last));
        }
        softmax.finish();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = upper + i * 8;
            const bool exists = r < tile.rows;
            const int64_t at = exists ? tile.offset(p, r) : 0;
            const float share = softmax.share(i);
#pragma unroll
            for (int j = 0; j < D / 8; j += 4) {
                const uint4 block = transpose_quad(pack2<T>(o[j][2 * i] * share, o[j][2 * i + 1] * share),
                                                   pack2<T>(o[j + 1][2 * i] * share, o[j + 1][2 * i + 1] * share),
                                                   pack2<T>(o[j + 2][2 * i] * share, o[j + 2][2 * i + 1] * share),
                                                   pack2<T>(o[j + 3][2 * i] * share, o[j + 3][2 * i + 1] * share));
                if (exists) *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at + (j + lane % 4) * 8) = block;
            }
            if (p.lse != nullptr && lane % 4 == 0 && exists) p.lse[at / D] = softmax.lse(i, scale);
        }
        return keys.tiles;
    }

    // Of a quad of lanes that hold a, b, c, d each, lane i gets the i-th of all four.
    static __device__ uint4 transpose_quad(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        const bool odd = threadIdx.x % 2 != 0, high = threadIdx.x / 2 % 2 != 0;
        const uint32_t ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
        // lanes 0, 2: a and c of both; lanes 1, 3: b and d of both; in the order of lanes
        const uint32_t x0 = odd ? ab : a, x1 = odd ? b : ab, y0 = odd ? cd : c, y1 = odd ? d : cd;
        const uint32_t z0 = __shfl_xor_sync(0xffffffffu, high ? x0 : y0, 2), z1 = __shfl_xor_sync(0xffffffffu, high ? x1 : y1, 2);
        return high ? make_uint4(z0, z1, y0, y1) : make_uint4(x0, x1, z0, z1);
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
    const Cta cta(p, shared);
    if (threadIdx.x == 0) {
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        cta.init();
    }
    __syncthreads();
    grid_dependency_wait();
    grid_dependency_launch();
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / Cta::kGroupThreads, 0);  // known to be uniform
    if (group == Cta::kGroups) {
        less_registers<40>();
        const int thread = threadIdx.x % Cta::kGroupThreads;
        if (thread < kWarp)
            cta.fetch(&k_map, &v_map);
        else
            cta.bring(thread - kWarp);
    } else {
        more_registers<232>();
        cta.compute(group);
    }
#else
    __trap();  // not launched on other architectures
#endif
}

// kUnsupported where descriptors cannot be made.
template <typename T, int D>
int launch_prefill_hopper(const Slices& p, int64_t pool_rows, int sms, cudaStream_t stream) {
    using Shape = PrefillHopper<T, D>;
    const auto kernel = prefill_hopper_kernel<T, D>;
    static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
    if (allowed != cudaSuccess) return static_cast<int>(allowed);
    constexpr bool kBf16 = std::is_same_v<T, bf16>;
    CUtensorMap k_map, v_map;
    const int64_t tiles = most_tiles<Shape::kRows>(p);
    if (tiles > INT32_MAX || !pool_map(k_map, p.k_pool, pool_rows, D, kBf16) || !pool_map(v_map, p.v_pool, pool_rows, D, kBf16))
        return kUnsupported;
    return launch_pdl(kernel, dim3(static_cast<unsigned>(tiles < sms ? tiles : sms)), dim3(Shape::kThreads), Shape::kBytes,
                      stream, p, k_map, v_map);
}

}  // namespace spark::attn
