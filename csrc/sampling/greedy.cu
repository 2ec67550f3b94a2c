// GREEDY: the best logit of each row, the lowest id among equals; NaN counts as -inf.
//
// A cluster of eight CTAs a row, one pass. H200: a row of 248,320 moves 1 MB; one row is bound by what eight multiprocessors can
// pull (about 2 us and a cluster exchange), 128 rows by memory: 127 MB, 29.6 us at 4.29 TB/s.
#include "sampling/row.cuh"

namespace {

using namespace spark;

template <int kCluster>
__global__ void __launch_bounds__(kRowThreads, 1)
    greedy_kernel(int* tokens, int* feed, const float* logits, const int* slots, int64_t stride, int valid, int slot_count) {
    extern __shared__ __align__(16) unsigned char memory[];
    Row<kCluster> row(reinterpret_cast<RowShared*>(memory), valid);
    const int64_t r = row.index();
    grid_dependency_wait();
    grid_dependency_launch();
    uint64_t best = 0;
    for_logits(row, logits + r * stride, [&](int id, float z) {
        const uint64_t c = composite(settled(z), id);
        best = best > c ? best : c;
    });
    best = row.max(best);
    if (row.rank == 0 && threadIdx.x == 0) {
        const int token = composite_id(best), slot = slots[r];
        tokens[r] = token;
        if (slot >= 0 && slot < slot_count) feed[slot] = token;
    }
    row.sync();  // shared memory outlives those who read it
}

}  // namespace

// (tokens[R], feed[slots] in/out, logits[R,V], slots[R], valid_vocab)
SPARK_LAUNCHER(spark_greedy) {
    using spark::DType;
    const spark::Args a(args, count);
    SPARK_CHECK(count == 5 && a.is(0, DType::i32, 1) && a.is(1, DType::i32, 1) && a.is(2, DType::f32, 2) &&
                a.is(3, DType::i32, 1));
    const int64_t rows = a.dim(0, 0), valid = a.integer(4);
    SPARK_CHECK(a.dim(2, 0) == rows && a.dim(3, 0) == rows && valid > 0 && valid <= a.dim(2, 1) && rows < (1 << 27));
    if (rows == 0) return cudaSuccess;
    const auto launch = [&](auto kernel, int cluster) {
        return spark::launch_row_kernel(kernel, cluster, rows, sizeof(spark::RowShared), stream, a.ptr<int>(0), a.ptr<int>(1),
                                        a.ptr<float>(2), a.ptr<int>(3), a.dim(2, 1), static_cast<int>(valid),
                                        static_cast<int>(a.dim(1, 0)));
    };
    return spark::row_device().cluster == 1 ? launch(greedy_kernel<1>, 1)
                                            : launch(greedy_kernel<spark::kClusterSize>, spark::kClusterSize);
}
