// SAMPLE: the next token of each row under its own parameters, in the order of sparkrt/ops/sampling_rules.py.
//
// A cluster of eight CTAs a row. The edited row (allowed set, stop ban, biases, penalties) stays in shared memory, 31,040 floats
// a CTA at 248,320 ids, so logits and counts are read once: 2 MB a row, 60 us for 128 rows at 4.29 TB/s. Where shared memory does
// not hold it (devices without clusters) every pass edits the row anew. Top-k and top-p are selections, not sorts (select.cuh);
// the draw walks through integer weights in id order. A row's result depends on the row alone, bit for bit.
#include <cfloat>

#include "sampling/philox.cuh"
#include "sampling/select.cuh"

namespace {

using namespace spark;

// Columns of sparkrt/ops/sampling_rules.py.
constexpr int kColumns = 8;
enum FloatColumn { kTemperature = 0, kTopP = 1, kMinP = 2, kRepetition = 3, kPresence = 4, kFrequency = 5 };
enum IntColumn { kTopK = 0, kSeedLo = 1, kSeedHi = 2, kStep = 3, kMinTokens = 4, kAllowedRow = 5 };
constexpr int kPromptBit = 1 << 30;

struct Params {
    int *tokens, *feed, *counts;
    const float* logits;
    const int* slots;
    const float* params_f;
    const int *params_i, *bias_indptr, *bias_ids;
    const float* bias_values;
    const int *stop_indptr, *stop_ids;
    const uint32_t* allowed;
    int64_t stride, count_stride, allowed_stride;
    int valid, slot_count, allowed_rows;
};

// What changes a row's logits before temperature.
struct Edits {
    const float* logits;
    const uint32_t* allowed;  // of this row, or null
    const int* counts;        // of this row's slot, or null where nothing is penalized
    const int *stop, *stop_end, *bias, *bias_end;
    const float* bias_values;
    float repetition, presence, frequency;

    __device__ __forceinline__ float base(int id, float raw) const {
        const bool drop = allowed != nullptr && !(__ldg(allowed + id / 32) >> (id % 32) & 1u);
        return drop ? -INFINITY : settled(raw);
    }
    __device__ __forceinline__ float penalized(int id, float z) const {
        if (counts == nullptr) return z;
        const int seen = counts[id];
        if (seen == 0) return z;
        const int generated = seen & (kPromptBit - 1);
        z = z > 0.f ? z / repetition : z * repetition;
        z -= frequency * static_cast<float>(generated) + (generated > 0 ? presence : 0.f);
        return settled(z);
    }
    // All of it for one id, without shared memory.
    __device__ float operator()(int id) const {
        float z = base(id, __ldg(logits + id));
        for (const int* s = stop; s < stop_end; ++s)
            if (*s == id) z = -INFINITY;
        for (const int* b = bias; b < bias_end; ++b)
            if (*b == id) z += bias_values[b - bias];
        return penalized(id, z);
    }
};

__device__ Edits edits_of(const Params& p, int64_t r, const float* f, const int* i, int slot) {
    Edits e{};
    e.logits = p.logits + r * p.stride;
    const int row = i[kAllowedRow];
    if (p.allowed != nullptr && row >= 0 && row < p.allowed_rows) e.allowed = p.allowed + row * p.allowed_stride;
    e.repetition = f[kRepetition], e.presence = f[kPresence], e.frequency = f[kFrequency];
    const bool penalizes = e.repetition != 1.f || e.presence != 0.f || e.frequency != 0.f;
    if (penalizes && slot >= 0) e.counts = p.counts + slot * p.count_stride;
    e.stop = p.stop_ids + p.stop_indptr[r], e.stop_end = p.stop_ids + p.stop_indptr[r + 1];
    if (i[kStep] >= i[kMinTokens]) e.stop_end = e.stop;
    e.bias = p.bias_ids + p.bias_indptr[r], e.bias_end = p.bias_ids + p.bias_indptr[r + 1];
    e.bias_values = p.bias_values + p.bias_indptr[r];
    return e;
}

// The edited row in shared memory; returns this thread's best.
template <int kCluster>
__device__ uint64_t edit(const Row<kCluster>& row, const Edits& e, float* held) {
    uint64_t best = 0;
    for_logits(row, e.logits, [&](int id, float raw) {
        const float z = e.base(id, raw);
        held[id - row.lo] = z;
        const uint64_t c = composite(z, id);
        best = best > c ? best : c;
    });
    __syncthreads();
    if (e.counts == nullptr && e.stop == e.stop_end && e.bias == e.bias_end) return best;
    const auto mine = [&](int id) { return id >= row.lo && id < row.hi; };
    for (const int* s = e.stop + threadIdx.x; s < e.stop_end; s += kRowThreads)
        if (mine(*s)) held[*s - row.lo] = -INFINITY;
    __syncthreads();
    for (const int* b = e.bias + threadIdx.x; b < e.bias_end; b += kRowThreads)
        if (mine(*b)) held[*b - row.lo] += e.bias_values[b - e.bias];
    __syncthreads();
    best = 0;
    for (int id = row.lo + threadIdx.x; id < row.hi; id += kRowThreads) {
        const float z = e.penalized(id, held[id - row.lo]);
        held[id - row.lo] = z;
        const uint64_t c = composite(z, id);
        best = best > c ? best : c;
    }
    __syncthreads();
    return best;
}

template <int kCluster>
__device__ int best_raw(Row<kCluster>& row, const float* logits) {
    uint64_t best = 0;
    for_logits(row, logits, [&](int id, float raw) {
        const uint64_t c = composite(settled(raw), id);
        best = best > c ? best : c;
    });
    return composite_id(row.max(best));
}

// The id at which the running sum of weights, in id order, passes the part of their total that 53 random bits name; on one thread
// of the cluster, -1 on the others.
template <int kCluster, typename Weight>
__device__ int draw(Row<kCluster>& row, uint64_t bits, Weight weight) {
    RowShared* shared = row.shared;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int segment = ((row.hi - row.lo + kRowWarps - 1) / kRowWarps + kWarp - 1) / kWarp * kWarp;
    const int first = min(row.lo + warp * segment, row.hi), last = min(first + segment, row.hi);
    uint64_t own = 0;
#pragma unroll 4
    for (int id = first + lane; id < last; id += kWarp) own += weight(id);
    own = warp_sum_u64(own);
    __syncthreads();
    if (lane == 0) shared->warp[warp] = own;
    __syncthreads();
    uint64_t here = 0, before = 0, total = 0;
    for (int w = 0; w < kRowWarps; ++w) {
        if (w < warp) before += shared->warp[w];
        here += shared->warp[w];
    }
    uint64_t* mine = shared->exchange[row.exchanges++];
    if (threadIdx.x == 0) mine[0] = here;
    row.sync();
    for (int other = 0; other < kCluster; ++other) {
        const uint64_t theirs = row.of(mine, other)[0];
        if (other < row.rank) before += theirs;
        total += theirs;
    }
    const uint64_t target = __umul64hi(bits << 11, total);
    if (target < before || target >= before + own) return -1;
    for (int id = first + lane; id - lane < last; id += kWarp) {
        const uint64_t w = id < last ? weight(id) : 0, through = before + warp_scan_u64(w);
        const unsigned passed = __ballot_sync(0xffffffffu, through > target);
        if (passed) return lane == __ffs(static_cast<int>(passed)) - 1 ? id : -1;
        before = __shfl_sync(0xffffffffu, through, kWarp - 1);
    }
    return -1;
}

template <int kCluster, bool kResident>
__global__ void __launch_bounds__(kRowThreads, 1) sample_kernel(const Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto* shared = reinterpret_cast<RowShared*>(memory);
    auto* selecting = reinterpret_cast<SelectShared*>(shared + 1);
    auto* held = reinterpret_cast<float*>(selecting + 1);
    Row<kCluster> row(shared, p.valid);
    const int64_t r = row.index();
    grid_dependency_wait();
    grid_dependency_launch();

    const float* f = p.params_f + r * kColumns;
    const int* i = p.params_i + r * kColumns;
    int slot = p.slots[r];
    if (slot >= p.slot_count) slot = -1;
    const Edits e = edits_of(p, r, f, i, slot);
    uint64_t best = 0;
    if constexpr (kResident) {
        best = edit(row, e, held);
    } else {
        for (int id = row.lo + threadIdx.x; id < row.hi; id += kRowThreads) {
            const uint64_t c = composite(e(id), id);
            best = best > c ? best : c;
        }
    }
    best = row.max(best);
    float top = composite_value(best);
    const float temperature = f[kTemperature], min_p = f[kMinP], top_p = f[kTopP];
    const bool infinite = top == INFINITY;  // beside +inf nothing else has a chance

    int token = -1;
    if (top == -INFINITY) {
        token = best_raw(row, e.logits);
        if (row.rank != 0 || threadIdx.x != 0) token = -1;
    } else if (!(temperature > 0.f)) {
        if (row.rank == 0 && threadIdx.x == 0) token = composite_id(best);
    } else {
        if (infinite) top = 0.f;
        const auto seen = [&](float z) { return infinite ? (z == INFINITY ? 0.f : -INFINITY) : z; };
        const auto value = [&](int id) { return seen(kResident ? held[id - row.lo] : e(id)); };
        const auto each = [&](auto body) {
            if constexpr (kResident)
                for_held(row, held, [&](int id, float z) { body(id, seen(z)); });
            else
                for (int id = row.lo + threadIdx.x; id < row.hi; id += kRowThreads) body(id, value(id));
        };
        const float inverse = fminf(1.f / temperature, FLT_MAX);  // of the best, 0 * inf would be NaN
        const auto weight = [&](float z) {
            const float w = expf((z - top) * inverse);
            return w < min_p ? uint64_t(0) : fixed(w);
        };
        const auto nucleus = [&](uint64_t total) {
            const auto mass = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
            const uint64_t least = mass > 0 ? mass : 1;
            return least < total ? least : total;
        };
        Boundary end;
        uint64_t total = 0, unused = 0;
        bool listed = false;
        const int best_k = i[kTopK];
        const bool limited = best_k > 0 && best_k < p.valid;
        if (limited) {
            Select<kCluster> select(row, selecting, top, kCoarseBins);
            select.open();
            each([&](int, float z) { select.add_coarse(z, 1); });
            row.sync();
            end = select.finish(best_k, true, each, [](float) { return uint64_t(1); }, unused);
            listed = select.listed;
            if (listed && top_p < 1.f) end = select.cut(best_k, nucleus(select.measure_of(best_k, weight)), weight, unused);
        }
        if (top_p < 1.f && !listed) {
            Select<kCluster> select(row, selecting, top, kCoarseBins * inverse);
            select.open();
            each([&](int id, float z) {
                const uint64_t w = weight(z);
                if (end.keeps(z, id)) total += w;
                select.add_coarse(z, w);
            });
            row.sum(total, unused);
            end = select.finish(nucleus(total), false, each, weight, unused);
        }
        const uint64_t bits =
            philox_bits(static_cast<uint32_t>(i[kSeedLo]), static_cast<uint32_t>(i[kSeedHi]), static_cast<uint32_t>(i[kStep]));
        token = draw(row, bits, [&](int id) {
            const float z = value(id);
            return end.keeps(z, id) ? weight(z) : uint64_t(0);
        });
    }
    if (token >= 0) {
        p.tokens[r] = token;
        if (slot >= 0) {
            p.feed[slot] = token;
            p.counts[slot * p.count_stride + token] += 1;
        }
    }
    row.sync();  // shared memory outlives those who read it
}

}  // namespace

// (tokens[R], feed[slots] in/out, counts[slots,V] in/out, logits[R,V], slots[R], params_f[R,8], params_i[R,8], bias_indptr[R+1],
// bias_ids, bias_values, stop_indptr[R+1], stop_ids, allowed_bits|None [A,ceil(V/32)], valid_vocab)
SPARK_LAUNCHER(spark_sample) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK(count == 14 && a.is(0, DType::i32, 1) && a.is(1, DType::i32, 1) && a.is(2, DType::i32, 2) &&
                a.is(3, DType::f32, 2));
    SPARK_CHECK(a.is(4, DType::i32, 1) && a.is(5, DType::f32, 2) && a.is(6, DType::i32, 2) && a.is(7, DType::i32, 1) &&
                a.is(8, DType::i32, 1));
    SPARK_CHECK(a.is(9, DType::f32, 1) && a.is(10, DType::i32, 1) && a.is(11, DType::i32, 1) &&
                (!a.given(12) || a.is(12, DType::u32, 2)));
    const int64_t rows = a.dim(0, 0), valid = a.integer(13);
    SPARK_CHECK(a.dim(3, 0) == rows && a.dim(4, 0) == rows && a.dim(5, 0) == rows && a.dim(6, 0) == rows &&
                a.dim(7, 0) == rows + 1);
    SPARK_CHECK(a.dim(10, 0) == rows + 1 && a.dim(5, 1) == kColumns && a.dim(6, 1) == kColumns && a.dim(1, 0) == a.dim(2, 0));
    SPARK_CHECK(valid > 0 && valid <= a.dim(3, 1) && valid <= a.dim(2, 1) && (!a.given(12) || a.dim(12, 1) * 32 >= valid) &&
                rows < (1 << 27));
    if (valid > spark::kMaxVocab) return spark::kUnsupported;
    if (rows == 0) return cudaSuccess;
    Params p{};
    p.tokens = a.ptr<int>(0), p.feed = a.ptr<int>(1), p.counts = a.ptr<int>(2), p.logits = a.ptr<float>(3),
    p.slots = a.ptr<int>(4);
    p.params_f = a.ptr<float>(5), p.params_i = a.ptr<int>(6), p.bias_indptr = a.ptr<int>(7), p.bias_ids = a.ptr<int>(8);
    p.bias_values = a.ptr<float>(9), p.stop_indptr = a.ptr<int>(10), p.stop_ids = a.ptr<int>(11), p.allowed = a.ptr<uint32_t>(12);
    p.stride = a.dim(3, 1), p.count_stride = a.dim(2, 1), p.valid = static_cast<int>(valid),
    p.slot_count = static_cast<int>(a.dim(1, 0));
    if (a.given(12)) p.allowed_stride = a.dim(12, 1), p.allowed_rows = static_cast<int>(a.dim(12, 0));
    const spark::RowDevice device = spark::row_device();
    const auto launch = [&](auto resident, auto plain, int cluster, int chunk) {
        constexpr size_t kFixed = sizeof(spark::RowShared) + sizeof(spark::SelectShared);
        const size_t whole = kFixed + static_cast<size_t>(chunk) * sizeof(float);
        const bool fits = whole <= static_cast<size_t>(device.shared);
        return spark::launch_row_kernel(fits ? resident : plain, cluster, rows, fits ? whole : kFixed, stream, p);
    };
    constexpr int c = spark::kClusterSize;
    if (device.cluster == 1) return launch(sample_kernel<1, true>, sample_kernel<1, false>, 1, spark::Row<1>::chunk_of(p.valid));
    return launch(sample_kernel<c, true>, sample_kernel<c, false>, c, spark::Row<c>::chunk_of(p.valid));
}
