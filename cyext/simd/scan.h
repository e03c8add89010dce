/* Walks the rows that some query head of a group has sampled, tile by tile, and says which of a tile are whose. Words
 * have few bits, and how many varies: a branch for each costs more than taking some that are not there. */
#pragma once
#include "rows.h"
#ifdef __BMI2__
#include <immintrin.h>
#endif

static inline int lowest_bit(uint64_t word) { return __builtin_ctzll(word); }
static inline int count_bits(uint64_t word) { return __builtin_popcountll(word); }

/* The bits of `word` where `mask` has some, without gaps. */
static inline uint64_t compact_bits(uint64_t word, uint64_t mask) {
#ifdef __BMI2__
    return _pext_u64(word, mask);
#else
    uint64_t out = 0;
    for (int i = 0; mask; i++, mask &= mask - 1) out |= (word >> lowest_bit(mask) & 1) << i;
    return out;
#endif
}

typedef struct {
    const uint64_t *bits; /* [heads][words] */
    int64_t words;
    int heads;
    int64_t word, end;
    uint64_t left; /* rows of the word that are still to come */
} scan_t;

#define AT_ONCE 8 /* rows of a word that are taken without a branch */

/* Rows of a scan, in order: up to TILE, as many as there are bits in `taken`, of one word after the other. */
typedef struct {
    int n, words;
    int64_t word[TILE];
    uint64_t taken[TILE];
    int64_t ids[TILE + AT_ONCE];
} taken_t;

static inline void scan_start(scan_t *scan, const uint64_t *bits, int64_t words, int heads, int64_t start, int64_t stop) {
    scan->bits = bits, scan->words = words, scan->heads = heads, scan->left = 0;
    scan->word = start / 64 - 1, scan->end = (stop + 63) / 64;
}

/* The next rows of a scan; none are left if n is 0. */
static inline void scan_take(scan_t *scan, taken_t *tile) {
    int n = 0, words = 0;
    for (int h = 0; h < scan->heads; h++) /* of the next tiles: behind lines of rows they would be waited for */
        for (int64_t word = scan->word + 24; word < scan->word + 48; word += 8)
            __builtin_prefetch(scan->bits + h * scan->words + word);
    while (n < TILE) {
        while (!scan->left && ++scan->word < scan->end)
            for (int h = 0; h < scan->heads; h++) scan->left |= scan->bits[h * scan->words + scan->word];
        if (!scan->left) break;
        uint64_t left = scan->left, rest = 0;
        int count = count_bits(left);
        if (n + count > TILE) {
            count = TILE - n, rest = left;
            for (int i = 0; i < count; i++) rest &= rest - 1;
            left ^= rest;
        }
        scan->left = rest;
        tile->word[words] = scan->word, tile->taken[words++] = left;
        for (int i = 0; i < count; i += AT_ONCE)
            for (int j = 0; j < AT_ONCE; j++, left &= left - 1)
                tile->ids[n + i + j] = scan->word * 64 + lowest_bit(left | (uint64_t)1 << 63);
        n += count;
    }
    tile->n = n, tile->words = words;
}

/* The rows of a tile, its first as the lowest bit, that are set in `bits` [words]. */
static inline uint64_t rows_of_head(const taken_t *tile, const uint64_t *bits) {
    uint64_t rows = 0;
    for (int i = 0, n = 0; i < tile->words; n += count_bits(tile->taken[i++]))
        rows |= compact_bits(bits[tile->word[i]], tile->taken[i]) << n;
    return rows;
}

/* Positions of the bits of a word; returns how many. */
static inline int list_bits(uint64_t word, uint8_t *out) {
    const int n = count_bits(word);
    for (int i = 0; i < n; i++, word &= word - 1) out[i] = (uint8_t)lowest_bit(word);
    return n;
}
