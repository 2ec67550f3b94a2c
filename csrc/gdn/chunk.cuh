// Chunks of a prefill: 64 tokens on the grid of absolute positions, and what is kept of each between the two kernels.
//
// A slice that starts at position p begins with a chunk of 64 - p % 64 tokens and may end with a short one. A short chunk is
// filled up with rows that change nothing: q = k = v = 0, beta = 0, g = 0.
// Chunk c of slice s has number cu[s] / 64 + 2 s + c: room for all, whatever the lengths, found without a sum over slices.
//
// defines: spark::kChunk, kDim, Prefill, Chunk, first_chunk, chunks_of, chunk_at, Record, record_of
#pragma once

#include "common/device.cuh"

namespace spark {

constexpr int kChunk = 64;
constexpr int kDim = 128;  // DK and DV of the tensor-core kernels

// Arguments of GDN_PREFILL as its kernels take them.
struct Prefill {
    void* out;
    float *state, *snapshots;
    const void* qkv;
    const float *g, *beta;
    const int *slots, *cu, *starts, *snap_rows;
    unsigned char* workspace;
    int64_t stride;  // of qkv
    int slices, heads, k_heads, k_dim, v_dim, slot_count, snapshot_count;
    float scale;  // of q: DK^-1/2
};

struct Chunk {
    int first, rows, end;  // row of its first token, tokens, and tokens of its slice up to and with it
};

__device__ __forceinline__ int first_chunk(const int* cu, int slice) { return cu[slice] / kChunk + 2 * slice; }

__device__ __forceinline__ int chunks_of(int length, int start) {
    return length > 0 ? (start % kChunk + length + kChunk - 1) / kChunk : 0;
}

// Chunk `index` of a slice; without rows if there is none.
__device__ __forceinline__ Chunk chunk_at(int index, int first_row, int length, int start) {
    const int skipped = start % kChunk, begin = max(index * kChunk - skipped, 0),
              end = min((index + 1) * kChunk - skipped, length);
    return {first_row + begin, max(end - begin, 0), end};
}

// What is prepared of a chunk and value head: two 64 x 64 tiles of float16, as they shall lie in shared memory (mma.cuh), of
// which only the blocks of 16 x 16 on and off the diagonal that can differ from zero are written, and four rows of 64 floats.
//   solve [j][i]: T_ij e^{G_i - G_j} beta_j, T = (I + strict_lower(beta_i k_i.k_j))^-1;   scores [i][j]: q_i.k_j e^{G_i - G_j}
//   gates: e^{G_i} / |k_i|, e^{G_i} / |q_i| with q's scale, e^{G_63 - G_i} / |k_i|, e^{G_63}
struct Record {
    static constexpr int kTile = kChunk * kChunk * 2;
    static constexpr int kSolve = 0, kScores = kTile, kGates = 2 * kTile, kBytes = 2 * kTile + 4 * kChunk * 4;
};

__device__ __forceinline__ unsigned char* record_of(const Prefill& p, int chunk, int head) {
    return p.workspace + (static_cast<int64_t>(chunk) * p.heads + head) * Record::kBytes;
}

}  // namespace spark
