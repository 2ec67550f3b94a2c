// What a chunk of a prefill needs and the state does not decide, for all chunks at once (see chunk.cuh for what is kept).
//
// CTA = (chunk, key head), 8 warps; K K^T and Q K^T once for the value heads of the group, which are then taken two at a time.
//   products  warps 0-3: K K^T, warps 4-7: Q K^T, 16 rows each, tiles up to the diagonal, mma.sync on q and k as they came; norms
//             go into the results, so q and k are exact operands;
//   solve     (I + A)^-1 without gates, entries never above 1 whatever the keys: 16 x 16 blocks on the diagonal by
//             substitution in float, a column a lane (warps 0-3; warps 4-7 meanwhile gate Q K^T), then block columns of the
//             transpose Y, a warp each: Y_ji = -(sum_k Y_jk A_ik^T) Y_ii in float16 with float sums; no power series
//             (near-parallel keys);
//   gates     e^{G_i - G_j} from cumulative sums in double, kept as pairs of floats: a strong decay costs later ones no digits.
// 43 KB of shared memory, three CTAs an SM. H200, 16 key and 32 value heads, 4096 tokens: reads 34 MB, writes 23 MB, 13 us at
// 4.29 TB/s; some 2000 instructions a warp take as long.
#pragma once

#include "common/mma.cuh"
#include "common/pdl.h"
#include "gdn/chunk.cuh"
#include "gdn/state_row.cuh"

namespace spark {

constexpr int kPrepareThreads = 256;
constexpr int kBlock = 16;
constexpr float kForget = -200.f;  // e^-200 is 0 in float
constexpr double kLog2e = 1.4426950408889634;

struct PrepareShared {
    union {
        struct {
            unsigned char keys[2 * kChunk * 128], queries[2 * kChunk * 128];  // two panels each
        };
        struct {                                // once the products are done
            unsigned char gram[kChunk * 128];   // k_i.k_j / |k_i| |k_j| in float16
            unsigned char cross[kChunk * 128];  // q_i.k_j / |q_i| |k_j|
            unsigned char solve[2][Record::kTile];
        };
    };
    float diagonal[4][kBlock][kBlock];         // of gram, in float
    unsigned char inverse[2][4][kBlock * 32];  // (I + A_ii)^-1 of two heads in float16
    float inv[2 * kChunk];                     // 1 / |k|, then 1 / |q| with its scale
    float2 sum[2][kChunk];                     // G log2 e = x + y
    float beta[2][kChunk];
};

// Byte of row r, 16-byte chunk c of a 16 x 16 float16 block.
__device__ __forceinline__ int block_offset(int row, int chunk) { return row * 32 + ((chunk ^ (row >> 2 & 1)) << 4); }

// e^{G_i - G_j}, for a result in float16; above the diagonal, where it would overflow, 1.
__device__ __forceinline__ float gate_ratio(const float2& i, const float2& j) {
    return exp2_fast(fminf((i.x - j.x) + (i.y - j.y), 0.f));
}

// 16 rows of K K^T or Q K^T, up to the diagonal; a warp.
template <typename T, int kRowBlock>
__device__ __forceinline__ void multiply_rows(const PrepareShared& s, float (&product)[8][4], bool of_keys, int lane) {
    const uint32_t keys = shared_address(s.keys), left = of_keys ? keys : shared_address(s.queries);
    const int row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        const int panel = k / 4 * (kChunk * 128);
        uint32_t a[4], b[4];
        ldmatrix(a, left + panel + swizzled(kRowBlock * kBlock + lane % 16, 2 * (k % 4) + lane / 16));
#pragma unroll
        for (int n = 0; n <= kRowBlock; ++n) {
            ldmatrix(b, keys + panel + swizzled(n * kBlock + row, 2 * (k % 4) + half));
            mma<T>(product[2 * n], a, b[0], b[1]);
            mma<T>(product[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// G of one head, a warp.
__device__ __forceinline__ void accumulate_gates(PrepareShared& s, const Prefill& p, const Chunk& chunk, int head, int h,
                                                 int lane) {
    double part[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int row = 2 * lane + e;
        const int64_t at = (static_cast<int64_t>(chunk.first) + row) * p.heads + head;
        part[e] = row < chunk.rows ? fmaxf(p.g[at], kForget) : 0.f;
        s.beta[h][row] = row < chunk.rows ? p.beta[at] : 0.f;
    }
    double sum = part[0] + part[1];
#pragma unroll
    for (int o = 1; o < kWarp; o *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= o) sum += before;
    }
    const double before = __shfl_up_sync(0xffffffffu, sum, 1);
    const double first = (lane > 0 ? before : 0.) + part[0];
    const auto split = [](double x) {
        x *= kLog2e;
        const float high = static_cast<float>(x);
        return make_float2(high, static_cast<float>(x - high));
    };
    s.sum[h][2 * lane] = split(first), s.sum[h][2 * lane + 1] = split(sum);
}

// Column c of (I + A_bb)^-1 of head h, a lane: into the float16 block and, gated, into the tile.
__device__ __forceinline__ void solve_diagonal(PrepareShared& s, int h, int block, int c) {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float a[4];
            load_floats<4>(&s.diagonal[block][i][j], a);
#pragma unroll
            for (int e = 0; e < 4 && j + e < i; ++e) sum = fmaf(a[e], x[j + e], sum);
        }
        x[i] = fmaf(-s.beta[h][block * kBlock + i], sum, i == c ? 1.f : 0.f);
    }
    const int column = block * kBlock + c;
    const float beta = s.beta[h][column];
    const float2 sum = s.sum[h][column];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t gated[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = half * 8 + 2 * e;
            const float2* sums = &s.sum[h][block * kBlock + i];
            gated[e] = pack_pair<f16>(x[i] * gate_ratio(sums[0], sum) * beta, x[i + 1] * gate_ratio(sums[1], sum) * beta);
        }
        *reinterpret_cast<uint4*>(s.solve[h] + swizzled(column, block * 2 + half)) =
            make_uint4(gated[0], gated[1], gated[2], gated[3]);
    }
    unsigned char* inverse = s.inverse[h][block] + c % 8 * 2;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) *reinterpret_cast<f16*>(inverse + block_offset(i, c / 8)) = __float2half_rn(x[i]);
}

// Block column j of T of head h, below the diagonal, as rows of its transpose; a warp.
__device__ __forceinline__ void solve_below(PrepareShared& s, int h, int j, int lane) {
    const int g = lane / 4, t = lane % 4, row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
    const int column = j * kBlock + g;  // and column + 8
    const float2 sum_j[2] = {s.sum[h][column], s.sum[h][column + 8]};
    const float beta_j[2] = {s.beta[h][column], s.beta[h][column + 8]};
    unsigned char* to = s.solve[h] + column * 128 + t * 4;  // a chunk c of its row lies at c ^ g
    uint32_t y[3][4], inverse[4], b[4];
    ldmatrix_trans(y[0], shared_address(s.inverse[h][j] + block_offset(row, half)));
#pragma unroll
    for (int d = 1; d < 4; ++d) {
        const int i = j + d;
        if (i > 3) break;
        float sum[2][4] = {}, result[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; ++e) {
            ldmatrix(b, shared_address(s.gram + swizzled(i * kBlock + row, 2 * (j + e) + half)));
            mma<f16>(sum[0], y[e], b[0], b[1]);
            mma<f16>(sum[1], y[e], b[2], b[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 beta = *reinterpret_cast<const float2*>(&s.beta[h][i * kBlock + n * 8 + 2 * t]);
            sum[n][0] *= beta.x, sum[n][1] *= beta.y, sum[n][2] *= beta.x, sum[n][3] *= beta.y;
        }
        uint32_t a[4];
        pack_fragment<f16>(sum[0], sum[1], a);
        ldmatrix(inverse, shared_address(s.inverse[h][i] + block_offset(row, half)));
        mma<f16>(result[0], a, inverse[0], inverse[1]);
        mma<f16>(result[1], a, inverse[2], inverse[3]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) result[n][e] = -result[n][e];
        }
        if (d < 3) pack_fragment<f16>(result[0], result[1], y[d]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2* sums = &s.sum[h][i * kBlock + n * 8 + 2 * t];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                *reinterpret_cast<uint32_t*>(to + e * 8 * 128 + (((2 * i + n) ^ g) << 4)) =
                    pack_pair<f16>(result[n][2 * e] * gate_ratio(sums[0], sum_j[e]) * beta_j[e],
                                   result[n][2 * e + 1] * gate_ratio(sums[1], sum_j[e]) * beta_j[e]);
        }
    }
}

// The scores of head h into its record, gated, by `threads` threads; the blocks up to the diagonal.
__device__ __forceinline__ void write_scores(const PrepareShared& s, unsigned char* record, int h, int thread, int threads) {
#pragma unroll 1
    for (int id = thread; id < Record::kTile / 16; id += threads) {
        const int row = id / 8, c = id % 8 ^ (row & 7);
        if (c / 2 > row / kBlock) continue;
        const uint4 x = *reinterpret_cast<const uint4*>(s.cross + id * 16);
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
        const float2 sum = s.sum[h][row];
        uint32_t y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = c * 8 + 2 * e;
            const float2* sums = &s.sum[h][column];
            const float2 v = unpack_pair<f16>(pairs[e]);
            y[e] = pack_pair<f16>(column <= row ? v.x * gate_ratio(sum, sums[0]) : 0.f,
                                  column < row ? v.y * gate_ratio(sum, sums[1]) : 0.f);
        }
        *reinterpret_cast<uint4*>(record + Record::kScores + id * 16) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

template <typename T>
__global__ void __launch_bounds__(kPrepareThreads, 3) gdn_prepare_kernel(const Prefill p) {
    PrepareShared& s = *reinterpret_cast<PrepareShared*>(dynamic_shared());
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp, k_head = blockIdx.y, number = blockIdx.x;
    grid_dependency_wait();
    grid_dependency_launch();
    int begun = 0;
    for (int at = 0; at < p.slices; at += kPrepareThreads) {
        const int slice = at + thread;
        begun += __syncthreads_count(slice < p.slices && first_chunk(p.cu, slice) <= number);
    }
    const int slice = begun - 1;
    const Chunk chunk = chunk_at(number - first_chunk(p.cu, slice), p.cu[slice], p.cu[slice + 1] - p.cu[slice], p.starts[slice]);
    if (chunk.rows == 0) return;

    {
        const int row = thread / 16, c = thread % 16;
        const T* rows = static_cast<const T*>(p.qkv) + chunk.first * p.stride + k_head * kDim + c * 8;
        const uint32_t to = c / 8 * (kChunk * 128) + swizzled(row, c % 8);
#pragma unroll
        for (int i = 0; i < kChunk; i += kPrepareThreads / 16) {
            const bool live = row + i < chunk.rows;
            const T* from = rows + (live ? row + i : 0) * p.stride;
            copy_async<false>(shared_address(s.keys) + to + i * 128, from + p.k_heads * kDim, live);
            copy_async<false>(shared_address(s.queries) + to + i * 128, from, live);
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    {  // norms: two threads a row, a panel each
        const int row = thread / 2, panel = thread % 2;
        const unsigned char* from = (row < kChunk ? s.keys : s.queries) + panel * (kChunk * 128);
        float sum = 0.f;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const Vec<T> x = *reinterpret_cast<const Vec<T>*>(from + swizzled(row % kChunk, c ^ (panel * 4)));
#pragma unroll
            for (int e = 0; e < Vec<T>::n; ++e) sum = fmaf(to_float(x.v[e]), to_float(x.v[e]), sum);
        }
        sum = group_sum<2>(sum);
        if (panel == 0) s.inv[row] = rsqrtf(sum + kL2Eps) * (row < kChunk ? 1.f : p.scale);
    }

    const int block = warp % 4, g = lane / 4, t = lane % 4, top = block * kBlock + g;
    const bool of_keys = warp < 4;
    float product[8][4] = {};
    switch (block) {
        case 0:
            multiply_rows<T, 0>(s, product, of_keys, lane);
            break;
        case 1:
            multiply_rows<T, 1>(s, product, of_keys, lane);
            break;
        case 2:
            multiply_rows<T, 2>(s, product, of_keys, lane);
            break;
        default:
            multiply_rows<T, 3>(s, product, of_keys, lane);
    }
    __syncthreads();
    {
        const float* inv = s.inv + (of_keys ? 0 : kChunk) + top;
        const float inv_top = inv[0], inv_low = inv[8];
        unsigned char* to = (of_keys ? s.gram : s.cross) + top * 128 + t * 4;  // a chunk n of its row lies at n ^ g
        float* diagonal = &s.diagonal[block][g][2 * t];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (n / 2 > block) break;
            const float2 inv_k = *reinterpret_cast<const float2*>(&s.inv[n * 8 + 2 * t]);
            const float2 x = make_float2(product[n][0] * (inv_top * inv_k.x), product[n][1] * (inv_top * inv_k.y));
            const float2 y = make_float2(product[n][2] * (inv_low * inv_k.x), product[n][3] * (inv_low * inv_k.y));
            *reinterpret_cast<uint32_t*>(to + ((n ^ g) << 4)) = pack_pair<f16>(x.x, x.y);
            *reinterpret_cast<uint32_t*>(to + 8 * 128 + ((n ^ g) << 4)) = pack_pair<f16>(y.x, y.y);
            if (of_keys && n / 2 == block) {
                *reinterpret_cast<float2*>(diagonal + n % 2 * 8) = x;
                *reinterpret_cast<float2*>(diagonal + 8 * kBlock + n % 2 * 8) = y;
            }
        }
    }

    const int group = p.heads / p.k_heads;
    for (int first = 0; first < group; first += 2) {
        const int heads = min(2, group - first), head = k_head * group + first;
        __syncthreads();  // products are there; the last pair's records are out
        if (warp < heads) accumulate_gates(s, p, chunk, head + warp, warp, lane);
        __syncthreads();
        if (of_keys) {
            const int h = lane / kBlock;
            if (h < heads) solve_diagonal(s, h, block, lane % kBlock);
        } else {
            for (int h = 0; h < heads; ++h)
                write_scores(s, record_of(p, number, head + h), h, thread - kPrepareThreads / 2, kPrepareThreads / 2);
        }
        __syncthreads();
        if (warp / 4 < heads) solve_below(s, warp / 4, block, lane);
        __syncthreads();
        for (int h = 0; h < heads; ++h) {
            unsigned char* record = record_of(p, number, head + h);
#pragma unroll
            for (int id = thread; id < Record::kTile / 16; id += kPrepareThreads) {
                const int row = id / 8, c = id % 8 ^ (row & 7);
                if (c / 2 >= row / kBlock)
                    *reinterpret_cast<uint4*>(record + Record::kSolve + id * 16) =
                        *reinterpret_cast<const uint4*>(s.solve[h] + id * 16);
            }
            const int kind = thread / kChunk, i = thread % kChunk;
            const float2 sum = s.sum[h][i], last = s.sum[h][kChunk - 1];
            const float decay = exp2f(kind == 2 ? (last.x - sum.x) + (last.y - sum.y) : kind == 3 ? last.x : sum.x);
            const float share = kind == 3 ? 1.f : s.inv[kind == 1 ? kChunk + i : i];
            reinterpret_cast<float*>(record + Record::kGates)[thread] = decay * share;
        }
    }
}

}  // namespace spark
