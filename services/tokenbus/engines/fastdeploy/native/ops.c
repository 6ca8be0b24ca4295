/*
 * FastDeploy's save and get ops: `pack` makes a message from tensors and sends it, and `fill` writes a message into
 * tensors.
 *
 * A message is a header and up to four arrays: a count for each slot, and for each token a line of ids, a line of
 * scores and a rank. `pack` sends only the counted tokens, whereas FastDeploy sends a struct of fixed size.
 * `fill` writes the same elements as FastDeploy's get op in that form. Both check each index before they use it,
 * and put the first argument that does not fit into the outcome.
 *
 * Arrays are Python objects, read through CPython's buffer protocol. Python's functions are declared here, so that one
 * library works with every version of Python and compiles without Python's headers.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

typedef intptr_t Size;
typedef struct {
    void *data, *object;
    Size bytes, item_bytes;
    int is_readonly, dimensions;
    char *format;
    Size *shape, *strides, *suboffsets;
    void *internal;
} Buffer;

extern void *PyTuple_GetItem(void *tuple, Size at);
extern long PyLong_AsLong(void *number);
extern void *PyErr_Occurred(void);
extern int PyObject_GetBuffer(void *object, Buffer *into, int flags);
extern void PyBuffer_Release(Buffer *buffer);
extern void PyErr_Clear(void);
extern int PyObject_IsTrue(void *object);
extern void *PyBytes_FromStringAndSize(const char *data, Size bytes);
extern char *PyBytes_AsString(void *bytes);

#define READABLE 0x3C /* PyBUF_C_CONTIGUOUS | PyBUF_FORMAT */
#define WRITABLE 0x3D

#define MAGIC 0x51464254u
#define SLOTS 512
#define SPECULATIVE_SLOTS 256
#define MOST_TOKENS 6
#define COLUMNS 21
#define STRUCT_PLACES (SLOTS * COLUMNS)
#define PREEMPTED (-9)
#define NOTHING (-1)
#define NOTHING_READ (-2)
#define UNRECOVERABLE (-3)
#define FLAT (-1)
#define TARGET 3
#define DRAFT 4

enum op { SPECULATED_TOPK, FIRST_TOPK, SINGLE_TOPK, SPECULATED, FIRST, SINGLE };
enum kind { KIND_SPECULATED_SCORED = 1, KIND_SINGLE_SCORED, KIND_SPECULATED, KIND_SINGLE };
enum role { TOKENS, IDS, SCORES, RANKS, COUNTS, OFFSETS, STOP, DECODER, PROMPT, PREEMPTION, STEP, ROLES };
enum what { FITS, NO_BUFFER, DIMENSIONS, MOST_SLOTS, TOO_SHORT, TOO_MANY, NO_PLACE, NARROW, EMPTY, NO_COLUMNS };

static const char FORMATS[ROLES] = {'l', 'l', 'f', 'l', 'i', 'i', '?', 'i', 'l', 'i', 'l'};

static const int IS_OF_SLOTS[ROLES] = {[COUNTS] = 1, [DECODER] = 1, [PROMPT] = 1, [PREEMPTION] = 1, [STEP] = 1};

struct header {
    uint32_t magic, bytes;
    uint8_t kind, flag;
    uint16_t columns;
    int32_t stop_flag;
    uint32_t slots, entries;
    uint64_t sequence, stamp;
};

/* The result of a call. If an argument does not fit: the reason, its role, the slot, the limit and the value.
   Otherwise the number of bytes that the socket accepted, or -errno. */
struct outcome {
    int64_t what, role, slot, limit, value, sent;
};

/* One signature of an op: the position of each role's argument, or -1 if it has none. */
struct call {
    int32_t op, is_dense, flag_at, skips_at, places[ROLES];
};

struct given {
    Buffer of[ROLES];
    int64_t items[ROLES];
    int has[ROLES];
    int32_t op, is_dense, flag, skips_prefill;
    const uint8_t *lost; /* null, or a flag for each slot whether tokens before this step were lost */
};

static int fails(struct outcome *fault, int what, int role, int64_t slot, int64_t limit, int64_t value) {
    *fault = (struct outcome){what, role, slot, limit, value, 0};
    return 0;
}

static int64_t first_dimension(const struct given *given, int role) {
    return given->of[role].dimensions ? given->of[role].shape[0] : 0;
}

/* An int64 is 'l' in numpy and 'q' elsewhere. */
static int is_format(const Buffer *buffer, char wanted) {
    const char *format = buffer->format;
    return format && !(format[0] && format[1]) && (format[0] == wanted || (wanted == 'l' && format[0] == 'q'));
}

static int take(struct given *given, const struct call *call, void *tuple, struct outcome *fault) {
    memset(given, 0, sizeof *given);
    given->op = call->op, given->is_dense = call->is_dense;
    given->flag = call->flag_at < 0 ? TARGET : (int32_t)PyLong_AsLong(PyTuple_GetItem(tuple, call->flag_at)) & 0xFF;
    given->skips_prefill = call->skips_at < 0 || PyObject_IsTrue(PyTuple_GetItem(tuple, call->skips_at));
    for (int role = 0; role < ROLES; role++) {
        if (call->places[role] < 0) continue;
        Buffer *buffer = &given->of[role];
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, call->places[role]), buffer, READABLE)) {
            PyErr_Clear();
            return fails(fault, NO_BUFFER, role, 0, 0, 0);
        }
        given->has[role] = 1;
        if (!is_format(buffer, FORMATS[role])) return fails(fault, NO_BUFFER, role, 0, 0, 0);
        given->items[role] = buffer->bytes / buffer->item_bytes;
    }
    return !PyErr_Occurred(); /* a flag that is not a number: ctypes raises CPython's error */
}

static void release(struct given *given) {
    for (int role = 0; role < ROLES; role++)
        if (given->has[role]) PyBuffer_Release(&given->of[role]);
}

#define DATA(type, role) ((const type *)given->of[role].data)

/* Return the width of a slot's line of sampled tokens, or FLAT if they are found by their offsets. */
static int64_t line_width(const struct given *given, int64_t slots) {
    if (given->of[TOKENS].dimensions < 2) return FLAT;
    int64_t width = given->of[TOKENS].shape[1];
    if (width != 1) return width;
    /* [n, 1] is either one token for each slot or a flat array; the counts tell which. */
    if (first_dimension(given, TOKENS) < slots) return FLAT;
    for (int64_t slot = 0; slot < slots; slot++)
        if (DATA(int32_t, COUNTS)[slot] > 1) return FLAT;
    return 1;
}

/* Write each slot's count, which may be a magic number. Return the number of tokens, or -1 if a count is too high. */
static int64_t count(const struct given *given, int64_t slots, int32_t *counts, struct outcome *fault) {
    int op = given->op, is_first = op == FIRST_TOPK;
    int64_t total = 0;
    for (int64_t slot = 0; slot < slots; slot++) {
        int32_t found = op == FIRST ? 2 * (DATA(int64_t, STEP)[slot] == 1) : DATA(int32_t, COUNTS)[slot];
        if (given->has[DECODER] && given->skips_prefill && DATA(int32_t, DECODER)[slot] < DATA(int64_t, PROMPT)[slot]) found = 0;
        if (given->has[PREEMPTION] && DATA(int32_t, PREEMPTION)[slot] == 1) found = PREEMPTED;
        if (found > MOST_TOKENS - is_first) {
            fails(fault, TOO_MANY, COUNTS, slot, MOST_TOKENS - is_first, found);
            return -1;
        }
        if (given->lost && given->lost[slot]) found = UNRECOVERABLE;
        counts[slot] = found + (is_first && found > 0);
        total += counts[slot] > 0 ? counts[slot] : 0;
    }
    return total;
}

/* Check that each token has an element in the sampled tokens, and a line in the ids, the scores and the ranks. */
static int check_places(const struct given *given, int op, int64_t slots, const int32_t *counts, int64_t width, struct outcome *fault) {
    int64_t end = 0;
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t tokens = counts[slot];
        if (tokens <= 0) continue;
        if (width != FLAT) {
            if (slot >= first_dimension(given, TOKENS)) return fails(fault, TOO_SHORT, TOKENS, slot, slot + 1, first_dimension(given, TOKENS));
            if (tokens > width) return fails(fault, NARROW, TOKENS, slot, tokens, width);
        }
        if (!given->has[OFFSETS]) continue;
        /* Newer runners pass offsets of only the slots in use. */
        if (slot >= given->items[OFFSETS]) return fails(fault, TOO_SHORT, OFFSETS, slot, slot + 1, given->items[OFFSETS]);
        int64_t begin = DATA(int32_t, OFFSETS)[slot], of_slot = op == FIRST_TOPK ? 1 : tokens;
        int64_t there = width == FLAT ? given->items[TOKENS] : given->of[IDS].shape[0];
        if (begin < 0 || begin + of_slot > there) {
            fails(fault, NO_PLACE, OFFSETS, slot, there, begin);
            fault->role |= of_slot << 8;
            return 0;
        }
        if (begin + of_slot > end) end = begin + of_slot;
    }
    if (!given->has[SCORES]) return 1;
    int64_t stride = given->of[IDS].shape[1];
    for (int role = IDS; role <= RANKS; role++) {
        int64_t lines = role == RANKS ? given->items[RANKS] : given->items[role] / stride;
        if (lines < end && !(role == IDS && stride == 1)) return fails(fault, TOO_SHORT, role, 0, end, lines);
    }
    return 1;
}

/* The locations of a message's arrays. */
struct arrays {
    int32_t *counts, *tokens;
    float *scores;
    int32_t *ranks;
};

static void narrow(int32_t *into, const int64_t *from, int64_t items) {
    for (int64_t item = 0; item < items; item++) into[item] = (int32_t)from[item];
}

static void write_line(const struct given *given, const struct arrays *into, int64_t entry, int64_t token, int64_t columns, int64_t id) {
    int64_t stride = given->of[IDS].shape[1];
    int32_t *line = into->tokens + entry * columns;
    float *values = into->scores + entry * columns;
    const float *scores = DATA(float, SCORES) + token * stride;
    if (columns > 1) {
        narrow(line, DATA(int64_t, IDS) + token * stride, columns);
        memcpy(values, scores, columns * sizeof(float));
    }
    line[0] = (int32_t)id, values[0] = scores[0];
    into->ranks[entry] = (int32_t)DATA(int64_t, RANKS)[token];
}

/* The speculative ops: the tokens of each slot, with scores or without. */
static void write_tokens(const struct given *given, int op, int64_t slots, const int32_t *counts, int64_t width, int64_t columns, const struct arrays *into) {
    const int64_t *tokens = DATA(int64_t, TOKENS);
    int64_t entry = 0;
    for (int64_t slot = 0; slot < slots; slot++) {
        if (counts[slot] <= 0) continue;
        int64_t begin = given->has[OFFSETS] ? DATA(int32_t, OFFSETS)[slot] : 0;
        const int64_t *own = tokens + (width == FLAT ? begin : slot * width);
        for (int32_t place = 0; place < counts[slot]; place++, entry++) {
            if (!given->has[SCORES]) into->tokens[entry] = (int32_t)own[place];
            else if (place == 0 || op == SPECULATED_TOPK) write_line(given, into, entry, begin + place, columns, own[place]);
            else { /* a draft after a first token has an id, and no scores */
                for (int64_t column = 0; column < columns; column++) into->tokens[entry * columns + column] = NOTHING;
                into->tokens[entry * columns] = (int32_t)own[place];
                memset(into->scores + entry * columns, 0, columns * sizeof(float));
                into->ranks[entry] = 0;
            }
        }
    }
}

/* The ops without speculation: one token for each slot, which may be a magic number. */
static void write_single(const struct given *given, int64_t slots, int64_t columns, int64_t lines, const struct arrays *into) {
    for (int64_t slot = 0; slot < slots; slot++) {
        int is_preempted = given->has[PREEMPTION] && DATA(int32_t, PREEMPTION)[slot] == 1;
        int64_t id = DATA(int64_t, TOKENS)[slot];
        int32_t *line = into->tokens + slot * columns;
        if (given->has[SCORES]) {
            into->counts[slot] = is_preempted ? PREEMPTED : 1;
            if (slot < lines) write_line(given, into, slot, slot, columns, id);
            else { /* a slot without a token needs no scores */
                for (int64_t column = 0; column < columns; column++) line[column] = NOTHING;
                memset(into->scores + slot * columns, 0, columns * sizeof(float));
                into->ranks[slot] = 0;
            }
        }
        line[0] = (int32_t)id;
        for (int64_t column = 0; is_preempted && column < columns; column++) line[column] = PREEMPTED;
        if (given->lost && given->lost[slot]) line[0] = UNRECOVERABLE;
    }
}

/* Return the number of slots with ids, scores and a rank, or -1 if a slot with a token lacks any of these. */
static int64_t scored_lines(const struct given *given, int64_t slots, struct outcome *fault) {
    int64_t stride = given->of[IDS].shape[1], least = slots, needed = 0;
    int shortest = IDS;
    for (int role = IDS; role <= RANKS; role++) {
        int64_t lines = role == RANKS ? given->items[RANKS] : given->items[role] / stride;
        if (lines < least) least = lines, shortest = role;
    }
    for (int64_t slot = 0; slot < slots; slot++)
        if (DATA(int64_t, TOKENS)[slot] >= 0 && !(given->has[PREEMPTION] && DATA(int32_t, PREEMPTION)[slot] == 1)) needed = slot + 1;
    if (least >= needed) return least;
    fails(fault, TOO_SHORT, shortest, 0, needed, least);
    return -1;
}

static int check_shapes(const struct given *given, int op, int64_t *slots, struct outcome *fault) {
    int has_lines = op == FIRST_TOPK || op == SPECULATED || op == FIRST, is_single = op == SINGLE || op == SINGLE_TOPK;
    int counted = op == SPECULATED_TOPK || op == FIRST_TOPK ? COUNTS : TOKENS;
    int64_t most = op == SPECULATED || op == FIRST ? SPECULATIVE_SLOTS : SLOTS;
    int dimensions = given->of[TOKENS].dimensions;
    if (has_lines ? dimensions != 2 : dimensions < 1 || dimensions > 2) return fails(fault, DIMENSIONS, TOKENS, 0, has_lines ? 2 : 1, dimensions);
    if (given->has[IDS] && given->of[IDS].dimensions != 2) return fails(fault, DIMENSIONS, IDS, 0, 2, given->of[IDS].dimensions);
    if (given->has[IDS] && given->of[IDS].shape[1] < 1) return fails(fault, NO_COLUMNS, IDS, 0, 1, 0);
    if (!given->of[counted].dimensions) return fails(fault, DIMENSIONS, counted, 0, 1, 0);
    *slots = first_dimension(given, counted);
    if (*slots > most) return fails(fault, MOST_SLOTS, counted, 0, most, *slots);
    for (int role = COUNTS; role < ROLES; role++)
        if (IS_OF_SLOTS[role] && given->has[role] && given->items[role] < *slots) return fails(fault, TOO_SHORT, role, 0, *slots, given->items[role]);
    if (is_single && given->items[TOKENS] < *slots) return fails(fault, TOO_SHORT, TOKENS, 0, *slots, given->items[TOKENS]);
    if (given->items[STOP] < 1) return fails(fault, EMPTY, STOP, 0, 1, 0);
    return 1;
}

/* Return the number of columns to send; columns that do not fit into FastDeploy's struct are cut off. */
static int64_t columns_of(const struct given *given, int64_t slots) {
    int64_t columns = given->has[IDS] ? given->of[IDS].shape[1] : 1;
    int fits_dense = given->op == SINGLE_TOPK && given->is_dense && slots * columns <= STRUCT_PLACES && columns <= UINT16_MAX;
    return columns > COLUMNS && !fits_dense ? COLUMNS : columns;
}

static void *packed(const struct given *given, int message_id, uint64_t sequence, struct outcome *fault) {
    static const uint8_t KINDS[] = {
        [SPECULATED_TOPK] = KIND_SPECULATED_SCORED, [FIRST_TOPK] = KIND_SPECULATED_SCORED, [SINGLE_TOPK] = KIND_SINGLE_SCORED,
        [SPECULATED] = KIND_SPECULATED, [FIRST] = KIND_SPECULATED, [SINGLE] = KIND_SINGLE};
    int op = given->op, is_single = op == SINGLE || op == SINGLE_TOPK;
    int64_t slots, entries, width = 0, lines = 0;
    int32_t counts[SLOTS];
    if (!check_shapes(given, op, &slots, fault)) return 0;
    if (is_single) {
        entries = slots;
        if (op == SINGLE_TOPK && (lines = scored_lines(given, slots, fault)) < 0) return 0;
    } else {
        if ((entries = count(given, slots, counts, fault)) < 0) return 0;
        width = op == SPECULATED_TOPK ? line_width(given, slots) : given->of[TOKENS].shape[1];
        if (!check_places(given, op, slots, counts, width, fault)) return 0;
    }
    int is_scored = given->has[SCORES];
    int64_t columns = columns_of(given, slots), own = op == SINGLE ? 0 : slots;
    int64_t items = own + entries * columns * (1 + is_scored) + entries * is_scored;
    int64_t bytes = (int64_t)sizeof(struct header) + 4 * items;
    void *message = PyBytes_FromStringAndSize(0, bytes);
    if (!message) return 0;
    char *at = PyBytes_AsString(message);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct header header = {
        MAGIC, (uint32_t)bytes, KINDS[op], (uint8_t)given->flag, (uint16_t)columns,
        DATA(uint8_t, STOP)[0] ? message_id : -message_id,
        (uint32_t)slots, (uint32_t)entries, sequence, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec};
    memcpy(at, &header, sizeof header);
    struct arrays into;
    into.counts = (int32_t *)(at + sizeof header);
    into.tokens = into.counts + own;
    into.scores = (float *)(into.tokens + entries * columns);
    into.ranks = (int32_t *)(into.scores + entries * columns);
    if (is_single) write_single(given, slots, columns, lines, &into);
    else {
        memcpy(into.counts, counts, slots * sizeof *counts);
        write_tokens(given, op, slots, counts, width, columns, &into);
    }
    return message;
}

/*
 * Return a message as bytes, or empty bytes if an argument does not fit. If `socket` is not -1, send as many bytes as
 * the socket takes without blocking, and set `outcome.sent` to their number or -errno. `lost` is null or has a byte for
 * each of SLOTS slots. Slots whose tokens were lost before become UNRECOVERABLE, except in a draft.
 */
void *tokenbus_fastdeploy_pack(
    const struct call *call, struct outcome *fault, void *tuple, int socket, int message_id, uint64_t sequence, const uint8_t *lost) {
    struct given given;
    void *message = 0;
    if (take(&given, call, tuple, fault)) {
        given.lost = given.flag == DRAFT ? 0 : lost;
        message = packed(&given, message_id, sequence, fault);
    }
    release(&given);
    if (!message) return PyBytes_FromStringAndSize(0, 0);
    *fault = (struct outcome){0};
    if (socket >= 0) {
        char *data = PyBytes_AsString(message);
        ssize_t written = send(socket, data, ((struct header *)data)->bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        fault->sent = written >= 0 ? written : errno == EAGAIN || errno == EINTR ? 0 : -errno;
    }
    return message;
}

/* The number of bytes that have arrived of a connection's next message, and the fields of its header. */
struct reading {
    uint64_t have, bytes, sequence, stamp;
    int64_t kind;
};
enum progress { MORE, WHOLE, ENDED, REFUSED };

/* Tell whether `pack` could have written a header. Nothing is read after any other header. */
static int is_sound(const struct header *header) {
    static const uint32_t MOST[] = {0, SLOTS, SLOTS, SPECULATIVE_SLOTS, SLOTS};
    int kind = header->kind;
    if (header->magic != MAGIC || kind < KIND_SPECULATED_SCORED || kind > KIND_SINGLE || !header->columns) return 0;
    int is_single = kind == KIND_SINGLE || kind == KIND_SINGLE_SCORED, is_scored = kind <= KIND_SINGLE_SCORED;
    uint64_t slots = header->slots, entries = header->entries, columns = header->columns;
    if (slots > MOST[kind] || (is_single ? entries != slots : entries > slots * MOST_TOKENS)) return 0;
    if (columns > COLUMNS && !(kind == KIND_SINGLE_SCORED && slots * columns <= STRUCT_PLACES)) return 0;
    uint64_t items = (kind == KIND_SINGLE ? 0 : slots) + entries * columns * (1 + is_scored) + entries * is_scored;
    return header->bytes == sizeof *header + 4 * items;
}

/* Tell whether the slots' counts add up to the message's tokens, because `fill` relies on the counts. */
static int has_sound_counts(const struct header *header) {
    if (header->kind == KIND_SINGLE || header->kind == KIND_SINGLE_SCORED) return 1;
    const int32_t *counts = (const int32_t *)(header + 1);
    uint64_t entries = 0;
    for (uint32_t slot = 0; slot < header->slots; slot++) {
        if (counts[slot] > MOST_TOKENS) return 0;
        entries += counts[slot] > 0 ? (uint64_t)counts[slot] : 0;
    }
    return entries == header->entries;
}

/* Receive, without blocking, the bytes that have arrived of one message, and none of the next message. */
int tokenbus_fastdeploy_receive(int socket, char *buffer, struct reading *reading) {
    for (;;) {
        uint64_t wanted = reading->bytes ? reading->bytes : sizeof(struct header);
        ssize_t found = recv(socket, buffer + reading->have, wanted - reading->have, MSG_DONTWAIT);
        if (found < 0 && errno == EINTR) continue;
        if (found <= 0) return found < 0 && errno == EAGAIN ? MORE : ENDED;
        reading->have += (uint64_t)found;
        if (reading->have < wanted) continue;
        if (!reading->bytes) {
            const struct header *header = (const struct header *)buffer;
            if (!is_sound(header)) return REFUSED;
            reading->bytes = header->bytes, reading->kind = header->kind;
            reading->sequence = header->sequence, reading->stamp = header->stamp;
        }
        if (reading->have == reading->bytes) return has_sound_counts((const struct header *)buffer) ? WHOLE : REFUSED;
    }
}

/*
 * Acknowledge a message, and reset `reading` for the next message. Return 0, or the sequence if the socket has no room
 * for the acknowledgement. If the saving process has ended, this is not an error.
 */
uint64_t tokenbus_fastdeploy_acknowledge(int socket, struct reading *reading) {
    uint64_t sequence = reading->sequence;
    memset(reading, 0, sizeof *reading);
    ssize_t sent = send(socket, &sequence, sizeof sequence, MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent < 0 && (errno == EAGAIN || errno == EINTR) ? sequence : 0;
}

/* Return the last sequence acknowledged since the previous call, 0 for none, or -1 if the get side has ended. */
int64_t tokenbus_fastdeploy_acknowledged(int socket) {
    uint64_t found[512]; /* a get side sends 8 bytes at once, so no read ends within a number */
    int64_t last = 0;
    for (;;) {
        ssize_t bytes = recv(socket, found, sizeof found, MSG_DONTWAIT);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes <= 0) return bytes < 0 && errno == EAGAIN ? last : last ? last : -1;
        if ((size_t)bytes >= sizeof *found) last = (int64_t)found[bytes / sizeof *found - 1];
        if ((size_t)bytes < sizeof found) return last;
    }
}

/* Return an environment variable as a number, or -1 for other text. The process may change the variable at any time. */
int tokenbus_fastdeploy_number(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    char *end = "";
    if (!text) return otherwise;
    long found = strtol(text, &end, 10);
    return *end || text[0] < '0' || text[0] > '9' || found > INT32_MAX ? -1 : (int)found;
}

/* The maximum size of a message in bytes. */
const uint32_t tokenbus_fastdeploy_most_bytes =
    sizeof(struct header) + 4 * (SLOTS + SLOTS * MOST_TOKENS * COLUMNS * 2 + SLOTS * MOST_TOKENS);

/* Outputs: the tokens and, if they are scored, their scores and ranks. */
struct outputs {
    int64_t *tokens;
    float *scores;
    int64_t *ranks;
};

/* Write a token's columns. Requested columns that were not saved become `blank`. */
static void fill_line(const struct outputs *out, int64_t place, const int32_t *tokens, const float *scores, int64_t columns, int64_t wanted, int32_t blank) {
    int64_t there = columns < wanted ? columns : wanted;
    out->tokens[place] = tokens[0], out->scores[place] = scores[0];
    if (there > 1) {
        for (int64_t column = 1; column < there; column++) out->tokens[place + column] = tokens[column];
        memcpy(out->scores + place, scores, there * sizeof(float));
    }
    for (int64_t column = there; column < wanted; column++) out->tokens[place + column] = blank, out->scores[place + column] = 0;
}

static void fill_speculated(const struct header *header, const struct arrays *from, int packs_columns, int64_t wanted, struct outputs out) {
    out.tokens[1] = header->flag | (packs_columns ? (int64_t)header->columns << 8 : 0);
    out.tokens[2] = header->slots;
    int64_t entry = 0, columns = header->columns;
    struct outputs lines = {out.tokens + 3 + SLOTS, out.scores, out.ranks};
    for (int64_t slot = 0; slot < header->slots; slot++) {
        out.tokens[3 + slot] = from->counts[slot];
        for (int64_t place = slot * MOST_TOKENS; place < slot * MOST_TOKENS + from->counts[slot]; place++, entry++) {
            int64_t own = entry * columns;
            fill_line(&lines, place * COLUMNS, from->tokens + own, from->scores + own, columns, packs_columns ? columns : wanted, NOTHING);
            out.ranks[place] = from->ranks[entry];
        }
    }
}

static void fill_single(const struct header *header, const struct arrays *from, int packs_columns, int64_t wanted, struct outputs out) {
    int64_t columns = header->columns, stride = packs_columns ? columns : COLUMNS;
    out.tokens[1] = header->slots | (packs_columns ? columns << 16 : 0);
    struct outputs lines = {out.tokens + 2, out.scores, out.ranks};
    for (int64_t slot = 0; slot < header->slots; slot++) {
        int32_t blank = from->counts[slot] == PREEMPTED ? PREEMPTED : NOTHING;
        int64_t own = slot * columns;
        fill_line(&lines, slot * stride, from->tokens + own, from->scores + own, columns, packs_columns ? columns : wanted, blank);
        out.ranks[slot] = from->ranks[slot];
    }
}

static void fill_plain(const struct header *header, const struct arrays *from, int64_t *tokens) {
    tokens[1] = header->slots;
    if (header->kind == KIND_SINGLE) {
        for (int64_t slot = 0; slot < header->slots; slot++) tokens[2 + slot] = from->tokens[slot];
        return;
    }
    int64_t *own = tokens + 2 + SPECULATIVE_SLOTS, entry = 0;
    memset(tokens + 2, 0, (SPECULATIVE_SLOTS + SPECULATIVE_SLOTS * MOST_TOKENS) * sizeof *tokens);
    for (int64_t slot = 0; slot < header->slots; slot++) {
        tokens[2 + slot] = from->counts[slot];
        for (int32_t place = 0; place < from->counts[slot]; place++) own[slot * MOST_TOKENS + place] = from->tokens[entry++];
    }
}

/* The least number of elements of each output, by kind. */
static const int64_t LEAST[][3] = {
    [KIND_SPECULATED_SCORED] = {3 + SLOTS + SLOTS * MOST_TOKENS * COLUMNS, SLOTS * MOST_TOKENS * COLUMNS, SLOTS * MOST_TOKENS},
    [KIND_SINGLE_SCORED] = {2 + STRUCT_PLACES, STRUCT_PLACES, SLOTS},
    [KIND_SPECULATED] = {2 + SPECULATIVE_SLOTS + SPECULATIVE_SLOTS * MOST_TOKENS, 0, 0},
    [KIND_SINGLE] = {2 + SLOTS, 0, 0}};

static int open_outputs(int kind, void **objects, Buffer *buffers, struct outcome *fault) {
    static const char OUTPUT_FORMATS[] = {'l', 'f', 'l'};
    int opened = 0;
    for (; opened < 3 && LEAST[kind][opened]; opened++) {
        Buffer *buffer = &buffers[opened];
        int is_open = !PyObject_GetBuffer(objects[opened], buffer, WRITABLE), is_right = is_open && is_format(buffer, OUTPUT_FORMATS[opened]);
        int64_t items = is_right ? buffer->bytes / buffer->item_bytes : 0;
        if (items >= LEAST[kind][opened]) continue;
        if (is_open) PyBuffer_Release(buffer);
        else PyErr_Clear();
        fails(fault, is_right ? TOO_SHORT : NO_BUFFER, opened, 0, LEAST[kind][opened], items);
        while (opened--) PyBuffer_Release(&buffers[opened]);
        return 0;
    }
    return opened;
}

/*
 * Fill a get op's outputs with a message, or with -2 if `is_empty` is set. With a null message, only check the outputs.
 * The message itself was checked when it arrived. Return 0 if an output does not fit.
 */
int tokenbus_fastdeploy_fill(
    int kind, const char *message, int is_empty, int packs_columns, int64_t wanted, void *tokens, void *scores, void *ranks,
    struct outcome *fault) {
    void *objects[] = {tokens, scores, ranks};
    Buffer buffers[3];
    int opened = open_outputs(kind, objects, buffers, fault);
    if (!opened) return 0;
    struct outputs out = {buffers[0].data, opened > 1 ? buffers[1].data : 0, opened > 1 ? buffers[2].data : 0};
    if (is_empty) {
        memset(out.tokens, 0, (kind == KIND_SPECULATED_SCORED ? 3 : 2) * sizeof *out.tokens);
        out.tokens[0] = NOTHING_READ;
    } else if (message) {
        const struct header *header = (const struct header *)message;
        int64_t own = kind == KIND_SINGLE ? 0 : header->slots, table = (int64_t)header->entries * header->columns;
        struct arrays from;
        from.counts = (int32_t *)(message + sizeof *header);
        from.tokens = from.counts + own;
        from.scores = (float *)(from.tokens + table);
        from.ranks = (int32_t *)(from.scores + table);
        out.tokens[0] = header->stop_flag;
        if (kind == KIND_SPECULATED_SCORED) fill_speculated(header, &from, packs_columns, wanted, out);
        else if (kind == KIND_SINGLE_SCORED) fill_single(header, &from, packs_columns, wanted, out);
        else fill_plain(header, &from, out.tokens);
    }
    while (opened--) PyBuffer_Release(&buffers[opened]);
    return 1;
}

#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0
#endif
const uint32_t tokenbus_source_crc32 = SOURCE_CRC32;
