// LOGPROBS: log-softmax of the raw logits at chosen tokens, their rank, and the K best.
//
// A cluster of eight CTAs a row, the row in shared memory where it fits (31,040 floats a CTA at 248,320 ids). Maximum; then, in
// one pass, the sum of weights, the count of those ahead and the histogram that finds the K best (select.cuh). NaN counts as
// -inf; beside +inf nothing else has a chance; of a row that is -inf everywhere, every log-probability is -inf.
#include "sampling/select.cuh"

namespace {

using namespace spark;

constexpr int kMaxBest = 128;

struct Params {
    float* chosen;
    int *rank, *top_ids;
    float* top_logprobs;
    const float* logits;
    const int* tokens;
    int64_t stride;
    int vocab, valid, best;  // ids from `valid` on are never named, but their weight counts in the sum
};

template <int kCluster, bool kResident>
__global__ void __launch_bounds__(kRowThreads, 1) logprobs_kernel(const Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto* shared = reinterpret_cast<RowShared*>(memory);
    auto* selecting = reinterpret_cast<SelectShared*>(shared + 1);
    auto* held = reinterpret_cast<float*>(selecting + 1);
    Row<kCluster> row(shared, p.vocab);
    const int64_t r = row.index();
    const float* logits = p.logits + r * p.stride;
    grid_dependency_wait();
    grid_dependency_launch();

    uint64_t best = 0;
    for_logits(row, logits, [&](int id, float raw) {
        const float z = settled(raw);
        if constexpr (kResident) held[id - row.lo] = z;
        const uint64_t c = composite(z, id);
        best = best > c ? best : c;
    });
    float top = composite_value(row.max(best));
    const bool infinite = top == INFINITY;
    const auto seen = [&](float z) { return infinite ? (z == INFINITY ? 0.f : -INFINITY) : z; };
    const auto each = [&](auto body) {
        if constexpr (kResident)
            for_held(row, held, [&](int id, float z) { body(id, seen(z)); });
        else
            for_logits(row, logits, [&](int id, float z) { body(id, seen(settled(z))); });
    };
    if (infinite) top = 0.f;

    const int token = min(max(p.tokens[r], 0), p.valid - 1);
    const float own = seen(settled(__ldg(logits + token)));
    Select<kCluster> select(row, selecting, top, kCoarseBins);
    select.open();
    uint64_t total = 0, ahead = 0;
    each([&](int id, float z) {
        if (top != -INFINITY) total += fixed(expf(z - top));
        if (id >= p.valid) return;
        ahead += z > own || (z == own && id < token);
        select.add_coarse(z, 1);
    });
    row.sum(total, ahead);
    const double normalizer = top == -INFINITY ? 0.0 : static_cast<double>(top) + log(static_cast<double>(total) / kOne);
    if (row.rank == 0 && threadIdx.x == 0) {
        p.chosen[r] = static_cast<float>(static_cast<double>(own) - normalizer);
        p.rank[r] = 1 + static_cast<int>(ahead);
    }
    if (p.best > 0) {
        uint64_t kept = 0;
        const auto named = [&](auto body) { each([&](int id, float z) { id < p.valid ? body(id, z) : void(); }); };
        const Boundary end = select.finish(p.best, true, named, [](float) { return uint64_t(1); }, kept);
        if (!select.listed) select.collect(named, [&](int id, float z) { return end.keeps(z, id); });
        if (row.rank == 0 && threadIdx.x < p.best) {
            const uint64_t c = selecting->sorted[threadIdx.x];
            p.top_ids[r * p.best + threadIdx.x] = composite_id(c);
            p.top_logprobs[r * p.best + threadIdx.x] = static_cast<float>(static_cast<double>(composite_value(c)) - normalizer);
        }
    }
    row.sync();  // shared memory outlives those who read it
}

}  // namespace

// (chosen[R], rank[R], top_ids[R,K], top_logprobs[R,K], logits[R,V], tokens[R], valid_vocab)
SPARK_LAUNCHER(spark_logprobs) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK(count == 7 && a.is(0, DType::f32, 1) && a.is(1, DType::i32, 1) && a.is(2, DType::i32, 2) &&
                a.is(3, DType::f32, 2));
    SPARK_CHECK(a.is(4, DType::f32, 2) && a.is(5, DType::i32, 1));
    const int64_t rows = a.dim(0, 0), best = a.dim(2, 1), valid = a.integer(6);
    SPARK_CHECK(a.dim(1, 0) == rows && a.dim(2, 0) == rows && a.dim(3, 0) == rows && a.dim(3, 1) == best && a.dim(4, 0) == rows);
    SPARK_CHECK(a.dim(5, 0) == rows && valid > 0 && valid <= a.dim(4, 1) && best <= valid && rows < (1 << 27));
    if (best > kMaxBest || a.dim(4, 1) > spark::kMaxVocab) return spark::kUnsupported;
    if (rows == 0) return cudaSuccess;
    const int vocab = static_cast<int>(a.dim(4, 1));
    const Params p{a.ptr<float>(0), a.ptr<int>(1), a.ptr<int>(2), a.ptr<float>(3),         a.ptr<float>(4),
                   a.ptr<int>(5),   a.dim(4, 1),   vocab,         static_cast<int>(valid), static_cast<int>(best)};
    const spark::RowDevice device = spark::row_device();
    const size_t fixed = sizeof(spark::RowShared) + sizeof(spark::SelectShared);
    const auto launch = [&](auto resident, auto plain, int cluster, int chunk) {
        const size_t whole = fixed + static_cast<size_t>(chunk) * sizeof(float);
        const bool fits = whole <= static_cast<size_t>(device.shared);
        return spark::launch_row_kernel(fits ? resident : plain, cluster, rows, fits ? whole : fixed, stream, p);
    };
    constexpr int c = spark::kClusterSize;
    if (device.cluster == 1)
        return launch(logprobs_kernel<1, true>, logprobs_kernel<1, false>, 1, spark::Row<1>::chunk_of(p.vocab));
    return launch(logprobs_kernel<c, true>, logprobs_kernel<c, false>, c, spark::Row<c>::chunk_of(p.vocab));
}
