/*
 * Feeds messages to accept.c, each in a block of exactly its size, so that a sanitizer sees any step beyond it; and takes
 * rows out of those that it accepts, and out of what was taken.
 */
#include <stdio.h>
#include <stdlib.h>

#include "accept.c"

static void *read_exactly(FILE *file, size_t size) {
    void *block = malloc(size ? size : 1);
    if (!block || fread(block, 1, size, file) != size) exit(2);
    return block;
}

/* Deals all rows out to shares, in blocks of exactly what they may have; and nothing, where one is not next. */
static void deal_rows(const uint8_t *message, size_t size, const struct rules *rules, const int64_t *columns) {
    static const uint8_t head[] = "head";
    static int32_t streams[MOST_ROWS], shares[MOST_ROWS];
    static uint8_t states[MOST_ROWS];
    static int64_t slots[MOST_ROWS], positions[MOST_ROWS];
    int64_t rows = columns[COLUMN_COUNT + REQUEST_IDS], sum = 0;
    struct requests requests = {streams, shares, states, positions, rows, 0};
    for (int64_t row = 0; row < rows; row++) {
        slots[row] = rows - 1 - row;
        shares[slots[row]] = (int32_t)(row % 3) - 1;
        positions[slots[row]] = ((const u32 *)(message + columns[POSITIONS]))[row];
    }
    size_t most = size + 3 * (sizeof head + COLUMN_COUNT * MOST_KEY_BYTES);
    uint8_t *out = malloc(most);
    int64_t *places = malloc((size_t)rows * 8 + 1), parts[3][4];
    if (rows && tokenbus_deals(message, columns, slots, &requests, 1, 0, head, sizeof head, rules, out, places, parts, 3) != -1)
        exit(3); /* of another stream */
    int64_t count = tokenbus_deals(message, columns, slots, &requests, 0, 0, head, sizeof head, rules, out, places, parts, 3);
    if (count != (rows < 3 ? rows : 3) || (count && (parts[count - 1][1] != rows || parts[0][2]))) exit(3);
    for (int64_t part = 0; part < count; part++) sum += parts[part][2];
    if (sum > (int64_t)most) exit(3);
    if (rows > 1 && tokenbus_deals(message, columns, slots, &requests, 0, 0, head, sizeof head, rules, out, places, parts, 1) != -1)
        exit(3); /* no room for so many */
    free(out);
    free(places);
}

/* Takes some rows into a block of exactly the size that they may have, and from there into another one. */
static void take_rows(const uint8_t *message, size_t size, const struct rules *rules, const struct layout *layout) {
    int64_t columns[2 * COLUMN_COUNT], laid[2 * COLUMN_COUNT], places[MOST_ROWS], rows = layout->items[REQUEST_IDS];
    memcpy(columns, layout->at, sizeof layout->at);
    memcpy(columns + COLUMN_COUNT, layout->items, sizeof layout->items);
    for (int64_t step = 1; step <= 3; step++) {
        int64_t count = 0;
        for (int64_t row = rows - 1; row >= 0; row -= step) places[count++] = row;
        uint8_t *taken = malloc(size ? size : 1);
        int64_t bytes = tokenbus_selects(message, columns, places, count, rules, taken, laid);
        if (bytes < 0 || bytes > (int64_t)size) exit(3);
        for (int64_t row = 0; row < count; row++) places[row] = row;
        uint8_t *again = malloc(bytes ? (size_t)bytes : 1);
        int64_t copied[2 * COLUMN_COUNT];
        if (tokenbus_selects(taken, laid, places, count, rules, again, copied) != bytes) exit(3);
        if (memcmp(taken, again, (size_t)bytes) || memcmp(laid, copied, sizeof laid)) exit(3);
        free(taken);
        free(again);
    }
    deal_rows(message, size, rules, columns);
    for (int64_t place = -1; place <= rows; place += rows + 1) {
        int64_t places_beyond[1] = {place};
        if (tokenbus_selects(message, columns, places_beyond, 1, rules, 0, laid) != -1) exit(3);
    }
}

/* Standard input: the rules, then each message behind its size in four bytes. Output: a line of 0 and 1. */
int main(void) {
    struct rules *rules = read_exactly(stdin, sizeof *rules);
    uint32_t size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        struct layout layout;
        uint8_t *message = read_exactly(stdin, size);
        int accepted = tokenbus_accepts(message, size, rules, &layout);
        if (accepted) take_rows(message, size, rules, &layout);
        putchar(accepted ? '1' : '0');
        free(message);
    }
    putchar('\n');
    free(rules);
    return 0;
}
