// Selection in a row of logits without sorting it: the shortest prefix, best first, that holds so many ids or so much weight.
//
// One histogram over a coarse digit that spreads likely values over the bins finds the bin where the prefix ends. What is in that
// bin (with `whole`: in it and the better ones) is as a rule a few hundred ids: every CTA of the cluster gathers and sorts them
// and finds the end by a scan. Where they are more than kFew, further digits follow: three of z's bits, two of the id among
// equals.
//
// defines: spark::{Boundary, SelectShared, Select}
#pragma once

#include "sampling/row.cuh"

namespace spark {

constexpr int kBins = 2048;
constexpr float kCoarseBins = 64.f;  // bins per unit of (top - z) / temperature
constexpr int kFew = 2048;           // 16 KB; of 248,320 ids N(0, 1) the fullest bin has 1,550

// The end of a prefix in (z descending, id ascending) order.
struct Boundary {
    uint32_t key = 0, last_id = 0xffffffffu;  // of the default, everything is kept: no settled value has key 0
    __device__ __forceinline__ bool keeps(float z, int id) const {
        const uint32_t k = ordered(z);
        return k > key || (k == key && static_cast<uint32_t>(id) <= last_id);
    }
};

struct SelectShared {
    union {
        struct {
            alignas(16) uint32_t low[2][kBins], high[2][kBins];  // twice: a level may not clear what another CTA still reads
        };
        uint64_t sorted[kFew];  // composites, best first: written when all have read the first histogram
    };
    uint64_t list[kFew];  // this CTA's part, for the others to read
    int count;
    uint32_t found_bin;
    uint64_t found_before, found_measure, found_end;
};

template <int kCluster>
struct Select {
    Row<kCluster>& row;
    SelectShared* shared;
    float top, scale;
    int levels = 0;
    bool listed = false;  // `sorted` holds the row's best ids, at least the selected ones

    __device__ Select(Row<kCluster>& of, SelectShared* memory, float best, float bins)
        : row(of), shared(memory), top(best), scale(bins) {}

    __device__ __forceinline__ int coarse(float z) const { return min(static_cast<int>((top - z) * scale), kBins - 1); }

    // A histogram: open; `add` by any thread; a sync of the row (any of its exchanges); find.
    __device__ void open() {
        ++levels;
        for (int b = threadIdx.x; b < kBins; b += kRowThreads) shared->low[levels % 2][b] = shared->high[levels % 2][b] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ void add(int bin, uint64_t measure) {
        const auto part = static_cast<uint32_t>(measure);
        const uint32_t before = atomicAdd(&shared->low[levels % 2][bin], part), carry = before + part < before ? 1u : 0u;
        const uint32_t upper = static_cast<uint32_t>(measure >> 32) + carry;
        if (upper) atomicAdd(&shared->high[levels % 2][bin], upper);
    }
    // By the coarse digit. The last bin, where most of a long tail may lie, is found by elimination.
    __device__ __forceinline__ void add_coarse(float z, uint64_t measure) {
        const int bin = coarse(z);
        if (bin < kBins - 1 && measure) add(bin, measure);
    }
    // The first bin whose running total reaches `target`, or the last: its number, the total in front of it and its own are left
    // in found_*, valid until the next.
    __device__ void find(uint64_t target) {
        constexpr int kEach = kBins / kRowThreads;
        static_assert(kEach == 4, "a thread reads its bins as one vector");
        uint64_t bins[kEach] = {};
#pragma unroll
        for (int r = 0; r < kCluster; ++r) {
            const uint4 l = reinterpret_cast<const uint4*>(row.of(shared->low[levels % 2], r))[threadIdx.x];
            const uint4 h = reinterpret_cast<const uint4*>(row.of(shared->high[levels % 2], r))[threadIdx.x];
            bins[0] += l.x + (static_cast<uint64_t>(h.x) << 32), bins[1] += l.y + (static_cast<uint64_t>(h.y) << 32);
            bins[2] += l.z + (static_cast<uint64_t>(h.z) << 32), bins[3] += l.w + (static_cast<uint64_t>(h.w) << 32);
        }
        uint64_t total, front = row.scan(bins[0] + bins[1] + bins[2] + bins[3], total);
        if (threadIdx.x == 0 && total < target)
            shared->found_bin = kBins - 1, shared->found_before = total, shared->found_measure = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (front < target && front + bins[i] >= target)
                shared->found_bin = threadIdx.x * kEach + i, shared->found_before = front, shared->found_measure = bins[i];
            front += bins[i];
        }
        __syncthreads();
    }

    // The ids that `wanted` wants, best first, in `sorted` of every CTA; how many there are: more than kFew are not listed.
    template <typename Each, typename Wanted>
    __device__ int collect(Each each, Wanted wanted) {
        if (threadIdx.x == 0) shared->count = 0;
        __syncthreads();
        each([&](int id, float z) {
            if (!wanted(id, z)) return;
            const int at = atomicAdd(&shared->count, 1);
            if (at < kFew) shared->list[at] = composite(z, id);
        });
        row.sync();
        int n = 0;
        for (int r = 0; r < kCluster; ++r) n += *row.of(&shared->count, r);
        if (n > kFew) return n;
        int size = 2, at = 0;
        while (size < n) size *= 2;
        for (int r = 0; r < kCluster; ++r) {
            const int theirs = *row.of(&shared->count, r);
            const uint64_t* list = row.of(shared->list, r);
            for (int i = threadIdx.x; i < theirs; i += kRowThreads) shared->sorted[at + i] = list[i];
            at += theirs;
        }
        for (int i = n + threadIdx.x; i < size; i += kRowThreads) shared->sorted[i] = 0;
        __syncthreads();
        for (int k = 2; k <= size; k *= 2) {  // bitonic, descending
            for (int j = k / 2; j > 0; j /= 2) {
                for (int i = threadIdx.x; i < size / 2; i += kRowThreads) {
                    const int a = (i & ~(j - 1)) * 2 + (i & (j - 1)), b = a + j;
                    const uint64_t x = shared->sorted[a], y = shared->sorted[b];
                    if ((x < y) == ((a & k) == 0)) shared->sorted[a] = y, shared->sorted[b] = x;
                }
                __syncthreads();
            }
        }
        return n;
    }

    // Of the first `n` in `sorted`: their measure.
    template <typename Measure>
    __device__ uint64_t measure_of(int n, Measure measure) const {
        uint64_t own = 0;
        for (int i = threadIdx.x; i < n; i += kRowThreads) own += measure(composite_value(shared->sorted[i]));
        return row.block_sum_u64(own);
    }

    // Of the first `n` in `sorted`: the end of the shortest prefix whose measure reaches `target`, or of all. `kept`: its
    // measure.
    template <typename Measure>
    __device__ Boundary cut(int n, uint64_t target, Measure measure, uint64_t& kept) const {
        constexpr int kEach = kFew / kRowThreads;
        uint64_t parts[kEach], own = 0, total;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int at = threadIdx.x * kEach + i;
            parts[i] = at < n ? measure(composite_value(shared->sorted[at])) : 0;
            own += parts[i];
        }
        uint64_t front = row.scan(own, total);
        if (threadIdx.x == 0 && total < target) shared->found_end = shared->sorted[n - 1], shared->found_before = total;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (front < target && front + parts[i] >= target)
                shared->found_end = shared->sorted[threadIdx.x * kEach + i], shared->found_before = front + parts[i];
            front += parts[i];
        }
        __syncthreads();
        kept = shared->found_before;
        return {static_cast<uint32_t>(shared->found_end >> 32), static_cast<uint32_t>(composite_id(shared->found_end))};
    }

    // After the coarse histogram: the end of the shortest prefix whose measure reaches `target` (at least 1, at most the row's
    // total). each(body) calls body(id, z) for this thread's ids, measure(z) is an id's part; both are pure. `kept`: the prefix's
    // measure. With `whole`, `listed` tells whether the prefix itself is in `sorted`.
    template <typename Each, typename Measure>
    __device__ Boundary finish(uint64_t target, bool whole, Each each, Measure measure, uint64_t& kept) {
        find(target);
        const int bin = static_cast<int>(shared->found_bin);
        const uint64_t before = shared->found_before;
        const int n = collect(each, [&](int, float z) { return whole ? coarse(z) <= bin : coarse(z) == bin; });
        if (n > kFew) return refine(bin, target, before, each, measure, kept);
        listed = whole;
        const Boundary end = cut(n, whole ? target : target - before, measure, kept);
        if (!whole) kept += before;
        return end;
    }

    // The same within a bin that holds too many to sort, digit by digit.
    template <typename Each, typename Measure>
    __device__ Boundary refine(int bin, uint64_t target, uint64_t before, Each each, Measure measure, uint64_t& kept) {
        uint32_t prefix = 0;
#pragma unroll 1
        for (int step = 0; step < 3; ++step) {
            const int shift = step == 0 ? 21 : step == 1 ? 10 : 0, width = step == 2 ? 10 : 11;
            open();
            each([&](int, float z) {
                const uint32_t key = ordered(z);
                if (coarse(z) != bin || (step > 0 && key >> (shift + width) != prefix)) return;
                const uint64_t m = measure(z);
                const int digit = (1 << width) - 1 - static_cast<int>(key >> shift & ((1u << width) - 1));  // the best first
                if (m) add(digit, m);
            });
            row.sync();
            find(target - before);
            prefix = prefix << width | ((1u << width) - 1 - shared->found_bin);
            before += shared->found_before;
        }
        Boundary end;
        end.key = prefix;
        const uint64_t one = measure(unordered(prefix)), equals = shared->found_measure / one;
        const uint64_t wanted = (target - before + one - 1) / one;
        kept = before + wanted * one;
        if (wanted < equals) {  // of equals, the lowest ids
            uint64_t left = wanted;
            uint32_t upper = 0;
#pragma unroll 1
            for (int step = 0; step < 2; ++step) {
                open();
                each([&](int id, float z) {
                    if (ordered(z) == prefix && (step == 0 || static_cast<uint32_t>(id) >> 11 == upper))
                        add(step == 0 ? id >> 11 : id & 2047, 1);
                });
                row.sync();
                find(left);
                upper = upper << 11 | shared->found_bin;
                left -= shared->found_before;
            }
            end.last_id = upper;
        }
        return end;
    }
};

}  // namespace spark
