// Products of many rows: a CTA takes kM rows of weights and kN rows of activations, both through a ring of stages in shared
// memory that cp.async fills, and leaves the fp32 product in shared memory, [kN][kM].
//
// As in stream.cuh the product is w x^T, a block is 32 columns and lane t of a quad takes columns 8t..8t+7 of it with one 16-byte
// load from shared memory, for two mma. A block of a tile lies in shared memory as rows of 64 bytes, so that the eight lanes of a
// quarter warp read 128 bytes in a row: no bank is met twice and nothing is swizzled. The sum keeps the order of stream.cuh:
// parts of k begin anew and are added up in order, in registers, or over the CTAs of a cluster that have one part each. Tensor
// cores by mma.sync: an H200 gives about 60 % of its 793 TFLOP/s this way. Per block a warp of 64 x 32 reads 12 times 512 bytes
// (48 cycles of shared memory for 8 warps: 384) for 32 mma (8 warps on 4 tensor cores: about 410 cycles).
//
// defines: spark::Tile
#pragma once

#include "linear/stream.cuh"

namespace spark {

// kWarpM x kWarpN is a warp's share. A stage has two blocks. Copies: how many 16-byte pieces of a stage a thread brings.
template <typename T_, int kM_, int kN_, int kWarpM, int kWarpN, int kStages>
struct Tile {
    using T = T_;
    static constexpr int kM = kM_, kN = kN_;
    static constexpr int kWarpsM = kM / kWarpM, kThreads = kWarpsM * (kN / kWarpN) * kWarp;
    static constexpr int kMs = kWarpM / 16, kNs = kWarpN / 8;  // fragments of a warp
    static constexpr int kStage = (kM + kN) * 8;               // pieces
    static constexpr int kWeightCopies = kM * 8 / kThreads, kInputCopies = kN * 8 / kThreads;
    static constexpr int kPitch = kM + 4;  // floats of a row of the result: stores of fragments meet every bank once
    static constexpr int kBytes = kStages * kStage * 16 > kN * kPitch * 4 ? kStages * kStage * 16 : kN * kPitch * 4;
    static_assert(kM * 8 % kThreads == 0 && kN * 8 % kThreads == 0 && kThreads % 16 == 0, "every thread brings the same");
    using Sum = float[kMs][kNs][4];

    const T *weights, *inputs;  // [.., k]
    int k;
    int weight_row[kWeightCopies], input_row[kInputCopies];  // of this thread's copies
    uint4* shared;

    // The tile's row that copy i of this thread belongs to.
    __device__ __forceinline__ static int row_of(int i) {
        const int piece = i * kThreads + threadIdx.x;
        return piece / 16 * 2 + piece % 8 / 4;
    }

    template <int kRows, int kCopies>
    __device__ __forceinline__ void copy(uint4* to, const T* from, const int (&row)[kCopies], int block, int last) const {
        const int half = threadIdx.x % 16 / 8, piece = threadIdx.x % 4;
        const int column = (block + half) * kBlock + piece * 8;
        const bool present = block + half < last && column < k;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            copy_async(to + (half * kRows + row_of(i)) * 4 + piece,
                       from + static_cast<int64_t>(row[i]) * k + (present ? column : 0), present);
    }
    __device__ __forceinline__ void copy_weights(int stage, int block, int last) const {
        copy<kM>(shared + stage * kStage, weights, weight_row, block, last);
    }
    __device__ __forceinline__ void copy_inputs(int stage, int block, int last) const {
        copy<kN>(shared + stage * kStage + kM * 8, inputs, input_row, block, last);
    }

    __device__ __forceinline__ static void multiply(const uint4* w, const uint4* x, Sum& sum) {
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;  // lane = 4 g + t: row g, piece t
        const uint4* a = w + warp % kWarpsM * kWarpM * 4 + lane;
        const uint4* b = x + warp / kWarpsM * kWarpN * 4 + lane;
        uint4 v[kNs];
#pragma unroll
        for (int j = 0; j < kNs; ++j) v[j] = b[j * 8 * 4];
#pragma unroll
        for (int i = 0; i < kMs; ++i) {
            const uint4 low = a[i * 16 * 4], high = a[(i * 16 + 8) * 4];
#pragma unroll
            for (int j = 0; j < kNs; ++j) mma<T>(sum[i][j], {low.x, high.x, low.y, high.y}, v[j].x, v[j].y);
#pragma unroll
            for (int j = 0; j < kNs; ++j) mma<T>(sum[i][j], {low.z, high.z, low.w, high.w}, v[j].z, v[j].w);
        }
    }

    // Adds blocks `span` of the product to `total`. With kAdd, parts of k end at the bounds that `parts` parts of all blocks have
    // (span is all of them); without, span is one part. ready() is called between the first copies of weights and of activations.
    // Afterwards shared memory is free.
    template <bool kAdd, typename Ready>
    __device__ __forceinline__ void run(Sum& total, Span span, int parts, Ready ready) const {
        const int blocks = (k + kBlock - 1) / kBlock, stages = (span.last - span.first + 1) / 2;
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s)
            if (s < stages) copy_weights(s, span.first + 2 * s, span.last);
        ready();
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s) {
            if (s < stages) copy_inputs(s, span.first + 2 * s, span.last);
            copy_async_commit();
        }
        Sum sum = {};
        int part = -1, end = 0;
        const auto next_part = [&](int done) {
            do end = part_of(blocks, ++part, parts).last;
            while (end <= done && part < parts);
        };
        if (kAdd) next_part(0);
        for (int s = 0; s < stages; ++s) {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // stage s is here for all, and all are done with stage s - 1
            const int ahead = s + kStages - 1;
            if (ahead < stages) {
                copy_weights(ahead % kStages, span.first + 2 * ahead, span.last);
                copy_inputs(ahead % kStages, span.first + 2 * ahead, span.last);
            }
            copy_async_commit();
            const uint4* stage = shared + s % kStages * kStage;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int block = span.first + 2 * s + half;
                if (block >= span.last) break;
                multiply(stage + half * kM * 4, stage + (kM * 2 + half * kN) * 4, kAdd ? sum : total);
                if (kAdd && block + 1 == end) {
#pragma unroll
                    for (int i = 0; i < kMs; ++i)
#pragma unroll
                        for (int j = 0; j < kNs; ++j)
#pragma unroll
                            for (int e = 0; e < 4; ++e) total[i][j][e] += sum[i][j][e], sum[i][j][e] = 0.f;
                    next_part(end);
                }
            }
        }
        __syncthreads();
    }

    // Calls body(row, column, fragment) for each fragment of the thread: elements (row, column), (row, column + 1), (row + 8,
    // column), (row + 8, column + 1) of the tile; rows are weights, columns activations.
    template <typename Body>
    __device__ __forceinline__ static void for_fragments(const Sum& total, Body body) {
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
        for (int i = 0; i < kMs; ++i)
#pragma unroll
            for (int j = 0; j < kNs; ++j)
                body(warp % kWarpsM * kWarpM + i * 16 + lane / 4, warp / kWarpsM * kWarpN + j * 8 + lane % 4 * 2, total[i][j]);
    }

    // Leaves the product in shared memory: element (row, column) at column * kPitch + row. The caller waits.
    __device__ __forceinline__ void keep(const Sum& total) const {
        float* to = reinterpret_cast<float*>(shared);
        for_fragments(total, [&](int row, int column, const float (&v)[4]) {
            to[column * kPitch + row] = v[0];
            to[(column + 1) * kPitch + row] = v[1];
            to[column * kPitch + row + 8] = v[2];
            to[(column + 1) * kPitch + row + 8] = v[3];
        });
    }
};

}  // namespace spark
