/* Stored rows and what is done with tiles of them: dot products, distances, weighted sums.
 *
 * A vector that meets rows (query, mean, accumulator) is "packed" for the row type: chunks of 2·VW elements, padded
 * with zeros. float32 rows keep their order; a chunk of bfloat16 rows has its even elements first, then its odd ones,
 * which is how the registers come out of the decoding. Every row is summed in the same order wherever it stands. */
#pragma once
#include MAGICPIG_VEC
#include <stdint.h>
#include <string.h>

#define INLINE inline __attribute__((always_inline)) /* so that constant arguments select code */
#define OUTLINE __attribute__((noinline)) /* inlined into long functions, GCC 12 keeps accumulators in memory */
#define UNROLL _Pragma("GCC unroll 8") /* early enough for arrays of vectors to become registers */
#define TILE 32 /* rows at once: K and V of a tile stay in the L1 cache up to 512-byte rows */
#define CHUNK (2 * VW)
#define MAX_PACKED 512 /* floats of the longest packed vector: head dims end at 512 */

typedef const char *row_t; /* address of K of one row; V follows D elements later */

typedef struct {
    const int64_t *blocks; /* addresses */
    int64_t block_rows;
    int64_t row_bytes;
    int32_t head_dim;
    int32_t wide; /* float32, otherwise bfloat16 */
} rows_t;

static inline row_t row_at(const rows_t *rows, int64_t head, int64_t row) {
    uint32_t block = (uint32_t)row / (uint32_t)rows->block_rows; /* 32-bit division: 3 times faster */
    int64_t within = row - block * rows->block_rows;
    return (row_t)(intptr_t)rows->blocks[block] + (head * rows->block_rows + within) * rows->row_bytes;
}

/* Addresses of n consecutive rows. */
static inline void rows_from(const rows_t *rows, int64_t head, int64_t first, int n, row_t *out) {
    for (int done = 0; done < n;) {
        int64_t left = rows->block_rows - (first + done) % rows->block_rows;
        row_t at = row_at(rows, head, first + done);
        for (; left > 0 && done < n; left--, at += rows->row_bytes) out[done++] = at;
    }
}

static inline int packed_length(int head_dim) { return (head_dim + CHUNK - 1) / CHUNK * CHUNK; }

/* x → packed. */
static inline void pack(const float *x, int head_dim, int wide, float *out) {
    int length = packed_length(head_dim), d = 0;
    for (; d < length; d++) out[d] = 0;
    if (wide) {
        memcpy(out, x, sizeof(float) * (size_t)head_dim);
        return;
    }
    for (d = 0; d + CHUNK <= head_dim; d += CHUNK)
        for (int i = 0; i < VW; i++) out[d + i] = x[d + 2 * i], out[d + VW + i] = x[d + 2 * i + 1];
    for (int i = 0; d + i < head_dim; i++) out[d + i % 2 * VW + i / 2] = x[d + i];
}

/* out += factor·x, x packed. */
static inline void add_packed(const float *x, int head_dim, int wide, float factor, float *out) {
    int d = 0;
    if (wide) {
        for (; d < head_dim; d++) out[d] += factor * x[d];
        return;
    }
    for (; d + CHUNK <= head_dim; d += CHUNK)
        for (int i = 0; i < VW; i++) {
            out[d + 2 * i] += factor * x[d + i];
            out[d + 2 * i + 1] += factor * x[d + VW + i];
        }
    for (int i = 0; d + i < head_dim; i++) out[d + i] += factor * x[d + i % 2 * VW + i / 2];
}

/* A chunk of a row, or its first `left` elements and zeros: what lies behind a row may be no number, or no memory. */
static INLINE void load_chunk(const char *at, int left, int wide, vf *a, vf *b) {
    if (left == CHUNK && wide) *a = vf_load((const float *)at), *b = vf_load((const float *)at + VW);
    else if (left == CHUNK) vf_load_bf16((const uint16_t *)at, a, b);
    else if (wide) vf_load_part((const float *)at, left, a, b);
    else vf_load_bf16_part((const uint16_t *)at, left, a, b);
}

static inline void prefetch(const char *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

/* Rows go to the L2 cache only: a tile would fill the L1 cache and its few miss buffers (measured on Zen 4, one query
 * head, 96k rows: 26 ns per row against 66; sampled rows 30% faster). Id lists are shorter and belong into the L1. */
static inline void prefetch_row(const char *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* What is summed over a row: its products with one or two vectors, or the squares of its differences from one. */
enum { PRODUCTS = 1, PRODUCTS_OF_TWO = 2, SQUARES = 3 };

static INLINE void sum_chunk(const float *x, int64_t stride, const row_t *at, int64_t offset, int left, int wide,
        int what, vf *first, vf *second) {
    vf xa = vf_load(x), xb = vf_load(x + VW), ya = xa, yb = xb;
    if (what == PRODUCTS_OF_TWO) ya = vf_load(x + stride), yb = vf_load(x + stride + VW);
    UNROLL for (int i = 0; i < 4; i++) {
        vf a, b;
        load_chunk(at[i] + offset, left, wide, &a, &b);
        if (what == SQUARES) {
            a = vf_sub(a, xa), b = vf_sub(b, xb);
            first[i] = vf_fma(a, a, first[i]), second[i] = vf_fma(b, b, second[i]);
        } else if (what == PRODUCTS) {
            first[i] = vf_fma(a, xa, first[i]), second[i] = vf_fma(b, xb, second[i]);
        } else {
            first[i] = vf_fma(b, xb, vf_fma(a, xa, first[i])), second[i] = vf_fma(b, yb, vf_fma(a, ya, second[i]));
        }
    }
}

static INLINE void rows_sums(const float *x, int64_t stride, const row_t *rows, int n, int head_dim, int wide,
        int what, const row_t *ahead, int64_t skip, int64_t bytes, float *out) {
    const int width = wide ? 4 : 2;
    for (int r = 0; r < n; r += 4) {
        row_t at[4];
        vf first[4], second[4]; /* two chains of additions per row hide the latency of one */
        int d = 0;
        UNROLL for (int i = 0; i < 4; i++) {
            at[i] = rows[r + i < n ? r + i : n - 1];
            first[i] = second[i] = vf_set1(0);
            if (ahead) prefetch_row(ahead[r + i < n ? r + i : n - 1] + skip, bytes);
        }
        for (; d + CHUNK <= head_dim; d += CHUNK)
            sum_chunk(x + d, stride, at, (int64_t)d * width, CHUNK, wide, what, first, second);
        if (d < head_dim)
            sum_chunk(x + d, stride, at, (int64_t)d * width, head_dim - d, wide, what, first, second);
        if (what == PRODUCTS_OF_TWO) vf_sum4(second[0], second[1], second[2], second[3], out + TILE + r);
        else UNROLL for (int i = 0; i < 4; i++) first[i] = vf_add(first[i], second[i]);
        vf_sum4(first[0], first[1], first[2], first[3], out + r);
    }
}

/* out[r] = Σ_d row_r[d]·x[d] for n ≤ TILE rows and `count` (1 or 2) vectors x that lie `stride` floats apart; out is
 * [count][TILE]. While at it, `bytes` at ahead[r] + skip are prefetched, if ahead is given. */
static OUTLINE void rows_dot(const float *x, int64_t stride, int count, const row_t *rows, int n, int head_dim,
        int wide, const row_t *ahead, int64_t skip, int64_t bytes, float *out) {
    if (count == 1 && wide) rows_sums(x, stride, rows, n, head_dim, 1, PRODUCTS, ahead, skip, bytes, out);
    else if (count == 1) rows_sums(x, stride, rows, n, head_dim, 0, PRODUCTS, ahead, skip, bytes, out);
    else if (wide) rows_sums(x, stride, rows, n, head_dim, 1, PRODUCTS_OF_TWO, ahead, skip, bytes, out);
    else rows_sums(x, stride, rows, n, head_dim, 0, PRODUCTS_OF_TWO, ahead, skip, bytes, out);
}

/* out[r] = Σ_d (row_r[d] − x[d])²; else as rows_dot. */
static OUTLINE void rows_distance(const float *x, const row_t *rows, int n, int head_dim, int wide, const row_t *ahead,
        int64_t skip, int64_t bytes, float *out) {
    if (wide) rows_sums(x, 0, rows, n, head_dim, 1, SQUARES, ahead, skip, bytes, out);
    else rows_sums(x, 0, rows, n, head_dim, 0, SQUARES, ahead, skip, bytes, out);
}

/* `chunks` chunks of rows_add in registers; the last has `left` elements. */
static INLINE void add_chunks(const float *p, int count, const row_t *rows, int n, int64_t offset, int wide,
        int chunks, int left, const row_t *ahead, int64_t bytes, const float *factor, float *sum, int64_t stride) {
    vf acc[2][8];
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int c = 0; c < 2 * chunks; c++)
            acc[q][c] = vf_mul(vf_set1(factor[q]), vf_load(sum + q * stride + c * VW));
    for (int r = 0; r < n; r++) {
        const char *at = rows[r] + offset;
        if (ahead) prefetch_row(ahead[r] + bytes, bytes);
        UNROLL for (int c = 0; c < chunks; c++) {
            vf a, b;
            load_chunk(at + c * CHUNK * (wide ? 4 : 2), left, wide, &a, &b);
            UNROLL for (int q = 0; q < count; q++) {
                vf weight = vf_set1(p[q * TILE + r]);
                acc[q][2 * c] = vf_fma(weight, a, acc[q][2 * c]);
                acc[q][2 * c + 1] = vf_fma(weight, b, acc[q][2 * c + 1]);
            }
        }
    }
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int c = 0; c < 2 * chunks; c++) vf_store(sum + q * stride + c * VW, acc[q][c]);
}

static INLINE void rows_add_typed(const float *p, int count, const row_t *rows, int n, int head_dim, int wide,
        const row_t *ahead, const float *factor, float *sum, int64_t stride) {
    const int64_t width = wide ? 4 : 2, value = head_dim * width;
    const int chunks = 4 / count; /* 8 accumulators */
    int d = 0;
    for (; d + chunks * CHUNK <= head_dim; d += chunks * CHUNK)
        add_chunks(p, count, rows, n, value + d * width, wide, chunks, CHUNK, d ? NULL : ahead, value, factor, sum + d, stride);
    for (; d + CHUNK <= head_dim; d += CHUNK)
        add_chunks(p, count, rows, n, value + d * width, wide, 1, CHUNK, d ? NULL : ahead, value, factor, sum + d, stride);
    if (d < head_dim)
        add_chunks(p, count, rows, n, value + d * width, wide, 1, head_dim - d, d ? NULL : ahead, value, factor, sum + d, stride);
}

/* sum = factor·sum + Σ_r p[r]·V_r for `count` (1 or 2) packed sums `stride` floats apart; p is [count][TILE]. While at
 * it, the values of the rows `ahead` are prefetched, if given: spread over the work, not in one burst (25% faster). */
static OUTLINE void rows_add(const float *p, int count, const row_t *rows, int n, int head_dim, int wide,
        const row_t *ahead, const float *factor, float *sum, int64_t stride) {
    if (count == 1 && wide) rows_add_typed(p, 1, rows, n, head_dim, 1, ahead, factor, sum, stride);
    else if (count == 1) rows_add_typed(p, 1, rows, n, head_dim, 0, ahead, factor, sum, stride);
    else if (wide) rows_add_typed(p, 2, rows, n, head_dim, 1, ahead, factor, sum, stride);
    else rows_add_typed(p, 2, rows, n, head_dim, 0, ahead, factor, sum, stride);
}

/* Σ x·y of packed vectors. */
static inline float packed_dot(const float *x, const float *y, int head_dim) {
    float out[4];
    vf sum = vf_set1(0);
    for (int d = 0; d < packed_length(head_dim); d += VW) sum = vf_fma(vf_load(x + d), vf_load(y + d), sum);
    vf_sum4(sum, sum, sum, sum, out);
    return out[0];
}
