// The types of logits: how sixteen bytes of a row become numbers, for each type.
//
// The file includes no CUDA header, so the run-time compiler works without an installed CUDA toolkit.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 MINUS_INFINITY_BITS = 0xff800000u;

#if defined(LOGITS_F32)
constexpr int PER_VECTOR = 4;
constexpr int BYTES_PER_LOGIT = 4;
constexpr u32 NOTHING = MINUS_INFINITY_BITS;
constexpr int UNUSED_BITS = 0;
#elif defined(LOGITS_BF16)
constexpr int PER_VECTOR = 8;
constexpr int BYTES_PER_LOGIT = 2;
constexpr u32 NOTHING = 0xff80ff80u;
constexpr int UNUSED_BITS = 16;
#elif defined(LOGITS_F16)
constexpr int PER_VECTOR = 8;
constexpr int BYTES_PER_LOGIT = 2;
constexpr u32 NOTHING = 0xfc00fc00u;
constexpr int UNUSED_BITS = 13;
#else
#error "define one of LOGITS_F32, LOGITS_BF16 and LOGITS_F16"
#endif

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(MINUS_INFINITY_BITS); }

#ifndef L2_HINT
#define L2_HINT ".L2::128B"
#endif
// Read a row for the first time. The data need not stay in the nearest cache.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate" L2_HINT ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

__device__ __forceinline__ uint4 load_again(const void* from) { return *static_cast<const uint4*>(from); }

__device__ __forceinline__ uint4 no_logits() { return make_uint4(NOTHING, NOTHING, NOTHING, NOTHING); }

#if defined(LOGITS_F16)
__device__ __forceinline__ float half_to_float(u32 bits) {
    float value;
    asm("{ .reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(value) : "r"(bits));
    return value;
}
#endif

// The logits of one word: one float, or two halves. The half at the lower address comes first.
__device__ __forceinline__ void unpack(u32 word, float* values) {
#if defined(LOGITS_F32)
    values[0] = __uint_as_float(word);
#elif defined(LOGITS_BF16)
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
#else
    values[0] = half_to_float(word & 0xffffu);
    values[1] = half_to_float(word >> 16);
#endif
}

__device__ __forceinline__ void unpack(const uint4& vector, float (&values)[PER_VECTOR]) {
    constexpr int EACH = PER_VECTOR / 4;
    unpack(vector.x, values);
    unpack(vector.y, values + EACH);
    unpack(vector.z, values + 2 * EACH);
    unpack(vector.w, values + 3 * EACH);
}

__device__ __forceinline__ float logit_at(const void* row, long long place) {
#if defined(LOGITS_F32)
    return static_cast<const float*>(row)[place];
#elif defined(LOGITS_BF16)
    return __uint_as_float(static_cast<u32>(static_cast<const unsigned short*>(row)[place]) << 16);
#else
    return half_to_float(static_cast<const unsigned short*>(row)[place]);
#endif
}

// The larger logits of two words. Halves are compared one by one. A number is preferred to a NaN.
__device__ __forceinline__ u32 larger(u32 left, u32 right) {
    u32 result;
#if defined(LOGITS_F32)
    result = __float_as_uint(fmaxf(__uint_as_float(left), __uint_as_float(right)));
#elif defined(LOGITS_BF16)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(left), "r"(right));
#else
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(left), "r"(right));
#endif
    return result;
}

__device__ __forceinline__ u32 larger(const uint4& vector) {
    return larger(larger(vector.x, vector.y), larger(vector.z, vector.w));
}

__device__ __forceinline__ float largest_of(u32 word) {
    float values[2];
    unpack(word, values);
#if defined(LOGITS_F32)
    return fmaxf(values[0], minus_infinity());
#else
    return fmaxf(fmaxf(values[0], values[1]), minus_infinity());
#endif
}

// Counts the logits that are larger than a limit. If the card supports it, two halves are compared at once.
// Each comparison yields a mask of sixteen ones, and the sums of the masks are separated at the end.
struct CountAbove {
    float limit;
    u32 sum;

    __device__ __forceinline__ explicit CountAbove(float above) : limit(above), sum(0) {}

    // The limit in both halves of a word. It is made at its use, so that earlier code need not wait for the limit.
    __device__ __forceinline__ u32 limits() const {
        u32 both = 0;
#if defined(LOGITS_BF16)
        const u32 bits = __float_as_uint(limit) >> 16;
        both = bits << 16 | bits;
#elif defined(LOGITS_F16)
        asm("{ .reg .b16 half; cvt.rn.f16.f32 half, %1; mov.b32 %0, {half, half}; }" : "=r"(both) : "f"(limit));
#endif
        return both;
    }

    __device__ __forceinline__ void add(u32 word, u32 limits) {
#if defined(LOGITS_F16) || (defined(LOGITS_BF16) && __CUDA_ARCH__ >= 900)
        u32 mask;
#if defined(LOGITS_BF16)
        asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(limits));
#else
        asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(limits));
#endif
        sum += mask;
#else
        float values[2];
        unpack(word, values);
        sum += values[0] > limit;
#if !defined(LOGITS_F32)
        sum += values[1] > limit;
#endif
#endif
    }

    __device__ __forceinline__ u32 total() const {
#if defined(LOGITS_F16) || (defined(LOGITS_BF16) && __CUDA_ARCH__ >= 900)
        // Low masks and high masks: sum = 65535 * (65536 * high + low), modulo 2**32.
        const u32 low = -sum & 0xffffu;
        const int low_minus_high = static_cast<short>((sum + low) >> 16);
        return 2 * low - low_minus_high;
#else
        return sum;
#endif
    }
};

// Integers in the same order as the floats. Both zeros become the same integer.
__device__ __forceinline__ u32 order_of(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float in_order(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

constexpr u32 ORDER_OF_MINUS_INFINITY = ~MINUS_INFINITY_BITS;

// The integer of the next smaller number of this type of logit.
__device__ __forceinline__ u32 order_before(u32 order) {
    const u32 before = order - 1;
    // The unused bits are zeros in a positive number, and ones in the integer of a negative number.
    return before & 0x80000000u ? before & ~((1u << UNUSED_BITS) - 1) : before;
}

__device__ __forceinline__ u32 order_after(u32 order) { return order + (1u << UNUSED_BITS); }

// An alternative as one number, which is larger for a larger logit or, if logits are equal, for a lower id.
// Bits that this type of logit never uses are omitted, so that a search among such numbers takes fewer steps.
constexpr int ID_BITS = 24;
constexpr u32 ID_MASK = (1u << ID_BITS) - 1;

__device__ __forceinline__ u64 ranked(u32 order, u32 id) {
    return static_cast<u64>(order >> UNUSED_BITS) << ID_BITS | (~id & ID_MASK);
}
__device__ __forceinline__ u32 order_in(u64 key) {
    const u32 order = static_cast<u32>(key >> ID_BITS) << UNUSED_BITS;
    return order & 0x80000000u ? order : order | ((1u << UNUSED_BITS) - 1);
}
__device__ __forceinline__ u32 id_in(u64 key) { return ~static_cast<u32>(key) & ID_MASK; }
