// Finds the largest of many numbers: first a bound, then the numbers above it, then exactly the wanted count.
#pragma once

#include "sums.cuh"

static_assert(THREADS < 1 << 10, "the bound is searched for with counts of ten bits");
constexpr int FEW = 256;  // the number of candidates that are sorted at once, one for each thread
static_assert(FEW <= THREADS, "each candidate needs a thread");
constexpr int ROOM = THREADS * PER_VECTOR + FEW;  // the candidates of one step of a stream and the kept candidates

struct Candidates {
    u64 keys[ROOM];
    u32 count;
    u64 floor;  // after the first drop, all kept candidates are at or above the floor, and only larger ones are wanted
    u32 bound;
    u32 maxima[THREADS];
    u32 counts[2][2 * WARPS];
    u64 ends[2][WARPS];
};

// Find a bound that at least `wanted` of the maxima reach, and seldom many more. Only the first warp calls this.
__device__ __forceinline__ void find_bound(Candidates& room, int wanted, int unused_bits) {
    u32 mine[WARPS];
    u32 low = 0xffffffffu, high = 0;
#pragma unroll
    for (int each = 0; each < WARPS; ++each) {
        mine[each] = room.maxima[threadIdx.x + 32 * each] >> unused_bits;
        low = min(low, mine[each]);
        high = max(high, mine[each]);
    }
    low = __reduce_min_sync(EVERY_LANE, low);
    high = __reduce_max_sync(EVERY_LANE, high);
    // All maxima are at or above `low`. Three bounds are tried at a time, and one number has the counts of all three.
    u32 span = high - low + 1;
    while (span > 1) {
        const u32 step = (span + 3) / 4;
        u32 counts = 0;
#pragma unroll
        for (int each = 0; each < WARPS; ++each) {
            counts += mine[each] >= low + step;
            counts += mine[each] >= low + 2 * step ? 1u << 10 : 0;
            counts += mine[each] >= low + 3 * step ? 1u << 20 : 0;
        }
        counts = __reduce_add_sync(EVERY_LANE, counts);
        u32 reach = 0, steps = 0;
#pragma unroll
        for (int tried = 1; tried <= 3; ++tried) {
            const u32 count = counts >> 10 * (tried - 1) & 0x3ff;
            if (count >= wanted) {
                reach = count;
                steps = tried;
            }
        }
        low += steps * step;
        span = min(step, span - steps * step);
        if (reach && reach <= wanted + wanted / 8) break;
    }
    if (threadIdx.x == 0) room.bound = low << unused_bits;
}

__device__ __forceinline__ void push(Candidates& room, u64 key) {
    const u32 at = atomicAdd(&room.count, 1);
    if (at < ROOM) room.keys[at] = key;
}

// Keep the `wanted` largest candidates of the room, in any order.
// All keys differ, so one key separates them from the other candidates.
__device__ __noinline__ void keep_largest(Candidates& room, int wanted) {
    constexpr int EACH = (ROOM + THREADS - 1) / THREADS;
    __syncthreads();
    const u32 count = room.count;
    if (count <= wanted) return;
    u64 mine[EACH];
    u64 low = ~0ull, high = 0;
#pragma unroll
    for (int each = 0; each < EACH; ++each) {
        const u32 at = threadIdx.x + each * THREADS;
        mine[each] = at < count ? room.keys[at] : 0;
        if (at < count) {
            low = min(low, mine[each]);
            high = max(high, mine[each]);
        }
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        low = min(low, __shfl_xor_sync(EVERY_LANE, low, distance));
        high = max(high, __shfl_xor_sync(EVERY_LANE, high, distance));
    }
    if (lane == 0) {
        room.ends[0][warp] = low;
        room.ends[1][warp] = high;
    }
    __syncthreads();
    for (int each = 0; each < WARPS; ++each) {
        low = min(low, room.ends[0][each]);
        high = max(high, room.ends[1][each]);
    }
    u64 span = high - low + 1;
    for (int round = 0; span > 1; ++round) {
        const u64 step = (span + 3) / 4;
        u32 first = 0, others = 0;
#pragma unroll
        for (int each = 0; each < EACH; ++each) {
            first += mine[each] >= low + step;
            others += mine[each] >= low + 2 * step;
            others += mine[each] >= low + 3 * step ? 1u << 16 : 0;
        }
        first = __reduce_add_sync(EVERY_LANE, first);
        others = __reduce_add_sync(EVERY_LANE, others);
        if (lane == 0) {
            room.counts[round % 2][warp] = first;
            room.counts[round % 2][WARPS + warp] = others;
        }
        __syncthreads();
        first = others = 0;
#pragma unroll
        for (int each = 0; each < WARPS; ++each) {
            first += room.counts[round % 2][each];
            others += room.counts[round % 2][WARPS + each];
        }
        const u32 second = others & 0xffff, third = others >> 16;
        const u32 steps = third >= wanted ? 3 : second >= wanted ? 2 : first >= wanted ? 1 : 0;
        const u32 reach = steps == 3 ? third : steps == 2 ? second : steps ? first : 0;
        low += steps * step;
        span = min(step, span - steps * step);
        if (reach == wanted) break;
    }
    if (threadIdx.x == 0) {
        room.count = 0;
        room.floor = low;
    }
    __syncthreads();
#pragma unroll
    for (int each = 0; each < EACH; ++each) {
        if (mine[each] >= low) push(room, mine[each]);
    }
    __syncthreads();
}

// Make room before a step of a stream. In one step, each thread may push one key for each logit of a vector.
__device__ __forceinline__ void make_room(Candidates& room, int wanted) {
    __syncthreads();
    if (room.count > FEW) keep_largest(room, wanted);
    __syncthreads();
}
