/*
 * FastDeploy's save and get ops over the kernel's queue, as each of its releases has them, without Paddle.
 *
 * Written from what its sources do; docs/fastdeploy.md names the commits. The peer of the benchmark, and what the tests
 * hold the drop-in against. Each op has one struct for its whole life, as FastDeploy's have: what a message does not
 * write is still there from the one before. A queue is named by its number; the caller chooses it as a key would.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/msg.h>

enum { SLOTS = 512, PLAIN_SLOTS = 256, TOKENS = 6, K = 20, LINE = K + 1 };
enum form { R24, R25, R26_PLAIN, R26_SLOTS, R26, DEVELOP };
enum op { SPECULATE_TOPK, FIRST_TOPK, SINGLE_TOPK, SPECULATE, FIRST, SINGLE };

struct scored_slot { int tokens[TOKENS * LINE]; float scores[TOKENS * LINE]; int ranks[TOKENS]; };
struct speculated_scored { long type; int meta[3 + SLOTS]; struct scored_slot slots[SLOTS]; };
struct single_scored { long type; int text[SLOTS * LINE + 2]; float scores[SLOTS * LINE]; int ranks[SLOTS]; };
struct speculated { long type; int text[PLAIN_SLOTS * TOKENS + PLAIN_SLOTS + 2]; };
struct single { long type; int text[SLOTS + 2]; };

struct given {
    const int64_t *sampled, *ids;
    const float *scores;
    const int64_t *ranks;
    const int32_t *counts, *offsets;
    const uint8_t *not_need_stop;
    const int32_t *decoder;
    const int64_t *prompt;
    const int32_t *preempted;
    const int64_t *step;
    int64_t slots, width, columns;
    int32_t message_id, flag, rank, each_rank, skips_prefill;
    int32_t is_flat; /* before #5927 sampled tokens lay one behind the other, in every release since in lines */
};

#define BYTES(message) (sizeof(message) - sizeof(long))

static int send_whole(int queue, const void *message, size_t bytes) { return msgsnd(queue, message, bytes, 0) ? -errno : 1; }

static int stop_flag(const struct given *given) { return given->not_need_stop[0] ? given->message_id : -given->message_id; }
static int prefills(const struct given *given, int64_t slot) { return given->decoder && given->decoder[slot] < given->prompt[slot]; }
static int preempts(const struct given *given, int64_t slot) { return given->preempted && given->preempted[slot] == 1; }

/* A token's columns, as its release writes them: all of a line, or those that there are. */
static void write_columns(int form, const struct given *given, struct scored_slot *slot, int place, int64_t token, int id) {
    int *tokens = slot->tokens + place * LINE;
    float *scores = slot->scores + place * LINE;
    int packs = form >= R26, columns = (int)given->columns;
    int64_t begin = token * (packs ? columns : LINE);
    for (int k = 0; k < (packs ? columns : LINE); k++) {
        if (k >= columns) tokens[k] = -1, scores[k] = 0;
        else tokens[k] = k ? (int)given->ids[begin + k] : id, scores[k] = given->scores[begin + k];
    }
    slot->ranks[place] = (int)given->ranks[token];
}

static int save_speculated_scored(int op, int form, int queue, const struct given *given) {
    static struct speculated_scored of_op[2];
    int is_first = op == FIRST_TOPK;
    if (given->rank > 0 && (!given->each_rank || (!is_first && form > R25))) return 0;
    struct speculated_scored *message = &of_op[is_first];
    message->type = 1;
    message->meta[0] = stop_flag(given);
    message->meta[1] = form >= R26 ? given->flag | (int)given->columns << 8 : given->flag;
    message->meta[2] = (int)given->slots;
    for (int64_t i = 0; i < given->slots; i++) {
        int tokens = prefills(given, i) ? 0 : given->counts[i];
        if (is_first && tokens) tokens++;
        message->meta[3 + i] = preempts(given, i) ? -9 : tokens;
        for (int j = 0; j < tokens; j++) {
            int64_t offset = given->offsets[i];
            int64_t place = given->is_flat ? offset + j : i * given->width + j;
            int id = (int)given->sampled[place];
            if (is_first && j) message->slots[i].tokens[j * LINE] = id;
            else write_columns(form, given, &message->slots[i], j, offset + j, id);
        }
    }
    return send_whole(queue, message, BYTES(*message));
}

static int save_single_scored(int form, int queue, const struct given *given) {
    static struct single_scored message;
    if (given->rank > 0) return 0;
    int packs = form >= R26_SLOTS, columns = (int)given->columns, stride = packs ? columns : LINE;
    message.type = 1;
    message.text[0] = stop_flag(given);
    message.text[1] = packs ? (int)given->slots | columns << 16 : (int)given->slots;
    for (int64_t i = 0; i < given->slots; i++) {
        for (int j = 0; j < stride; j++) {
            int64_t into = i * stride + j, from = i * columns + j;
            if (j >= columns) message.text[2 + into] = -1, message.scores[into] = 0;
            else message.text[2 + into] = j ? (int)given->ids[from] : (int)given->sampled[i], message.scores[into] = given->scores[from];
            if (preempts(given, i)) message.text[2 + into] = -9;
        }
        message.ranks[i] = (int)given->ranks[i];
    }
    return send_whole(queue, &message, BYTES(message));
}

static int save_speculated(int form, int queue, const struct given *given) {
    static struct speculated message;
    if (given->rank > 0 && (!given->each_rank || form > R25)) return 0;
    message.type = 1;
    message.text[0] = stop_flag(given);
    message.text[1] = (int)given->slots;
    for (int64_t i = 0; i < PLAIN_SLOTS; i++) {
        int is_there = i < given->slots, skips = is_there && given->skips_prefill && prefills(given, i);
        message.text[2 + i] = is_there && !skips ? given->counts[i] : 0;
        if (is_there && preempts(given, i)) message.text[2 + i] = -9;
        for (int j = 0; j < TOKENS; j++) { /* of a narrow line those behind it are its neighbour's: FastDeploy copies all six */
            int64_t place = i * given->width + j;
            message.text[2 + PLAIN_SLOTS + i * TOKENS + j] = is_there && place < given->slots * given->width ? (int)given->sampled[place] : 0;
        }
    }
    return send_whole(queue, &message, BYTES(message));
}

static int save_first(int queue, const struct given *given) {
    static struct speculated message;
    if (given->rank > 0 && !given->each_rank) return 0;
    message.type = 1;
    message.text[0] = stop_flag(given);
    message.text[1] = (int)given->slots;
    for (int64_t i = 0; i < given->slots; i++) {
        if ((given->skips_prefill && prefills(given, i)) || given->step[i] == 0) message.text[2 + i] = 0;
        else if (given->step[i] == 1) {
            message.text[2 + i] = 2;
            for (int j = 0; j < 2; j++) message.text[2 + PLAIN_SLOTS + i * TOKENS + j] = (int)given->sampled[i * given->width + j];
        } /* later steps: what was there before */
    }
    return send_whole(queue, &message, BYTES(message));
}

static int save_single(int queue, const struct given *given) {
    static struct single message;
    if (given->rank > 0) return 0;
    message.type = 1;
    message.text[0] = stop_flag(given);
    message.text[1] = (int)given->slots;
    for (int64_t i = 0; i < given->slots; i++) message.text[2 + i] = preempts(given, i) ? -9 : (int)given->sampled[i];
    return send_whole(queue, &message, BYTES(message));
}

/* Save; 1: a message was sent, 0: this rank sends none, below: why the kernel took none. */
int theirs_save(int op, int form, int queue, const struct given *given) {
    switch (op) {
    case SPECULATE_TOPK: case FIRST_TOPK: return save_speculated_scored(op, form, queue, given);
    case SINGLE_TOPK: return save_single_scored(form, queue, given);
    case SPECULATE: return save_speculated(form, queue, given);
    case FIRST: return save_first(queue, given);
    default: return save_single(queue, given);
    }
}

static int get_speculated_scored(int form, int queue, int wait, int real_k, int64_t *tokens, float *scores, int64_t *ranks) {
    static struct speculated_scored message;
    if (msgrcv(queue, &message, BYTES(message), 0, wait ? 0 : IPC_NOWAIT) == -1) {
        tokens[0] = -2, tokens[1] = tokens[2] = 0;
        return 0;
    }
    for (int i = 0; i < 3; i++) tokens[i] = message.meta[i];
    int columns = form >= R26 ? message.meta[1] >> 8 : real_k + 1;
    for (int i = 0; i < message.meta[2]; i++) {
        tokens[3 + i] = message.meta[3 + i];
        for (int j = 0; j < message.meta[3 + i]; j++) {
            int64_t place = (int64_t)(i * TOKENS + j) * LINE;
            for (int k = 0; k < columns; k++) {
                tokens[3 + SLOTS + place + k] = message.slots[i].tokens[j * LINE + k];
                scores[place + k] = message.slots[i].scores[j * LINE + k];
            }
            ranks[i * TOKENS + j] = message.slots[i].ranks[j];
        }
    }
    return 1;
}

static int get_single_scored(int form, int queue, int wait, int real_k, int64_t *tokens, float *scores, int64_t *ranks) {
    static struct single_scored message;
    if (msgrcv(queue, &message, BYTES(message), 0, wait ? 0 : IPC_NOWAIT) == -1) {
        tokens[0] = -2, tokens[1] = 0;
        return 0;
    }
    int packs = form >= R26_SLOTS, slots = packs ? message.text[1] & 0xFFFF : message.text[1];
    int columns = packs ? message.text[1] >> 16 & 0xFFFF : real_k + 1, stride = packs ? columns : LINE;
    tokens[0] = message.text[0], tokens[1] = message.text[1];
    for (int i = 0; i < slots; i++) {
        for (int j = 0; j < columns; j++) {
            tokens[2 + i * stride + j] = message.text[2 + i * stride + j];
            scores[i * stride + j] = message.scores[i * stride + j];
        }
        ranks[i] = message.ranks[i];
    }
    return 1;
}

static int get_plain(int queue, int wait, void *message, int *text, size_t bytes, int items, int64_t *tokens) {
    if (msgrcv(queue, message, bytes, 0, wait ? 0 : IPC_NOWAIT) == -1) {
        tokens[0] = -2, tokens[1] = 0;
        return 0;
    }
    for (int i = 0; i < (items ? items : text[1] + 2); i++) tokens[i] = text[i];
    return 1;
}

/* Get by the op that reads what a save op sends, on rank 0; 1: a message was read. */
int theirs_get(int op, int form, int queue, int wait, int real_k, int64_t *tokens, float *scores, int64_t *ranks) {
    static struct speculated speculated;
    static struct single single;
    switch (op) {
    case SPECULATE_TOPK: case FIRST_TOPK: return get_speculated_scored(form, queue, wait, real_k, tokens, scores, ranks);
    case SINGLE_TOPK: return get_single_scored(form, queue, wait, real_k, tokens, scores, ranks);
    case SPECULATE: case FIRST:
        return get_plain(queue, wait, &speculated, speculated.text, BYTES(speculated), sizeof speculated.text / sizeof(int), tokens);
    default: return get_plain(queue, wait, &single, single.text, BYTES(single), 0, tokens);
    }
}
