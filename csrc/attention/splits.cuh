// How decode attention cuts a row's keys, and how the parts become one again: the same whoever computes them.
//
// A row is at most kGroups groups of at most kSplits splits; a split is the smallest kSplit * 2^n keys with which that suffices.
// Splits are folded left to right into their group, groups left to right into the row.
//
// defines: spark::attn::{kSplit, kSplits, kGroups, Cut, Fold, Pair}
#pragma once

#include "attention/plain.cuh"
#include "common/mma.cuh"

namespace spark::attn {

constexpr int kSplit = 128;  // keys of the smallest split
constexpr int kSplits = 8;   // splits of a group, and CTAs of a team
constexpr int kGroups = 8;   // groups of a row

// How a row of `tokens` keys is cut.
struct Cut {
    int split, groups;
    __device__ Cut(int tokens, int max_groups) {
        const int most = kSplit * kSplits * max_groups, x = max(tokens - 1, 0) / most;
        split = kSplit << (x > 0 ? 32 - __clz(x) : 0);
        groups = max((tokens + split * kSplits - 1) / (split * kSplits), 1);
    }
};

// The one way in which two parts of a softmax become one; the order of roundings is spelled out.
struct Fold {
    float max, total_factor, part_factor;
    __device__ Fold(float total_max, float part_max) {
        max = fmaxf(total_max, part_max);
        total_factor = exp2_fast(total_max - max), part_factor = exp2_fast(part_max - max);
    }
    __device__ float operator()(float total, float part) const {
        return __fmaf_rn(total, total_factor, __fmul_rn(part, part_factor));
    }
};

// Output columns d, d + 1 of one head, being folded.
struct Pair {
    float max = kNothing, sum = 0.f, x = 0.f, y = 0.f;
    __device__ void add(float2 max_sum, float2 part) {
        const Fold fold(max, max_sum.x);
        max = fold.max, sum = fold(sum, max_sum.y), x = fold(x, part.x), y = fold(y, part.y);
    }
    template <typename T>
    __device__ void store(T* out) const {
        const float share = sum > 0.f ? 1.f / sum : 0.f;
        *reinterpret_cast<uint32_t*>(out) = pack_pair<T>(x * share, y * share);
    }
};

}  // namespace spark::attn
