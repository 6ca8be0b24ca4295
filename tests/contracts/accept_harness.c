/* Feeds messages to accept.c, each in a block of exactly its size, so that a sanitizer sees any step beyond it. */
#include <stdio.h>
#include <stdlib.h>

#include "accept.c"

static void *read_exactly(FILE *file, size_t size) {
    void *block = malloc(size ? size : 1);
    if (!block || fread(block, 1, size, file) != size) exit(2);
    return block;
}

/* Standard input: the rules, then each message behind its size in four bytes. Output: a line of 0 and 1. */
int main(void) {
    struct rules *rules = read_exactly(stdin, sizeof *rules);
    uint32_t size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        struct layout layout;
        uint8_t *message = read_exactly(stdin, size);
        putchar(tokenbus_accepts(message, size, rules, &layout) ? '1' : '0');
        free(message);
    }
    putchar('\n');
    free(rules);
    return 0;
}
