// Philox4x32-10, as sparkrt/ops/philox.py: a draw is a pure function of the seed and the step.
//
// defines: spark::philox_bits
#pragma once

#include <cstdint>

namespace spark {

// 53 random bits for a 64-bit seed and a step.
__device__ __forceinline__ uint64_t philox_bits(uint32_t seed_lo, uint32_t seed_hi, uint32_t step) {
    uint32_t c0 = step, c1 = 0, c2 = 0, c3 = 0, k0 = seed_lo, k1 = seed_hi;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t a_hi = __umulhi(c0, 0xD2511F53u), a_lo = c0 * 0xD2511F53u;
        const uint32_t b_hi = __umulhi(c2, 0xCD9E8D57u), b_lo = c2 * 0xCD9E8D57u;
        c0 = b_hi ^ c1 ^ k0, c1 = b_lo, c2 = a_hi ^ c3 ^ k1, c3 = a_lo;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (static_cast<uint64_t>(c0) << 21) | (c1 >> 11);
}

}  // namespace spark
