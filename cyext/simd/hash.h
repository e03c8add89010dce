/* SimHash as a matrix product whose epilogue packs signs.
 *
 * The projection is packed as [table block][bit][D][VW]: a lane is a table, so bits go straight into codes. Rows are
 * packed as [row tile][D][HASH_ROWS]. A sum runs over d in order in one accumulator: no result depends on tiling. */
#pragma once
#include "rows.h"

#define HASH_BLOCK 128 /* rows packed at once: 64 KB at D = 128, so they stay in the L2 cache */

static inline int table_blocks(int tables) { return (tables + VW - 1) / VW; }

static inline void pack_projection_block(const float *matrix, int D, int K, int L, int block, float *out) {
    for (int k = 0; k < K; k++)
        for (int d = 0; d < D; d++)
            for (int lane = 0; lane < VW; lane++) {
                int table = block * VW + lane;
                *out++ = table < L ? matrix[(int64_t)d * L * K + table * K + k] : 0.0f;
            }
}

/* n ≤ HASH_BLOCK keys → packed; missing rows of the last tile are zero. */
static inline void hash_pack(const row_t *rows, int n, int D, int type, float *out) {
    for (int r = 0; r < (n + HASH_ROWS - 1) / HASH_ROWS * HASH_ROWS; r++) {
        float *to = out + (int64_t)(r / HASH_ROWS) * D * HASH_ROWS + r % HASH_ROWS;
        const float scale = r < n && type == INT8 ? scale_at(rows[r], D) : 0;
        for (int d = 0; d < D; d++) {
            float x = 0;
            if (r < n && type == FLOAT32) memcpy(&x, rows[r] + 4 * d, 4);
            else if (r < n && type == INT8) x = scale * (float)((const int8_t *)rows[r])[d];
            else if (r < n) {
                uint16_t upper;
                memcpy(&upper, rows[r] + 2 * d, 2);
                uint32_t bits = (uint32_t)upper << 16;
                memcpy(&x, &bits, 4);
            }
            to[(int64_t)d * HASH_ROWS] = x;
        }
    }
}

/* Bit k of the codes [HASH_ROWS][VW] of `tables` neighbouring table blocks, for one tile of rows. */
static INLINE void hash_tile(const float *rows, const float *panel, int64_t stride,
        int D, int tables, const float *bias, int64_t bias_stride, int k, uint32_t *codes, int64_t code_stride,
        float *raw) {
    vf acc[HASH_ROWS][HASH_TABLES];
#pragma GCC unroll 8
    for (int r = 0; r < HASH_ROWS; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tables; t++) acc[r][t] = vf_set1(0);
    for (int d = 0; d < D; d++) {
        vf column[HASH_TABLES];
#pragma GCC unroll 4
        for (int t = 0; t < tables; t++) column[t] = vf_load(panel + t * stride + d * VW);
#pragma GCC unroll 8
        for (int r = 0; r < HASH_ROWS; r++) {
            vf x = vf_set1(rows[d * HASH_ROWS + r]);
#pragma GCC unroll 4
            for (int t = 0; t < tables; t++) acc[r][t] = vf_fma(x, column[t], acc[r][t]);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < tables; t++) {
        vf limit = vf_load(bias + t * bias_stride);
#pragma GCC unroll 8
        for (int r = 0; r < HASH_ROWS; r++) {
            if (raw) vf_store(raw + t * code_stride + r * VW, acc[r][t]);
            else vf_or_gt(codes + t * code_stride + r * VW, acc[r][t], limit, k);
        }
    }
}

/* Codes [tables][HASH_BLOCK][VW] (set to 0 before) of packed rows for `tables` ≤ HASH_TABLES neighbouring table blocks
 * that start at `panel`; bias is [table block][K][VW]. With `raw`, projections [K][tables][HASH_BLOCK][VW] instead. */
static OUTLINE void hash_tables(const float *rows, int n, const float *panel, int D, int K, int tables,
        const float *bias, uint32_t *codes, float *raw) {
    const int64_t stride = (int64_t)K * D * VW, plane = HASH_BLOCK * VW;
    for (int k = 0; k < K; k++)
        for (int r = 0; r < n; r += HASH_ROWS) {
            const float *tile = rows + (int64_t)r * D, *at = panel + (int64_t)k * D * VW;
            float *to = raw ? raw + (int64_t)k * tables * plane + r * VW : NULL;
            if (tables == HASH_TABLES)
                hash_tile(tile, at, stride, D, HASH_TABLES, bias + k * VW, K * VW, k, codes + r * VW, plane, to);
            else
                for (int t = 0; t < tables; t++)
                    hash_tile(tile, at + t * stride, stride, D, 1, bias + (t * K + k) * VW, K * VW, k,
                              codes + t * plane + r * VW, plane, to ? to + t * plane : NULL);
        }
}
