/*
 * FastDeploy's save and get ops over the kernel's queues, without Paddle: what each release sends, and what it fills in.
 *
 * Written from FastDeploy's sources at the commits beside each form, and not from our drop-in or its page. Each save op
 * has one static message, as in FastDeploy: an element that a step does not write keeps an earlier step's value. Where
 * FastDeploy reads beyond a tensor, this reads 0; the tests do not compare such elements.
 */
#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/ipc.h>
#include <sys/msg.h>

enum { MOST_SLOTS = 512, PLAIN_MOST = 256, DRAFTS = 6, WIDE = 21, EMPTY = -2, PREEMPTED = -9, BLANK = -1 };

/* How releases differ. */
struct form {
    int heeds_each_rank; /* the two speculative saves, until #7172; first tokens heed it in every release */
    int reads_lines;     /* slot i's tokens are line i of sampled_token_ids, since #5927; flat by offset before */
    int packs_slots;     /* save_output_topk: slots | columns << 16, lines of so many columns, since #7860 */
    int packs_flag;      /* speculative with scores: flag | columns << 8, and only so many columns, since #7883 */
};

static const struct form FORMS[] = {
    {1, 0, 0, 0}, /* 2.4-before-5927: d05f5f087^ */
    {1, 1, 0, 0}, /* 2.4: f83673daa */
    {1, 1, 0, 0}, /* 2.5: f3fb7e032; its ops take preempted_idx, which is a null pointer where they do not */
    {0, 1, 0, 0}, /* 2.6-before-7861: 31b12ee8f^ */
    {0, 1, 1, 0}, /* 2.6-before-7884: c52b06310^ */
    {0, 1, 1, 1}, /* 2.6: 7198b5883 */
    {0, 1, 1, 1}, /* develop: c1b7c083d with #7860 and #7883, merged there as in 2.6 */
};

enum save_op { SAVE_SPECULATED_TOPK, SAVE_FIRST_TOPK, SAVE_TOPK, SAVE_SPECULATED, SAVE_FIRST, SAVE };
enum get_op { GET_SPECULATED_TOPK, GET_TOPK, GET_SPECULATED, GET, GET_EP };

/* A save op's arguments; null is what it is not given. */
struct step {
    const int64_t *tokens, *ids;
    const float *scores;
    const int64_t *ranks;
    const int32_t *counts, *offsets;
    const uint8_t *not_need_stop;
    const int32_t *decoded;
    const int64_t *prompts;
    const int32_t *preempted;
    const int64_t *steps;
    int64_t slots, width, columns; /* width: of a line of tokens */
    int64_t token_items, scored_items;
    int32_t message_id, flag, rank, each_rank, skips_prefill;
    int32_t is_flat; /* tokens have one dimension: since #5927 that is undefined, so read it as before #5927 */
};

/* A get op's arguments. */
struct request {
    int32_t k, rank, wait, each_rank;
    int64_t *tokens;
    float *scores;
    int64_t *ranks;
};

struct candidates {
    int tokens[DRAFTS * WIDE];
    float scores[DRAFTS * WIDE];
    int ranks[DRAFTS];
};
struct speculated_topk { long type; int meta[3 + MOST_SLOTS]; struct candidates slots[MOST_SLOTS]; };
struct topk { long type; int text[2 + MOST_SLOTS * WIDE]; float scores[MOST_SLOTS * WIDE]; int ranks[MOST_SLOTS]; };
struct speculated { long type; int text[2 + PLAIN_MOST + PLAIN_MOST * DRAFTS]; };
struct single { long type; int text[2 + MOST_SLOTS]; };

#define BODY(message) (sizeof(message) - sizeof(long))

static int put(int queue, void *message, size_t bytes) {
    *(long *)message = 1;
    return msgsnd(queue, message, bytes, 0) ? -errno : 1; /* waits while the queue is full */
}

static int stop_flag(const struct step *step) { return *step->not_need_stop ? step->message_id : -step->message_id; }

static int is_chunk(const struct step *step, int64_t slot) {
    return step->decoded && step->decoded[slot] < step->prompts[slot];
}

static int is_preempted(const struct step *step, int64_t slot) { return step->preempted && step->preempted[slot] == 1; }

static int token_at(const struct step *step, int64_t place) {
    return place < step->token_items ? (int)step->tokens[place] : 0;
}

/* Write one token with its columns and rank; `line` is its line in the scores. */
static void put_candidates(const struct form *form, const struct step *step, struct candidates *into, int at, int token, int64_t line) {
    int *tokens = into->tokens + at * WIDE;
    float *scores = into->scores + at * WIDE;
    int columns = (int)step->columns;
    into->ranks[at] = (int)step->ranks[line];
    if (form->packs_flag) {
        const int64_t *ids = step->ids + line * columns;
        const float *values = step->scores + line * columns;
        tokens[0] = token;
        for (int column = 1; column < columns; column++) tokens[column] = (int)ids[column];
        for (int column = 0; column < columns; column++) scores[column] = values[column];
        return;
    }
    for (int column = 0; column < WIDE; column++) { /* reads lines of 21, however many columns there are */
        int64_t from = line * WIDE + column;
        int is_there = from < step->scored_items;
        if (column == 0) tokens[0] = token;
        else tokens[column] = column < columns ? (is_there ? (int)step->ids[from] : 0) : BLANK;
        scores[column] = (column < columns || column == 0) && is_there ? step->scores[from] : 0;
    }
}

static void put_meta(const struct form *form, const struct step *step, struct speculated_topk *message) {
    message->meta[0] = stop_flag(step);
    message->meta[1] = step->flag | (form->packs_flag ? (int)step->columns << 8 : 0);
    message->meta[2] = (int)step->slots;
}

static int save_speculated_topk(const struct form *form, int queue, const struct step *step) {
    static struct speculated_topk message;
    int is_flat = step->is_flat || !form->reads_lines;
    if (step->rank > 0 && !(form->heeds_each_rank && step->each_rank)) return 0;
    put_meta(form, step, &message);
    for (int64_t slot = 0; slot < step->slots; slot++) {
        int count = is_chunk(step, slot) ? 0 : step->counts[slot];
        message.meta[3 + slot] = is_preempted(step, slot) ? PREEMPTED : count;
        for (int at = 0; at < count; at++) { /* those of a preempted slot, too */
            int64_t line = step->offsets[slot] + at;
            int token = token_at(step, is_flat ? line : slot * step->width + at);
            put_candidates(form, step, &message.slots[slot], at, token, line);
        }
    }
    return put(queue, &message, BODY(message));
}

static int save_first_topk(const struct form *form, int queue, const struct step *step) {
    static struct speculated_topk message;
    if (step->rank > 0 && !step->each_rank) return 0;
    put_meta(form, step, &message);
    for (int64_t slot = 0; slot < step->slots; slot++) {
        int count = is_chunk(step, slot) || step->counts[slot] == 0 ? 0 : step->counts[slot] + 1; /* -3 becomes -2 */
        message.meta[3 + slot] = is_preempted(step, slot) ? PREEMPTED : count;
        for (int at = 0; at < count; at++) {
            int token = token_at(step, slot * step->width + at);
            if (at == 0) put_candidates(form, step, &message.slots[slot], 0, token, step->offsets[slot]);
            else message.slots[slot].tokens[at * WIDE] = token; /* a draft has an id alone: the rest is not written */
        }
    }
    return put(queue, &message, BODY(message));
}

static int save_topk(const struct form *form, int queue, const struct step *step) {
    static struct topk message;
    if (step->rank > 0) return 0;
    int64_t columns = step->columns, stride = form->packs_slots ? columns : WIDE;
    message.text[0] = stop_flag(step);
    message.text[1] = (int)step->slots | (form->packs_slots ? (int)columns << 16 : 0);
    for (int64_t slot = 0; slot < step->slots; slot++) {
        int *tokens = message.text + 2 + slot * stride;
        float *scores = message.scores + slot * stride;
        for (int64_t column = 0; column < stride; column++) {
            int64_t from = slot * columns + column;
            int is_there = column == 0 || column < columns;
            tokens[column] = column == 0 ? (int)step->tokens[slot] : is_there ? (int)step->ids[from] : BLANK;
            scores[column] = is_there ? step->scores[from] : 0;
            if (is_preempted(step, slot)) tokens[column] = PREEMPTED;
        }
        message.ranks[slot] = (int)step->ranks[slot];
    }
    return put(queue, &message, BODY(message));
}

static int save_speculated(const struct form *form, int queue, const struct step *step) {
    static struct speculated message;
    if (step->rank > 0 && !(form->heeds_each_rank && step->each_rank)) return 0;
    int *counts = message.text + 2, *tokens = counts + PLAIN_MOST;
    message.text[0] = stop_flag(step);
    message.text[1] = (int)step->slots;
    for (int64_t slot = 0; slot < PLAIN_MOST; slot++) {
        int is_there = slot < step->slots;
        counts[slot] = !is_there || (step->skips_prefill && is_chunk(step, slot)) ? 0 : step->counts[slot];
        if (is_there && is_preempted(step, slot)) counts[slot] = PREEMPTED;
        for (int at = 0; at < DRAFTS; at++) /* always six: a shorter line takes its neighbour's tokens */
            tokens[slot * DRAFTS + at] = is_there ? token_at(step, slot * step->width + at) : 0;
    }
    return put(queue, &message, BODY(message));
}

static int save_first(int queue, const struct step *step) {
    static struct speculated message;
    if (step->rank > 0 && !step->each_rank) return 0;
    int *counts = message.text + 2, *tokens = counts + PLAIN_MOST;
    message.text[0] = stop_flag(step);
    message.text[1] = (int)step->slots;
    for (int64_t slot = 0; slot < step->slots; slot++) {
        if ((step->skips_prefill && is_chunk(step, slot)) || step->steps[slot] == 0) counts[slot] = 0;
        else if (step->steps[slot] == 1) {
            counts[slot] = 2;
            for (int at = 0; at < 2; at++) tokens[slot * DRAFTS + at] = token_at(step, slot * step->width + at);
        } /* a slot at a later step, and slots behind the last one, keep an earlier message's values */
    }
    return put(queue, &message, BODY(message));
}

static int save_single(int queue, const struct step *step) {
    static struct single message;
    if (step->rank > 0) return 0; /* in every release, whatever save_each_rank says */
    message.text[0] = stop_flag(step);
    message.text[1] = (int)step->slots;
    for (int64_t slot = 0; slot < step->slots; slot++)
        message.text[2 + slot] = is_preempted(step, slot) ? PREEMPTED : (int)step->tokens[slot];
    return put(queue, &message, BODY(message));
}

/* Do a save op; 1: a message was sent, 0: a rank that sends none, below 0: the kernel's error. */
int theirs_save(int form, int op, int queue, const struct step *step) {
    switch ((enum save_op)op) {
    case SAVE_SPECULATED_TOPK: return save_speculated_topk(&FORMS[form], queue, step);
    case SAVE_FIRST_TOPK: return save_first_topk(&FORMS[form], queue, step);
    case SAVE_TOPK: return save_topk(&FORMS[form], queue, step);
    case SAVE_SPECULATED: return save_speculated(&FORMS[form], queue, step);
    case SAVE_FIRST: return save_first(queue, step);
    case SAVE: return save_single(queue, step);
    }
    return -EINVAL;
}

/* Take the message at the head. One that is larger stays there (E2BIG), and to FastDeploy the queue then looks empty. */
static ssize_t take(int queue, void *message, size_t bytes, const struct request *request) {
    ssize_t found = msgrcv(queue, message, bytes, 0, request->wait ? 0 : IPC_NOWAIT);
    if (found >= 0) return found;
    request->tokens[0] = EMPTY, request->tokens[1] = 0;
    return -errno;
}

static void fill_speculated_topk(const struct form *form, const struct speculated_topk *message, const struct request *request) {
    int64_t *tokens = request->tokens + 3 + MOST_SLOTS;
    int columns = form->packs_flag ? message->meta[1] >> 8 : request->k + 1;
    for (int at = 0; at < 3; at++) request->tokens[at] = message->meta[at];
    for (int64_t slot = 0; slot < message->meta[2]; slot++) {
        const struct candidates *from = &message->slots[slot];
        int count = message->meta[3 + slot];
        request->tokens[3 + slot] = count;
        for (int at = 0; at < count; at++) {
            int64_t line = (slot * DRAFTS + at) * WIDE;
            for (int column = 0; column < columns; column++) {
                tokens[line + column] = from->tokens[at * WIDE + column];
                request->scores[line + column] = from->scores[at * WIDE + column];
            }
            request->ranks[slot * DRAFTS + at] = from->ranks[at];
        }
    }
}

static void fill_topk(const struct form *form, const struct topk *message, const struct request *request) {
    int second = message->text[1], slots = form->packs_slots ? second & 0xFFFF : second;
    int columns = form->packs_slots ? second >> 16 & 0xFFFF : request->k + 1, stride = form->packs_slots ? columns : WIDE;
    request->tokens[0] = message->text[0], request->tokens[1] = second;
    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t at = slot * stride; at < slot * stride + columns; at++) {
            request->tokens[2 + at] = message->text[2 + at];
            request->scores[at] = message->scores[at];
        }
        request->ranks[slot] = message->ranks[slot];
    }
}

static void widen(int64_t *into, const int *from, int64_t items) {
    for (int64_t item = 0; item < items; item++) into[item] = from[item];
}

/*
 * Do a get op. Return the bytes read; 0 on a rank that reads nothing; -errno on an error (-ENOMSG: an empty queue).
 *
 * A smaller message of another kind is consumed. FastDeploy would fill in parts of it and of its old struct, which no
 * test can compare: here the outputs stay unchanged, and the returned size tells.
 */
ssize_t theirs_get(int form, int op, int queue, const struct request *request) {
    static union { struct speculated_topk speculated_topk; struct topk topk; struct speculated speculated; struct single single; } of;
    ssize_t found;
    switch ((enum get_op)op) {
    case GET_SPECULATED_TOPK:
        found = take(queue, &of, BODY(of.speculated_topk), request);
        if (found < 0) request->tokens[2] = 0;
        if (found == BODY(of.speculated_topk)) fill_speculated_topk(&FORMS[form], &of.speculated_topk, request);
        return found;
    case GET_TOPK:
        found = take(queue, &of, BODY(of.topk), request);
        if (found == BODY(of.topk)) fill_topk(&FORMS[form], &of.topk, request);
        return found;
    case GET_SPECULATED:
        if (request->rank > 0 && !request->each_rank) return 0;
        found = take(queue, &of, BODY(of.speculated), request);
        if (found == BODY(of.speculated)) widen(request->tokens, of.speculated.text, sizeof of.speculated.text / sizeof(int));
        return found;
    case GET:
        if (request->rank > 0) return 0;
        /* fall through */
    case GET_EP: /* on every rank */
        found = take(queue, &of, BODY(of.single), request);
        if (found == BODY(of.single)) widen(request->tokens, of.single.text, 2 + of.single.text[1]);
        return found;
    }
    return -EINVAL;
}
