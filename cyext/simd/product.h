/* A few vectors times stored weights [n, K], which memory bounds: rows are read once for up to four vectors. */
#pragma once
#include "int4.h"

#define PRODUCT_BYTES 32768 /* of weights in an item: 2 to 4 µs of one core */
#define AHEAD_BYTES 4096    /* read before their turn, rows of any length following each other */

enum { INT4 = 3 }; /* a type of weights that rows of a cache do not have: int4.h */

typedef struct {
    const char *weight;    /* [N][K], rows without gaps */
    const uint16_t *scale; /* int8: of each row, bfloat16; INT4: [N][K/32][2] float16; else NULL */
    int64_t N;
    float *out;            /* [vectors][N] */
} product_t;

static inline float from_bf16(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static INLINE int64_t weight_bytes(int64_t K, int type) {
    return type == INT4 ? int4_code_bytes(K) + 2 * int4_factors(K) : K * value_bytes(type);
}

/* A vector as weights of the type take it, so many floats long; out is zero before. */
static inline int64_t vector_length(int64_t K, int type) {
    return type == INT4 ? quads(K) * (int64_t)(sizeof(int4_quad_t) / sizeof(float)) : packed_length((int)K);
}
static inline void pack_vector(const float *x, int64_t K, int type, float *out) {
    if (type == INT4) pack_quads(x, K, (int4_quad_t *)out);
    else pack(x, (int)K, type, out);
}

static INLINE void int4_rows(const product_t *p, int64_t first, int64_t last, int64_t K, const int4_quad_t *x,
        int64_t stride, int heads, int count, float *out) {
    const int64_t code_bytes = int4_code_bytes(K), row_factors = int4_factors(K);
    for (int64_t r = first; r < last; r++) {
        const uint8_t *codes = (const uint8_t *)p->weight + r * code_bytes;
        const uint16_t *factors = p->scale + r * row_factors;
        float sums[4];
        for (int64_t i = 0; i < code_bytes; i += 64) __builtin_prefetch(codes + AHEAD_BYTES + i);
        for (int64_t i = 0; i < row_factors; i += 32) __builtin_prefetch(factors + AHEAD_BYTES / 8 + i);
        int4_row(codes, factors, K, x, stride, heads, sums);
        for (int m = 0; m < count; m++) out[m * p->N + r] = sums[m];
    }
}

/* out[m][r] = Σ_k W_r[k]·x_m[k] for rows [first, last) and the first `count` of `heads` vectors x. */
static INLINE void product_rows(const product_t *p, int64_t first, int64_t last, int64_t K, int type, const float *x,
        int64_t packed, int heads, int count, float *out) {
    const int step = SUM_ROWS(heads);
    const int64_t row_bytes = K * value_bytes(type);
    for (int64_t r = first; r < last; r += step) {
        row_t at[4];
        float sums[4 * TILE];
        UNROLL for (int i = 0; i < step; i++) at[i] = p->weight + (r + i < last ? r + i : last - 1) * row_bytes;
        for (int64_t i = 0; i < step * row_bytes; i += 64) __builtin_prefetch(at[0] + AHEAD_BYTES + i);
        sum_rows(x, packed, heads, at, (int)K, type, ALIKE, NULL, 0, sums);
        for (int i = 0; i < step && r + i < last; i++) {
            const float scale = p->scale ? from_bf16(p->scale[r + i]) : 1.0f;
            for (int m = 0; m < count; m++) out[m * p->N + r + i] = scale * sums[m * TILE + i];
        }
    }
}

/* x: up to four vectors, packed for the type, `packed` floats apart; three are followed by a fourth of any numbers. */
static OUTLINE void product(const product_t *p, int64_t first, int64_t last, int64_t K, int type, const float *x,
        int64_t packed, int count, float *out) {
    const int heads = count == 3 ? 4 : count;
#define INT4_PRODUCT(H) int4_rows(p, first, last, K, (const int4_quad_t *)x, quads(K), H, count, out)
    if (type == INT4) {
        if (heads == 1) INT4_PRODUCT(1);
        else if (heads == 2) INT4_PRODUCT(2);
        else INT4_PRODUCT(4);
        return;
    }
#undef INT4_PRODUCT
#define PRODUCT(H, T) product_rows(p, first, last, K, T, x, packed, H, count, out)
    BY_HEADS_AND_TYPE(PRODUCT)
#undef PRODUCT
}
