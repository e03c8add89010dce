/* What memory gives when nothing is computed: the measure for everything else. */
#pragma once
#include "rows.h"

/* Reads `bytes` bytes with vector loads; the sum keeps the compiler from leaving them out. */
static OUTLINE float read_bytes(const char *at, int64_t bytes) {
    vf sum[4] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
    const int64_t step = 16 * VW;
    int64_t i = 0;
    float out[4], rest = 0;
    for (; i + step <= bytes; i += step)
        UNROLL for (int v = 0; v < 4; v++) sum[v] = vf_add(sum[v], vf_load((const float *)(at + i) + v * VW));
    for (; i < bytes; i++) rest += at[i];
    vf_sum4(sum[0], sum[1], sum[2], sum[3], out);
    return out[0] + out[1] + out[2] + out[3] + rest;
}

/* Reads n rows in the order given, fetching `ahead` rows before their turn. */
static OUTLINE float read_tiles(const row_t *rows, int64_t n, int64_t row_bytes, int64_t ahead) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + ahead < n) {
            const char *at = rows[i + ahead];
            for (int64_t line = 0; line < row_bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
        }
        sum += read_bytes(rows[i], row_bytes);
    }
    return sum;
}
