// Computes the logprob, rank and alternatives of each sampled token in one pass over a row of logits.
//
// A row is divided among gridDim.x blocks. The last block to finish combines the results of all blocks.
#include "call.cuh"
#include "row.cuh"

#ifndef BLOCKS_AT_ONCE
#if defined(WITH_EXTRAS) && defined(LOGITS_BF16) && __CUDA_ARCH__ < 900
#define BLOCKS_AT_ONCE 3  // extra scores of bfloat16 logits need more registers, so fewer blocks run at once
#else
#define BLOCKS_AT_ONCE 4
#endif
#endif

constexpr float FLOOR = -9999.0f;  // the contract's replacement for minus infinity
constexpr u32 NO_NUMBER = 0x7fc00000u;

#ifdef WITH_ALTERNATIVES
constexpr float LOWEST = -3.402823466e38f;  // the lowest finite float
constexpr int MAX_PARTS = 512;  // launch.py never divides a row into more parts than this
#endif

struct Shared {
    TotalsOfWarps totals;
    double log_of_sum;
    bool is_last;
#ifdef WITH_ALTERNATIVES
    union {
        Groups groups;
        u32 candidates_of[MAX_PARTS];
        u64 values[FEW];
    };
    Candidates room;
    float last_value;
    bool last_is_crowded;  // whether omitted logits may have the same value as the last alternative
    u32 offsets[WARPS];
#endif
};

struct Scale {
    double log_of_sum;
    bool as_logits;

    __device__ __forceinline__ float value_of(float logit) const {
        const double exact = static_cast<double>(logit) - log_of_sum;
        const float value = as_logits ? logit : static_cast<float>(fmin(exact, 0.0));
        return fmaxf(value, FLOOR);
    }
};

// Handles logits whose products overflow a float.
// Such logits are rare, so a second and a third pass over the row are acceptable.
__device__ __noinline__ Totals far_totals(TotalsOfWarps& room, const void* row, u32 vocabulary, Totals once) {
    float sum = 0.0f, weighted = 0.0f;
    for (u32 id = threadIdx.x; id < vocabulary; id += THREADS) {
        const float exponent = (logit_at(row, id) - once.largest) * LOG2_E;
        const float power = two_to_the(exponent);
        sum += power;
        if (EXTRAS) weighted += power * fmaxf(exponent, NEGLIGIBLE);
    }
    Totals mine = {0.0f, sum, 0, 0, weighted, 0};  // the sums of all threads refer to the same largest logit
    Totals all = together(room, mine);
    return {once.largest, all.sum, once.above, once.dropped, all.weighted, once.unmasked};
}

__device__ __forceinline__ Fault fault_of(const Totals& totals, long long id, u32 vocabulary) {
    if (id < 0 || id >= vocabulary) return ID_OUT_OF_RANGE;
    if (totals.largest == -minus_infinity()) return INFINITE;
    if (totals.sum != totals.sum) return NOT_A_NUMBER;
    return totals.largest == minus_infinity() ? ALL_MASKED : FINE;
}

#ifdef WITH_ALTERNATIVES
// The number of candidates that a thread loads at once, one from each part.
constexpr int PARTS_AT_ONCE = 8;

__device__ __forceinline__ void take(u64 (&keys)[PARTS_AT_ONCE], const Shared& shared, const u64* found, u32 from,
                                     u32 parts) {
#pragma unroll
    for (int each = 0; each < PARTS_AT_ONCE; ++each) {
        const u32 part = from + each;
        const bool is_there = part < parts && threadIdx.x < shared.candidates_of[part];
        keys[each] = is_there ? __ldcg(found + part * FEW + threadIdx.x) : 0;
    }
}

// Collects the candidates of all parts, and omits candidates that cannot be alternatives.
// Returns the largest omitted candidate's logit as an ordered integer, or zero if no candidate was omitted.
__device__ __forceinline__ u32 collect(Shared& shared, const Call& call, u32 item, u32 parts, int wanted) {
    Candidates& room = shared.room;
    const u64* found = call.candidates + static_cast<u64>(item) * parts * FEW;
    u64 keys[PARTS_AT_ONCE];
    u32 total = 0, order = 0;
    for (u32 part = 0; part < parts; ++part) total += shared.candidates_of[part];
    if (threadIdx.x == 0) {
        room.count = 0;
        room.floor = 0;
    }
    if (total > FEW) {
        u64 largest = 0;
        for (u32 from = 0; from < parts; from += PARTS_AT_ONCE) {
            take(keys, shared, found, from, parts);
#pragma unroll
            for (int each = 0; each < PARTS_AT_ONCE; ++each) largest = max(largest, keys[each]);
        }
        room.maxima[threadIdx.x] = order_in(largest);
        __syncthreads();
        if (threadIdx.x < 32) find_bound(room, wanted, UNUSED_BITS);
        __syncthreads();
        order = room.bound;
    }
    __syncthreads();
    const u64 bound = order ? ranked(order, ID_MASK) : 1;
    for (u32 from = 0; from < parts; from += PARTS_AT_ONCE) {
        take(keys, shared, found, from, parts);
#pragma unroll
        for (int each = 0; each < PARTS_AT_ONCE; ++each) {
            if (keys[each] >= bound) push(room, keys[each]);
        }
    }
    __syncthreads();
    if (room.count > ROOM) {
        __syncthreads();
        if (threadIdx.x == 0) room.count = 0;
        for (u32 part = 0; part < parts; ++part) {
            make_room(room, wanted);
            take(keys, shared, found, part, part + 1);
            if (keys[0] > room.floor) push(room, keys[0]);
        }
        __syncthreads();
    }
    if (room.count > FEW) {
        keep_largest(room, wanted);
        return order_in(room.floor);
    }
    return order ? order_before(order) : 0;
}

// Different logits may have the same rounded logprob. For equal logprobs, the lower id comes first.
// The list of a smaller top_k is therefore always a prefix of the list of a larger top_k.
// This function finds the omitted logits that tie with the last selected logit.
// All larger logits are already selected.
__device__ __noinline__ void settle_ties(Shared& shared, const Call& call, const void* row, Scale scale,
                                         u32 alternatives_at, int wanted, u32 larger_ones) {
    constexpr int EACH = 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float value = shared.last_value;
    u32 found = larger_ones;
    for (u32 from = 0; from < call.vocabulary && found < wanted; from += THREADS * EACH) {
        const u32 first = from + threadIdx.x * EACH;
        u32 ties = 0;
        for (int each = 0; each < EACH; ++each) {
            const u32 id = first + each;
            if (id < call.vocabulary && scale.value_of(logit_at(row, id)) == value) ties |= 1u << each;
        }
        u32 up_to_here = __popc(ties);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const u32 before = __shfl_up_sync(EVERY_LANE, up_to_here, distance);
            if (lane >= distance) up_to_here += before;
        }
        __syncthreads();
        if (lane == 31) shared.offsets[warp] = up_to_here;
        __syncthreads();
        u32 place = found + up_to_here - __popc(ties);
        for (int each = 0; each < WARPS; ++each) {
            if (each < warp) place += shared.offsets[each];
            found += shared.offsets[each];
        }
        for (; ties && place < wanted; ++place, ties &= ties - 1) {
            put(call, ALTERNATIVE_IDS, alternatives_at + place, first + __ffs(ties) - 1);
            put(call, ALTERNATIVE_LOGPROBS, alternatives_at + place, __float_as_uint(value));
        }
    }
}

// Packs a value's order and an id into one integer, which is larger for a larger value, or for a lower id on a tie.
__device__ __forceinline__ u64 placed(u32 order, u32 id) { return static_cast<u64>(order) << ID_BITS | (~id & ID_MASK); }
__device__ __forceinline__ u32 value_order_in(u64 number) { return static_cast<u32>(number >> ID_BITS); }

// Sort the candidates by value and id, and write the first candidates.
__device__ __forceinline__ void put_alternatives(Shared& shared, const Call& call, const void* row,
                                                 const Scale& scale, u32 alternatives_at, int wanted, u32 dropped) {
    const u32 count = shared.room.count;
    u64 key = 0, mine = 0;
    if (threadIdx.x < count) {
        key = shared.room.keys[threadIdx.x];
        mine = placed(order_of(scale.value_of(in_order(order_in(key)))), id_in(key));
        shared.values[threadIdx.x] = mine;
    }
    __syncthreads();
    u32 place = 0;
    for (u32 each = 0; each < count; ++each) place += shared.values[each] > mine;
    if (threadIdx.x < count && place < wanted) {
        const float value = in_order(value_order_in(mine));
        put(call, ALTERNATIVE_IDS, alternatives_at + place, id_in(key));
        put(call, ALTERNATIVE_LOGPROBS, alternatives_at + place, __float_as_uint(value));
        if (place == wanted - 1) {
            const u32 order = order_in(key);
            shared.last_value = value;
            shared.last_is_crowded = scale.value_of(in_order(order_after(order))) == value ||
                                     scale.value_of(in_order(order_before(order))) == value;
        }
    }
    const float next = scale.value_of(in_order(max(dropped, ORDER_OF_MINUS_INFINITY)));
    __syncthreads();
    // The search for ties is needed only if an omitted logit may have the same value as the last alternative.
    if (shared.last_is_crowded && dropped >= ORDER_OF_MINUS_INFINITY && next >= shared.last_value) {
        const bool is_larger = threadIdx.x < count && value_order_in(mine) > order_of(shared.last_value);
        const u32 larger_ones = __syncthreads_count(is_larger);
        settle_ties(shared, call, row, scale, alternatives_at, wanted, larger_ones);
    }
}

__device__ __forceinline__ void put_no_alternatives(const Call& call, u32 alternatives_at, int wanted) {
    for (u32 each = threadIdx.x; each < wanted; each += THREADS) {
        put(call, ALTERNATIVE_IDS, alternatives_at + each, 0);
        put(call, ALTERNATIVE_LOGPROBS, alternatives_at + each, NO_NUMBER);
    }
}

constexpr int MOST_MASKED = 1024;
static_assert(MOST_MASKED <= ROOM, "the ids of a mask are pushed before they are sorted");

// Write the pushed ids in ascending order, and empty the buffer.
__device__ __noinline__ void put_ascending(Shared& shared, u32* into) {
    Candidates& room = shared.room;
    u64* ids = room.keys;
    const u32 count = room.count;
    u32 size = 2;
    while (size < count) size *= 2;
    for (u32 at = threadIdx.x; at < size; at += THREADS) ids[at] = at < count ? id_in(ids[at]) : ~0ull;
    // Each round of the bitonic sort doubles the run length. Each pass of a round halves the distance of compared ids.
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 reach = run / 2; reach; reach /= 2) {
            __syncthreads();
            for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const u32 low = 2 * pair - (pair & (reach - 1));
                const u64 left = ids[low], right = ids[low + reach];
                if ((left > right) == !(low & run)) {
                    ids[low] = right;
                    ids[low + reach] = left;
                }
            }
        }
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < count; at += THREADS) into[at] = static_cast<u32>(ids[at]);
    __syncthreads();
    if (threadIdx.x == 0) {
        room.count = 0;
        shared.groups.count = 0;
    }
    __syncthreads();
}

// Write the extra scores of a row.
__device__ __forceinline__ void put_extras(const Call& call, const Wish& wish, u32 item, const void* row,
                                           const Totals& totals, const Scale& scale, Fault fault, float sampled) {
    if (threadIdx.x == 0) {
        if (is_of_other(call, item) && wish.value_at != NOWHERE) {
            const float value = scale.value_of(sampled);
            *extra(call, OTHER_LOGPROBS, wish.value_at) = fault == FINE ? __float_as_uint(value) : NO_NUMBER;
        }
        if (wish.entropy_at != NOWHERE) {
            const float entropy = entropy_of(totals);
            *extra(call, ENTROPIES, wish.entropy_at) = fault == FINE ? __float_as_uint(entropy) : NO_NUMBER;
        }
        if (wish.mask_bound) *extra(call, MASK_SIZES, wish.mask_at) = fault == FINE ? totals.unmasked : 0;
    }
    for (u32 each = threadIdx.x; each < wish.given_count; each += THREADS) {
        const float value = scale.value_of(logit_at(row, call.given_ids[wish.given_ids_at + each]));
        *extra(call, GIVEN_LOGPROBS, wish.given_at + each) = fault == FINE ? __float_as_uint(value) : NO_NUMBER;
    }
    const u32 parts = gridDim.x;
    if (parts == 1 || !wish.mask_bound || totals.unmasked > wish.mask_bound) return;
    // The ids of each part are in ascending order, and lower than the ids of the next part.
    u32 before = wish.mask_ids_at;
    for (u64 part = static_cast<u64>(item) * parts; part < (item + 1ull) * parts; ++part) {
        const u32 count = __ldcg(&call.partials[part].unmasked);
        for (u32 each = threadIdx.x; each < count; each += THREADS) {
            *extra(call, MASK_IDS, before + each) = __ldcg(call.mask_ids + part * call.most_mask + each);
        }
        before += count;
    }
}
#endif

// Write the results of this part, and return whether this is the last part of the row to finish.
__device__ __forceinline__ bool hand_over(Shared& shared, const Call& call, u32 item, const Totals& totals) {
    const u32 parts = gridDim.x;
    const u64 mine = static_cast<u64>(item) * parts + blockIdx.x;
    u32 count = 0;
#ifdef WITH_ALTERNATIVES
    count = shared.room.count;
    if (threadIdx.x < count) call.candidates[mine * FEW + threadIdx.x] = shared.room.keys[threadIdx.x];
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        call.partials[mine] = {totals.largest, totals.sum,      totals.above,    totals.dropped,
                               count,          totals.weighted, totals.unmasked, 0};
        __threadfence();
        const bool is_last = atomicAdd(call.tickets + item, 1) == parts - 1;
        if (is_last) call.tickets[item] = 0;  // the next launch needs a ticket of zero
        __threadfence();
        shared.is_last = is_last;
    }
    __syncthreads();
    return shared.is_last;
}

__device__ __forceinline__ Totals of_all_parts(Shared& shared, const Call& call, u32 item) {
    const u32 parts = gridDim.x;
    Totals mine = {minus_infinity(), 0.0f, 0, 0, 0.0f, 0};
    for (u32 part = threadIdx.x; part < parts; part += THREADS) {
        const uint4* from = reinterpret_cast<const uint4*>(call.partials + static_cast<u64>(item) * parts + part);
        const uint4 words = __ldcg(from);
        const float largest = __uint_as_float(words.x);
        const float both = fmaxf(mine.largest, largest);
        if (EXTRAS) {
            const uint4 rest = __ldcg(from + 1);
            mine.weighted = moved(mine.weighted, mine.sum, reference_for(mine.largest) - reference_for(both)) +
                            moved(__uint_as_float(rest.y), __uint_as_float(words.y),
                                  reference_for(largest) - reference_for(both));
            mine.unmasked += rest.z;
        }
        mine.sum = mine.sum * two_to_the(reference_for(mine.largest) - reference_for(both)) +
                   __uint_as_float(words.y) * two_to_the(reference_for(largest) - reference_for(both));
        mine.largest = both;
        mine.above += words.z;
        mine.dropped = max(mine.dropped, words.w);
#ifdef WITH_ALTERNATIVES
        shared.candidates_of[part] = __ldcg(&reinterpret_cast<const Partial*>(from)->candidates);
#endif
    }
    return together(shared.totals, mine);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) token_logprobs(const __grid_constant__ Call call) {
    __shared__ Shared shared;
    const u32 item = blockIdx.y, parts = gridDim.x;
    if (item == call.items) {
        if (blockIdx.x == 0) put_unscored(call);
        if (item == 0 && blockIdx.x == 0) put_prefixes(call);
        return;
    }
    const bool is_other = is_of_other(call, item);
    const u32 alike = is_other ? item - call.scored : item, top_k = is_other ? 0 : call.top_k;
    const Place place = call.places ? call.places[item] : Place{alike, alike, alike, alike * top_k, top_k, {}};
    [[maybe_unused]] const bool has_entropy = EXTRAS && wish_of(call, item).entropy_at != NOWHERE;
    const bool has_mask = EXTRAS && wish_of(call, item).mask_bound;
    const unsigned char* row = is_other ? call.other_logits + place.row * call.other_row_bytes
                                        : call.logits + place.row * call.row_bytes;
    const Part part(row, call.vocabulary, call.vectors_of_part, blockIdx.x, parts);
    // The sampled id is loaded early, because the sampled logit cannot be loaded before the id is known.
    const long long id = token_id(call, place.id_at);
    uint4 vectors[VECTORS_AT_ONCE];
    load(vectors, part, part.begin + threadIdx.x);
    const bool id_is_known = id >= 0 && id < call.vocabulary;
    // A comparison with NaN is false, so no logit is counted.
    const float sampled = id_is_known ? logit_at(part.row, id) : __uint_as_float(NO_NUMBER);
    CountAbove above(sampled);
    CountAbove unmasked(has_mask ? minus_infinity() : __uint_as_float(NO_NUMBER));
    Running running;
#ifdef WITH_ALTERNATIVES
    if (has_entropy) {
        stream<true, true>(part, running, above, unmasked, &shared.groups, vectors);
    } else {
        stream<true, false>(part, running, above, unmasked, &shared.groups, vectors);
    }
    const float of_thread = running.largest;
#else
    stream<false, false>(part, running, above, unmasked, nullptr, vectors);
#endif
    if (item == 0 && blockIdx.x == 0) put_prefixes(call);
    u32 counted = above.total(), there = unmasked.total();
    u32 edge_id;
    float of_edge = minus_infinity();
    if (part.edge(edge_id)) {
        of_edge = logit_at(part.row, edge_id);
        running.raise(of_edge);
        running.add<EXTRAS>(of_edge, 0);
        counted += of_edge > sampled;
        there += of_edge > unmasked.limit;
    }
#ifdef WITH_ALTERNATIVES
    const int wanted = static_cast<int>(place.top_k);
    shared.room.maxima[threadIdx.x] = order_of(running.largest);
    if (threadIdx.x == 0) {
        shared.room.count = 0;
        shared.room.floor = 0;
        shared.groups.count = 0;
    }
#endif
    Totals totals = together(shared.totals, {running.largest, running.sums[0] + running.sums[1], counted, 0,
                                             running.weighted[0] + running.weighted[1], there});
    if (threadIdx.x == THREADS - 1) shared.log_of_sum = log_of_sum(totals.largest, totals.sum);
#ifdef WITH_ALTERNATIVES
    const Wish wish = EXTRAS ? wish_of(call, item) : Wish{};  // the wish is read late to save registers
    if (has_mask && totals.unmasked <= wish.mask_bound) {
        push_all(shared.room, part, shared.groups, of_thread, of_edge, LOWEST);
        const u64 mine = static_cast<u64>(item) * parts + blockIdx.x;
        put_ascending(shared, parts > 1 ? call.mask_ids + mine * call.most_mask
                                        : extra(call, MASK_IDS, wish.mask_ids_at));
    }
    if (wanted) {
        if (threadIdx.x < 32) find_bound(shared.room, wanted, UNUSED_BITS);
        __syncthreads();
        totals.dropped = gather(shared.room, part, shared.groups, of_thread, of_edge, wanted);
    }
#endif
    __syncthreads();
    if (parts > 1) {
        if (!hand_over(shared, call, item, totals)) return;
        totals = of_all_parts(shared, call, item);
    }
    const bool is_far = fabsf(totals.largest) > FAR && fabsf(totals.largest) < -minus_infinity();
    if (is_far) totals = far_totals(shared.totals, part.row, call.vocabulary, totals);
    const Fault fault = fault_of(totals, id, call.vocabulary);
    if (parts > 1 || is_far) {
        if (threadIdx.x == 0) {
            shared.log_of_sum = is_far ? totals.largest + log(static_cast<double>(totals.sum))
                                       : log_of_sum(totals.largest, totals.sum);
        }
        __syncthreads();
    }
    const Scale scale = {shared.log_of_sum, call.as_logits != 0};
    if (threadIdx.x == 0) {
        const u32 value = fault == FINE ? __float_as_uint(scale.value_of(sampled)) : NO_NUMBER;
        call.output[item] = static_cast<unsigned char>(fault);
        if (!is_other) {
            put(call, TOKEN_IDS, place.token, static_cast<u32>(id));
            put(call, LOGPROBS, item, value);
            put(call, RANKS, item, fault == FINE ? totals.above + 1 : 0);
        }
    }
#ifdef WITH_ALTERNATIVES
    if (EXTRAS) put_extras(call, wish, item, part.row, totals, scale, fault, sampled);
    if (wanted == 0) return;
    if (fault != FINE) {
        put_no_alternatives(call, place.alternatives_at, wanted);
        return;
    }
    u32 dropped = totals.dropped;
    if (parts > 1) dropped = max(dropped, collect(shared, call, item, parts, wanted));
    __syncthreads();
    put_alternatives(shared, call, part.row, scale, place.alternatives_at, wanted, dropped);
#endif
}
