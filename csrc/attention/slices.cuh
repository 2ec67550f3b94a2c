// What prefill kernels share: which tile of which slice a CTA does, which keys a row sees, and the running softmax.
//
// The rows of a slice and kv head are its queries times the query heads of the group, packed: row r is query r / group, head
// r % group. A tile is kRows consecutive rows, so that short slices fill tiles and the heads of a group share what is read of the
// cache. Tiles of keys start at absolute multiples of their size and are visited in ascending order; keys that a row does not see
// leave its state as it was, bit for bit, so a row's result does not depend on where its slice was cut.
//
// defines: spark::attn::{Slices, Span, Tile, find_tile, most_tiles, Softmax, hide}
#pragma once

#include "attention/plain.cuh"
#include "common/mma.cuh"

namespace spark::attn {

struct Slices {
    void* out;
    float* lse;  // or null
    const void *q, *k_pool, *v_pool;
    const int *tables, *slots, *cu_q, *kv_len;
    const float* bias;  // [heads, queries, bias_width], or null
    int64_t queries, bias_width, page_elements;
    int sequences, heads, kv_heads, group, dim, page_shift, table_width, full, window;
    float scale;
};

// Keys [first, last).
struct Span {
    int first, last;
};

// A tile of rows: of which slice, and where.
struct Tile {
    int slot, kv_head, first_row, rows;  // rows: those that exist, at most kRows; 0: there is no such tile
    int first_query;                     // of the slice, in the batch
    int position, tokens;                // of the slice's first query; keys in the cache

    // The keys that query `i` of the slice sees.
    __device__ Span sees(const Slices& p, int i) const {
        const int at = position + i;
        return {p.window > 0 ? max(at - p.window + 1, 0) : 0, p.full ? tokens : min(max(at + 1, 0), tokens)};
    }
    // Element (row, 0) of q or out.
    __device__ int64_t offset(const Slices& p, int row) const {
        const int r = first_row + row, query = r / p.group;
        return (static_cast<int64_t>(first_query + query) * p.heads + kv_head * p.group + (r - query * p.group)) * p.dim;
    }
};

// Tile number `index`, counted slice by slice, in each head by head, the longest (last) rows first; one of no rows if there are
// fewer. Every warp finds it for itself.
template <int kRows>
__device__ Tile find_tile(const Slices& p, int index) {
    const int lane = threadIdx.x % kWarp;
    for (int base = 0; base < p.sequences; base += kWarp) {
        const int s = base + lane;
        const bool exists = s < p.sequences;
        const int from = exists ? p.cu_q[s] : 0, queries = exists ? p.cu_q[s + 1] - from : 0;
        const int length = exists ? p.kv_len[s] : 0, slot = exists ? p.slots[s] : 0;
        const int tiles = (queries * p.group + kRows - 1) / kRows, count = tiles * p.kv_heads;
        int upto = count;
#pragma unroll
        for (int o = 1; o < kWarp; o <<= 1) {
            const int below = __shfl_up_sync(0xffffffffu, upto, o);
            if (lane >= o) upto += below;
        }
        const unsigned beyond = __ballot_sync(0xffffffffu, upto > index);
        if (beyond != 0) {
            const int source = __ffs(static_cast<int>(beyond)) - 1;
            const auto of = [&](int x) { return __shfl_sync(0xffffffffu, x, source); };
            const int inside = index - of(upto - count), per_head = of(tiles), slice_queries = of(queries);
            Tile tile;
            tile.slot = of(slot);
            tile.kv_head = inside / per_head;
            tile.first_row = (per_head - 1 - inside % per_head) * kRows;
            tile.rows = min(slice_queries * p.group - tile.first_row, kRows);
            tile.first_query = of(from);
            tile.position = of(length) - slice_queries;
            tile.tokens = min(max(of(length), 0), p.table_width << p.page_shift);
            return tile;
        }
        index -= __shfl_sync(0xffffffffu, upto, kWarp - 1);
    }
    return Tile{};
}

// Tiles there can be at most.
template <int kRows>
inline int64_t most_tiles(const Slices& p) {
    return p.kv_heads * (p.queries * p.group / kRows + p.sequences);
}

// The running softmax of two rows: lane / 4 of a fragment and 8 below. Scores x[j] are columns 8 * j + 2 * (lane % 4) + {0, 1} of
// the upper row, then of the lower.
struct Softmax {
    float top[2] = {kNothing, kNothing}, sum[2] = {0.f, 0.f};  // raw maxima, the same in a quad; each lane's own sums

    // Scores become weights 2^(scale * (x - top)); what was summed before must be multiplied by `fade`.
    template <int kBlocks>
    __device__ void step(float (&x)[kBlocks][4], float scale, float (&fade)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = top[r];
#pragma unroll
            for (int j = 0; j < kBlocks; ++j) m = fmaxf(m, fmaxf(x[j][2 * r], x[j][2 * r + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            fade[r] = exp2_fast((top[r] - m) * scale);
            top[r] = m;
            const float base = m * scale;
            float added = 0.f;
#pragma unroll
            for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    x[j][i] = exp2_fast(__fmaf_rn(x[j][i], scale, -base));
                    added += x[j][i];
                }
            }
            sum[r] = __fmaf_rn(sum[r], fade[r], added);
        }
    }
    // After the last step: sums of whole rows.
    __device__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        }
    }
    __device__ float share(int r) const { return sum[r] > 0.f ? 1.f / sum[r] : 0.f; }
    __device__ float lse(int r, float scale) const { return sum[r] > 0.f ? top[r] * scale / kLog2E + logf(sum[r]) : -INFINITY; }
};

// Takes the keys that a row does not see out of its scores; `key` is the key of x[0][0].
template <int kBlocks>
__device__ __forceinline__ void hide(float (&x)[kBlocks][4], const Span (&sees)[2], int key) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = key + 8 * j + (i & 1);
            if (at < sees[i >> 1].first || at >= sees[i >> 1].last) x[j][i] = -INFINITY;
        }
    }
}

}  // namespace spark::attn
