// The recurrence over the chunks of a slice, on tensor cores, with the state in registers.
//
//   V' = T (V - e^G K S),   O = e^G Q S + P V',   S <- e^{G_63} S + (e^{G_63 - G} V')^T K       (T, P and gates: chunk.cuh)
// CTA = (slice, value head, 16 kPairs columns of DV). Everything is transposed, columns of DV being the rows of a product, so
// that a warp owns 16 of them from end to end and each result is the next product's operand in its own registers: no exchange
// between warps, and a column has the same bits whatever the slicing. Columns go in pairs of warps:
//   the state warp   S^T [16 x 128] in float registers, K S, V', the update: the chain that chunks wait for;
//   the output warp  Q S and P V' on the operands the state warp leaves in shared memory, fragment by fragment; it also keeps
//                    kStages chunks of q, k, v and records on their way.
// mma.sync with T (bf16 or f16) operands; T, P and what they multiply are float16.
// A chunk costs the state warp 148 products of 16 x 8 x 16, the output warp 84. H200, 4096 tokens, 16 key and 32 value heads:
// 4.8 MFLOP a token, 25 us at 793 TFLOP/s were all tensor cores at work; but one slice is 64 chunks in a row, 128 CTAs of 32
// columns or 64 of 64, and each CTA takes some 50 KB a chunk from L2.
#pragma once

#include "common/mma.cuh"
#include "common/pdl.h"
#include "gdn/chunk.cuh"

namespace spark {

template <int kPairs>
struct AdvanceStage {
    static constexpr int kWidth = 16 * kPairs;                        // columns of DV
    unsigned char keys[2 * kChunk * 128], queries[2 * kChunk * 128];  // two panels each
    unsigned char record[Record::kBytes];
    unsigned char values[kChunk * kWidth * 2];

    // Byte of row r, 16-byte chunk c of the values.
    __device__ static constexpr int value_offset(int row, int chunk) {
        return kPairs == 4 ? swizzled(row, chunk) : row * (kWidth * 2) + ((chunk ^ (row >> 1 & 3)) << 4);
    }
};

template <int kPairs, int kStages>
struct AdvanceShared {
    AdvanceStage<kPairs> stage[kStages];
    uint4 state[2][kPairs][kDim / 16][kWarp];  // S^T before a chunk, as operands; of this chunk and the next
    uint4 change[kPairs][kChunk / 16][kWarp];  // V'^T of this chunk
};

// S^T of 16 columns of DV, as the result of products: tile n holds columns 8 n … of DK.
struct StateTiles {
    float s[kDim / 8][4];
    uint32_t packed[kDim / 16][4];  // as operands

    template <typename T>
    __device__ __forceinline__ void pack(uint4 (*to)[kWarp], int lane) {
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            pack_fragment<T>(s[2 * k], s[2 * k + 1], packed[k]);
            to[k][lane] = make_uint4(packed[k][0], packed[k][1], packed[k][2], packed[k][3]);
        }
    }
    // `at` is this lane's element of a state [DV, DK]: row lane / 4 of the 16, column 2 (lane % 4).
    __device__ __forceinline__ void load(const float* at) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            const float2 x = *reinterpret_cast<const float2*>(at + n * 8),
                         y = *reinterpret_cast<const float2*>(at + 8 * kDim + n * 8);
            s[n][0] = x.x, s[n][1] = x.y, s[n][2] = y.x, s[n][3] = y.y;
        }
    }
    __device__ __forceinline__ void store(float* at) const {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            *reinterpret_cast<float2*>(at + n * 8) = make_float2(s[n][0], s[n][1]);
            *reinterpret_cast<float2*>(at + 8 * kDim + n * 8) = make_float2(s[n][2], s[n][3]);
        }
    }
};

// Where a lane's addresses for ldmatrix lie in a panel: of operands read as they lie (rows are columns of B) and transposed.
struct LaneOffsets {
    uint32_t plain[4], turned[4];  // 16-byte chunks 2 q and 2 q + 1

    __device__ __forceinline__ explicit LaneOffsets(int lane) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            plain[q] = swizzled(lane % 8 + lane / 16 * 8, 2 * q + lane / 8 % 2);
            turned[q] = swizzled(lane % 16, 2 * q + lane / 16);
        }
    }
};

constexpr int kPanel = kChunk * 128;
constexpr int kRows16 = 16 * 128;  // bytes of 16 rows of a panel

// tiles[n] += S^T X^T for rows 8 n … of X [64 x 128], two panels at `x`; `operand(k)` is the A fragment of step k.
template <typename T, typename Operand>
__device__ __forceinline__ void times_state(float (&tiles)[kChunk / 8][4], uint32_t x, const LaneOffsets& at, Operand operand) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        const uint32_t (&a)[4] = operand(k);
#pragma unroll
        for (int n = 0; n < kChunk / 16; ++n) {
            uint32_t b[4];
            ldmatrix(b, x + k / 4 * kPanel + n * kRows16 + at.plain[k % 4]);
            mma<T>(tiles[2 * n], a, b[0], b[1]);
            mma<T>(tiles[2 * n + 1], a, b[2], b[3]);
        }
    }
}

template <typename T, int kPairs, int kStages>
class Advance {
    using Shared = AdvanceShared<kPairs, kStages>;
    using Stage = AdvanceStage<kPairs>;

  public:
    static constexpr int kThreads = 2 * kPairs * kWarp;

    __device__ __forceinline__ explicit Advance(const Prefill& p)
        : p_(p),
          shared_(*reinterpret_cast<Shared*>(dynamic_shared())),
          head_(blockIdx.y),
          slice_(blockIdx.z),
          lane_(threadIdx.x % kWarp),
          pair_(threadIdx.x / kWarp % kPairs),
          column_(blockIdx.x * Stage::kWidth + pair_ * 16),
          at_(lane_) {
        k_head_ = head_ / (p.heads / p.k_heads);
        number_ = first_chunk(p.cu, slice_);
    }

    __device__ __forceinline__ void run() {
        const int slot = p_.slots[slice_];
        first_row_ = p_.cu[slice_], length_ = p_.cu[slice_ + 1] - first_row_, start_ = p_.starts[slice_];
        if (slot < 0 || slot >= p_.slot_count) return;
        chunks_ = chunks_of(length_, start_);
        const int64_t in_head = (static_cast<int64_t>(column_) + lane_ / 4) * kDim + 2 * (lane_ % 4);
        float* state = p_.state + (static_cast<int64_t>(slot) * p_.heads + head_) * (kDim * kDim) + in_head;
        if (threadIdx.x / kWarp < kPairs) {
            run_state(state, in_head);
        } else {
            run_output();
        }
    }

  private:
    __device__ __forceinline__ Chunk chunk(int c) const { return chunk_at(c, first_row_, length_, start_); }
    __device__ __forceinline__ Stage& stage(int c) const { return shared_.stage[c % kStages]; }

    // Not __syncthreads: the two kinds of warps come from different places.
    __device__ __forceinline__ static void meet() { barrier_sync(0, kThreads); }

    // Both kinds of warps meet before each chunk (its data and the state's operands are there; what was read two chunks ago is
    // free) and, with one stage, once more, when the chunk that was asked for at the meeting is there.
    __device__ __forceinline__ void run_state(float* state, int64_t in_head) {
        StateTiles s;
        if (start_ == 0) {
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) s.s[n][0] = s.s[n][1] = s.s[n][2] = s.s[n][3] = 0.f;
        } else {
            s.load(state);
        }
        s.template pack<T>(shared_.state[0][pair_], lane_);
        int end = 0, wanted = next_snapshot(-1);
        for (int c = 0;; ++c) {
            if (end == wanted) take_snapshots(s, end, in_head);
            if (end >= wanted) wanted = next_snapshot(end);
            if (c == chunks_) break;
            meet();
            if (kStages == 1) meet();
            advance(s, c);
            end = chunk(c).end;
        }
        if (chunks_ > 0 || start_ == 0) s.store(state);
    }

    // The smallest offset above `after` at which a snapshot of the slice is wanted.
    __device__ __forceinline__ int next_snapshot(int after) const {
        if (p_.snapshot_count == 0) return INT32_MAX;
        int next = INT32_MAX;
        for (int i = lane_; i < p_.snapshot_count; i += kWarp) {
            const int offset = p_.snap_rows[2 * i + 1];
            if (p_.snap_rows[2 * i] == slice_ && offset > after) next = min(next, offset);
        }
#pragma unroll
        for (int o = kWarp / 2; o > 0; o /= 2) next = min(next, __shfl_xor_sync(0xffffffffu, next, o));
        return next;
    }

    __device__ __forceinline__ void take_snapshots(const StateTiles& s, int offset, int64_t in_head) const {
        for (int i = 0; i < p_.snapshot_count; ++i) {
            if (p_.snap_rows[2 * i] == slice_ && p_.snap_rows[2 * i + 1] == offset)
                s.store(p_.snapshots + (static_cast<int64_t>(i) * p_.heads + head_) * (kDim * kDim) + in_head);
        }
    }

    __device__ __forceinline__ void advance(StateTiles& s, int c) {
        const Stage& in = stage(c);
        const float* gates = reinterpret_cast<const float*>(in.record + Record::kGates) + 2 * (lane_ % 4);
        const uint32_t keys = shared_address(in.keys), solve = shared_address(in.record + Record::kSolve);
        float tiles[kChunk / 8][4] = {};
        times_state<T>(tiles, keys, at_, [&](int k) -> const uint32_t (&)[4] { return s.packed[k]; });

        uint32_t rest[kChunk / 16][4];  // V - e^G K S
        {
            const int row = lane_ % 8 + lane_ / 16 * 8, half = lane_ / 8 % 2;
            const uint32_t values = shared_address(in.values) + Stage::value_offset(row, 2 * pair_ + half);
#pragma unroll
            for (int k = 0; k < kChunk / 16; ++k) {
                uint32_t v[4];
                ldmatrix_trans(v, values + k * 16 * Stage::kWidth * 2);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 decay = *reinterpret_cast<const float2*>(gates + (2 * k + n) * 8);
                    const float2 low = unpack_pair<T>(v[2 * n]), high = unpack_pair<T>(v[2 * n + 1]);
                    const float (&x)[4] = tiles[2 * k + n];
                    rest[k][2 * n] = pack_pair<f16>(fmaf(-decay.x, x[0], low.x), fmaf(-decay.y, x[1], low.y));
                    rest[k][2 * n + 1] = pack_pair<f16>(fmaf(-decay.x, x[2], high.x), fmaf(-decay.y, x[3], high.y));
                }
            }
        }
        float change[kChunk / 8][4] = {};  // V'
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
#pragma unroll
            for (int n = k; n < kChunk / 16; ++n) {
                uint32_t b[4];
                ldmatrix_trans(b, solve + k * kRows16 + at_.turned[n]);
                mma<f16>(change[2 * n], rest[k], b[0], b[1]);
                mma<f16>(change[2 * n + 1], rest[k], b[2], b[3]);
            }
        }
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
            pack_fragment<f16>(change[2 * k], change[2 * k + 1], rest[k]);
            shared_.change[pair_][k][lane_] = make_uint4(rest[k][0], rest[k][1], rest[k][2], rest[k][3]);
        }
        barrier_arrive(1 + pair_, 2 * kWarp);
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            const float2 to_end = *reinterpret_cast<const float2*>(gates + 2 * kChunk + n * 8);
            change[n][0] *= to_end.x, change[n][1] *= to_end.y, change[n][2] *= to_end.x, change[n][3] *= to_end.y;
        }
        const float total = gates[3 * kChunk];
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) s.s[n][0] *= total, s.s[n][1] *= total, s.s[n][2] *= total, s.s[n][3] *= total;
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
            uint32_t a[4];
            pack_fragment<T>(change[2 * k], change[2 * k + 1], a);
#pragma unroll
            for (int n = 0; n < kDim / 16; ++n) {
                uint32_t b[4];
                ldmatrix_trans(b, keys + n / 4 * kPanel + k * kRows16 + at_.turned[n % 4]);
                mma<T>(s.s[2 * n], a, b[0], b[1]);
                mma<T>(s.s[2 * n + 1], a, b[2], b[3]);
            }
        }
        s.template pack<T>(shared_.state[(c + 1) % 2][pair_], lane_);
    }

    __device__ __forceinline__ void run_output() {
        for (int c = 1 - kStages; c < chunks_; ++c) {
            if (kStages > 1 && c >= 0) {
                copy_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
                meet();
            }
            if (kStages == 1) meet();
            const Chunk next = chunk(c + kStages - 1);
            if (next.rows == kChunk) {
                load<true>(c + kStages - 1, next);
            } else if (next.rows > 0) {
                load<false>(c + kStages - 1, next);
            }
            copy_async_commit();  // a group a chunk, even if there is none
            if (kStages == 1) {
                copy_async_wait<0>();
                meet();
            }
            if (c >= 0) output(c);
        }
    }

    // Asks for chunk c. kFull: it has 64 rows; else the missing ones become zeros.
    template <bool kFull>
    __device__ __forceinline__ void load(int c, const Chunk& from) {
        constexpr int kLoaders = kPairs * kWarp, kRowBytes = Stage::kWidth * 2;
        const int thread = threadIdx.x - kLoaders;
        Stage& to = stage(c);
        const uint32_t stride = static_cast<uint32_t>(p_.stride) * 2;
        const unsigned char* rows = static_cast<const unsigned char*>(p_.qkv) + static_cast<int64_t>(from.first) * stride;
        const auto copy_row = [&](uint32_t at, const unsigned char* first, int row) {
            const bool live = kFull || row < from.rows;
            copy_async<false>(at, first + static_cast<uint64_t>(static_cast<uint32_t>(live ? row : 0)) * stride, live);
        };
        const int row = thread / 8 % 8, c16 = thread % 8;
#pragma unroll
        for (int panel = thread / 64; panel < 2; panel += kLoaders / 64) {
            const unsigned char *queries = rows + (k_head_ * kDim + panel * 64 + c16 * 8) * 2,
                                *keys = queries + p_.k_heads * kDim * 2;
            const uint32_t offset = panel * kPanel + swizzled(row, c16);
            const uint32_t to_keys = shared_address(to.keys) + offset, to_queries = shared_address(to.queries) + offset;
#pragma unroll
            for (int i = 0; i < kChunk; i += 8) {
                copy_row(to_keys + i * 128, keys, row + i);
                copy_row(to_queries + i * 128, queries, row + i);
            }
        }
        {
            constexpr int kChunks = kRowBytes / 16, kStep = kLoaders / kChunks;  // of a row; rows at a time: 16
            const int first = thread / kChunks, part = thread % kChunks;
            const int column = 2 * p_.k_heads * kDim + head_ * kDim + blockIdx.x * Stage::kWidth + part * 8;
            const uint32_t to_values = shared_address(to.values) + Stage::value_offset(first, part);
#pragma unroll
            for (int i = 0; i < kChunk; i += kStep) copy_row(to_values + i * kRowBytes, rows + column * 2, first + i);
        }
        const unsigned char* record = record_of(p_, number_ + c, head_) + thread * 16;
        const uint32_t to_record = shared_address(to.record) + thread * 16;
        const int block = (c16 ^ row) / 2;
#pragma unroll
        for (int i = 0; i < 2 * Record::kTile; i += kLoaders * 16) {  // the blocks of 16 x 16 that were written
            const int row_block = i / (16 * 128) % 4;
            if (i < Record::kTile ? block >= row_block : block <= row_block) copy_async<false>(to_record + i, record + i);
        }
        if (thread < 4 * kChunk * 4 / 16) copy_async<false>(to_record + Record::kGates, record + Record::kGates);
    }

    __device__ __forceinline__ void output(int c) {
        const Stage& in = stage(c);
        const float* gates = reinterpret_cast<const float*>(in.record + Record::kGates) + kChunk + 2 * (lane_ % 4);
        float tiles[kChunk / 8][4] = {};
        {
            uint32_t state[kDim / 16][4];
#pragma unroll
            for (int k = 0; k < kDim / 16; ++k) fetch(shared_.state[c % 2][pair_][k][lane_], state[k]);
            times_state<T>(tiles, shared_address(in.queries), at_, [&](int k) -> const uint32_t (&)[4] { return state[k]; });
        }
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            const float2 decay = *reinterpret_cast<const float2*>(gates + n * 8);
            tiles[n][0] *= decay.x, tiles[n][1] *= decay.y, tiles[n][2] *= decay.x, tiles[n][3] *= decay.y;
        }
        barrier_sync(1 + pair_, 2 * kWarp);
        const uint32_t scores = shared_address(in.record + Record::kScores);
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
            uint32_t change[4];
            fetch(shared_.change[pair_][k][lane_], change);
#pragma unroll
            for (int n = k; n < kChunk / 16; ++n) {
                uint32_t b[4];
                ldmatrix(b, scores + n * kRows16 + at_.plain[k]);
                mma<f16>(tiles[2 * n], change, b[0], b[1]);
                mma<f16>(tiles[2 * n + 1], change, b[2], b[3]);
            }
        }
        // A tile is 16 columns of DV by 8 tokens: transposed, and with the neighbour's half, a lane has 4 columns of a token.
        const Chunk to = chunk(c);
        const bool odd = lane_ % 2;
        T* out = static_cast<T*>(p_.out) + (static_cast<int64_t>(to.first) * p_.heads + head_) * kDim + column_ + (odd ? 8 : 0) +
                 lane_ % 4 / 2 * 4;
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
            const uint32_t low = transpose_8x8(pack_pair<T>(tiles[n][0], tiles[n][1]));
            const uint32_t high = transpose_8x8(pack_pair<T>(tiles[n][2], tiles[n][3]));
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
            const int row = n * 8 + lane_ / 4;
            if (row < to.rows)
                *reinterpret_cast<uint2*>(out + static_cast<int64_t>(row) * p_.heads * kDim) =
                    odd ? make_uint2(other, high) : make_uint2(low, other);
        }
    }

    __device__ static __forceinline__ void fetch(const uint4& from, uint32_t (&to)[4]) {
        const uint4 x = from;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }

    const Prefill& p_;
    Shared& shared_;
    const int head_, slice_, lane_, pair_, column_;
    const LaneOffsets at_;
    int k_head_, number_, first_row_, length_, start_, chunks_;  // number_: of the slice's first chunk
};

template <typename T, int kPairs, int kStages>
__global__ void __launch_bounds__(2 * kPairs * kWarp, 1) gdn_advance_kernel(const Prefill p) {
    grid_dependency_wait();
    grid_dependency_launch();
    Advance<T, kPairs, kStages>(p).run();
}

}  // namespace spark
