// What one launch is told. launch.py fills the same bytes: the two are held together by CALL_BYTES.
#pragma once

#include "logits.cuh"

enum IdType : u32 { IDS_INT32 = 0, IDS_INT64 = 1 };
enum Fault : u32 { FINE = 0, NOT_A_NUMBER = 1, INFINITE = 2, ALL_MASKED = 3, ID_OUT_OF_RANGE = 4 };
enum Column { TOKEN_IDS = 0, LOGPROBS = 1, RANKS = 2, ALTERNATIVE_IDS = 3, ALTERNATIVE_LOGPROBS = 4, COLUMNS = 5 };

// One scored token: its row of logits, where its id is given, its place among all tokens, and where its alternatives
// begin in their columns and how many it wants.
struct __align__(16) Place {
    u32 row;
    u32 id_at;
    u32 token;
    u32 alternatives_at;
    u32 top_k;
    u32 unused[3];
};

// A token that wants its id alone.
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
    u32 unused[3];
};

// Where a column begins in the output, and the bytes that stand before it in a message.
struct ColumnPlace {
    u32 at;
    u32 prefix_bytes;
    u64 prefix;
};

struct Call {
    const unsigned char* logits;
    long long row_bytes;
    const void* token_ids;
    const Place* places;  // none: token i is row i, all alike
    const Unscored* unscored;
    unsigned char* output;
    Partial* partials;
    u64* candidates;
    u32* tickets;
    ColumnPlace columns[COLUMNS];
    u32 vocabulary;
    u32 scored;
    u32 unscored_count;
    u32 top_k;
    u32 id_type;
    u32 as_logits;
    u32 vectors_of_part;
    u32 unused;
};

constexpr int CALL_BYTES = 184;
static_assert(sizeof(Call) == CALL_BYTES, "launch.py packs the call by these offsets");

// Columns begin where the message has them, which may be anywhere.
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
