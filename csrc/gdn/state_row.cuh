// One token of the gated delta rule on rows of a state S [DV, DK], spread over the lanes of a warp.
//
// With S as it was before the token, both dots are taken at once and S stays in registers until it is written:
//   d = beta (v - e^g S k),  o = e^g S q + (q.k) d,  S <- e^g S + d k      (q, k normalized, q scaled by DK^-1/2)
// The norms go into the coefficients; q and k stay as they are. Every operation is spelled out (fmaf, products), so that a row
// has the same bits in every kernel that is made of this.
//
// defines: spark::RowLayout, spark::KeyPair, load_keys, spark::RowState, load_state, store_state, advance, prefetch_state
#pragma once

#include "common/device.cuh"

namespace spark {

constexpr float kL2Eps = 1e-6f;  // inside the root; a constant of the layer, not the model's rms_norm_eps

// kLanes lanes a row, kItems vectors of kVec floats a lane; with kFull they cover a row exactly.
template <int kLanes_, int kVec_, int kItems_, bool kFull_>
struct RowLayout {
    static constexpr int kLanes = kLanes_, kVec = kVec_, kItems = kItems_;
    static constexpr bool kFull = kFull_;
    static constexpr int kRows = kWarp / kLanes;  // a warp holds at a time

    __device__ static int lane() { return threadIdx.x % kLanes; }
    __device__ static int column(int item) { return (item * kLanes + lane()) * kVec; }
    __device__ static bool live(int item, int dim) { return kFull || column(item) < dim; }
};
using Row128 = RowLayout<8, 4, 4, true>;  // DK = 128: 8 lanes a row, so that a sum takes three exchanges
using RowAny = RowLayout<kWarp, 1, 8, false>;

// A token's q and k of one head, as a row of the state meets them.
template <typename L>
struct KeyPair {
    float q[L::kItems][L::kVec], k[L::kItems][L::kVec];
    float inv_q, inv_k, cross;  // 1 / |q| with its scale, 1 / |k|, q.k of the normalized
};

template <typename L>
struct RowState {
    float s[L::kItems][L::kVec];
};

// Reads q and k and takes their norms; every lane of the warp takes part, all rows alike.
template <typename L, typename T>
__device__ __forceinline__ KeyPair<L> load_keys(const T* q, const T* k, int dim, float scale) {
    KeyPair<L> x;
#pragma unroll
    for (int i = 0; i < L::kItems; ++i) {
        Pack<T, L::kVec> packed_q, packed_k;
        const bool live = L::live(i, dim);
        if (live) {
            packed_q = load_pack<T, L::kVec>(q + L::column(i));
            packed_k = load_pack<T, L::kVec>(k + L::column(i));
        }
#pragma unroll
        for (int e = 0; e < L::kVec; ++e) {
            x.q[i][e] = live ? to_float(packed_q.v[e]) : 0.f;
            x.k[i][e] = live ? to_float(packed_k.v[e]) : 0.f;
        }
    }
    float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
    for (int i = 0; i < L::kItems; ++i) {
#pragma unroll
        for (int e = 0; e < L::kVec; ++e) {
            qq = fmaf(x.q[i][e], x.q[i][e], qq);
            kk = fmaf(x.k[i][e], x.k[i][e], kk);
            qk = fmaf(x.q[i][e], x.k[i][e], qk);
        }
    }
    qq = group_sum<L::kLanes>(qq), kk = group_sum<L::kLanes>(kk), qk = group_sum<L::kLanes>(qk);
    x.inv_q = rsqrtf(qq + kL2Eps) * scale;
    x.inv_k = rsqrtf(kk + kL2Eps);
    x.cross = qk * x.inv_q * x.inv_k;
    return x;
}

// `row` is a state's row; one that is not `live` reads as zeros. Read once and written once: last in line for the L2 cache.
template <typename L>
__device__ __forceinline__ RowState<L> load_state(const float* row, int dim, bool live) {
    RowState<L> x;
#pragma unroll
    for (int i = 0; i < L::kItems; ++i) {
        const bool there = live && L::live(i, dim);
        if constexpr (L::kVec == 4) {
            const float4 v =
                there ? __ldcs(reinterpret_cast<const float4*>(row + L::column(i))) : make_float4(0.f, 0.f, 0.f, 0.f);
            x.s[i][0] = v.x, x.s[i][1] = v.y, x.s[i][2] = v.z, x.s[i][3] = v.w;
        } else {
#pragma unroll
            for (int e = 0; e < L::kVec; ++e) x.s[i][e] = there ? __ldcs(row + L::column(i) + e) : 0.f;
        }
    }
    return x;
}

template <typename L>
__device__ __forceinline__ void store_state(float* row, int dim, bool live, const RowState<L>& x) {
#pragma unroll
    for (int i = 0; i < L::kItems; ++i) {
        if (!live || !L::live(i, dim)) continue;
        if constexpr (L::kVec == 4) {
            __stcs(reinterpret_cast<float4*>(row + L::column(i)), make_float4(x.s[i][0], x.s[i][1], x.s[i][2], x.s[i][3]));
        } else {
#pragma unroll
            for (int e = 0; e < L::kVec; ++e) __stcs(row + L::column(i) + e, x.s[i][e]);
        }
    }
}

// Moves a row by one token and returns its output, on every lane of the row. decay = e^g.
template <typename L>
__device__ __forceinline__ float advance(RowState<L>& x, const KeyPair<L>& keys, float decay, float beta, float v) {
    float sk = 0.f, sq = 0.f;
#pragma unroll
    for (int i = 0; i < L::kItems; ++i) {
#pragma unroll
        for (int e = 0; e < L::kVec; ++e) {
            sk = fmaf(x.s[i][e], keys.k[i][e], sk);
            sq = fmaf(x.s[i][e], keys.q[i][e], sq);
        }
    }
    sk = group_sum<L::kLanes>(sk), sq = group_sum<L::kLanes>(sq);
    const float d = beta * fmaf(-(decay * keys.inv_k), sk, v);
    const float share = d * keys.inv_k;
#pragma unroll
    for (int i = 0; i < L::kItems; ++i) {
#pragma unroll
        for (int e = 0; e < L::kVec; ++e) x.s[i][e] = fmaf(share, keys.k[i][e], decay * x.s[i][e]);
    }
    return fmaf(keys.cross, d, decay * keys.inv_q * sq);
}

}  // namespace spark
