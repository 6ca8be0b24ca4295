// One block's part of a row: its logits, and the passes over them.
//
// A row may be unaligned. Then a few logits precede its first sixteen aligned bytes, and a few follow the last.
// These logits are the edges. The vectors between the edges are divided among the parts of the row.
#pragma once

#include "candidates.cuh"

#ifndef VECTORS_AT_ONCE
#define VECTORS_AT_ONCE 4
#endif
constexpr int STEP = THREADS * VECTORS_AT_ONCE;
constexpr int MAX_STEPS = 20480 / STEP;  // the limit for a part with alternatives, which launch.py ensures

struct Part {
    const unsigned char* row;
    const unsigned char* vectors;  // the first aligned byte
    u32 head;                      // the number of logits before the first aligned byte
    u32 tail_at, tail;             // the logits after the last vector
    u32 begin, end;                // the range of vectors of this part
    bool first, last;

    __device__ __forceinline__ Part(const unsigned char* row, u32 vocabulary, u32 each, u32 part, u32 parts) : row(row) {
        const u32 astray = static_cast<u32>(reinterpret_cast<u64>(row)) & 15;
        head = min(astray ? (16 - astray) / BYTES_PER_LOGIT : 0, vocabulary);
        vectors = row + head * BYTES_PER_LOGIT;
        const u32 count = (vocabulary - head) / PER_VECTOR;
        tail_at = head + count * PER_VECTOR;
        tail = vocabulary - tail_at;
        begin = min(part * each, count);
        end = min(begin + each, count);
        first = part == 0;
        last = part == parts - 1;
    }

    __device__ __forceinline__ int steps() const { return (end - begin + STEP - 1) / STEP; }
    __device__ __forceinline__ const unsigned char* at(u32 vector) const { return vectors + 16ull * vector; }
    __device__ __forceinline__ u32 id_of(u32 vector) const { return head + vector * PER_VECTOR; }

    // Returns this thread's logit at an edge, if there is one.
    __device__ __forceinline__ bool edge(u32& id) const {
        if (first && threadIdx.x < head) {
            id = threadIdx.x;
            return true;
        }
        const u32 from_end = THREADS - 1 - threadIdx.x;
        id = tail_at + from_end;
        return last && from_end < tail;
    }
};

// The largest logit of each step of each thread. The search for alternatives needs only some of these groups.
struct Groups {
    float largest[MAX_STEPS][THREADS];
    unsigned short promising[ROOM];  // the groups to search, as numbers made of step and thread
    u32 count;
};

__device__ __forceinline__ void load(uint4 (&into)[VECTORS_AT_ONCE], const Part& part, u32 from) {
#pragma unroll
    for (int each = 0; each < VECTORS_AT_ONCE; ++each) {
        const u32 vector = from + each * THREADS;
        into[each] = vector < part.end ? load_once(part.at(vector)) : no_logits();
    }
}

__device__ __forceinline__ void count(CountAbove& above, const uint4 (&vectors)[VECTORS_AT_ONCE]) {
    const u32 limits = above.limits();
#pragma unroll
    for (int each = 0; each < VECTORS_AT_ONCE; ++each) {
        above.add(vectors[each].x, limits);
        above.add(vectors[each].y, limits);
        above.add(vectors[each].z, limits);
        above.add(vectors[each].w, limits);
    }
}

template <bool WITH_ENTROPY>
__device__ __forceinline__ float absorb(Running& running, CountAbove& above, CountAbove& unmasked,
                                        const uint4 (&vectors)[VECTORS_AT_ONCE]) {
    u32 largest = larger(vectors[0]);
#pragma unroll
    for (int each = 1; each < VECTORS_AT_ONCE; ++each) largest = larger(largest, larger(vectors[each]));
    const float of_group = largest_of(largest);
    running.raise(of_group);
#pragma unroll
    for (int each = 0; each < VECTORS_AT_ONCE; ++each) {
        float logits[PER_VECTOR];
        unpack(vectors[each], logits);
#pragma unroll
        for (int one = 0; one < PER_VECTOR; ++one) running.add<WITH_ENTROPY>(logits[one], one % 2);
    }
    if (of_group > above.limit) count(above, vectors);
    if (EXTRAS && of_group > unmasked.limit) count(unmasked, vectors);
    return of_group;
}

// Makes one pass over the part. The caller has issued the loads of the first step.
// The loads of the next step are issued before this step's loads arrive, so that two steps are always in flight.
template <bool WITH_GROUPS, bool WITH_ENTROPY>
__device__ __forceinline__ void stream(const Part& part, Running& running, CountAbove& above, CountAbove& unmasked,
                                       Groups* groups, uint4 (&vectors)[VECTORS_AT_ONCE]) {
    const int steps = part.steps();
    u32 from = part.begin + threadIdx.x;
    for (int step = 0; step < steps; ++step) {
        uint4 next[VECTORS_AT_ONCE];
        from += STEP;
        load(next, part, from);
        const float of_group = absorb<WITH_ENTROPY>(running, above, unmasked, vectors);
        if (WITH_GROUPS) groups->largest[step][threadIdx.x] = of_group;
#pragma unroll
        for (int each = 0; each < VECTORS_AT_ONCE; ++each) vectors[each] = next[each];
    }
}

__device__ __forceinline__ void push_vector(Candidates& room, const Part& part, u32 vector, float bound, u64 floor) {
    if (vector >= part.end) return;
    float logits[PER_VECTOR];
    unpack(load_again(part.at(vector)), logits);
    const u32 id = part.id_of(vector);
#pragma unroll
    for (int one = 0; one < PER_VECTOR; ++one) {
        if (logits[one] >= bound) {
            const u64 key = ranked(order_of(logits[one]), id + one);
            if (key > floor) push(room, key);
        }
    }
}

// The slow path works for all inputs. It goes step by step, with no more candidates than there is room for.
// Candidates that are too small are dropped.
__device__ __noinline__ void gather_in_steps(Candidates& room, const Part part, const Groups& groups, int wanted) {
    __syncthreads();
    if (threadIdx.x == 0) {
        room.count = 0;
        room.floor = 0;
    }
    __syncthreads();
    u32 id;
    const bool has_edge = part.edge(id);
    if (has_edge && id < part.head) push(room, ranked(order_of(logit_at(part.row, id)), id));
    for (int step = 0; step < part.steps(); ++step) {
        // Ids ascend, so a logit equal to the floor comes after the kept candidates.
        const bool promising = room.floor == 0 || order_of(groups.largest[step][threadIdx.x]) > order_in(room.floor);
        if (!__syncthreads_or(promising)) continue;
        for (int each = 0; each < VECTORS_AT_ONCE; ++each) {
            make_room(room, wanted);
            const u32 vector = part.begin + threadIdx.x + step * STEP + each * THREADS;
            push_vector(room, part, vector, minus_infinity(), room.floor);
        }
    }
    make_room(room, wanted);
    if (has_edge && id >= part.head) push(room, ranked(order_of(logit_at(part.row, id)), id));
    __syncthreads();
    keep_largest(room, wanted);
}

// Push the logits of this part that are at or above a bound. Returns the number of groups with such logits.
// If there is no room for so many groups, none of their logits is pushed.
__device__ __forceinline__ u32 push_all(Candidates& room, const Part& part, Groups& groups, float of_thread,
                                        float of_edge, float bound) {
    if (of_thread >= bound) {
        const int steps = part.steps();
#pragma unroll
        for (int step = 0; step < MAX_STEPS; ++step) {
            if (step < steps && groups.largest[step][threadIdx.x] >= bound) {
                const u32 at = atomicAdd(&groups.count, 1);
                if (at < ROOM) groups.promising[at] = static_cast<unsigned short>(step * THREADS + threadIdx.x);
            }
        }
    }
    u32 id;
    if (part.edge(id) && of_edge >= bound) push(room, ranked(order_of(of_edge), id));
    __syncthreads();
    // Every thread loads one vector at a time, so that all loads are in flight at once.
    const u32 promising = groups.count;
    const u32 vectors = promising > ROOM ? 0 : promising * VECTORS_AT_ONCE;
    for (u32 at = threadIdx.x; at < vectors; at += THREADS) {
        const u32 group = groups.promising[at / VECTORS_AT_ONCE];
        const u32 step = group / THREADS, thread = group % THREADS;
        const u32 vector = part.begin + thread + step * STEP + at % VECTORS_AT_ONCE * THREADS;
        push_vector(room, part, vector, bound, 0);
    }
    __syncthreads();
    return promising;
}

// Find the largest logits of this part: at least as many as wanted, if the part has as many, and few more.
// Returns the integer of the largest omitted logit or a smaller number, or zero if no logit was omitted.
// The caller has found the bound.
__device__ __forceinline__ u32 gather(Candidates& room, const Part& part, Groups& groups, float of_thread,
                                      float of_edge, int wanted) {
    const u32 order = max(room.bound, ORDER_OF_MINUS_INFINITY);  // without the omitted low bits, it may be lower
    const u32 promising = push_all(room, part, groups, of_thread, of_edge, in_order(order));
    const u32 count = room.count;
    if (promising <= ROOM && count <= FEW) return order_before(order);
    if (promising > ROOM || count > ROOM) {
        gather_in_steps(room, part, groups, wanted);
    } else {
        keep_largest(room, wanted);
    }
    return order_in(room.floor);
}
