/*
 * Writes the JSON of rows in one pass over their columns: the lists of logprobs of whole answers, and whole events of
 * streams, which it also sends to their sockets.
 *
 * This is an optimisation of answer, sse and logprob_writers, which write the same bytes in Python. They also do so if
 * this code lacks room or a fragment for a token, or finds a number out of its range. A fragment is the JSON before a
 * logprob, with the token's name; or the JSON of the token's text. Python makes each fragment once.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

typedef unsigned __int128 u128;

#ifndef MSG_NOSIGNAL /* Python ignores the signal */
#define MSG_NOSIGNAL 0
#endif

/* Columns in a message are not aligned. */
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef float f32 __attribute__((aligned(1), may_alias));

#define MOST_NUMBER_BYTES 32
#define MOST_DIGITS 16
#define MOST_POWER 30
#define NARROW 11 /* powers of ten that fit into 64 bits besides a mantissa and two bits */

/* Why nothing was written; IS_LEFT: the row's text is more than the texts of its tokens. */
enum { NO_FRAGMENT = -1, NO_ROOM = -2, NO_NUMBER = -3, IS_LEFT = -4 };

struct fragments {
    const uint8_t *bytes;
    const int64_t *begins;  /* by token id; below 0: not made yet */
    const int32_t *sizes;   /* negative: the token has no text of its own; in a fragment before a logprob, also no name
                               in its own list of alternatives */
    int64_t count;
};

struct columns {
    const u32 *ids, *ranks, *alternative_ids;
    const f32 *logprobs, *alternative_logprobs;
    const uint8_t *counts, *top_ks;
};

/*
 * Defines a function that returns the shortest decimal for a float, without its point, and sets `power` to the number
 * of digits after the point. `unit` is the power of ten that leaves nine or ten digits, which are always enough. The
 * float is mantissa / 2^(shift - 2). A decimal is read as this float if it is at most half a step below it (a quarter,
 * if smaller floats are closer together) or half a step above it. Only even mantissas include both ends.
 */
#define SHORTEST(name, integer)                                                                                    \
    static inline uint64_t name(integer unit, uint32_t mantissa, int shift, int *power) {                          \
        integer exact = unit * (4 * (integer)mantissa), one = (integer)1 << shift, is_open = mantissa & 1;         \
        integer low = exact - (mantissa == 0x800000 ? 1 : 2) * unit + is_open, high = exact + 2 * unit - is_open;  \
        uint64_t least = (uint64_t)((low + one - 1) >> shift), most = (uint64_t)(high >> shift), scale = 1;        \
        /* Drop digits as long as the number without them is within these bounds. */                                \
        uint64_t nearest = (uint64_t)(exact >> shift);                                                             \
        for (uint64_t rest = most / 10; *power && rest * scale * 10 >= least; rest /= 10, nearest /= 10, --*power) \
            scale *= 10;                                                                                           \
        integer behind = exact - (integer)(nearest * scale) * one, whole = (integer)scale * one;                   \
        if (2 * behind > whole || (2 * behind == whole && (nearest & 1))) nearest++; /* of two as near the even */ \
        return nearest * scale < least ? nearest + 1 : nearest;                                                    \
    }
SHORTEST(shortest_narrow, uint64_t)
SHORTEST(shortest_wide, u128)

/* Writes a number as orjson does, and returns the address after it; 0 if it is out of range. */
static uint8_t *number(uint8_t *out, float value, const u128 *powers) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (bits >> 31) *out++ = '-';
    bits &= 0x7FFFFFFF;
    if (!bits) {
        memcpy(out, "0.0", 3);
        return out + 3;
    }
    int exponent = (int)(bits >> 23) - 150;              /* value = mantissa * 2^exponent */
    uint32_t mantissa = (bits & 0x7FFFFF) | 0x800000;
    if (exponent > -4 || exponent < -90) return 0;       /* 2^20 and more, or below 1e-20 */
    int shift = 2 - exponent;                            /* everything below is scaled by it, in quarters of a step */
    int power = 9 + (int)((-exponent - 24) * 30103LL / 100000); /* log10(2) is 0.30103 */
    uint64_t digits = power <= NARROW ? shortest_narrow((uint64_t)powers[power], mantissa, shift, &power)
                                      : shortest_wide(powers[power], mantissa, shift, &power);
    uint8_t text[2 * MOST_DIGITS] = {0};
    int first = MOST_DIGITS;
    do {
        text[--first] = (uint8_t)('0' + digits % 10);
        digits /= 10;
    } while (digits);
    int length = MOST_DIGITS - first;
    const uint8_t *from = text + first;              /* copied with the bytes after it, for a constant size */
    int before = length - power;                     /* digits before the point */
    if (before > 0) {
        memcpy(out, from, MOST_DIGITS);
        out += before;
        *out++ = '.';
        if (!power) *out++ = '0';
        memcpy(out, from + before, MOST_DIGITS);
        return out + power;
    }
    if (before > -6) {
        memcpy(out, "0.00000", 7);
        out += 2 - before;
        memcpy(out, from, MOST_DIGITS);
        return out + length;
    }
    *out++ = from[0];
    if (length > 1) {
        *out++ = '.';
        memcpy(out, from + 1, MOST_DIGITS);
        out += length - 1;
    }
    *out++ = 'e';
    *out++ = '-';
    int tens = 1 - before;
    if (tens > 9) *out++ = (uint8_t)('0' + tens / 10);
    *out++ = (uint8_t)('0' + tens % 10);
    return out;
}

struct writer {
    uint8_t *at, *end;
    const struct fragments *fragments;
    u128 powers[MOST_POWER + 1];
};

static int text(struct writer *writer, const char *bytes, int64_t size) {
    if (writer->end - writer->at < size) return NO_ROOM;
    memcpy(writer->at, bytes, (size_t)size);
    writer->at += size;
    return 0;
}

/* Writes a token's fragment, without its first `skipped` bytes, and a logprob. */
static int pair(struct writer *writer, uint32_t id, float logprob, int skipped, int is_own) {
    const struct fragments *fragments = writer->fragments;
    if (id >= fragments->count || fragments->begins[id] < 0) return NO_FRAGMENT;
    int32_t size = fragments->sizes[id];
    const uint8_t *from = fragments->bytes + fragments->begins[id];
    if (size < 0) {
        size = -size;
        if (is_own) {
            from = (const uint8_t *)",\"\":";
            size = 4;
        }
    }
    if (writer->end - writer->at < size + MOST_NUMBER_BYTES) return NO_ROOM;
    memcpy(writer->at, from + skipped, (size_t)(size - skipped));
    uint8_t *at = number(writer->at + size - skipped, logprob, writer->powers);
    if (!at) return NO_NUMBER;
    writer->at = at;
    return 0;
}

/* Writes a token's name, which its fragment has between a comma and a colon. */
static int name(struct writer *writer, uint32_t id) {
    const struct fragments *fragments = writer->fragments;
    if (id >= fragments->count || fragments->begins[id] < 0) return NO_FRAGMENT;
    int32_t size = fragments->sizes[id];
    if (size < 0) return text(writer, "\"\"", 2);
    return text(writer, (const char *)fragments->bytes + fragments->begins[id] + 1, size - 2);
}

/* For completions: writes the names of a row's tokens. */
static int names(struct writer *writer, const struct columns *next, int count) {
    int fault = 0;
    for (int token = 0; token < count && !fault; token++) {
        if (token) fault = text(writer, ",", 1);
        if (!fault) fault = name(writer, next->ids[token]);
    }
    return fault;
}

/* For completions: writes the logprobs of a row's tokens. */
static int logprobs(struct writer *writer, const struct columns *next, int count) {
    for (int token = 0; token < count; token++) {
        if (writer->end - writer->at < MOST_NUMBER_BYTES) return NO_ROOM;
        if (token) *writer->at++ = ',';
        uint8_t *at = number(writer->at, next->logprobs[token], writer->powers);
        if (!at) return NO_NUMBER;
        writer->at = at;
    }
    return 0;
}

/* For completions: writes a token's object, with the token itself and its alternatives by their names. */
static int members(struct writer *writer, const struct columns *next, int token, int top_k) {
    uint32_t own = next->ids[token];
    const u32 *ids = next->alternative_ids + token * top_k;
    const f32 *logprobs = next->alternative_logprobs + token * top_k;
    if (!top_k) return text(writer, token ? ",null" : "null", token ? 5 : 4); /* they were dropped on the way */
    int fault = text(writer, token ? ",{" : "{", token ? 2 : 1);
    if (!fault) fault = pair(writer, own, next->logprobs[token], 1, 1);
    for (int i = 0; i < top_k && !fault; i++)
        if (ids[i] != own) fault = pair(writer, ids[i], logprobs[i], 0, 0);
    return fault ? fault : text(writer, "}", 1);
}

/* For chats: writes a token's object, which contains its alternatives. A fragment begins with the last object's end. */
static int entries(struct writer *writer, const struct columns *next, int token, int top_k, int is_last) {
    const u32 *ids = next->alternative_ids + token * top_k;
    const f32 *logprobs = next->alternative_logprobs + token * top_k;
    int fault = pair(writer, next->ids[token], next->logprobs[token], token ? 0 : 2, 0);
    if (!fault) fault = text(writer, ",\"top_logprobs\":[", 17);
    for (int i = 0; i < top_k && !fault; i++) fault = pair(writer, ids[i], logprobs[i], i ? 0 : 2, 0);
    if (!fault && top_k) fault = text(writer, "}", 1);
    return fault ? fault : text(writer, "]}", is_last ? 2 : 1);
}

/* The checksum of this source, to detect a stale library. */
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0
#endif
const uint32_t tokenbus_source_crc32 = SOURCE_CRC32;

/*
 * The form of a row's logprobs: three lists for completions, one for chats; the rows must be scored. Streams may also
 * have none, or lists in which the only alternative of each token is the token itself.
 */
enum { LISTS, CONTENT, NONE, OWN };

/*
 * Writes some rows, the first of which is at the beginning of the columns, as lists without brackets. Sets `ends` to
 * the ends of the lists. Returns the number of bytes, or why nothing was written.
 */
int64_t tokenbus_render(const struct columns *columns, const struct fragments *fragments, int64_t rows, int32_t form,
                        uint8_t *out, int64_t room, int64_t *ends) {
    struct writer writer = {out, out + room, fragments, {1}};
    struct columns next = *columns;
    for (int i = 1; i <= MOST_POWER; i++) writer.powers[i] = 10 * writer.powers[i - 1];
    for (int64_t row = 0; row < rows; row++) {
        int count = columns->counts[row], top_k = columns->top_ks[row], fault = 0;
        if (form == LISTS) {
            if ((fault = names(&writer, &next, count))) return fault;
            *ends++ = writer.at - out;
            if ((fault = logprobs(&writer, &next, count))) return fault;
            *ends++ = writer.at - out;
        }
        for (int token = 0; token < count && !fault; token++)
            fault = form == CONTENT ? entries(&writer, &next, token, top_k, token == count - 1)
                                    : members(&writer, &next, token, top_k);
        if (fault) return fault;
        *ends++ = writer.at - out;
        next.ids += count;
        next.ranks += count;
        next.logprobs += count;
        next.alternative_ids += count * top_k;
        next.alternative_logprobs += count * top_k;
    }
    return writer.at - out;
}

/* A batch: its columns, and the beginnings of each row's tokens, logprobs and alternatives. */
struct step {
    struct columns columns;
    const uint64_t *keys;
    const uint8_t *statuses, *scorings;
    const int64_t *begins, *scored_begins, *alternative_begins;
};

/* One request's stream of events. */
struct stream {
    uint64_t key;
    const uint8_t *around;          /* the bytes before a row's text, after it, and at the event's end */
    int64_t tokens, characters;     /* written so far */
    int32_t before, behind, ending; /* sizes of the three parts of `around` */
    int32_t socket;                 /* receives the events; below 0: Python sends them */
    uint8_t form, has_ids, is_silent, is_held;
    /* is_silent: a row without text has no event; is_held: Python writes all rows */
};

/* By token id: fragments of texts, keys and entries, and the number of characters that begin in the token. */
struct vocabulary {
    const struct fragments *texts, *keys, *entries;
    const int32_t *characters;
};

/* The state of a row. Python writes LEFT rows, sends RENDERED ones, and sends the REST of a partly sent one. */
enum { LEFT, SENT, RENDERED, REST, QUIET };
enum { ACTIVE = 1, UNSCORED = 1, MOST_HEAD_BYTES = 10, MOST_INTEGER_BYTES = 20 };

struct found { int32_t fault, rows; };

static int integer(struct writer *writer, uint64_t value) {
    uint8_t digits[MOST_INTEGER_BYTES];
    int first = MOST_INTEGER_BYTES;
    do {
        digits[--first] = (uint8_t)('0' + value % 10);
        value /= 10;
    } while (value);
    return text(writer, (const char *)digits + first, MOST_INTEGER_BYTES - first);
}

/* Writes a row's text without quotes; leaves split characters to Python. */
static int string(struct writer *writer, const struct fragments *texts, const struct columns *row, int count) {
    int fault = 0;
    for (int token = 0; token < count && !fault; token++) {
        uint32_t id = row->ids[token];
        if (id >= texts->count || texts->begins[id] < 0) return NO_FRAGMENT;
        if (texts->sizes[id] < 0) return IS_LEFT;
        fault = text(writer, (const char *)texts->bytes + texts->begins[id], texts->sizes[id]);
    }
    return fault;
}

/* Writes `members` in which each token is its own only alternative. */
static int own(struct writer *writer, const struct columns *row, int count) {
    int fault = 0;
    for (int token = 0; token < count && !fault; token++) {
        fault = text(writer, token ? ",{" : "{", token ? 2 : 1);
        if (!fault) fault = pair(writer, row->ids[token], row->logprobs[token], 1, 1);
        if (!fault) fault = text(writer, "}", 1);
    }
    return fault;
}

#define PUT(literal) if (!fault) fault = text(writer, literal, sizeof(literal) - 1)

/* Writes the logprobs of a stream's row; adds the characters of its tokens to `characters`. */
static int logprobs_of(struct writer *writer, const struct vocabulary *vocabulary, int form, const struct columns *row,
                       int count, int top_k, int64_t *characters) {
    int fault = 0;
    if (form == CONTENT) {
        writer->fragments = vocabulary->entries;
        PUT("\"logprobs\":{\"content\":[");
        for (int token = 0; token < count && !fault; token++)
            fault = entries(writer, row, token, top_k, token == count - 1);
        PUT("],\"refusal\":null}");
        return fault;
    }
    writer->fragments = vocabulary->keys;
    PUT("\"logprobs\":{\"tokens\":[");
    if (!fault) fault = names(writer, row, count);
    PUT("],\"token_logprobs\":[");
    if (!fault) fault = logprobs(writer, row, count);
    PUT("],\"top_logprobs\":[");
    if (!fault && form == OWN) fault = own(writer, row, count);
    if (form == LISTS)
        for (int token = 0; token < count && !fault; token++) fault = members(writer, row, token, top_k);
    PUT("],\"text_offset\":[");
    for (int token = 0; token < count && !fault; token++) {
        if (token) PUT(",");
        if (!fault) fault = integer(writer, (uint64_t)*characters);
        *characters += vocabulary->characters[row->ids[token]];
    }
    PUT("]}");
    return fault;
}

/* Writes the event of a row that does not end its stream, and counts it in `stream`, which the caller may reset. */
static int event(struct writer *writer, const struct vocabulary *vocabulary, struct stream *stream,
                 const struct step *step, int32_t place) {
    int count = step->columns.counts[place], top_k = step->columns.top_ks[place], fault;
    if (step->statuses[place] != ACTIVE || !count) return IS_LEFT;
    if (stream->form != NONE && step->scorings[place] == UNSCORED) return IS_LEFT;
    int64_t begin = step->begins[place], scored = step->scored_begins[place], other = step->alternative_begins[place];
    struct columns row = {
        .ids = step->columns.ids + begin,
        .ranks = step->columns.ranks + scored,
        .logprobs = step->columns.logprobs + scored,
        .alternative_ids = step->columns.alternative_ids + other,
        .alternative_logprobs = step->columns.alternative_logprobs + other,
    };
    stream->tokens += count;
    uint8_t *from = writer->at;
    const char *around = (const char *)stream->around;
    fault = text(writer, around, stream->before);
    PUT("\"");
    uint8_t *said = writer->at;
    if (!fault) fault = string(writer, vocabulary->texts, &row, count);
    if (!fault && writer->at == said && stream->is_silent) {
        writer->at = from;
        return 0;
    }
    PUT("\"");
    if (!fault) fault = text(writer, around + stream->before, stream->behind);
    if (!fault && stream->form != NONE)
        fault = logprobs_of(writer, vocabulary, stream->form, &row, count, top_k, &stream->characters);
    if (stream->has_ids) {
        PUT(",\"token_ids\":[");
        for (int token = 0; token < count && !fault; token++) {
            if (token) PUT(",");
            if (!fault) fault = integer(writer, row.ids[token]);
        }
        PUT("]");
    }
    return fault ? fault : text(writer, around + stream->before + stream->behind, stream->ending);
}

/* Sends events from `begin` on as one HTTP chunk, whose head fits before them. Returns the rest, or 0. */
static uint8_t *sent(struct writer *writer, int socket, uint8_t *begin) {
    uint64_t size = (uint64_t)(writer->at - begin);
    memcpy(writer->at, "\r\n", 2);
    uint8_t *head = begin, *end = writer->at + 2;
    *--head = '\n';
    *--head = '\r';
    do *--head = (uint8_t)"0123456789abcdef"[size & 15];
    while (size >>= 4);
    ssize_t done = send(socket, head, (size_t)(end - head), MSG_DONTWAIT | MSG_NOSIGNAL);
    return done <= 0 ? 0 : head + done;
}

/*
 * Writes the events of some rows, and sends those of streams with a socket; successive rows of one stream in one write.
 * `steps_of` and `places` are each row's batch and its number there, `streams_of` its stream (below 0: none). An
 * initial state of 1 leaves its stream's rows to Python. `begins` and `ends` are set for events in `out` that Python has to
 * send, `times` for sent ones. Returns the first unwritten row, and sets `found` to the cause and to the number of rows
 * that Python has to write or send.
 */
int64_t tokenbus_stream(const struct step *steps, const int32_t *steps_of, const int32_t *places,
                        const int64_t *streams_of, int64_t rows, struct stream *streams,
                        const struct vocabulary *vocabulary, uint8_t *out, int64_t room, int64_t *begins, int64_t *ends,
                        uint8_t *states, int64_t *times, int64_t row, struct found *found) {
    struct writer writer = {out, out + room, 0, {1}};
    for (int i = 1; i <= MOST_POWER; i++) writer.powers[i] = 10 * writer.powers[i - 1];
    for (int64_t end; row < rows; row = end) {
        struct stream *stream = streams_of[row] < 0 ? 0 : streams + streams_of[row];
        for (end = row + 1; stream && end < rows && streams_of[end] == streams_of[row];) end++;
        int is_left = !stream || stream->is_held || states[row] || stream->key != steps[steps_of[row]].keys[places[row]];
        struct stream before = {0};
        if (stream) before = *stream;
        uint8_t *from = writer.at;
        if (writer.end - writer.at < MOST_HEAD_BYTES + 2) found->fault = NO_ROOM;
        else writer.at += MOST_HEAD_BYTES;
        uint8_t *begin = writer.at;
        writer.end -= 2;
        for (int64_t each = row; each < end && !found->fault; each++) {
            states[each] = LEFT;
            if (is_left) continue;
            struct stream so_far = *stream;
            uint8_t *at = writer.at;
            int why = event(&writer, vocabulary, stream, steps + steps_of[each], places[each]);
            if (why == IS_LEFT) {
                *stream = so_far;
                writer.at = at;
                is_left = 1;
            } else if (why) {
                found->fault = why;
            } else {
                states[each] = writer.at == at ? QUIET : RENDERED;
                begins[each] = at - out;
                ends[each] = writer.at - out;
            }
        }
        writer.end += 2;
        if (found->fault) {
            if (stream) *stream = before;
            for (int64_t each = row; each < end; each++) states[each] = LEFT;
            return row;
        }
        int64_t rendered = 0;
        for (int64_t each = row; each < end; each++) {
            found->rows += states[each] == LEFT;
            rendered += states[each] == RENDERED;
        }
        if (!rendered) {
            writer.at = from;
            continue;
        }
        if (stream->socket < 0) {
            found->rows += (int32_t)rendered;
            continue;
        }
        uint8_t *rest = sent(&writer, stream->socket, begin);
        if (!rest) {
            stream->socket = -1;
            found->rows += (int32_t)rendered;
            continue;
        }
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        int64_t last = row;
        for (int64_t each = row; each < end; each++) {
            if (states[each] != RENDERED) continue;
            states[each] = SENT;
            times[each] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
            last = each;
        }
        if (rest == writer.at + 2) {
            writer.at = from;
            continue;
        }
        stream->socket = -1;
        states[last] = REST;
        found->rows++;
        begins[last] = rest - out;
        ends[last] = writer.at + 2 - out;
        writer.at += 2;
    }
    return row;
}

/* Writes one number, for the tests. Returns its size in bytes; 0 if it is out of range. */
int32_t tokenbus_number(float value, uint8_t *out) {
    u128 powers[MOST_POWER + 1] = {1};
    for (int i = 1; i <= MOST_POWER; i++) powers[i] = 10 * powers[i - 1];
    uint8_t *end = number(out, value, powers);
    return end ? (int32_t)(end - out) : 0;
}
