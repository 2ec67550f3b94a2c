// MARK_PROMPT: which tokens a prompt has, as bit 30 of the slot's counts; a slice at position 0 clears the slot's row first.
//
// A CTA owns a run of ids of one slice's slot: it clears its run and marks in it, so that clearing and marking need no order
// between CTAs. Every CTA reads the whole slice, which is short beside a row of counts (1 MB at 248,320 ids).
#include "common/device.cuh"
#include "common/launch.h"
#include "common/pdl.h"

namespace {

using namespace spark;

constexpr int kThreads = 512;
constexpr int kRuns = 16;
constexpr int kPromptBit = 1 << 30;

__global__ void __launch_bounds__(kThreads) mark_prompt_kernel(int* counts, const int* slots, const int* ids, const int* cu,
                                                               const int* starts, int vocab, int slot_count) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int slice = blockIdx.y, slot = slots[slice];
    if (slot < 0 || slot >= slot_count) return;
    const int chunk = (vocab + kRuns - 1) / kRuns, lo = blockIdx.x * chunk, hi = min(lo + chunk, vocab);
    int* row = counts + static_cast<int64_t>(slot) * vocab;
    if (starts[slice] == 0) {
        for (int id = lo + threadIdx.x; id < hi; id += kThreads) row[id] = 0;
        __syncthreads();
    }
    for (int t = cu[slice] + threadIdx.x; t < cu[slice + 1]; t += kThreads) {
        const int id = ids[t];
        if (id >= lo && id < hi) atomicOr(row + id, kPromptBit);
    }
}

}  // namespace

// (counts[slots,V] in/out, slots[S], ids[T], cu[S+1], starts[S])
SPARK_LAUNCHER(spark_mark_prompt) {
    const spark::Args a(args, count);
    SPARK_CHECK(count == 5 && a.is(0, spark::DType::i32, 2));
    for (int i = 1; i < 5; ++i) SPARK_CHECK(a.is(i, spark::DType::i32, 1));
    const int64_t slices = a.dim(1, 0), vocab = a.dim(0, 1);
    SPARK_CHECK(a.dim(3, 0) == slices + 1 && a.dim(4, 0) == slices && slices < (1 << 16) && vocab > 0 &&
                vocab < (int64_t(1) << 30));
    if (slices == 0) return cudaSuccess;
    return spark::launch_pdl(mark_prompt_kernel, dim3(kRuns, static_cast<unsigned>(slices)), dim3(kThreads), 0, stream,
                             a.ptr<int>(0), a.ptr<int>(1), a.ptr<int>(2), a.ptr<int>(3), a.ptr<int>(4), static_cast<int>(vocab),
                             static_cast<int>(a.dim(0, 0)));
}
