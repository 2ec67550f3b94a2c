// PAGED_ATTENTION_DECODE: one query a row over its pages; what bounds it is reading K and V once.
//
// Cutting (splits.cuh). A row's keys are cut into splits, at most 8 to a group, and 8 groups; a split is the smallest 128 * 2^n
// keys with which that suffices, so that the cuts depend on the row's own length alone. Splits fold left to right into their
// group, groups into the row, by one function: who does a split (below) never changes a bit of the result.
//
// Who does it. An item is a group of one row and kv head. Where items are few, the 8 CTAs of a cluster take a split each and fold
// over distributed shared memory, each an eighth of the columns (a team); where they are many, one CTA takes all splits of an
// item in turn and folds in registers. Groups meet in the workspace: the last to arrive folds them; its counter wraps to zero by
// itself. CTAs stay and take items in turn, so that a launch for the longest context costs no more than its rows need.
//
// A CTA: 4 warps, tiles of 64 keys on their way through a ring of buffers (decode_ring.cuh). Scores are S^T = K Q^T: 16 keys a
// warp, up to 8 query heads as the 8 columns of m16n8k16 (16 as two such), so that no row of the tensor cores is padding; O^T =
// V^T P^T by columns, a quarter of the dims a warp, P passed through shared memory; a row of ones beside V^T sums P. Keys that no
// kernel in flight can be writing (all but the newest 64) are fetched before the wait for the kernel in front; slots, lengths and
// tables are written at the start of a step, long before.
//
// H200, bf16, 16/2 heads x 256: a key is 2 KB; 128 rows x 1024 keys 268 MB, 63 us at 4.29 TB/s; 1 row x 32768 keys 67 MB, 16 us.
#include <type_traits>

#include "attention/decode_ring.cuh"
#include "attention/plain.cuh"
#include "attention/pool_map.h"
#include "attention/splits.cuh"
#include "common/cluster.cuh"
#include "common/dispatch.h"
#include "common/mma.cuh"
#include "common/pdl.h"

namespace {

using namespace spark;
using namespace spark::attn;

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kFresh = 64;      // newest keys of a row: the kernel in front may be writing them (one, or a few drafts)
constexpr int kTeamBelow = 40;  // items from which on single CTAs fill the machine

struct Params {
    void* out;
    const void *q, *k_pool, *v_pool;
    const int *tables, *slots, *kv_len;
    float* workspace;   // a row: kSplits counters a kv head | [heads, kGroups, dim] outputs | [heads, kGroups, 2] maxima and sums
    int64_t row_words;  // of the workspace
    int64_t page_elements;
    int rows, heads, kv_heads, group, dim, page_shift, table_width, max_groups;
    float scale;  // of scores, times log2(e)
};

// Finds items: pairs (row, group) in order, counted by every warp for itself.
class Rows {
  public:
    struct Found {
        int row, slot, tokens, group;
    };
    __device__ explicit Rows(const Params& p) : p_(p), lane_(threadIdx.x % kWarp), first_(at(0)) {}
    __device__ int count() const {
        int total = __reduce_add_sync(0xffffffffu, groups(0, first_));
        for (int base = kWarp; base < p_.rows; base += kWarp) total += __reduce_add_sync(0xffffffffu, groups(base, at(base)));
        return total;
    }
    // The pair of number `index`, which must exist.
    __device__ Found find(int index) const {
        for (int base = 0;; base += kWarp) {
            const int2 mine = base == 0 ? first_ : at(base);
            const int count = groups(base, mine);
            int upto = count;
#pragma unroll
            for (int o = 1; o < kWarp; o <<= 1) {
                const int below = __shfl_up_sync(0xffffffffu, upto, o);
                if (lane_ >= o) upto += below;
            }
            const unsigned beyond = __ballot_sync(0xffffffffu, upto > index);
            if (beyond != 0) {
                const int source = __ffs(static_cast<int>(beyond)) - 1;
                return {base + source, __shfl_sync(0xffffffffu, mine.y, source), __shfl_sync(0xffffffffu, mine.x, source),
                        index - __shfl_sync(0xffffffffu, upto - count, source)};
            }
            index -= __shfl_sync(0xffffffffu, upto, kWarp - 1);
        }
    }

  private:
    // This lane's row of 32: its tokens and its slot.
    __device__ int2 at(int base) const {
        const int row = base + lane_;
        if (row >= p_.rows) return make_int2(0, 0);
        const int tokens = p_.kv_len[row], slot = p_.slots[row];
        return make_int2(min(max(tokens, 0), p_.table_width << p_.page_shift), slot);
    }
    __device__ int groups(int base, int2 row) const { return base + lane_ < p_.rows ? Cut(row.x, p_.max_groups).groups : 0; }

    const Params& p_;
    int lane_;
    int2 first_;
};

// kBlocks: blocks of 8 query heads that a kv head has; kRing: buffers of a tile of K or V.
template <typename T, int D, int kBlocks, int kRing, bool kBulk>
struct Decode {
    using Keys = Ring<T, D, kRing, kBulk>;
    static constexpr int kBlock = 16 * D;                 // bytes of 8 rows of a tile
    static constexpr int kSteps = D / 16;                 // of QK^T
    static constexpr int kChains = kBlocks == 1 ? 4 : 2;  // independent sums of QK^T
    static constexpr int kDims = D / kWarps;              // a warp's columns of the output
    static constexpr int kPieces = kDims / 16;            // in tiles of 16
    static constexpr int kHeads = kBlocks * 8;
    static constexpr int kPart = D + 4;  // floats from head to head of a part: no two lanes meet in a bank
    // shared memory
    static constexpr int kP = Keys::kBytes;                     // T [blocks][64 keys][8 heads]
    static constexpr int kMax = kP + kBlocks * kTile * 16;      // float [warps][heads]
    static constexpr int kMaxSum = kMax + kWarps * kHeads * 4;  // float2 [heads] of the part
    static constexpr int kFlag = kMaxSum + kHeads * 8;
    static constexpr int kBarriers = kFlag + 16;
    static constexpr int kBytes = kBarriers + Keys::kBarrierBytes;
    static_assert(kHeads * kPart * 4 <= Keys::kBytes, "the part lies in the ring");

    struct State {
        float o[kBlocks][kPieces][4], sum[kBlocks][2], max[kBlocks][2];  // index & 1 of o: the head
        __device__ void clear() {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
                for (int i = 0; i < kPieces; ++i) o[b][i][0] = o[b][i][1] = o[b][i][2] = o[b][i][3] = 0.f;
                sum[b][0] = sum[b][1] = 0.f, max[b][0] = max[b][1] = kNothing;
            }
        }
    };

    const Params& p;
    uint8_t* const shared;
    const uint32_t base;
    const int lane, warp;
    const CUtensorMap *const k_map, *const v_map;
    Keys keys;  // in work: one split, or the splits of a group
    uint32_t q[kSteps][kBlocks][2];
    State total;

    __device__ Decode(const Params& params, const CUtensorMap* map_of_k, const CUtensorMap* map_of_v, uint8_t* memory)
        : p(params),
          shared(memory),
          base(shared_address(memory)),
          lane(threadIdx.x % kWarp),
          warp(threadIdx.x / kWarp),
          k_map(map_of_k),
          v_map(map_of_v),
          keys(memory, memory + kBarriers) {
        if constexpr (kBulk) {
            if (threadIdx.x == 0) prefetch_map(k_map), prefetch_map(v_map);
            __syncthreads();
        }
    }

    __device__ void issue(int e) { keys.issue(p, k_map, v_map, e); }

    // Query heads as columns: heads past the group are zero.
    __device__ void load_q(int row, int kv_head) {
        const T* from =
            static_cast<const T*>(p.q) + (static_cast<int64_t>(row) * p.heads + kv_head * p.group) * D + 2 * (lane % 4);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const int head = b * 8 + lane / 4;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    q[s][b][i] = head < p.group ? *reinterpret_cast<const uint32_t*>(from + head * D + s * 16 + i * 8) : 0u;
            }
        }
    }

    // total <- the keys, split by split.
    __device__ void attend(int split) {
        const int per_split = split / kTile;
        State part;
        total.clear();
        part.clear();
        float ones_sum[kBlocks][4] = {};
        int left = per_split;
        for (int tile = 0; tile < keys.tiles; ++tile) {
            const int e = 2 * tile;
            if (tile == 0)
                keys.template await<kRing - 1>(e);
            else
                keys.template await<kRing - 2>(e);
            float s[kBlocks][4];
            score(s, keys.buffer(e) + warp * 2 * kBlock, keys.live(tile));
            publish_max(s);
            __syncthreads();  // all are done with V and P of the tile before
            if (tile > 0) issue(e - 1 + kRing);
            issue(e + kRing);
            weigh(s, part, ones_sum);
            keys.template await<kRing - 1>(e + 1);
            __syncthreads();
            gather(part, ones_sum, keys.buffer(e + 1));
            if (--left == 0 || tile + 1 == keys.tiles) {
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) {
                    part.sum[b][0] = ones_sum[b][0], part.sum[b][1] = ones_sum[b][1];
                    ones_sum[b][0] = ones_sum[b][1] = ones_sum[b][2] = ones_sum[b][3] = 0.f;
                }
                fold(part);
                part.clear();
                left = per_split;
            }
        }
    }

    // S^T of this warp's 16 keys, of which `live` exist, times the scale: s[b][i] is key lane / 4 + (i >> 1) * 8.
    __device__ void score(float (&s)[kBlocks][4], uint32_t tile, int live) const {
        float sums[kChains][kBlocks][4] = {};
        const int r = lane % 16;
        const uint32_t row = tile + r / 8 * kBlock + r % 8 * 128, column = ((lane / 16) ^ (r % 8)) << 4;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a[4];
            ldmatrix(a, row + step / 4 * 1024 + (column ^ (step % 4 << 5)));
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) mma<T>(sums[step % kChains][b], a, q[step][b][0], q[step][b][1]);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = sums[0][b][i] + sums[1][b][i];
                if constexpr (kChains == 4) x += sums[2][b][i] + sums[3][b][i];
                s[b][i] = lane / 4 + (i >> 1) * 8 < live ? __fmul_rn(x, p.scale) : -INFINITY;
            }
        }
    }

    // This warp's maxima over its keys, for all warps to see.
    __device__ void publish_max(const float (&s)[kBlocks][4]) const {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            float x = fmaxf(s[b][0], s[b][2]), y = fmaxf(s[b][1], s[b][3]);
#pragma unroll
            for (int o = 4; o < kWarp; o <<= 1) {
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
                y = fmaxf(y, __shfl_xor_sync(0xffffffffu, y, o));
            }
            if (lane < 4) reinterpret_cast<float2*>(shared + kMax)[(warp * kHeads + b * 8) / 2 + lane] = make_float2(x, y);
        }
    }

    // The tile's maximum is known: P to shared memory, and what was summed so far is brought down to the new maximum.
    __device__ void weigh(const float (&s)[kBlocks][4], State& part, float (&ones_sum)[kBlocks][4]) const {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            float top[2] = {part.max[b][0], part.max[b][1]}, fade[2], w[4];
#pragma unroll
            for (int i = 0; i < kWarps; ++i) {
                const float2 m = reinterpret_cast<const float2*>(shared + kMax)[(i * kHeads + b * 8) / 2 + lane % 4];
                top[0] = fmaxf(top[0], m.x), top[1] = fmaxf(top[1], m.y);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                fade[h] = exp2_fast(part.max[b][h] - top[h]);
                part.max[b][h] = top[h];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                w[i] = exp2_fast(s[b][i] - top[i & 1]);
                ones_sum[b][i] *= fade[i & 1];
            }
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
                for (int i = 0; i < 4; ++i) part.o[b][piece][i] *= fade[i & 1];
            }
            uint32_t* to = reinterpret_cast<uint32_t*>(shared + kP) + (b * kTile + warp * 16 + lane / 4) * 4 + lane % 4;
            to[0] = pack_pair<T>(w[0], w[1]);
            to[8 * 4] = pack_pair<T>(w[2], w[3]);
        }
    }

    // O^T += V^T P^T for this warp's dims, and the sums of P by a row of ones.
    __device__ void gather(State& part, float (&ones_sum)[kBlocks][4], uint32_t tile) const {
        uint32_t weights[kBlocks][kTile / 16][2];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < kTile / kWarp; ++i) {
                uint32_t x[4];
                ldmatrix_trans(x, base + kP + (b * kTile + i * kWarp + lane) * 16);
                weights[b][2 * i][0] = x[0], weights[b][2 * i][1] = x[1];
                weights[b][2 * i + 1][0] = x[2], weights[b][2 * i + 1][1] = x[3];
            }
        }
        const uint32_t one = pack_pair<T>(1.f, 1.f), ones[4] = {one, one, one, one};
        const int r = lane % 8 + lane / 16 * 8;
        const int chunk = warp * kDims / 8;  // the first of this warp's dims
        const uint32_t row = tile + r / 8 * kBlock + chunk / 8 * 1024 + r % 8 * 128;
        const uint32_t column = ((lane / 8 % 2) ^ (r % 8) ^ (chunk % 8)) << 4;
#pragma unroll
        for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                uint32_t a[4];
                ldmatrix_trans(a, row + step * 2 * kBlock + (column ^ (piece << 5)));
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) mma<T>(part.o[b][piece], a, weights[b][step][0], weights[b][step][1]);
            }
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) mma<T>(ones_sum[b], ones, weights[b][step][0], weights[b][step][1]);
        }
    }

    __device__ void fold(const State& part) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Fold f(total.max[b][h], part.max[b][h]);
                total.max[b][h] = f.max;
                total.sum[b][h] = f(total.sum[b][h], part.sum[b][h]);
#pragma unroll
                for (int piece = 0; piece < kPieces; ++piece) {
                    total.o[b][piece][h] = f(total.o[b][piece][h], part.o[b][piece][h]);
                    total.o[b][piece][h + 2] = f(total.o[b][piece][h + 2], part.o[b][piece][h + 2]);
                }
            }
        }
    }

    // `total` to shared memory, where the ring was: float [heads][kPart].
    __device__ void lay_out() const {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const int head = b * 8 + 2 * (lane % 4);
            float* to = reinterpret_cast<float*>(shared) + head * kPart + warp * kDims + lane / 4;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[(i & 1) * kPart + piece * 16 + (i >> 1) * 8] = total.o[b][piece][i];
            }
            if (warp == 0 && lane < 4) {
                float2* stats = reinterpret_cast<float2*>(shared + kMaxSum) + head;
                stats[0] = make_float2(total.max[b][0], total.sum[b][0]);
                stats[1] = make_float2(total.max[b][1], total.sum[b][1]);
            }
        }
    }

    // Folds what `parts` CTAs of the team laid out (or we did) into the row's output, or into the workspace and, if ours is the
    // last group to come, from there into the output. A team's CTA does its eighth of the columns.
    template <bool kTeam>
    __device__ void emit(int row, int kv_head, int group, int groups, int parts, int rank) {
        constexpr int kPairs = D / 2 / (kTeam ? kSplits : 1);
        const int first = rank * kPairs * 2;
        T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(row) * p.heads + kv_head * p.group) * D;
        float* words = p.workspace + row * p.row_words;
        float* outputs = words + p.kv_heads * kSplits + static_cast<int64_t>(kv_head) * p.group * kGroups * D;
        float* stats =
            words + p.kv_heads * kSplits + static_cast<int64_t>(p.heads) * kGroups * D + kv_head * p.group * kGroups * 2;
        for (int i = threadIdx.x; i < p.group * kPairs; i += kThreads) {
            const int head = i / kPairs, d = first + i % kPairs * 2;
            float2 part[kTeam ? kSplits : 1], part_stats[kTeam ? kSplits : 1];
#pragma unroll
            for (int r = 0; r < (kTeam ? kSplits : 1); ++r) {
                if (r >= parts) continue;
                const uint32_t at = base + (head * kPart + d) * 4, at_stats = base + kMaxSum + head * 8;
                if constexpr (kTeam) {
                    part[r] = load_peer(at, r), part_stats[r] = load_peer(at_stats, r);
                } else {
                    part[r] = *reinterpret_cast<const float2*>(shared + (at - base));
                    part_stats[r] = *reinterpret_cast<const float2*>(shared + (at_stats - base));
                }
            }
            Pair sum;
#pragma unroll
            for (int r = 0; r < (kTeam ? kSplits : 1); ++r)
                if (r < parts) sum.add(part_stats[r], part[r]);
            if (groups == 1) {
                sum.store(out + head * D + d);
            } else {
                const int64_t at = head * kGroups + group;
                *reinterpret_cast<float2*>(outputs + at * D + d) = make_float2(sum.x, sum.y);
                // every CTA of a team writes these, the same: each vouches for what its successor reads
                if (d == first) *reinterpret_cast<float2*>(stats + at * 2) = make_float2(sum.max, sum.sum);
            }
        }
        if (groups == 1) return;
        __threadfence();
        __syncthreads();
        int* last = reinterpret_cast<int*>(shared + kFlag);
        if (threadIdx.x == 0) {
            unsigned* counter = reinterpret_cast<unsigned*>(words) + kv_head * kSplits + rank;
            *last = atomicInc(counter, groups - 1) == static_cast<unsigned>(groups - 1);
        }
        __syncthreads();
        if (!*last) return;
        __threadfence();
        for (int i = threadIdx.x; i < p.group * kPairs; i += kThreads) {
            const int head = i / kPairs, d = first + i % kPairs * 2;
            float2 part[kGroups], part_stats[kGroups];
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                if (g >= groups) continue;
                part[g] = __ldcg(reinterpret_cast<const float2*>(outputs + static_cast<int64_t>(head * kGroups + g) * D + d));
                part_stats[g] = __ldcg(reinterpret_cast<const float2*>(stats + (head * kGroups + g) * 2));
            }
            Pair sum;
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                if (g < groups) sum.add(part_stats[g], part[g]);
            sum.store(out + head * D + d);
        }
    }
};

template <typename T, int D, int kBlocks, int kRing, bool kCluster, int kPerSm>
__global__ void __launch_bounds__(kThreads, kPerSm)
    paged_decode_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap k_map,
                        const __grid_constant__ CUtensorMap v_map) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Decode<T, D, kBlocks, kRing, kCluster> work(p, &k_map, &v_map, shared);
    const Rows rows(p);
    const int items = rows.count() * p.kv_heads;
    const bool team = kCluster && items < kTeamBelow;
    const int rank = team ? cluster_rank() : 0;
    const int workers = team ? gridDim.x / kSplits : gridDim.x;
    bool settled = false;
    const auto settle = [&] {
        if (!settled) {
            grid_dependency_wait();
            grid_dependency_launch();
            settled = true;
        }
    };
    for (int item = team ? blockIdx.x / kSplits : blockIdx.x; item < items; item += workers) {
        const int kv_head = item % p.kv_heads;
        const Rows::Found at = rows.find(item / p.kv_heads);
        const Cut cut(at.tokens, p.max_groups);
        const int group_begin = at.group * cut.split * kSplits, group_end = min(group_begin + cut.split * kSplits, at.tokens);
        const int parts = (group_end - group_begin + cut.split - 1) / cut.split;
        const int begin = group_begin + rank * cut.split;
        work.keys.open(p, p.tables + static_cast<int64_t>(at.slot) * p.table_width, kv_head, begin,
                       team ? min(begin + cut.split, group_end) : group_end);
        for (int e = 0; e < kRing; ++e) {
            if (begin + (e / 2 + 1) * kTile > at.tokens - kFresh) settle();
            work.issue(e);
        }
        settle();
        work.load_q(at.row, kv_head);
        work.attend(cut.split);
        __syncthreads();  // the ring is free
        work.keys.close();
        work.lay_out();
        if (team) {
            cluster_sync();
            work.template emit<true>(at.row, kv_head, at.group, cut.groups, parts, rank);
            fence_async_proxy();  // the part lies where the copy engine writes next
            cluster_sync();
        } else {
            __syncthreads();
            work.template emit<false>(at.row, kv_head, at.group, cut.groups, min(parts, 1), 0);
            fence_async_proxy();
            __syncthreads();
        }
    }
    settle();
}

struct Pools {
    CUtensorMap k{}, v{};
};

template <typename T, int D, int kBlocks, int kRing, bool kCluster, int kPerSm>
int launch(const Params& p, const Pools& pools, const Device& device, cudaStream_t stream) {
    const auto kernel = paged_decode_kernel<T, D, kBlocks, kRing, kCluster, kPerSm>;
    constexpr int kBytes = Decode<T, D, kBlocks, kRing, kCluster>::kBytes;
    static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (allowed != cudaSuccess) return static_cast<int>(allowed);
    const int64_t most = (static_cast<int64_t>(p.table_width << p.page_shift) + kSplit * kSplits - 1) / (kSplit * kSplits);
    const int64_t items = static_cast<int64_t>(p.rows) * p.kv_heads * (most < 1 ? 1 : most < p.max_groups ? most : p.max_groups);
    const int64_t room = static_cast<int64_t>(device.sms) * kPerSm / (kCluster ? kSplits : 1);
    const int64_t workers = items < room ? items : room < 1 ? 1 : room;
    constexpr unsigned kTogether = kCluster ? kSplits : 1;
    return launch_pdl_cluster(kernel, dim3(static_cast<unsigned>(workers) * kTogether), dim3(kThreads), kTogether, kBytes, stream,
                              p, pools.k, pools.v);
}

// Few rows: clusters and the copy engine, two CTAs a multiprocessor, or not all 16 clusters that one long row needs find room
// (some of the chip's groups of multiprocessors have fewer than 16). Many rows: single CTAs and cp.async, which may drift apart
// (128 x 1024 keys: 67 us, with the copy engine 72; 1 x 32768: 31 and 23).
template <typename T, int D, int kBlocks>
int by_size(const Params& p, int64_t pool_rows, const Device& device, cudaStream_t stream) {
    constexpr int kPerSm = D == 64 ? 4 - kBlocks / 2 : 2, kRing = D == 256 ? 3 : 6;
    constexpr bool kBf16 = std::is_same_v<T, bf16>;
    Pools pools;
    if (device.major >= 9 && static_cast<int64_t>(p.rows) * p.kv_heads < kTeamBelow && device.shared >= 200 * 1024 &&
        pool_map(pools.k, p.k_pool, pool_rows, D, kBf16) && pool_map(pools.v, p.v_pool, pool_rows, D, kBf16))
        return launch<T, D, kBlocks, kRing, true, 2>(p, pools, device, stream);
    if constexpr (D == 256) {
        if (device.shared < 110 * 1024) return launch<T, D, kBlocks, 2, false, 1>(p, pools, device, stream);
    }
    return launch<T, D, kBlocks, kRing, false, kPerSm>(p, pools, device, stream);
}

template <typename T>
int run(const Params& p, int64_t pool_rows, bool aligned, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
        const Device device;
        const bool wide = p.group > 8;
        if (aligned && p.group <= 16 && p.page_shift >= 4) {
            if (p.dim == 64)
                return wide ? by_size<T, 64, 2>(p, pool_rows, device, stream) : by_size<T, 64, 1>(p, pool_rows, device, stream);
            if (p.dim == 128)
                return wide ? by_size<T, 128, 2>(p, pool_rows, device, stream) : by_size<T, 128, 1>(p, pool_rows, device, stream);
            if (p.dim == 256)
                return wide ? by_size<T, 256, 2>(p, pool_rows, device, stream) : by_size<T, 256, 1>(p, pool_rows, device, stream);
        }
    }
    Plain plain{};
    plain.out = p.out, plain.q = p.q, plain.k_pool = p.k_pool, plain.v_pool = p.v_pool;
    plain.tables = p.tables, plain.slots = p.slots, plain.kv_len = p.kv_len;
    plain.queries = plain.sequences = p.rows, plain.heads = p.heads, plain.kv_heads = p.kv_heads, plain.dim = p.dim;
    plain.page = 1 << p.page_shift, plain.table_width = p.table_width, plain.scale = p.scale / kLog2E;
    return launch_plain<T>(plain, stream);
}

}  // namespace

// (out[B,Hq,D], q[B,Hq,D], k_pool[P,Hkv,page,D], v_pool, tables[slots,maxb], slots[B], kv_len[B], scale,
// workspace|None[>=B,words])
SPARK_LAUNCHER(spark_paged_attention_decode) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK((count == 8 || count == 9) && a.given(0));
    const DType t = a.dtype(0);
    SPARK_CHECK(a.is(0, t, 3) && a.is(1, t, 3) && a.is(2, t, 4) && a.is(3, t, 4));
    SPARK_CHECK(a.is(4, DType::i32, 2) && a.is(5, DType::i32, 1) && a.is(6, DType::i32, 1));
    const int64_t rows = a.dim(0, 0), heads = a.dim(0, 1), dim = a.dim(0, 2), kv_heads = a.dim(2, 1), page = a.dim(2, 2);
    for (int axis = 0; axis < 3; ++axis) SPARK_CHECK(a.dim(0, axis) == a.dim(1, axis));
    for (int axis = 0; axis < 4; ++axis) SPARK_CHECK(a.dim(2, axis) == a.dim(3, axis));
    SPARK_CHECK(a.dim(2, 3) == dim && kv_heads > 0 && heads % kv_heads == 0 && page > 0 && (page & (page - 1)) == 0);
    SPARK_CHECK(a.dim(5, 0) == rows && a.dim(6, 0) == rows && a.dim(4, 1) * page < INT32_MAX);
    if (a.size(0) == 0) return cudaSuccess;
    Params p{};
    p.out = a.ptr<void>(0), p.q = a.ptr<void>(1), p.k_pool = a.ptr<void>(2), p.v_pool = a.ptr<void>(3);
    p.tables = a.ptr<int>(4), p.slots = a.ptr<int>(5), p.kv_len = a.ptr<int>(6);
    p.rows = static_cast<int>(rows), p.heads = static_cast<int>(heads), p.kv_heads = static_cast<int>(kv_heads);
    p.group = static_cast<int>(heads / kv_heads), p.dim = static_cast<int>(dim), p.table_width = static_cast<int>(a.dim(4, 1));
    p.page_elements = kv_heads * page * dim;
    while ((int64_t{1} << p.page_shift) < page) ++p.page_shift;
    p.scale = a.real(7) * kLog2E;
    p.max_groups = 1;
    if (count == 9 && a.given(8)) {
        p.row_words = a.dim(8, 1);
        SPARK_CHECK(a.is(8, DType::f32, 2) && a.dim(8, 0) >= rows && a.vectors(8, p.row_words, 4) &&
                    p.row_words >= kv_heads * kSplits + heads * kGroups * (dim + 2));
        p.workspace = a.ptr<float>(8), p.max_groups = kGroups;
    }
    const bool aligned = a.vectors(0, dim, 2) && a.vectors(1, dim, 2) && a.vectors(2, dim, 2) && a.vectors(3, dim, 2);
    SPARK_DISPATCH_ACTIVATION(t, return run<T>(p, a.dim(2, 0) * kv_heads * page, aligned, stream))
    return spark::kUnsupported;
}
