/* Finding rows that share at least two codes with a query: by counting the ids of buckets, or by comparing codes. */
#pragma once
#include <stdint.h>
#include <string.h>

#define COUNTER_PASS 253 /* tables between two clampings: 2 + 253 hits still fit in a byte */

/* counters[id] += 1 for n ids; four ids per load. */
static inline void count_ids(uint8_t *counters, const uint16_t *ids, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        uint64_t four;
        memcpy(&four, ids + i, 8);
        counters[four & 0xffff]++;
        counters[four >> 16 & 0xffff]++;
        counters[four >> 32 & 0xffff]++;
        counters[four >> 48]++;
    }
    for (; i < n; i++) counters[ids[i]]++;
}

/* No counter above 2, so that another COUNTER_PASS tables cannot overflow it. */
static inline void counters_clamp(uint8_t *counters, int64_t n) {
    for (int64_t i = 0; i < n; i++) counters[i] = counters[i] < 2 ? counters[i] : 2;
}

/* Of n ≤ 64 rows with codes[table·stride + row], which equal the query's code in at least two of L tables, as bits. */
static inline uint64_t compare_codes(const uint16_t *codes, int64_t stride, int n, int L, const uint16_t *query) {
    uint16_t hits[64] = {0};
    uint64_t word = 0;
    if (n == 64)
        for (int l = 0; l < L; l++)
            for (int i = 0; i < 64; i++) hits[i] += codes[l * stride + i] == query[l];
    else
        for (int l = 0; l < L; l++)
            for (int i = 0; i < n; i++) hits[i] += codes[l * stride + i] == query[l];
    for (int i = 0; i < n; i++) word |= (uint64_t)(hits[i] >= 2) << i;
    return word;
}
