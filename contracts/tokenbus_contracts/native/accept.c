/*
 * Checks whether a message in the plain encoding keeps the contract. The answer is "valid" or "ask Python".
 *
 * This file is an optimisation of tokenbus_contracts.validate and has no other rules.
 * Python parses and checks every message that is not accepted here.
 * Python then decides whether the message is valid, and names the wrong field of an invalid message.
 * Every bound comes from the schema, through struct rules. Only the columns and their element sizes are written here.
 * The check takes one pass over the message, without allocation and without access outside of the message.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

/* Each column and its element size in bytes, in the order of schema.COLUMNS. Python refuses a library that differs. */
#define COLUMNS(X) \
    X(REQUEST_IDS, 8) X(BATCH_INDICES, 4) X(POSITIONS, 4) X(STATUSES, 1) X(TOKEN_COUNTS, 1) \
    X(DRAFT_TOKEN_COUNTS, 1) X(PROPOSAL_COUNTS, 1) X(SCORINGS, 1) X(TOP_KS, 1) X(TOKEN_IDS, 4) X(LOGPROBS, 4) \
    X(RANKS, 4) X(ALTERNATIVE_TOKEN_IDS, 4) X(ALTERNATIVE_LOGPROBS, 4) X(PROPOSAL_TOKEN_IDS, 4) X(STOPS, 1) \
    X(EXTRAS, 1) X(GIVEN_COUNTS, 4) X(MASK_BOUNDS, 4) X(OTHER_LOGPROBS, 4) X(ENTROPIES, 4) X(GIVEN_TOKEN_IDS, 4) \
    X(GIVEN_LOGPROBS, 4) X(MASK_SIZES, 4) X(MASK_TOKEN_IDS, 4)
#define NAME(name, bytes) name,
#define BYTES(name, bytes) bytes,
#define DESCRIBE(name, bytes) #name ":" #bytes " "

enum column { COLUMNS(NAME) COLUMN_COUNT };
static const int ITEM_BYTES[COLUMN_COUNT] = {COLUMNS(BYTES)};
const char tokenbus_columns[] = COLUMNS(DESCRIBE);

enum header_type { UNKNOWN, VARINT, FIXED64, TEXT };
enum status_flag { STATUS_VALID = 1, NEEDS_TOKENS = 2, FORBIDS_TOKENS = 4, MAY_PROPOSE = 8, STOPPED = 16 };
enum scoring_flag { SCORING_VALID = 1, SCORED = 2, MAY_HAVE_ALTERNATIVES = 4 };
enum found { BASE_ALONE = 1, WITH_EXTRAS = 2 };
enum extra { OTHER_LOGPROB = 1, ENTROPY = 2 };

#define HEADER_NUMBERS 32 /* header fields with larger numbers are left to Python */
#define KEY_SLOTS 4096    /* at least twice as many as a message may have rows */
#define MOST_ROWS (KEY_SLOTS / 2)
#define MOST_STEP_ROWS 65536

struct rules {
    uint64_t header_min[HEADER_NUMBERS], header_max[HEADER_NUMBERS]; /* for a text, the size in bytes */
    int32_t header_type[HEADER_NUMBERS];
    int32_t header_key, column_keys[COLUMN_COUNT];
    int32_t part_index, part_count, step_rows, selection, kind, value_kind, draft_follows, vocabulary; /* field ids */
    int32_t draft_kind, no_value_kind;
    uint32_t logit_kinds; /* one bit for each value kind that means logits */
    uint32_t position_max, rank_min, rank_max, token_id_max;
    uint32_t rows_max, token_count_max, draft_count_max, top_k_max, stop_max;
    uint32_t extras_max, given_count_max, mask_bound_max;
    uint8_t status_flags[256], scoring_flags[256];
};

/*
 * The offset and size of the header, and the offset and number of elements of each column in the message.
 * The header's values are indexed by field number. The value of the text field is the text's length in bytes.
 * Index 0 of the values has the text's offset.
 */
struct layout {
    int64_t header_at, header_bytes;
    uint64_t header[HEADER_NUMBERS];
    int64_t at[COLUMN_COUNT], items[COLUMN_COUNT];
};

/* Columns may be unaligned, because each column begins at the end of the previous field. */
typedef uint64_t u64 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef float f32 __attribute__((aligned(1), may_alias));

/* Loops handle four elements at a time, because every supported CPU has registers of that size. */
#define LANES 4
typedef uint32_t u32x4 __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef float f32x4 __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(4 * LANES)));

/* Keys and lengths with more bytes are left to Python, because parsers differ in how many bytes they accept. */
#define KEY_BYTES 4
#define VALUE_BYTES 10

/* Returns the address after a varint of at most `most` bytes, or NULL if there is no such varint. */
static const uint8_t *varint(const uint8_t *at, const uint8_t *end, int most, uint64_t *value) {
    uint64_t result = 0;
    for (int shift = 0; shift < 7 * most && at < end; shift += 7) {
        uint8_t digit = *at++;
        if (shift == 63 && digit > 1) return 0;
        result |= (uint64_t)(digit & 0x7F) << shift;
        if (digit < 0x80) {
            *value = result;
            return at;
        }
    }
    return 0;
}

static int header_holds(const uint8_t *data, const struct rules *rules, struct layout *layout) {
    const uint8_t *at = data + layout->header_at, *end = at + layout->header_bytes;
    uint64_t *values = layout->header;
    uint32_t seen = 0;
    while (at < end) {
        uint64_t key, value;
        if (!(at = varint(at, end, KEY_BYTES, &key)) || key >> 3 >= HEADER_NUMBERS) return 0;
        int number = (int)(key >> 3), wire_type = (int)(key & 7);
        if (seen & 1u << number) return 0;
        seen |= 1u << number;
        switch (rules->header_type[number]) {
        case VARINT:
            if (wire_type != 0 || !(at = varint(at, end, VALUE_BYTES, &value))) return 0;
            break;
        case FIXED64:
            if (wire_type != 1 || end - at < 8) return 0;
            memcpy(&value, at, 8);
            at += 8;
            break;
        case TEXT:
            if (wire_type != 2 || !(at = varint(at, end, KEY_BYTES, &value))) return 0;
            if (value > (uint64_t)(end - at)) return 0;
            for (uint64_t i = 0; i < value; i++)
                if (at[i] >= 0x80) return 0; /* protobuf decides whether the text is UTF-8 */
            values[0] = (uint64_t)(at - data);
            at += value;
            break;
        default:
            return 0;
        }
        values[number] = value;
    }
    for (int number = 0; number < HEADER_NUMBERS; number++)
        if (rules->header_type[number] != UNKNOWN
            && (values[number] < rules->header_min[number] || values[number] > rules->header_max[number]))
            return 0;
    return values[rules->part_index] < values[rules->part_count];
}

static int lay_out(const uint8_t *data, int64_t size, const struct rules *rules, struct layout *layout) {
    const uint8_t *at = data, *end = data + size;
    uint64_t key, length;
    memset(layout, 0, sizeof *layout);
    if (!(at = varint(at, end, KEY_BYTES, &key)) || (int64_t)key != rules->header_key) return 0;
    if (!(at = varint(at, end, KEY_BYTES, &length)) || length > (uint64_t)(end - at)) return 0;
    layout->header_at = at - data;
    layout->header_bytes = (int64_t)length;
    at += length;
    for (int column = 0; at < end; column++) {
        if (!(at = varint(at, end, KEY_BYTES, &key))) return 0;
        while (column < COLUMN_COUNT && (int64_t)key != rules->column_keys[column]) column++;
        if (column == COLUMN_COUNT) return 0;
        if (!(at = varint(at, end, KEY_BYTES, &length)) || !length || length > (uint64_t)(end - at) || length % ITEM_BYTES[column])
            return 0; /* the codec never writes a column without elements, and Python does not treat one as plain */
        layout->at[column] = at - data;
        layout->items[column] = (int64_t)length / ITEM_BYTES[column];
        at += length;
    }
    return 1;
}

static int keys_hold(const u64 *keys, int64_t rows) {
    uint16_t slots[KEY_SLOTS];
    int bits = 1;
    while (1 << bits < 2 * rows) bits++;
    memset(slots, 0, sizeof *slots << bits);
    for (int64_t row = 0; row < rows; row++) {
        uint64_t key = keys[row];
        if (!key) return 0;
        uint32_t slot = (uint32_t)(key * 0x9E3779B97F4A7C15u >> (64 - bits));
        for (; slots[slot]; slot = (slot + 1) & ((1u << bits) - 1))
            if (keys[slots[slot] - 1] == key) return 0;
        slots[slot] = (uint16_t)(row + 1);
    }
    return 1;
}

static int indices_hold(const u32 *indices, int64_t rows, uint64_t step_rows) {
    uint64_t taken[MOST_STEP_ROWS / 64];
    memset(taken, 0, (step_rows + 63) / 64 * 8);
    for (int64_t row = 0; row < rows; row++) {
        uint32_t index = indices[row];
        if (index >= step_rows || taken[index / 64] >> index % 64 & 1) return 0;
        taken[index / 64] |= (uint64_t)1 << index % 64;
    }
    return 1;
}

/* Checks the column of stops, which has one element for each stopped row. */
static int stops_hold(const uint8_t *stops, int64_t count, const uint8_t *statuses, int64_t rows,
                      const struct rules *rules) {
    int64_t stopped = 0;
    int wrong = 0;
    for (int64_t row = 0; row < rows; row++) stopped += (rules->status_flags[statuses[row]] & STOPPED) != 0;
    for (int64_t i = 0; i < count; i++) wrong |= stops[i] > rules->stop_max;
    return !wrong && count == stopped;
}

static int within(const u32 *values, int64_t count, uint32_t least, uint32_t most) {
    uint32_t beyond = 0;
    for (int64_t i = 0; i < count; i++) beyond |= values[i] - least > most - least;
    return !beyond;
}

static int finite_within(const f32 *values, int64_t count, float least, float most) {
    i32x4 wrong = {0};
    int64_t i = 0;
    for (; i <= count - LANES; i += LANES) {
        f32x4 value = *(const f32x4 *)(values + i);
        wrong |= ~(value <= most) | ~(value >= least); /* NaN fails both comparisons */
    }
    for (; i < count; i++) wrong[0] |= !(values[i] <= most) | !(values[i] >= least);
    return !(wrong[0] | wrong[1] | wrong[2] | wrong[3]);
}

/* The faults by lane, and the bits of all ids. They are collected without branches and tested once at the end. */
struct findings {
    i32x4 wrong, ids;
};

/*
 * Checks the alternatives of one token: their order, values and ids, and their agreement with the token.
 * Valid ids are below 2^31, so ids are compared as signed numbers, which takes fewer instructions.
 * An invalid id leaves its sign bit in the findings.
 */
static inline int alternatives_wrong(const u32 *ids, const f32 *values, int32_t count, int32_t own_id, float own,
                                     uint32_t rank, int32_t most, float ceiling, struct findings *findings) {
    int wrong = (!(values[0] <= ceiling)) | (!(values[count - 1] >= -FLT_MAX));
    wrong |= (ids[0] > (uint32_t)most) | (((int32_t)ids[0] == own_id) & (values[0] != own));
    int32_t i = 1;
    if (count > LANES) {
        for (int32_t next = 1; i < count; i = next += LANES) {
            if (i > count - LANES) i = count - LANES; /* the last step repeats elements, so that it has four */
            f32x4 value = *(const f32x4 *)(values + i), before = *(const f32x4 *)(values + i - 1);
            i32x4 id = (i32x4)*(const u32x4 *)(ids + i), id_before = (i32x4)*(const u32x4 *)(ids + i - 1);
            findings->wrong |= ~(value <= before) | ((value == before) & (id <= id_before));
            findings->wrong |= (id > most) | ((id == own_id) & (value != own));
            findings->ids |= id;
        }
    }
    for (; i < count; i++) {
        float value = values[i], before = values[i - 1];
        wrong |= (!(value <= before)) | ((value == before) & (ids[i] <= ids[i - 1]));
        wrong |= (ids[i] > (uint32_t)most) | (((int32_t)ids[i] == own_id) & (value != own));
    }
    float there = values[(rank < (uint32_t)count ? rank : (uint32_t)count) - 1];
    return wrong | !((there == own) | ((rank > (uint32_t)count) & (there > own)));
}

struct tokens {
    const u32 *ids, *ranks, *alternative_ids;
    const f32 *logprobs, *alternative_logprobs;
};

static int all_alternatives_hold(struct tokens next, const uint8_t *counts, const uint8_t *scorings,
                                 const uint8_t *top_ks, int64_t rows, const struct rules *rules, float ceiling,
                                 uint32_t most) {
    struct findings findings = {{0}, {0}};
    int wrong = most > INT32_MAX;
    for (int64_t row = 0; row < rows; row++) {
        int scored = (rules->scoring_flags[scorings[row]] & SCORED) != 0;
        int32_t count = counts[row], top_k = top_ks[row];
        for (int32_t token = 0; top_k && token < count; token++) {
            wrong |= alternatives_wrong(next.alternative_ids, next.alternative_logprobs, top_k,
                                        (int32_t)next.ids[token], next.logprobs[token], next.ranks[token],
                                        (int32_t)most, ceiling, &findings);
            next.alternative_ids += top_k;
            next.alternative_logprobs += top_k;
        }
        next.ids += count;
        next.logprobs += scored ? count : 0;
        next.ranks += scored ? count : 0;
    }
    for (int lane = 0; lane < LANES; lane++) wrong |= findings.wrong[lane] | (findings.ids[lane] < 0);
    return !wrong;
}

/*
 * Returns the number of ids that are not above the previous id, or -1 if an id is too large.
 * One pass checks the ids of all masks: the ids of a mask ascend, so only the first id of a mask may be counted.
 * Ids are compared as signed numbers, as in alternatives_wrong.
 */
static int64_t not_ascending(const u32 *ids, int64_t count, int32_t last) {
    i32x4 found = {0}, beyond = {0};
    int64_t i = 1;
    for (; i <= count - LANES; i += LANES) {
        i32x4 id = (i32x4)*(const u32x4 *)(ids + i), before = (i32x4)*(const u32x4 *)(ids + i - 1);
        found -= id <= before;
        beyond |= (id > last) | id; /* a fault sets the sign bit */
    }
    for (; i < count; i++) {
        found[0] += ids[i] <= ids[i - 1];
        beyond[0] |= ids[i] > (uint32_t)last ? -1 : 0;
    }
    if ((beyond[0] | beyond[1] | beyond[2] | beyond[3]) < 0 || (count && ids[0] > (uint32_t)last)) return -1;
    return found[0] + found[1] + found[2] + found[3];
}

/* The extra scores that a row's request asked for. Absent columns count as zero. */
struct asked {
    uint32_t extras, given, mask_bound;
};

static struct asked asked_by(const uint8_t *data, const int64_t *at, const int64_t *items, int64_t row) {
    struct asked asked = {0, 0, 0};
    if (items[EXTRAS]) asked.extras = data[at[EXTRAS] + row];
    if (items[GIVEN_COUNTS]) asked.given = ((const u32 *)(data + at[GIVEN_COUNTS]))[row];
    if (items[MASK_BOUNDS]) asked.mask_bound = ((const u32 *)(data + at[MASK_BOUNDS]))[row];
    return asked;
}

static int extras_hold(const uint8_t *data, const int64_t *at, const int64_t *items, const struct rules *rules,
                       float ceiling, uint32_t token_id_max, uint32_t most_tokens) {
    int64_t rows = items[REQUEST_IDS], other = 0, entropies = 0, given = 0, values = 0, masked = 0, told = 0;
    const uint8_t *counts = data + at[TOKEN_COUNTS], *scorings = data + at[SCORINGS];
    const u32 *sizes = (const u32 *)(data + at[MASK_SIZES]), *ids = (const u32 *)(data + at[MASK_TOKEN_IDS]);
    int64_t firsts = 0; /* first ids of masks that are not above the last id of the previous mask */
    int wrong = token_id_max > INT32_MAX;
    for (int column = EXTRAS; column <= MASK_BOUNDS; column++)
        if (items[column] && items[column] != rows) return 0;
    for (int64_t row = 0; row < rows; row++) {
        struct asked asked = asked_by(data, at, items, row);
        int scoring = rules->scoring_flags[scorings[row]];
        wrong |= (asked.extras > rules->extras_max) | (asked.given > rules->given_count_max);
        wrong |= (asked.mask_bound > rules->mask_bound_max) | (asked.extras && !(scoring & SCORED));
        wrong |= (asked.given | asked.mask_bound) && !(scoring & MAY_HAVE_ALTERNATIVES);
        if (wrong) return 0;
        other += asked.extras & OTHER_LOGPROB ? counts[row] : 0;
        entropies += asked.extras & ENTROPY ? counts[row] : 0;
        given += asked.given;
        values += (int64_t)counts[row] * asked.given;
        for (int token = 0; asked.mask_bound && token < counts[row]; token++, masked++) {
            if (masked == items[MASK_SIZES] || sizes[masked] < rules->rank_min || sizes[masked] > most_tokens) return 0;
            if (sizes[masked] > asked.mask_bound) continue;
            if (told && told < items[MASK_TOKEN_IDS]) firsts += ids[told] <= ids[told - 1];
            told += sizes[masked];
        }
    }
    if (items[OTHER_LOGPROBS] != other || items[ENTROPIES] != entropies || items[GIVEN_TOKEN_IDS] != given) return 0;
    if (items[GIVEN_LOGPROBS] != values || items[MASK_SIZES] != masked || items[MASK_TOKEN_IDS] != told) return 0;
    return !wrong && not_ascending(ids, told, (int32_t)token_id_max) == firsts
           && finite_within((const f32 *)(data + at[OTHER_LOGPROBS]), other, -FLT_MAX, ceiling)
           && finite_within((const f32 *)(data + at[ENTROPIES]), entropies, 0, FLT_MAX)
           && within((const u32 *)(data + at[GIVEN_TOKEN_IDS]), given, 0, token_id_max)
           && finite_within((const f32 *)(data + at[GIVEN_LOGPROBS]), values, -FLT_MAX, ceiling);
}

/* The start of each row's elements in the ragged columns. The last element is the end of the last row. */
struct starts {
    uint32_t tokens[MOST_ROWS + 1], scored[MOST_ROWS + 1], alternatives[MOST_ROWS + 1], proposals[MOST_ROWS + 1];
    uint32_t stops[MOST_ROWS + 1];
    /* The following arrays are set only if a row has extras. */
    uint32_t other[MOST_ROWS + 1], entropies[MOST_ROWS + 1], given[MOST_ROWS + 1], given_values[MOST_ROWS + 1];
    uint32_t masked[MOST_ROWS + 1], told[MOST_ROWS + 1];
};

static void find_starts_of_extras(const uint8_t *data, const int64_t *at, int64_t rows, struct starts *starts) {
    const uint8_t *counts = data + at[TOKEN_COUNTS];
    const u32 *sizes = (const u32 *)(data + at[MASK_SIZES]);
    uint32_t other = 0, entropies = 0, given = 0, values = 0, masked = 0, told = 0;
    for (int64_t row = 0; row <= rows; row++) {
        starts->other[row] = other;
        starts->entropies[row] = entropies;
        starts->given[row] = given;
        starts->given_values[row] = values;
        starts->masked[row] = masked;
        starts->told[row] = told;
        if (row == rows) return;
        struct asked asked = asked_by(data, at, at + COLUMN_COUNT, row);
        other += asked.extras & OTHER_LOGPROB ? counts[row] : 0;
        entropies += asked.extras & ENTROPY ? counts[row] : 0;
        given += asked.given;
        values += counts[row] * asked.given;
        for (int token = 0; asked.mask_bound && token < counts[row]; token++, masked++)
            told += sizes[masked] <= asked.mask_bound ? sizes[masked] : 0;
    }
}

static void find_starts(const uint8_t *data, const int64_t *at, int64_t rows, const struct rules *rules,
                        struct starts *starts) {
    const uint8_t *counts = data + at[TOKEN_COUNTS], *proposals = data + at[PROPOSAL_COUNTS];
    const uint8_t *statuses = data + at[STATUSES], *scorings = data + at[SCORINGS], *top_ks = data + at[TOP_KS];
    uint32_t tokens = 0, scored = 0, alternatives = 0, proposed = 0, stopped = 0;
    const int64_t *items = at + COLUMN_COUNT;
    if (items[EXTRAS] | items[GIVEN_COUNTS] | items[MASK_BOUNDS]) find_starts_of_extras(data, at, rows, starts);
    for (int64_t row = 0; row <= rows; row++) {
        starts->tokens[row] = tokens;
        starts->scored[row] = scored;
        starts->alternatives[row] = alternatives;
        starts->proposals[row] = proposed;
        starts->stops[row] = stopped;
        if (row == rows) return;
        tokens += counts[row];
        scored += rules->scoring_flags[scorings[row]] & SCORED ? counts[row] : 0;
        alternatives += (uint32_t)counts[row] * top_ks[row];
        proposed += proposals[row];
        stopped += (rules->status_flags[statuses[row]] & STOPPED) != 0;
    }
}

static const uint32_t *starts_of(int column, const struct starts *starts) {
    switch (column) {
    case TOKEN_IDS: return starts->tokens;
    case LOGPROBS: case RANKS: return starts->scored;
    case ALTERNATIVE_TOKEN_IDS: case ALTERNATIVE_LOGPROBS: return starts->alternatives;
    case PROPOSAL_TOKEN_IDS: return starts->proposals;
    case STOPS: return starts->stops;
    case OTHER_LOGPROBS: return starts->other;
    case ENTROPIES: return starts->entropies;
    case GIVEN_TOKEN_IDS: return starts->given;
    case GIVEN_LOGPROBS: return starts->given_values;
    case MASK_SIZES: return starts->masked;
    case MASK_TOKEN_IDS: return starts->told;
    default: return 0; /* one element for each row */
    }
}

static uint8_t *put_varint(uint8_t *out, uint64_t value) {
    for (; value >= 0x80; value >>= 7) *out++ = (uint8_t)(value | 0x80);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *put_elements(uint8_t *out, const uint8_t *from, const uint32_t *starts, const int64_t *places,
                             int64_t count, int width) {
    for (int64_t i = 0; i < count; i++) {
        int64_t row = places[i];
        if (starts) {
            size_t length = (size_t)(starts[row + 1] - starts[row]) * (size_t)width;
            memcpy(out, from + (size_t)starts[row] * (size_t)width, length);
            out += length;
        } else if (width == 8) {
            memcpy(out, from + row * 8, 8);
            out += 8;
        } else if (width == 4) {
            memcpy(out, from + row * 4, 4);
            out += 4;
        } else {
            *out++ = from[row];
        }
    }
    return out;
}

/* The checksum of the source at compilation, by which Python detects a stale library. */
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0
#endif
const uint32_t tokenbus_source_crc32 = SOURCE_CRC32;

int32_t tokenbus_rules_bytes(void) { return sizeof(struct rules); }

int32_t tokenbus_layout_bytes(void) { return sizeof(struct layout); }

int32_t tokenbus_accepts(const uint8_t *data, int64_t size, const struct rules *rules, struct layout *layout) {
    if (!lay_out(data, size, rules, layout) || !header_holds(data, rules, layout)) return 0;

    const uint64_t *header = layout->header;
    int64_t rows = layout->items[REQUEST_IDS];
    uint64_t step_rows = header[rules->step_rows];
    if (rows > rules->rows_max || rows > MOST_ROWS || step_rows > MOST_STEP_ROWS) return 0;
    for (int column = BATCH_INDICES; column <= TOP_KS; column++)
        if (layout->items[column] != rows) return 0;
    int alone = header[rules->part_count] == 1 && !header[rules->selection];
    if (alone ? step_rows != (uint64_t)rows : step_rows < (uint64_t)rows) return 0;

    uint64_t vocabulary = header[rules->vocabulary];
    uint32_t top_k_max = rules->top_k_max, token_id_max = rules->token_id_max, rank_max = rules->rank_max;
    if (vocabulary) {
        if (vocabulary < top_k_max) top_k_max = (uint32_t)vocabulary;
        if (vocabulary - 1 < token_id_max) token_id_max = (uint32_t)vocabulary - 1;
        if (vocabulary < rank_max) rank_max = (uint32_t)vocabulary;
    }

    const uint8_t *statuses = data + layout->at[STATUSES], *counts = data + layout->at[TOKEN_COUNTS];
    const uint8_t *drafts = data + layout->at[DRAFT_TOKEN_COUNTS], *proposals = data + layout->at[PROPOSAL_COUNTS];
    const uint8_t *scorings = data + layout->at[SCORINGS], *top_ks = data + layout->at[TOP_KS];
    const int draft_batch = header[rules->kind] == (uint64_t)rules->draft_kind;
    int64_t tokens = 0, scored = 0, alternatives = 0, proposed = 0;
    int any_scored = 0, wrong = 0;
    for (int64_t row = 0; row < rows; row++) {
        int status = rules->status_flags[statuses[row]], scoring = rules->scoring_flags[scorings[row]];
        int count = counts[row];
        wrong |= (!(status & STATUS_VALID)) | (!(scoring & SCORING_VALID));
        wrong |= ((status & NEEDS_TOKENS) && !count) | ((status & FORBIDS_TOKENS) && count);
        wrong |= (proposals[row] && !(status & MAY_PROPOSE)) | (top_ks[row] && !(scoring & MAY_HAVE_ALTERNATIVES));
        wrong |= (draft_batch && (drafts[row] | proposals[row]));
        wrong |= (count > (int)rules->token_count_max) | (top_ks[row] > top_k_max);
        wrong |= (drafts[row] > rules->draft_count_max) | (proposals[row] > rules->draft_count_max);
        any_scored |= scoring & SCORED;
        tokens += count;
        scored += scoring & SCORED ? count : 0;
        alternatives += count * top_ks[row];
        proposed += proposals[row];
    }
    if (wrong || (draft_batch && header[rules->draft_follows])) return 0;
    uint64_t value_kind = header[rules->value_kind];
    if (any_scored && value_kind == (uint64_t)rules->no_value_kind) return 0;
    if (layout->items[TOKEN_IDS] != tokens || layout->items[PROPOSAL_TOKEN_IDS] != proposed) return 0;
    if (layout->items[LOGPROBS] != scored || layout->items[RANKS] != scored) return 0;
    if (layout->items[ALTERNATIVE_TOKEN_IDS] != alternatives) return 0;
    if (layout->items[ALTERNATIVE_LOGPROBS] != alternatives) return 0;
    int64_t stops = layout->items[STOPS];
    if (stops && !stops_hold(data + layout->at[STOPS], stops, statuses, rows, rules)) return 0;

    if (!keys_hold((const u64 *)(data + layout->at[REQUEST_IDS]), rows)) return 0;
    if (!indices_hold((const u32 *)(data + layout->at[BATCH_INDICES]), rows, step_rows)) return 0;
    if (!within((const u32 *)(data + layout->at[POSITIONS]), rows, 0, rules->position_max)) return 0;
    if (!within((const u32 *)(data + layout->at[PROPOSAL_TOKEN_IDS]), proposed, 0, token_id_max)) return 0;

    struct tokens first = {
        (const u32 *)(data + layout->at[TOKEN_IDS]),
        (const u32 *)(data + layout->at[RANKS]),
        (const u32 *)(data + layout->at[ALTERNATIVE_TOKEN_IDS]),
        (const f32 *)(data + layout->at[LOGPROBS]),
        (const f32 *)(data + layout->at[ALTERNATIVE_LOGPROBS]),
    };
    float ceiling = value_kind < 32 && rules->logit_kinds >> value_kind & 1 ? FLT_MAX : 0.0f;
    int64_t further = 0;
    for (int column = EXTRAS; column < COLUMN_COUNT; column++) further |= layout->items[column];
    if (further && !extras_hold(data, layout->at, layout->items, rules, ceiling, token_id_max, rank_max)) return 0;
    if (!within(first.ids, tokens, 0, token_id_max)) return 0;
    if (!within(first.ranks, scored, rules->rank_min, rank_max)) return 0;
    if (!finite_within(first.logprobs, scored, -FLT_MAX, ceiling)) return 0;
    if (alternatives && !all_alternatives_hold(first, counts, scorings, top_ks, rows, rules, ceiling, token_id_max))
        return 0;
    return further ? WITH_EXTRAS : BASE_ALONE;
}

/* Returns whether all given places are places of rows, without repetition. */
static int places_hold(const int64_t *places, int64_t count, int64_t rows) {
    uint64_t taken[MOST_ROWS / 64] = {0};
    if (rows > MOST_ROWS || count > rows) return 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = places[i];
        if (row < 0 || row >= rows || taken[row / 64] >> row % 64 & 1) return 0;
        taken[row / 64] |= (uint64_t)1 << row % 64;
    }
    return 1;
}

/* Writes the columns of some rows as fields, and returns the end. `laid` receives each column's offset in `out`. */
static uint8_t *put_rows(uint8_t *out, const uint8_t *data, const int64_t *columns, const struct starts *starts,
                         const int64_t *places, int64_t count, const struct rules *rules, int64_t *laid) {
    const int64_t *at = columns, *items = columns + COLUMN_COUNT;
    uint8_t *next = out;
    for (int column = 0; column < COLUMN_COUNT; column++) {
        const uint32_t *begins = starts_of(column, starts);
        int64_t chosen = 0;
        if (!items[column]) /* the column is absent */;
        else if (!begins) chosen = count;
        else for (int64_t i = 0; i < count; i++) chosen += begins[places[i] + 1] - begins[places[i]];
        laid[column] = 0;
        laid[COLUMN_COUNT + column] = chosen;
        if (!chosen) continue;
        next = put_varint(next, (uint64_t)rules->column_keys[column]);
        next = put_varint(next, (uint64_t)chosen * (uint64_t)ITEM_BYTES[column]);
        laid[column] = next - out;
        next = put_elements(next, data + at[column], begins, places, count, ITEM_BYTES[column]);
    }
    return next;
}

/*
 * Writes some rows of an accepted message, in the given order, as fields. Also writes the offset of each column.
 * Returns the number of bytes, which is at most the size of the message.
 * Returns -1 if a place is not the place of a row, or is repeated.
 * `columns` has the offset of each column in the message, followed by the number of elements of each column.
 */
int64_t tokenbus_selects(const uint8_t *data, const int64_t *columns, const int64_t *places, int64_t count,
                         const struct rules *rules, uint8_t *out, int64_t *laid) {
    struct starts starts;
    int64_t rows = columns[COLUMN_COUNT + REQUEST_IDS];
    if (!places_hold(places, count, rows)) return -1;
    find_starts(data, columns, rows, rules, &starts);
    return put_rows(out, data, columns, &starts, places, count, rules, laid) - out;
}

/* The maximum size of a column's key and length, which each additional message repeats. */
#define MOST_KEY_BYTES 8

/*
 * Columns of requests, indexed by slot. Only rows of requests in the state `running` are accepted.
 * For each slot: the stream that may bring rows, the share that receives rows, the state, and the next position.
 */
struct requests {
    const int32_t *streams, *shares;
    const uint8_t *states;
    const int64_t *positions;
    int64_t count, running;
};

static int are_next(const uint8_t *data, const int64_t *at, const int64_t *slots, int64_t rows,
                    const struct requests *requests, int32_t stream) {
    const u32 *positions = (const u32 *)(data + at[POSITIONS]);
    int wrong = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t slot = slots[row];
        if (slot < 0 || slot >= requests->count) return 0;
        wrong |= (requests->streams[slot] != stream) | (requests->states[slot] != requests->running);
        wrong |= requests->positions[slot] != positions[row];
    }
    return !wrong;
}

/* The sort key of each row has, from the highest bits down, the share, the batch index and the row's place. */
#define PLACE_BITS 11
#define INDEX_BITS 16

static void order(uint64_t *keys, int64_t count) {
    for (int64_t gap = count / 2; gap; gap /= 2)
        for (int64_t i = gap; i < count; i++) {
            uint64_t key = keys[i];
            int64_t at = i;
            for (; at >= gap && keys[at - gap] > key; at -= gap) keys[at] = keys[at - gap];
            keys[at] = key;
        }
}

/*
 * Distributes the rows of an accepted message to shares, if each row is the next row of its request.
 * Writes the rows of each share, in original batch order, as a message that begins with `head`.
 * Shares below `least` are not written.
 * Returns the number of shares, or -1 if a row is not the next row or there are more than `most_parts` shares.
 * `places` receives the rows in their new order.
 * `parts` receives for each share: its number, the end of its rows in `places`, its size in bytes,
 * and the offset of its request ids.
 */
int64_t tokenbus_deals(const uint8_t *data, const int64_t *columns, const int64_t *slots,
                       const struct requests *requests, int32_t stream, int32_t least, const uint8_t *head,
                       int64_t head_bytes, const struct rules *rules, uint8_t *out, int64_t *places, int64_t (*parts)[4],
                       int64_t most_parts) {
    struct starts starts;
    uint64_t keys[MOST_ROWS];
    int64_t rows = columns[COLUMN_COUNT + REQUEST_IDS], laid[2 * COLUMN_COUNT], count = 0;
    const u32 *indices = (const u32 *)(data + columns[BATCH_INDICES]);
    if (rows > MOST_ROWS || !are_next(data, columns, slots, rows, requests, stream)) return -1;
    for (int64_t row = 0; row < rows; row++) {
        uint64_t share = (uint32_t)requests->shares[slots[row]] ^ 0x80000000u;
        keys[row] = (share << INDEX_BITS | indices[row]) << PLACE_BITS | (uint64_t)row;
    }
    order(keys, rows);
    for (int64_t row = 0; row < rows; row++) {
        int32_t share = requests->shares[slots[places[row] = keys[row] & (MOST_ROWS - 1)]];
        if (!row || share != parts[count - 1][0]) {
            if (count == most_parts) return -1;
            parts[count++][0] = share;
        }
        parts[count - 1][1] = row + 1;
    }
    find_starts(data, columns, rows, rules, &starts);
    for (int64_t part = 0, begin = 0; part < count; begin = parts[part++][1]) {
        uint8_t *from = out;
        if (parts[part][0] >= least) {
            memcpy(out, head, (size_t)head_bytes);
            out = put_rows(out + head_bytes, data, columns, &starts, places + begin, parts[part][1] - begin, rules, laid);
            parts[part][3] = head_bytes + laid[REQUEST_IDS];
        }
        parts[part][2] = out - from;
    }
    return count;
}
