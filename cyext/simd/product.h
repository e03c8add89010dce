/* A few vectors times stored weights [n, K], which memory bounds: rows are read once for up to four vectors. */
#pragma once
#include "rows.h"

#define PRODUCT_BYTES 32768 /* of weights in an item: 2 to 4 µs of one core */
#define AHEAD_BYTES 4096    /* read before their turn, rows of any length following each other */

typedef struct {
    const char *weight;    /* [N][K], rows without gaps */
    const uint16_t *scale; /* of each row, bfloat16; NULL where values are what they say */
    int64_t N;
    float *out;            /* [vectors][N] */
} product_t;

static inline float from_bf16(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
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
        sum_rows(x, packed, heads, at, (int)K, type, ALIKE, sums);
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
#define PRODUCT(H, T) product_rows(p, first, last, K, T, x, packed, H, count, out)
    BY_HEADS_AND_TYPE(PRODUCT)
#undef PRODUCT
}
