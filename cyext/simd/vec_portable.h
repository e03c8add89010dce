/* Vectors of 4 floats in the compiler's own vector extension: runs on any x86-64 and aarch64. No fused
 * multiply-add, so a projection that is zero within rounding may get another sign than on the other tiers. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define VW 4
#define HASH_ROWS 4 /* accumulators of the hash kernel: HASH_ROWS × HASH_TABLES of 16 registers */
#define HASH_TABLES 2

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

static inline vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf vf_set1(float x) { return (vf){x, x, x, x}; }
/* The value, in a register where that needs to be said */
static inline vf vf_keep(vf a) { return a; }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_sqrt(vf a) { return (vf){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
/* a·b + c */
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
/* x where a > b, else y; y also where a or b is not a number */
static inline vf vf_gt(vf a, vf b, vf x, vf y) {
    vi m = (vi)(a > b);
    return (vf)((m & (vi)x) | (~m & (vi)y));
}
/* The larger, the smaller; b where a is not a number. */
static inline vf vf_max(vf a, vf b) { return vf_gt(a, b, a, b); }
static inline vf vf_min(vf a, vf b) { return vf_gt(b, a, a, b); }
/* bit k of every lane set where a > b */
static inline void vf_or_gt(uint32_t *codes, vf a, vf b, int k) {
    vi v;
    memcpy(&v, codes, sizeof v);
    v |= (vi)(a > b) & (vi){1 << k, 1 << k, 1 << k, 1 << k};
    memcpy(codes, &v, sizeof v);
}
/* y·2^n, n the integer in the low bits of t = n + 1.5·2^23 */
static inline vf vf_ldexp(vf y, vf t) { return (vf)((vu)y + ((vu)t << 23)); }
/* 2·VW bfloat16 as the even and the odd elements */
static inline void vf_load_bf16(const uint16_t *p, vf *even, vf *odd) {
    vu v;
    memcpy(&v, p, sizeof v);
    *even = (vf)(v << 16);
    *odd = (vf)(v & 0xffff0000u);
}
/* 2·VW int8 in their order */
static inline void vf_load_int8(const int8_t *p, vf *first, vf *second) {
    *first = (vf){p[0], p[1], p[2], p[3]};
    *second = (vf){p[4], p[5], p[6], p[7]};
}
/* The first n < 2·VW elements, then zeros. */
static inline void vf_load_part(const float *p, int n, vf *first, vf *second) {
    float part[2 * VW] = {0};
    for (int i = 0; i < n; i++) part[i] = p[i];
    *first = vf_load(part);
    *second = vf_load(part + VW);
}
static inline void vf_load_bf16_part(const uint16_t *p, int n, vf *even, vf *odd) {
    uint16_t part[2 * VW] = {0};
    for (int i = 0; i < n; i++) part[i] = p[i];
    vf_load_bf16(part, even, odd);
}
/* The sums of the lanes of four vectors, each in the same order. */
static inline void vf_sum4(vf a, vf b, vf c, vf d, float *out) {
    out[0] = (a[0] + a[1]) + (a[2] + a[3]);
    out[1] = (b[0] + b[1]) + (b[2] + b[3]);
    out[2] = (c[0] + c[1]) + (c[2] + c[3]);
    out[3] = (d[0] + d[1]) + (d[2] + d[3]);
}
/* base[index[i]] */
static inline vf vf_pick(const float *base, const int32_t *index) {
    return (vf){base[index[0]], base[index[1]], base[index[2]], base[index[3]]};
}
/* base[index[which[i]]] */
static inline vf vf_pick_by(const float *base, const int32_t *index, const int32_t *which) {
    return (vf){base[index[which[0]]], base[index[which[1]]], base[index[which[2]]], base[index[which[3]]]};
}
/* Positions among uniform cells → values of the table [cells + 1], by linear interpolation. */
static inline vf vf_read(const float *table, int cells, vf at) {
    vf out;
    for (int i = 0; i < VW; i++) {
        int cell = (int)at[i];
        if (cell > cells - 1) cell = cells - 1;
        out[i] = table[cell] + (at[i] - (float)cell) * (table[cell + 1] - table[cell]);
    }
    return out;
}

/* The value as m·2^e with 1 ≤ m < 2; of positive normal numbers. */
static inline vf vf_split(vf x, vf *e) {
    vu bits = (vu)x;
    vi exponent = (vi)(bits >> 23) - 127;
    *e = __builtin_convertvector(exponent, vf);
    return (vf)((bits & 0x7fffffu) | 0x3f800000u);
}
/* VW numbers of 16 bits, in order: integers, or bfloat16. */
static inline vf vf_widen_bf16(const uint16_t *p) { return (vf)((vu){p[0], p[1], p[2], p[3]} << 16); }
/* 2·VW numbers to the nearest integer, in order; what does not fit in 16 bits becomes one that does. */
static inline void vf_store_i16(int16_t *p, vf a, vf b) {
    for (int i = 0; i < VW; i++) {
        float x = a[i] > -32768 ? a[i] < 32767 ? a[i] : 32767 : -32768;
        float y = b[i] > -32768 ? b[i] < 32767 ? b[i] : 32767 : -32768;
        p[i] = (int16_t)(int32_t)(x + 12582912.0f - 12582912.0f);
        p[VW + i] = (int16_t)(int32_t)(y + 12582912.0f - 12582912.0f);
    }
}

#ifndef HAS_SCORE_BITS /* Which of 64 scores reach the bound. */
static inline uint64_t scores_reach(const int16_t *scores, int16_t bound) {
    uint64_t word = 0;
    int any = 0;
    for (int i = 0; i < 64; i++) any |= scores[i] >= bound;
    if (any)
        for (int i = 0; i < 64; i++) word |= (uint64_t)(scores[i] >= bound) << i;
    return word;
}
#endif

#ifndef HAS_NIBBLE_SUMS
/* out[h][row] = Σ_j table_h[j][nibble j of the row] of 32 rows (signature.h), for `heads` tables `stride` bytes apart.
 * Without shuffles: a byte holds a nibble of two rows, and one look-up finds both values. */
static inline void nibble_sums(const uint8_t *codes, int nibbles, const uint8_t *tables, int64_t stride, int heads,
        uint16_t *out) {
    for (int h = 0; h < heads; h++) {
        uint32_t sums[16] = {0};
        for (int j = 0; j < nibbles; j++) {
            const uint8_t *table = tables + h * stride + 16 * j, *code = codes + 16 * j;
            for (int i = 0; i < 16; i++) sums[i] += table[code[i] & 15] | (uint32_t)table[code[i] >> 4] << 16;
        }
        for (int i = 0; i < 16; i++) out[32 * h + i] = (uint16_t)sums[i], out[32 * h + 16 + i] = (uint16_t)(sums[i] >> 16);
    }
}
#endif

static inline float half_to_float(uint16_t half) {
    const uint32_t rest = half & 0x7fffu; /* exponent and fraction */
    uint32_t bits = rest >= 0x7c00u ? 0x7f800000u | (rest & 0x3ffu) << 13 : rest << 13;
    float value;
    memcpy(&value, &bits, 4);
    if (rest < 0x7c00u) value *= 0x1p112f; /* the exponents' biases differ by so much; small numbers come out as well */
    memcpy(&bits, &value, 4);
    bits |= (uint32_t)(half & 0x8000u) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

/* Four groups of 4-bit weights (int4.h), times four groups of vectors, whose products are summed in 16 lanes. */
typedef uint8_t vb __attribute__((vector_size(16)));
typedef int16_t vs __attribute__((vector_size(16)));
typedef uint16_t vt __attribute__((vector_size(16)));
typedef struct { vb low[4], high[4]; } int4_codes_t; /* of each group */
typedef struct { vf two[2]; } int4_pairs_t;          /* scale and minimum of each group */
typedef struct { vf lanes[4], offsets[2]; } int4_sum_t; /* every second offset belongs to a minimum */

static inline int4_sum_t int4_zero(void) { return (int4_sum_t){{{0}}, {{0}}}; }
/* Of the first `left` groups; no byte behind them is read. */
static inline int4_codes_t int4_codes(const uint8_t *p, int left) {
    int4_codes_t codes = {{{0}}, {{0}}};
    for (int g = 0; g < left; g++) {
        vb both;
        memcpy(&both, p + 16 * g, 16);
        codes.low[g] = both & 15, codes.high[g] = both >> 4;
    }
    return codes;
}
static inline int4_pairs_t int4_pairs(const uint16_t *p, int left) {
    float pairs[8] = {0};
    for (int i = 0; i < 2 * left; i++) pairs[i] = half_to_float(p[i]);
    return (int4_pairs_t){{vf_load(pairs), vf_load(pairs + 4)}};
}
/* Sums of four products each. */
static inline vi int4_dot(vb codes_low, vb codes_high, const int8_t *low, const int8_t *high);
#ifndef HAS_INT4_DOT
static inline vi int4_dot(vb codes_low, vb codes_high, const int8_t *low, const int8_t *high) {
    vs x, y;
    memcpy(&x, low, 16), memcpy(&y, high, 16);
    vs sums = (vs)((vt)codes_low & 255) * (x << 8 >> 8) + (vs)((vt)codes_low >> 8) * (x >> 8);
    sums += (vs)((vt)codes_high & 255) * (y << 8 >> 8) + (vs)((vt)codes_high >> 8) * (y >> 8);
    return ((vi)sums << 16 >> 16) + ((vi)sums >> 16);
}
#endif
static inline int4_sum_t int4_add(int4_sum_t sum, int4_codes_t codes, int4_pairs_t pairs, const int8_t *low,
        const int8_t *high, const float *factors) {
    vf scaled[2] = {pairs.two[0] * vf_load(factors), pairs.two[1] * vf_load(factors + 4)};
    for (int g = 0; g < 4; g++) {
        vi dots = int4_dot(codes.low[g], codes.high[g], low + 16 * g, high + 16 * g);
        sum.lanes[g] += __builtin_convertvector(dots, vf) * vf_set1(scaled[g / 2][g % 2 * 2]);
    }
    sum.offsets[0] += scaled[0], sum.offsets[1] += scaled[1];
    return sum;
}
static inline float int4_total(int4_sum_t sum) {
    vf four = (sum.lanes[0] + sum.lanes[2]) + (sum.lanes[1] + sum.lanes[3]), two = sum.offsets[0] + sum.offsets[1];
    return ((four[0] + four[1]) + (four[2] + four[3])) + (two[1] + two[3]);
}

/* Which of 64 counters are ≥ 2, as bits; the counters are cleared. */
static inline uint64_t counters_take(uint8_t *counters) {
    uint64_t word = 0;
    for (int i = 0; i < 8; i++) {
        uint64_t v;
        memcpy(&v, counters + 8 * i, 8);
        if (v) {
            uint64_t high = (((v & 0x7f7f7f7f7f7f7f7full) + 0x7e7e7e7e7e7e7e7eull) | v) & 0x8080808080808080ull;
            word |= ((high >> 7) * 0x0102040810204080ull >> 56) << (8 * i);
        }
    }
    memset(counters, 0, 64);
    return word;
}
