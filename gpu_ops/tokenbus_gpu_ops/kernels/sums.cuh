// The sum of exponentials of a row in one pass, relative to the largest logit so far, in powers of two.
#pragma once

#include "logits.cuh"

#ifndef THREADS_OF_BLOCK
#define THREADS_OF_BLOCK 256
#endif
constexpr int THREADS = THREADS_OF_BLOCK;
constexpr int WARPS = THREADS / 32;
#ifdef WITH_EXTRAS
constexpr bool EXTRAS = true;
#else
constexpr bool EXTRAS = false;
#endif
constexpr u32 EVERY_LANE = 0xffffffffu;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr double LN_2 = 0.6931471805599453094;
constexpr float FAR = 1e37f;  // the product of a larger logit and LOG2_E may overflow a float

constexpr float NEGLIGIBLE = -150.0f;  // two to the power of this exponent or a lower one counts as zero

__device__ __forceinline__ float two_to_the(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

// The reference of the exponents. Masked rows have no largest number, so they get a fixed reference.
// The product is rounded here, because a fused product would have two different values.
__device__ __forceinline__ float reference_for(float largest) { return __fmul_rn(fmaxf(largest, -FAR), LOG2_E); }

// Converts a sum of powers times exponents to a new reference. `by` is the difference, `sum` the sum of the powers.
__device__ __forceinline__ float moved(float weighted, float sum, float by) {
    return two_to_the(by) * fmaf(fmaxf(by, NEGLIGIBLE), sum, weighted);
}

struct Running {
    float largest;
    float reference;
    float sums[2];
    float weighted[2];  // the sum of powers times exponents, for the entropy

    __device__ __forceinline__ Running()
        : largest(minus_infinity()), reference(-FAR * LOG2_E), sums{0.0f, 0.0f}, weighted{0.0f, 0.0f} {}

    __device__ __forceinline__ void raise(float to) {
        if (to > largest) {
            largest = to;
            const float higher = reference_for(to);
            const float scale = two_to_the(reference - higher);
            if (EXTRAS) {
                weighted[0] = moved(weighted[0], sums[0], reference - higher);
                weighted[1] = moved(weighted[1], sums[1], reference - higher);
            }
            sums[0] *= scale;
            sums[1] *= scale;
            reference = higher;
        }
    }

    template <bool WITH_ENTROPY>
    __device__ __forceinline__ void add(float logit, int which) {
        const float exponent = fmaf(logit, LOG2_E, -reference);
        const float power = two_to_the(exponent);
        sums[which] += power;
        // The exponent of a masked logit is minus infinity, and the product would be NaN.
        if (WITH_ENTROPY) weighted[which] = fmaf(power, fmaxf(exponent, NEGLIGIBLE), weighted[which]);
    }
};

struct Totals {
    float largest;
    float sum;
    u32 above;
    u32 dropped;
    float weighted;
    u32 unmasked;  // the number of logits above minus infinity, if requested
};

struct TotalsOfWarps {
    u32 largest[WARPS];
    float sum[WARPS];
    u32 above[WARPS];
    u32 dropped[WARPS];
#ifdef WITH_EXTRAS
    float weighted[WARPS];
    u32 unmasked[WARPS];
#endif
};

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(EVERY_LANE, value, distance);
    return value;
}

// Returns the total of all threads of the block to every thread.
__device__ __forceinline__ Totals together(TotalsOfWarps& room, const Totals& mine) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 order = __reduce_max_sync(EVERY_LANE, order_of(mine.largest));
    const float of_warp = reference_for(in_order(order));
    const float by = reference_for(mine.largest) - of_warp;
    const float sum = sum_of_warp(mine.sum * two_to_the(by));
    const u32 above = __reduce_add_sync(EVERY_LANE, mine.above);
    const u32 dropped = __reduce_max_sync(EVERY_LANE, mine.dropped);
    __syncthreads();  // another thread may still be reading the shared memory
    if (lane == 0) {
        room.largest[warp] = order;
        room.sum[warp] = sum;
        room.above[warp] = above;
        room.dropped[warp] = dropped;
    }
#ifdef WITH_EXTRAS
    const float weighted = sum_of_warp(moved(mine.weighted, mine.sum, by));
    const u32 unmasked = __reduce_add_sync(EVERY_LANE, mine.unmasked);
    if (lane == 0) {
        room.weighted[warp] = weighted;
        room.unmasked[warp] = unmasked;
    }
#endif
    __syncthreads();
    Totals all = {0.0f, 0.0f, 0, 0, 0.0f, 0};
    u32 highest = 0;
#pragma unroll
    for (int each = 0; each < WARPS; ++each) highest = max(highest, room.largest[each]);
    all.largest = in_order(highest);
    const float reference = reference_for(all.largest);
#pragma unroll
    for (int each = 0; each < WARPS; ++each) {
        const float by = reference_for(in_order(room.largest[each])) - reference;
        all.sum += room.sum[each] * two_to_the(by);
#ifdef WITH_EXTRAS
        all.weighted += moved(room.weighted[each], room.sum[each], by);
        all.unmasked += room.unmasked[each];
#endif
        all.above += room.above[each];
        all.dropped = max(all.dropped, room.dropped[each]);
    }
    return all;
}

// A logarithm with full float precision. The exponent is separated first, so that the rest is small.
__device__ __forceinline__ double log_of(float sum, double rounding) {
    const int bits = __float_as_int(sum) - 0x3f3504f3;  // so that the rest is between sqrt(1/2) and sqrt(2)
    const int exponent = bits >> 23;
    const float rest = __int_as_float(__float_as_int(sum) - (exponent << 23));
    return (exponent + rounding) * LN_2 + static_cast<double>(logf(rest));
}

// The logarithm of a row's sum. The reference was rounded, so its rounding error is added back.
__device__ __forceinline__ double log_of_sum(float largest, float sum) {
    const double rounding = static_cast<double>(reference_for(largest)) - static_cast<double>(largest) * LOG2_E;
    return static_cast<double>(largest) + log_of(sum, rounding);
}

// Returns the entropy in nats. All exponents must have the same reference.
__device__ __forceinline__ float entropy_of(const Totals& totals) {
    const double mean = static_cast<double>(totals.weighted) / static_cast<double>(totals.sum);
    return static_cast<float>(fmax(log_of(totals.sum, 0.0) - mean * LN_2, 0.0));
}
