/* Stored rows and what is done with tiles of them: dot products, distances, weighted sums.
 *
 * A vector that meets rows (query, mean, accumulator) is "packed" for the row type: chunks of 2·VW elements, padded
 * with zeros. They keep their order, but for bfloat16 rows a chunk has its even elements first, then its odd ones,
 * which is how the registers come out of the decoding. Every row is summed in the same order wherever it stands. */
#pragma once
#include MAGICPIG_VEC
#include <stdint.h>
#include <string.h>

#define INLINE inline __attribute__((always_inline)) /* so that constant arguments select code */
#define OUTLINE __attribute__((noinline)) /* inlined into long functions, GCC 12 keeps accumulators in memory */
#define UNROLL _Pragma("GCC unroll 16") /* early enough for arrays of vectors to become registers */
#define TILE 64 /* rows at once: K of a tile stays in the L1 cache up to 512-byte rows, K and V in the L2 */
#define CHUNK (2 * VW)
#define MAX_PACKED 512 /* floats of the longest packed vector: head dims end at 512 */

typedef const char *row_t; /* address of K of one row; V follows half a row later */

typedef struct {
    const int64_t *blocks; /* addresses */
    int64_t block_rows;
    int64_t block_shift; /* log2 of block_rows, or −1 */
    int64_t row_bytes;
    int32_t head_dim;
    int32_t type;
} rows_t;

/* Types of rows. int8 values are followed by their scale, a bfloat16, in either half of a row. */
enum { BFLOAT16 = 0, FLOAT32 = 1, INT8 = 2 };

static INLINE int64_t value_bytes(int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }
static INLINE int64_t half_bytes(int head_dim, int type) {
    return head_dim * value_bytes(type) + (type == INT8 ? 2 : 0);
}

static inline row_t row_at(const rows_t *rows, int64_t head, int64_t row) {
    int64_t block = rows->block_shift >= 0 ? row >> rows->block_shift : (uint32_t)row / (uint32_t)rows->block_rows;
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
static inline void pack(const float *x, int head_dim, int type, float *out) {
    int length = packed_length(head_dim), d = 0;
    for (; d < length; d++) out[d] = 0;
    if (type != BFLOAT16) {
        memcpy(out, x, sizeof(float) * (size_t)head_dim);
        return;
    }
    for (d = 0; d + CHUNK <= head_dim; d += CHUNK)
        for (int i = 0; i < VW; i++) out[d + i] = x[d + 2 * i], out[d + VW + i] = x[d + 2 * i + 1];
    for (int i = 0; d + i < head_dim; i++) out[d + i % 2 * VW + i / 2] = x[d + i];
}

/* out += factor·x, x packed. */
static inline void add_packed(const float *x, int head_dim, int type, float factor, float *out) {
    int d = 0;
    if (type != BFLOAT16) {
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
static INLINE void load_chunk(const char *at, int left, int type, vf *a, vf *b) {
    if (left == CHUNK && type == FLOAT32) *a = vf_load((const float *)at), *b = vf_load((const float *)at + VW);
    else if (left == CHUNK && type == BFLOAT16) vf_load_bf16((const uint16_t *)at, a, b);
    else if (left == CHUNK) vf_load_int8((const int8_t *)at, a, b);
    else if (type == FLOAT32) vf_load_part((const float *)at, left, a, b);
    else if (type == BFLOAT16) vf_load_bf16_part((const uint16_t *)at, left, a, b);
    else {
        int8_t part[CHUNK] = {0};
        for (int i = 0; i < left; i++) part[i] = (int8_t)at[i];
        vf_load_int8(part, a, b);
    }
}

/* The scale behind the int8 values of half a row. */
static inline float scale_at(const char *half, int head_dim) {
    uint16_t upper;
    memcpy(&upper, half + head_dim, 2);
    uint32_t bits = (uint32_t)upper << 16;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

/* The upper half of a finite or infinite float's bits, rounded to nearest even. */
static inline uint16_t nearest_bf16(uint32_t bits) { return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }

/* K or V of a row from float32 values: as they are, or rounded to bfloat16, to nearest even. */
static inline void store_values(const float *x, int head_dim, int type, char *half) {
    if (type == FLOAT32) {
        memcpy(half, x, sizeof(float) * (size_t)head_dim);
        return;
    }
    for (int d = 0; d < head_dim; d++) {
        uint32_t bits;
        memcpy(&bits, x + d, 4);
        const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint16_t upper = is_nan ? 0x7fc0 : nearest_bf16(bits);
        memcpy(half + 2 * d, &upper, 2);
    }
}

static inline void prefetch(const char *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

/* Rows that will be read next, fetched line by line while others are worked on: memory is always busy, where it would
 * wait half of the time for bursts. They go to the L2 cache only: a tile would fill the L1 cache and its few miss
 * buffers (measured on Zen 4, one query head, 96k rows: 26 ns per row against 66). */
typedef struct {
    const char *at, *end; /* next line, end of its row */
    const row_t *rows;    /* the rows that come after it */
    int left;             /* how many */
    int done;             /* `at` is no line of a row any more */
    int turns;            /* of four heads each, in which they are fetched: a power of two; see rows_add_some */
    int64_t bytes;
} fetch_t;

static INLINE void fetch_row(fetch_t *fetch) {
    if (fetch->left) {
        const row_t row = *fetch->rows++;
        fetch->left--;
        fetch->at = (const char *)((uintptr_t)row & ~(uintptr_t)63), fetch->end = row + fetch->bytes;
    } else { /* from now on a line that is at hand: steps need not ask whether any are left */
        fetch->at = (const char *)fetch->rows, fetch->end = fetch->at + 1;
        fetch->done = 1;
    }
}

/* `turns`: how often what is at hand is read meanwhile, K and V. */
static inline void fetch_start(fetch_t *fetch, const row_t *rows, int n, int64_t bytes, int turns) {
    fetch->rows = rows, fetch->left = n, fetch->bytes = bytes, fetch->turns = 1, fetch->done = 0;
    while (2 * fetch->turns <= turns) fetch->turns *= 2;
    fetch_row(fetch);
}

/* The next line, if there is one. */
static INLINE void fetch_line(fetch_t *fetch) {
    __builtin_prefetch(fetch->at, 0, 2);
    fetch->at += 64;
    if (fetch->at >= fetch->end) fetch_row(fetch);
}

/* All lines that are left. */
static inline void fetch_rest(fetch_t *fetch) {
    while (!fetch->done) fetch_line(fetch);
}

/* A pass fetches while it goes over its rows, step by step, as many bytes as it reads: what is wanted at once waits for
 * the miss buffers of the L1 cache, and so do all loads behind it. Steps that have one of the bits returned here fetch
 * nothing: of four heads, which read less than a line in a step (`read` bytes), and in several turns. */
static INLINE int fetch_skips(const fetch_t *fetch, int heads, int64_t read) {
    return heads < 4 ? 0 : (int)(read < 64 ? 64 / read : 1) * fetch->turns - 1;
}

static INLINE int lines_read(int64_t read) { return read <= 64 ? 1 : (int)(read / 64); }

static INLINE void fetch_step(fetch_t *fetch, int64_t read) {
    UNROLL for (int i = 0; i < lines_read(read); i++) fetch_line(fetch);
}

/* What is summed over a row: its products with vectors, or the squares of its differences from one. ALIKE are products
 * summed in one order for any number of vectors; PRODUCTS take another one, with more chains, for a single vector. */
enum { PRODUCTS = 0, SQUARES = 1, ALIKE = 2 };

/* Rows at once: a chain of additions for each vector and row, 8 of them or more hide the latency of one. */
#define SUM_ROWS(heads) (VW < 16 && (heads) == 4 ? 2 : 4)

static INLINE void sum_rows(const float *x, int64_t stride, int heads, const row_t *at, int head_dim, int type,
        int what, fetch_t *fetch, int skips, float *out) {
    const int count = SUM_ROWS(heads);
    const int scaled = what == SQUARES && type == INT8;
    const int two = heads == 1 && !scaled && what != ALIKE; /* chains per row; scales need registers too */
    vf acc[4][4], scale[4];
    UNROLL for (int h = 0; h < heads + two; h++) UNROLL for (int i = 0; i < count; i++) acc[h][i] = vf_set1(0);
    if (scaled) UNROLL for (int i = 0; i < count; i++) scale[i] = vf_set1(-scale_at(at[i], head_dim));
    for (int d = 0; d < head_dim; d += CHUNK) {
        vf a[4], b[4];
        const int64_t offset = d * value_bytes(type);
        if (fetch && !(d / CHUNK & skips)) fetch_step(fetch, count * CHUNK * value_bytes(type));
        if (d + CHUNK <= head_dim)
            UNROLL for (int i = 0; i < count; i++) load_chunk(at[i] + offset, CHUNK, type, &a[i], &b[i]);
        else
            UNROLL for (int i = 0; i < count; i++) load_chunk(at[i] + offset, head_dim - d, type, &a[i], &b[i]);
        UNROLL for (int h = 0; h < heads; h++) {
            vf xa = vf_keep(vf_load(x + h * stride + d)), xb = vf_keep(vf_load(x + h * stride + d + VW));
            UNROLL for (int i = 0; i < count; i++) {
                vf ya = a[i], yb = b[i], fa = xa, fb = xb;
                if (what == SQUARES) {
                    ya = fa = type == INT8 ? vf_fma(scale[i], ya, xa) : vf_sub(ya, xa);
                    yb = fb = type == INT8 ? vf_fma(scale[i], yb, xb) : vf_sub(yb, xb);
                }
                acc[h][i] = vf_fma(ya, fa, acc[h][i]);
                if (two) acc[1][i] = vf_fma(yb, fb, acc[1][i]);
                else acc[h][i] = vf_fma(yb, fb, acc[h][i]);
            }
        }
    }
    if (two) UNROLL for (int i = 0; i < count; i++) acc[0][i] = vf_add(acc[0][i], acc[1][i]);
    if (count == 4)
        UNROLL for (int h = 0; h < heads; h++) vf_sum4(acc[h][0], acc[h][1], acc[h][2], acc[h][3], out + h * TILE);
    else
        UNROLL for (int h = 0; h < heads; h += 2) {
            float sums[4];
            vf_sum4(acc[h][0], acc[h][1], acc[h + 1][0], acc[h + 1][1], sums);
            memcpy(out + h * TILE, sums, 8), memcpy(out + (h + 1) * TILE, sums + 2, 8);
        }
}

static INLINE void sum_tile(const float *x, int64_t stride, int heads, const row_t *rows, int n, int head_dim, int type,
        int what, fetch_t *fetch, float *out) {
    const int count = SUM_ROWS(heads), skips = fetch_skips(fetch, heads, count * CHUNK * value_bytes(type));
    fetch_t ahead = *fetch; /* in registers */
    for (int r = 0; r < n; r += count) {
        row_t at[4];
        UNROLL for (int i = 0; i < count; i++) at[i] = rows[r + i < n ? r + i : n - 1];
        sum_rows(x, stride, heads, at, head_dim, type, what, &ahead, skips, out + r);
    }
    *fetch = ahead;
    if (type == INT8 && what == PRODUCTS)
        for (int r = 0; r < n; r++)
            for (int h = 0; h < heads; h++) out[h * TILE + r] *= scale_at(rows[r], head_dim);
}

/* One function per row type and number of vectors (1, 2 or 4), selected by constants. */
#define BY_TYPE(CALL, H) \
    switch (type) { \
        case BFLOAT16: CALL(H, BFLOAT16); break; \
        case FLOAT32: CALL(H, FLOAT32); break; \
        default: CALL(H, INT8); \
    }
#define BY_HEADS_AND_TYPE(CALL) \
    if (heads == 1) BY_TYPE(CALL, 1) \
    else if (heads == 2) BY_TYPE(CALL, 2) \
    else BY_TYPE(CALL, 4)

/* out[h][r] = Σ_d row_r[d]·x_h[d] for n ≤ TILE rows and `heads` vectors x that lie `stride` floats apart; out is
 * [heads][TILE]. */
static OUTLINE void rows_dot(const float *x, int64_t stride, int heads, const row_t *rows, int n, int head_dim,
        int type, fetch_t *fetch, float *out) {
#define DOT(H, T) sum_tile(x, stride, H, rows, n, head_dim, T, PRODUCTS, fetch, out)
    BY_HEADS_AND_TYPE(DOT)
#undef DOT
}

/* out[r] = Σ_d (row_r[d] − x[d])²; else as rows_dot. */
static OUTLINE void rows_distance(const float *x, const row_t *rows, int n, int head_dim, int type, fetch_t *fetch,
        float *out) {
#define DISTANCE(H, T) sum_tile(x, 0, H, rows, n, head_dim, T, SQUARES, fetch, out)
    BY_TYPE(DISTANCE, 1)
#undef DISTANCE
}

/* Rows of rows_measure at once: four, or where scales need registers too, two of two chains each. */
#define MEASURED(type) (VW < 16 && (type) == INT8 ? 2 : 4)

/* So many rows, decoded once. Without x only their products: rows_products. */
static INLINE void measure_rows(const float *x, const float *const *q, const row_t *at, int head_dim, int type,
        fetch_t *fetch, float *distances, float *products) {
    const int count = MEASURED(type), second = count == 2;
    const int64_t read = count * CHUNK * value_bytes(type);
    vf square[4], dot[4], scale[4], xa, xb; /* [count], then the second chains */
    float scales[4], sums[4];
    UNROLL for (int i = 0; i < 4; i++) square[i] = dot[i] = vf_set1(0);
    if (type == INT8)
        UNROLL for (int i = 0; i < count; i++) scales[i] = scale_at(at[i], head_dim), scale[i] = vf_set1(-scales[i]);
    for (int d = 0; d < head_dim; d += CHUNK) {
        const int64_t offset = d * value_bytes(type);
        if (x) xa = vf_keep(vf_load(x + d)), xb = vf_keep(vf_load(x + d + VW));
        fetch_step(fetch, read);
        UNROLL for (int i = 0; i < count; i++) {
            const int j = i + 2 * second;
            vf a, b;
            if (d + CHUNK <= head_dim) load_chunk(at[i] + offset, CHUNK, type, &a, &b);
            else load_chunk(at[i] + offset, head_dim - d, type, &a, &b);
            dot[i] = vf_fma(a, vf_load(q[i] + d), dot[i]);
            dot[j] = vf_fma(b, vf_load(q[i] + d + VW), dot[j]);
            if (!x) continue;
            const vf ya = type == INT8 ? vf_fma(scale[i], a, xa) : vf_sub(a, xa);
            const vf yb = type == INT8 ? vf_fma(scale[i], b, xb) : vf_sub(b, xb);
            square[i] = vf_fma(ya, ya, square[i]);
            square[j] = vf_fma(yb, yb, square[j]);
        }
    }
    if (second) {
        vf_sum4(vf_add(square[0], square[2]), vf_add(square[1], square[3]), vf_add(dot[0], dot[2]),
            vf_add(dot[1], dot[3]), sums);
        if (x) memcpy(distances, sums, 8);
        memcpy(products, sums + 2, 8);
    } else {
        if (x) vf_sum4(square[0], square[1], square[2], square[3], distances);
        vf_sum4(dot[0], dot[1], dot[2], dot[3], products);
    }
    if (type == INT8)
        for (int i = 0; i < count; i++) products[i] *= scales[i];
}

static INLINE void measure_tile(const float *x, const float *q, int64_t stride, const uint16_t *which,
        const row_t *rows, int n, int head_dim, int type, fetch_t *fetch, float *distances, float *products) {
    const int count = MEASURED(type);
    fetch_t ahead = *fetch; /* in registers */
    for (int r = 0; r < n; r += count) {
        row_t at[4];
        const float *own[4];
        UNROLL for (int i = 0; i < count; i++) {
            const int next = r + i < n ? r + i : n - 1;
            at[i] = rows[next], own[i] = q + which[next] * stride;
        }
        measure_rows(x, own, at, head_dim, type, &ahead, x ? distances + r : NULL, products + r);
    }
    *fetch = ahead;
}

/* distances[r] = Σ_d (row_r[d] − x[d])² and products[r] = Σ_d row_r[d]·q_h[d] with the vector h = which[r] of those
 * that lie `stride` floats apart. Three more of either may be written. */
static OUTLINE void rows_measure(const float *x, const float *q, int64_t stride, const uint16_t *which,
        const row_t *rows, int n, int head_dim, int type, fetch_t *fetch, float *distances, float *products) {
#define MEASURE(H, T) measure_tile(x, q, stride, which, rows, n, head_dim, T, fetch, distances, products)
    BY_TYPE(MEASURE, 1)
#undef MEASURE
}

/* The products alone, to the last bit the same. */
static OUTLINE void rows_products(const float *q, int64_t stride, const uint16_t *which, const row_t *rows, int n,
        int head_dim, int type, fetch_t *fetch, float *products) {
#define MEASURE(H, T) measure_tile(NULL, q, stride, which, rows, n, head_dim, T, fetch, NULL, products)
    BY_TYPE(MEASURE, 1)
#undef MEASURE
}

/* `chunks` chunks of rows_add in registers; the last has `left` elements. */
static INLINE void add_chunks(const float *p, int heads, const row_t *rows, const int32_t *which, int n, int64_t offset,
        int type, int chunks, int left, fetch_t *fetch, const float *factor, float *sum, int64_t stride) {
    const int64_t read = chunks * CHUNK * value_bytes(type);
    const int skips = which ? fetch->turns - 1 : fetch_skips(fetch, heads, read);
    fetch_t ahead = *fetch;
    vf acc[4][16];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < 2 * chunks; c++)
            acc[h][c] = vf_mul(vf_set1(factor[h]), vf_load(sum + h * stride + c * VW));
    for (int r = 0; r < n; r++) {
        UNROLL for (int c = 0; c < chunks; c++) {
            vf a, b;
            load_chunk(rows[which ? which[r] : r] + offset + c * CHUNK * value_bytes(type), left, type, &a, &b);
            UNROLL for (int h = 0; h < heads; h++) {
                vf weight = vf_set1(p[h * TILE + r]);
                acc[h][2 * c] = vf_fma(weight, a, acc[h][2 * c]);
                acc[h][2 * c + 1] = vf_fma(weight, b, acc[h][2 * c + 1]);
            }
        }
        if (!(r & skips)) fetch_step(&ahead, read);
    }
    *fetch = ahead;
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < 2 * chunks; c++) vf_store(sum + h * stride + c * VW, acc[h][c]);
}

/* A row in blocks of as many chunks as there are accumulators for: 8, or 16 where there are 32 registers. */
static INLINE void add_tile(float *p, int heads, const row_t *rows, const int32_t *which, int n, int head_dim, int type,
        fetch_t *fetch, const float *factor, float *sum, int64_t stride) {
    const int64_t width = value_bytes(type), value = half_bytes(head_dim, type);
    const int most = (VW < 16 ? 4 : 8) / heads;
    int d = 0;
    if (type == INT8)
        for (int r = 0; r < n; r++)
            for (int h = 0; h < heads; h++) p[h * TILE + r] *= scale_at(rows[which ? which[r] : r] + value, head_dim);
#define ADD_CHUNKS(COUNT) \
    for (; COUNT <= most && d + COUNT * CHUNK <= head_dim; d += COUNT * CHUNK) \
        add_chunks(p, heads, rows, which, n, value + d * width, type, COUNT, CHUNK, fetch, factor, sum + d, stride);
    ADD_CHUNKS(8)
    ADD_CHUNKS(4)
    ADD_CHUNKS(2)
    ADD_CHUNKS(1)
#undef ADD_CHUNKS
    if (d < head_dim)
        add_chunks(p, heads, rows, which, n, value + d * width, type, 1, head_dim - d, fetch, factor, sum + d, stride);
}

/* sum_h = factor_h·sum_h + Σ_r p[h][r]·V_r for `heads` packed sums `stride` floats apart; p, [heads][TILE], is used
 * up. */
static OUTLINE void rows_add(float *p, int heads, const row_t *rows, int n, int head_dim, int type, fetch_t *fetch,
        const float *factor, float *sum, int64_t stride) {
#define ADD(H, T) add_tile(p, H, rows, NULL, n, head_dim, T, fetch, factor, sum, stride)
    BY_HEADS_AND_TYPE(ADD)
#undef ADD
}

/* The same for rows[which[r]] and one or two heads. Every step fetches, or as many as there are turns. */
static OUTLINE void rows_add_some(float *p, int heads, const row_t *rows, const int32_t *which, int n, int head_dim,
        int type, fetch_t *fetch, const float *factor, float *sum, int64_t stride) {
#define ADD(H, T) add_tile(p, H, rows, which, n, head_dim, T, fetch, factor, sum, stride)
    if (heads == 1) BY_TYPE(ADD, 1)
    else BY_TYPE(ADD, 2)
#undef ADD
}

/* Σ x·y of packed vectors. */
static inline float packed_dot(const float *x, const float *y, int head_dim) {
    float out[4];
    vf sum = vf_set1(0);
    for (int d = 0; d < packed_length(head_dim); d += VW) sum = vf_fma(vf_load(x + d), vf_load(y + d), sum);
    vf_sum4(sum, sum, sum, sum, out);
    return out[0];
}
