/* Walks the rows that some query head of a group has sampled, tile by tile, and says which of a tile are whose. Words
 * have few bits, and how many varies: a branch for each costs more than taking some that are not there. */
#pragma once
#include "rows.h"
#ifdef __BMI2__
#include <immintrin.h>
#endif

static inline int lowest_bit(uint64_t word) { return __builtin_ctzll(word); }
/* The lowest bit, or any number if there is none. */
static inline int first_bit(uint64_t word) {
#ifdef __BMI__
    return (int)_tzcnt_u64(word);
#else
    return lowest_bit(word | (uint64_t)1 << 63);
#endif
}
static inline int highest_bit(uint64_t word) { return 63 - __builtin_clzll(word); }
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
    const rows_t *rows;
    int64_t kv_head, start;         /* the first bit is of this row */
    int64_t block_first, block_end; /* bits of rows of the block at hand */
    row_t origin;                   /* the address that bit 0 would have, were it in that block */
} scan_t;

#define AT_ONCE 8 /* rows of a word that are taken without a branch */

/* Rows of a scan, in order: up to TILE. */
typedef struct {
    int n;
    row_t rows[TILE + AT_ONCE];
    int32_t ids[TILE + AT_ONCE]; /* numbers of their bits, where somebody wants them */
} taken_t;

static inline void scan_start(scan_t *scan, const uint64_t *bits, int64_t words, int heads, int64_t first, int64_t stop,
        const rows_t *rows, int64_t kv_head, int64_t start) {
    scan->bits = bits, scan->words = words, scan->heads = heads, scan->left = 0;
    scan->word = first / 64 - 1, scan->end = (stop + 63) / 64;
    scan->rows = rows, scan->kv_head = kv_head, scan->start = start;
    scan->block_first = scan->block_end = 0;
}

/* The row of a bit. Others of its block then stand at fixed distances from `origin`. */
static inline row_t scan_row(scan_t *scan, int64_t bit) {
    const rows_t *rows = scan->rows;
    if (bit < scan->block_first || bit >= scan->block_end) {
        const int64_t row = scan->start + bit;
        scan->block_first = bit - row % rows->block_rows, scan->block_end = scan->block_first + rows->block_rows;
        scan->origin = row_at(rows, scan->kv_head, row) - bit * rows->row_bytes;
    }
    return scan->origin + bit * rows->row_bytes;
}

/* The next rows of a scan; none are left if n is 0. sampled [heads]: which of them are whose, the first as lowest bit. */
static INLINE void take_rows(scan_t *scan, int heads, int with_ids, taken_t *tile, uint64_t *sampled) {
    const uint64_t *bits = scan->bits;
    const int64_t row_bytes = scan->rows->row_bytes, words = scan->words, end = scan->end;
    uint64_t left = scan->left;
    int64_t word = scan->word;
    int n = 0;
    for (int h = 0; h < heads; h++) { /* of the next tiles: behind lines of rows they would be waited for */
        sampled[h] = 0;
        for (int64_t later = word + 24; later < word + 48; later += 8)
            __builtin_prefetch(bits + h * words + later);
    }
    while (n < TILE) {
        uint64_t rest = 0;
        while (!left && ++word < end)
            for (int h = 0; h < heads; h++) left |= bits[h * words + word];
        if (!left) break;
        int count = count_bits(left);
        if (n + count > TILE) {
            count = TILE - n, rest = left;
            for (int i = 0; i < count; i++) rest &= rest - 1;
            left ^= rest;
        }
        for (int h = 0; h < heads; h++) sampled[h] |= compact_bits(bits[h * words + word], left) << n;
        const int64_t id = word * 64;
        scan_row(scan, id + lowest_bit(left));
        if (id + highest_bit(left) < scan->block_end) {
            const row_t first = scan->origin + id * row_bytes;
            for (int i = 0; i < count; i += AT_ONCE)
                for (int j = n + i; j < n + i + AT_ONCE; j++, left &= left - 1) {
                    const int64_t bit = first_bit(left);
                    row_t at = first + bit * row_bytes;
                    __asm__("" : "+r"(at)); /* vectors of them take longer */
                    tile->rows[j] = at;
                    if (with_ids) tile->ids[j] = (int32_t)(id + bit);
                }
        } else
            for (int j = n; left; j++, left &= left - 1) {
                tile->ids[j] = (int32_t)id + lowest_bit(left);
                tile->rows[j] = scan_row(scan, tile->ids[j]);
            }
        left = rest;
        n += count;
    }
    scan->left = left, scan->word = word, tile->n = n;
}

static OUTLINE void scan_take(scan_t *scan, int with_ids, taken_t *tile, uint64_t *sampled) {
    if (scan->heads == 4) {
        if (with_ids) take_rows(scan, 4, 1, tile, sampled);
        else take_rows(scan, 4, 0, tile, sampled);
    } else
        take_rows(scan, scan->heads, with_ids, tile, sampled);
}

#ifndef HAS_LIST_BITS
/* Positions of the bits of a word, twice; returns how many. All 64 may be written. */
static inline int list_bits(uint64_t word, int32_t *a, int32_t *b) {
    const int n = count_bits(word);
    for (int i = 0; i < n; i++, word &= word - 1) a[i] = b[i] = lowest_bit(word);
    return n;
}
#endif
