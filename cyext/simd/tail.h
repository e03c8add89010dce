/* The uniform tail: rows that are taken whatever the query is, by a draw that hash seed, layer, kv head and row decide. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline uint64_t tail_mix(uint64_t x) { /* the finaliser of SplitMix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t tail_seed(uint64_t hash_seed, uint64_t layer, uint64_t kv_head) {
    uint64_t seed = tail_mix(hash_seed + (layer + 1) * 0x9e3779b97f4a7c15u);
    return tail_mix(seed + (kv_head + 1) * 0x9e3779b97f4a7c15u);
}

/* Which of 64 hashes are below a limit < 2^32, as bits: eight bytes of 0 or 1 become eight bits by one product. */
static inline uint64_t hashes_below(const uint32_t *hash, uint32_t limit) {
    uint8_t flags[64];
    uint64_t word = 0, eight;
    for (int i = 0; i < 64; i++) flags[i] = hash[i] < limit;
    for (int i = 0; i < 8; i++) {
        memcpy(&eight, flags + 8 * i, 8);
        word |= (eight * 0x0102040810204080u >> 56) << 8 * i;
    }
    return word;
}

/* bits[h·words + word] = which of rows [first, first + n), in words of 64, have a hash below limits[h] ≤ 2^32, for
 * `heads` heads, which share the hash. */
static inline void tail_words(int64_t first, int64_t n, uint64_t seed, const uint64_t *limits, int heads,
        uint64_t *bits, int64_t words) {
    const uint32_t add = (uint32_t)seed, flip = (uint32_t)(seed >> 32);
    for (int64_t done = 0; done < n; done += 64) {
        const uint64_t valid = n - done < 64 ? ((uint64_t)1 << (n - done)) - 1 : ~(uint64_t)0;
        uint32_t hash[64], least = ~(uint32_t)0;
        for (int i = 0; i < 64; i++) {
            uint32_t x = (uint32_t)(first + done) + (uint32_t)i + add; /* "lowbias32" of C. Wellons */
            x = (x ^ x >> 16) * 0x7feb352du;
            x = (x ^ x >> 15) * 0x846ca68bu;
            hash[i] = x ^ x >> 16 ^ flip;
        }
        for (int i = 0; i < 64; i++) least = hash[i] < least ? hash[i] : least;
        for (int h = 0; h < heads; h++) {
            uint64_t word = 0;
            if (h && limits[h] == limits[h - 1]) word = bits[(h - 1) * words + done / 64];
            else if (limits[h] >> 32) word = ~(uint64_t)0;
            else if (least < limits[h]) word = hashes_below(hash, (uint32_t)limits[h]);
            bits[h * words + done / 64] = word & valid;
        }
    }
}
