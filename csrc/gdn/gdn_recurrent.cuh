// The gated delta rule token after token, for head sizes and types that the tensor-core kernels do not take.
//
// CTA = (slice, value head, 8 rows of DV or a multiple), a warp per row or rows with the state in registers; q and k are read and
// normed again by every warp. Float throughout: the arithmetic of GDN_STEP, bit for bit.
#pragma once

#include "common/pdl.h"
#include "gdn/chunk.cuh"
#include "gdn/state_row.cuh"

namespace spark {

constexpr int kRecurrentThreads = 256;

template <typename T, typename L>
__global__ void __launch_bounds__(kRecurrentThreads) gdn_recurrent_kernel(const Prefill p) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int v = (blockIdx.x * kRecurrentThreads + threadIdx.x) / L::kLanes, head = blockIdx.y, slice = blockIdx.z;
    const int slot = p.slots[slice], first = p.cu[slice], length = p.cu[slice + 1] - first, start = p.starts[slice];
    if (slot < 0 || slot >= p.slot_count) return;
    const bool live = v < p.v_dim;
    const int64_t in_pool = (static_cast<int64_t>(head) * p.v_dim + v) * p.k_dim;
    const int64_t head_size = static_cast<int64_t>(p.v_dim) * p.k_dim;
    float* state = p.state + static_cast<int64_t>(slot) * p.heads * head_size + in_pool;
    RowState<L> s = load_state<L>(state, p.k_dim, live && start != 0);
    const int k_head = head / (p.heads / p.k_heads);
    for (int t = 0;; ++t) {
        for (int i = 0; i < p.snapshot_count; ++i) {
            if (p.snap_rows[2 * i] == slice && p.snap_rows[2 * i + 1] == t)
                store_state<L>(p.snapshots + static_cast<int64_t>(i) * p.heads * head_size + in_pool, p.k_dim, live, s);
        }
        if (t >= length) break;
        const int64_t token = static_cast<int64_t>(first) + t, gate = token * p.heads + head;
        const T* x = static_cast<const T*>(p.qkv) + token * p.stride;
        const T* values = x + 2 * p.k_heads * p.k_dim + head * p.v_dim;
        const KeyPair<L> keys = load_keys<L, T>(x + k_head * p.k_dim, x + (p.k_heads + k_head) * p.k_dim, p.k_dim, p.scale);
        const float o = advance<L>(s, keys, expf(p.g[gate]), p.beta[gate], live ? to_float(values[v]) : 0.f);
        if (L::lane() == 0 && live) static_cast<T*>(p.out)[gate * p.v_dim + v] = from_float<T>(o);
    }
    if (length > 0 || start == 0) store_state<L>(state, p.k_dim, live, s);
}

}  // namespace spark
