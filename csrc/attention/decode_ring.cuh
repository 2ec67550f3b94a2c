// A range of keys on its way through shared memory, for decode attention: tiles of 64 keys, K and V in turn, in a ring of
// buffers.
//
// Element e is K of tile e / 2, or (odd) its V. A warp brings 16 rows of each element, which lie in one page and, at 256 dims,
// are 8 KB in one piece: by one order to the copy engine where there is one (kBulk), else by 16-byte cp.async. A tile in shared
// memory is laid out as bulk.cuh says, whoever wrote it. Rows past the range's end: of V zeros (of keys that are masked, values
// must still be finite), of K anything.
//
// defines: spark::attn::{kTile, Ring}
#pragma once

#include "common/bulk.cuh"

namespace spark::attn {

constexpr int kTile = 64;  // keys of a tile, 16 a warp

template <typename T, int D, int kRing, bool kBulk>
class Ring {
  public:
    static constexpr int kWarps = 4, kChunks = D / 8, kRowBytes = D * 2, kPieceBytes = 16 * kRowBytes;
    static constexpr int kTileBytes = kTile * kRowBytes, kBytes = kRing * kTileBytes;
    static constexpr int kBarrierBytes = kBulk ? kRing * kWarps * 8 : 0;  // one a warp and buffer
    int tiles = 0;

    // `barriers`: kBarrierBytes of shared memory; the CTA must meet before it uses them.
    __device__ Ring(uint8_t* memory, uint8_t* barriers) : memory_(memory), base_(shared_address(memory)) {
        if constexpr (kBulk) {
            barriers_ = shared_address(barriers);
            if (threadIdx.x == 0) {
                for (int i = 0; i < kRing * kWarps; ++i) init_barrier(barriers_ + i * 8, 1);
                fence_barriers();
            }
        }
    }

    // Keys [first, last) of a sequence with this block table; `head` is the kv head.
    template <typename Params>
    __device__ void open(const Params& p, const int* table, int head, int first, int last) {
        table_ = table, head_ = head, begin_ = first, end_ = last;
        tiles = max(last - first + kTile - 1, 0) / kTile;
        next_page_ = page_of(p, 0);
    }
    // After the last tile: all are done with it.
    __device__ void close() { start_ += 2 * tiles; }

    __device__ uint32_t buffer(int e) const { return base_ + (start_ + e) % kRing * kTileBytes; }
    // Keys of this warp in a tile: 16, fewer (or none, or a negative number) at the end.
    __device__ int live(int tile) const { return end_ - (begin_ + tile * kTile + warp_ * 16); }

    // Starts element e on its way into its buffer, which all must be done with.
    template <typename Params>
    __device__ void issue(const Params& p, const CUtensorMap* k_map, const CUtensorMap* v_map, int e) {
        const int tile = e >> 1;
        if (tile < tiles) {
            const bool is_v = (e & 1) != 0;
            if (!is_v) page_ = next_page_, next_page_ = page_of(p, tile + 1);
            const int at = begin_ + tile * kTile + warp_ * 16, rows = end_ - at, within = at & ((1 << p.page_shift) - 1);
            const uint32_t to = buffer(e) + warp_ * kPieceBytes;
            if constexpr (kBulk) {
                if (lane_ == 0) {
                    if (rows > 0) {
                        expect_bytes(barrier(e), kPieceBytes);
                        load_tile(to, is_v ? v_map : k_map, (((page_ * p.kv_heads + head_) << p.page_shift) + within) / 8,
                                  barrier(e));
                    } else {
                        arrive(barrier(e));
                    }
                }
            } else {
                const T* from = static_cast<const T*>(is_v ? p.v_pool : p.k_pool);
                if (rows > 0) from += page_ * p.page_elements + ((static_cast<int64_t>(head_) << p.page_shift) + within) * D;
#pragma unroll
                for (int i = 0; i < kChunks / 2; ++i) {
                    const int x = i * kWarp + lane_, r = x / kChunks, c = x % kChunks;
                    copy_async(to + tile_chunk<D>(r, c), from + x * 8, r < rows);
                }
            }
        }
        if constexpr (!kBulk) copy_async_commit();
    }

    // Waits for this warp's rows of element e; kNewer elements have been started since.
    template <int kNewer>
    __device__ void await(int e) const {
        if constexpr (kBulk) {
            wait_barrier(barrier(e), (start_ + e) / kRing & 1);
            const int rows = live(e >> 1);
            if ((e & 1) != 0 && rows < 16) {
                uint8_t* values = memory_ + (buffer(e) - base_) + warp_ * kPieceBytes;
                for (int x = max(rows, 0) * kChunks + lane_; x < 16 * kChunks; x += kWarp)
                    *reinterpret_cast<uint4*>(values + tile_chunk<D>(x / kChunks, x % kChunks)) = make_uint4(0, 0, 0, 0);
                fence_async_proxy();  // before the copy engine writes here again
            }
        } else {
            copy_async_wait<kNewer>();
        }
        __syncwarp();
    }

  private:
    // The page of this warp's keys of a tile.
    template <typename Params>
    __device__ int page_of(const Params& p, int tile) const {
        const int at = begin_ + tile * kTile + warp_ * 16;
        return at < end_ ? table_[at >> p.page_shift] : 0;
    }
    __device__ uint32_t barrier(int e) const { return barriers_ + ((start_ + e) % kRing * kWarps + warp_) * 8; }

    uint8_t* memory_;
    uint32_t base_, barriers_ = 0;
    const int lane_ = threadIdx.x % kWarp, warp_ = threadIdx.x / kWarp;
    const int* table_ = nullptr;
    int head_ = 0, begin_ = 0, end_ = 0, page_ = 0, next_page_ = 0;
    int start_ = 0;  // elements of the ranges before
};

}  // namespace spark::attn
