// The arguments of one launch. launch.py fills the same bytes, and CALL_BYTES checks that the sizes agree.
#pragma once

#include "sums.cuh"

enum IdType : u32 { IDS_INT32 = 0, IDS_INT64 = 1 };
enum Fault : u32 { FINE = 0, NOT_A_NUMBER = 1, INFINITE = 2, ALL_MASKED = 3, ID_OUT_OF_RANGE = 4 };
enum Extra { OTHER_LOGPROBS = 0, ENTROPIES = 1, GIVEN_LOGPROBS = 2, MASK_SIZES = 3, MASK_IDS = 4, EXTRA_COLUMNS = 5 };
constexpr u32 NOWHERE = 0xffffffffu;
enum Column { TOKEN_IDS = 0, LOGPROBS = 1, RANKS = 2, ALTERNATIVE_IDS = 3, ALTERNATIVE_LOGPROBS = 4, COLUMNS = 5 };

// One scored token: its row of logits, the location of its id, and its index among all tokens.
// Also the offset and the number of its alternatives.
struct __align__(16) Place {
    u32 row;
    u32 id_at;
    u32 token;
    u32 alternatives_at;
    u32 top_k;
    u32 unused[3];
};

// The extra scores of a row and their offsets in the extra columns. An offset may be NOWHERE.
struct __align__(16) Wish {
    u32 value_at;
    u32 entropy_at;
    u32 given_ids_at;
    u32 given_at;
    u32 given_count;
    u32 mask_at;
    u32 mask_ids_at;
    u32 mask_bound;  // zero means no mask
};

// A token whose result is only its id.
struct Unscored {
    u32 id_at;
    u32 token;
};

struct __align__(16) Partial {
    float largest;
    float sum;
    u32 above;
    u32 dropped;
    u32 candidates;
    float weighted;
    u32 unmasked;
    u32 unused;
};

// The offset of a column in the output, and the column's prefix in a message.
struct ColumnPlace {
    u32 at;
    u32 prefix_bytes;
    u64 prefix;
};

struct Call {
    const unsigned char* logits;
    long long row_bytes;
    const void* token_ids;
    const Place* places;  // null if token i has row i and all tokens are alike
    const Unscored* unscored;
    unsigned char* output;
    Partial* partials;
    u64* candidates;
    u32* tickets;
    const unsigned char* other_logits;
    long long other_row_bytes;
    const Wish* wishes;  // null if all tokens are alike
    const u32* given_ids;
    u32* mask_ids;  // the ids of masks that each part of a row has found
    ColumnPlace columns[COLUMNS];
    u32 vocabulary;
    u32 scored;
    u32 unscored_count;
    u32 top_k;
    u32 id_type;
    u32 as_logits;
    u32 vectors_of_part;
    u32 items;  // the number of rows to read: the scored rows of the first tensor, then the rows of the second tensor
    u32 extras_at[EXTRA_COLUMNS];
    u32 most_mask;
    u32 masks_are_others;
    u32 extras;  // the extras of all tokens if they are alike: bit 1 for other logprobs, bit 2 for entropies
};

constexpr int CALL_BYTES = 256;
static_assert(sizeof(Call) == CALL_BYTES, "launch.py packs the call by these offsets");

__device__ __forceinline__ bool is_of_other(const Call& call, u32 item) { return EXTRAS && item >= call.scored; }

__device__ __forceinline__ Wish wish_of(const Call& call, u32 item) {
    if (call.wishes) return call.wishes[item];
    const bool is_other = is_of_other(call, item);
    const u32 token = is_other ? item - call.scored : item;
    const bool has_mask = is_other == (call.masks_are_others != 0);
    const u32 value_at = is_other && !(call.extras & 1) ? NOWHERE : token;
    const u32 entropy_at = is_other || !(call.extras & 2) ? NOWHERE : token;
    return {value_at, entropy_at, 0, 0, 0, token, token * call.most_mask, has_mask ? call.most_mask : 0};
}

// Columns are at their offsets in the message, so they may be unaligned.
__device__ __forceinline__ void put(unsigned char* at, u32 value) {
    if ((reinterpret_cast<u64>(at) & 3) == 0) {
        *reinterpret_cast<u32*>(at) = value;
        return;
    }
    at[0] = static_cast<unsigned char>(value);
    at[1] = static_cast<unsigned char>(value >> 8);
    at[2] = static_cast<unsigned char>(value >> 16);
    at[3] = static_cast<unsigned char>(value >> 24);
}

__device__ __forceinline__ void put(const Call& call, Column column, u32 element, u32 value) {
    put(call.output + call.columns[column].at + 4ull * element, value);
}

// The extra columns are aligned.
__device__ __forceinline__ u32* extra(const Call& call, Extra column, u32 element) {
    return reinterpret_cast<u32*>(call.output + call.extras_at[column]) + element;
}

__device__ __forceinline__ long long token_id(const Call& call, u32 at) {
    if (call.id_type == IDS_INT64) return static_cast<const long long*>(call.token_ids)[at];
    return static_cast<const int*>(call.token_ids)[at];
}

__device__ __forceinline__ void put_prefixes(const Call& call) {
    if (threadIdx.x >= COLUMNS) return;
    const ColumnPlace place = call.columns[threadIdx.x];
    for (u32 byte = 0; byte < place.prefix_bytes; ++byte) {
        call.output[place.at - place.prefix_bytes + byte] = static_cast<unsigned char>(place.prefix >> 8 * byte);
    }
}

__device__ __forceinline__ void put_unscored(const Call& call) {
    for (u32 at = threadIdx.x; at < call.unscored_count; at += blockDim.x) {
        const Unscored token = call.unscored[at];
        put(call, TOKEN_IDS, token.token, static_cast<u32>(token_id(call, token.id_at)));
    }
}
