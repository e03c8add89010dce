/* A few vectors times weights of 4 bits: 32 values along K share a scale and a minimum, value = minimum + scale·code.
 *
 * A row is K/2 bytes of codes, byte i of a group having value i in its lower half and 16 + i in its upper half, and K/32
 * pairs of float16: scale and minimum. A vector is rounded to int8 once, by groups as well, each with a step of its
 * own: then
 *     Σ_k W[k]·x[k] = Σ_g scale_g·step_g·Σ code·integer + minimum_g·(step_g·Σ integer),
 * whose inner sums are exact. The minimum meets the rounded values, not the true ones: so what rounding did to x is
 * weighed by the weights themselves, which lie around zero, and not by their distance from a minimum.
 *
 * Four groups are taken at once, and floats are summed in one order on every instruction set, without fused additions:
 * 16 sums for the group's number modulo 4 and the value's modulo 16, over 4. All give the same bits. */
#pragma once
#include "rows.h"

#define GROUP 32       /* values with a scale */
#define GROUP_BYTES 16 /* of their codes */
#define GROUP_FACTORS 2
#define STEPS 15       /* from the smallest code to the largest */
#define ON_GRID 0.05f  /* steps that a value may be off: float32, and bfloat16 up to 12 steps from zero, are within */
#define SHIFT 12582912.0f /* 1.5·2^23: added to a float, it leaves the nearest integer in the lowest bits */
#define SMALLEST 0x1p-100f /* a group of a vector that stays below is zero */

/* Four groups of a vector, the last with zeros for those that K does not have. */
typedef struct {
    int8_t low[4 * GROUP_BYTES], high[4 * GROUP_BYTES]; /* values 0 to 15 and 16 to 31 of one group after the other */
    float factors[8];                                   /* step and step·Σ integer of each group */
} __attribute__((aligned(64))) int4_quad_t;

static inline int64_t quads(int64_t K) { return (K / GROUP + 3) / 4; }

static inline int32_t shifted_integer(float shifted) {
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    return (int32_t)(bits - 0x4b400000u); /* of SHIFT; of no number anything */
}

/* 32 values as integers from −127 to 127 and factors. What is no number or infinite makes both factors NaN. */
static inline void round_group(const float *x, int8_t *integers, float *factors) {
    uint32_t size[GROUP], largest = 0; /* compared as integers: that order is the same, and the compiler may change it */
    memcpy(size, x, sizeof size);
    for (int i = 0; i < GROUP; i++) size[i] &= 0x7fffffffu;
    for (int i = 0; i < GROUP; i++) largest = size[i] > largest ? size[i] : largest;
    float top;
    memcpy(&top, &largest, 4);
    if (!(top < INFINITY)) factors[0] = factors[1] = NAN;
    if (!(top < INFINITY) || top < SMALLEST) return;
    const float inverse = 127 / top;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) {
        const int32_t integer = shifted_integer(x[i] * inverse + SHIFT);
        integers[i] = (int8_t)integer;
        sum += integer;
    }
    factors[0] = top / 127, factors[1] = factors[0] * (float)sum;
}

/* x [K] → out [quads(K)], zero before. */
static OUTLINE void pack_quads(const float *x, int64_t K, int4_quad_t *out) {
    for (int64_t g = 0; g < K / GROUP; g++) {
        int8_t integers[GROUP] = {0};
        int4_quad_t *quad = out + g / 4;
        const int64_t at = g % 4;
        round_group(x + g * GROUP, integers, quad->factors + 2 * at);
        memcpy(quad->low + at * GROUP_BYTES, integers, GROUP_BYTES);
        memcpy(quad->high + at * GROUP_BYTES, integers + GROUP_BYTES, GROUP_BYTES);
    }
}

static INLINE int64_t int4_code_bytes(int64_t K) { return K / GROUP * GROUP_BYTES; }
static INLINE int64_t int4_factors(int64_t K) { return K / GROUP * GROUP_FACTORS; }

/* Σ_k W[k]·x_m[k] of one row for `heads` vectors, `stride` apart. */
static INLINE void int4_row(const uint8_t *codes, const uint16_t *factors, int64_t K, const int4_quad_t *x, int64_t stride,
        int heads, float *out) {
    const int64_t groups = K / GROUP;
    int4_sum_t sum[4];
    UNROLL for (int m = 0; m < heads; m++) sum[m] = int4_zero();
    for (int64_t g = 0; g < groups; g += 4) {
        const int left = groups - g < 4 ? (int)(groups - g) : 4;
        const int4_codes_t four = int4_codes(codes + g * GROUP_BYTES, left);
        const int4_pairs_t pairs = int4_pairs(factors + 2 * g, left);
        const int4_quad_t *quad = x + g / 4;
        UNROLL for (int m = 0; m < heads; m++)
            sum[m] = int4_add(sum[m], four, pairs, quad[m * stride].low, quad[m * stride].high, quad[m * stride].factors);
    }
    UNROLL for (int m = 0; m < heads; m++) out[m] = int4_total(sum[m]);
}

/* The same as float32 [K]. */
static OUTLINE void int4_widen(const uint8_t *codes, const uint16_t *factors, int64_t K, float *out) {
    for (int64_t g = 0; g < K / GROUP; g++, codes += GROUP_BYTES, out += GROUP) {
        const float scale = half_to_float(factors[2 * g]), minimum = half_to_float(factors[2 * g + 1]);
        uint8_t both[GROUP_BYTES]; /* a copy, which `out` cannot be the same memory as: that makes vectors of the loops */
        memcpy(both, codes, GROUP_BYTES);
        for (int i = 0; i < GROUP_BYTES; i++) out[i] = scale * (float)(both[i] & 15) + minimum;
        for (int i = 0; i < GROUP_BYTES; i++) out[GROUP_BYTES + i] = scale * (float)(both[i] >> 4) + minimum;
    }
}

/* To the nearest float16, halves to even, as bits. */
static inline uint16_t half_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);  /* not a number */
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from 65,520 on */
    if (bits < 0x38800000u) { /* below 2^-14 a number is so many 2^-24, which are the steps of floats from 0.5 on */
        memcpy(&value, &bits, 4);
        value += 0.5f;
        memcpy(&bits, &value, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    return (uint16_t)(sign | (bits + 0xfffu + (bits >> 13 & 1) - 0x38000000u) >> 13);
}

/* How many steps of the grid on which 32 values lie the distance from the lowest to the highest is. What was 4 bits
 * before, read as floats, need not have the codes at the ends. 15 where there is no such grid: most weights are found
 * to lie on none by their first value or two. */
static inline float int4_steps(const float *x, float low, float range) {
    for (int steps = STEPS; steps > 0; steps--) {
        const float inverse = (float)steps / range;
        int i = 0;
        for (; i < GROUP; i++) {
            const float at = (x[i] - low) * inverse;
            if (!(fabsf(at - (at + SHIFT - SHIFT)) < ON_GRID)) break;
        }
        if (i == GROUP) return (float)steps;
    }
    return STEPS;
}

/* 32 weights → 16 bytes of codes, and the float16 that the codes are chosen for. */
static inline void int4_round_group(const float *x, uint8_t *codes, uint16_t *factors) {
    int32_t low = INT32_MAX, high = INT32_MIN; /* bits whose order is that of the floats */
    for (int i = 0; i < GROUP; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits ^= bits >> 31 & 0x7fffffff;
        low = bits < low ? bits : low;
        high = bits > high ? bits : high;
    }
    low ^= low >> 31 & 0x7fffffff, high ^= high >> 31 & 0x7fffffff;
    float smallest, largest;
    memcpy(&smallest, &low, 4), memcpy(&largest, &high, 4);
    const float range = largest - smallest;
    factors[0] = half_from_float(range / int4_steps(x, smallest, range)), factors[1] = half_from_float(smallest);
    const float scale = half_to_float(factors[0]), minimum = half_to_float(factors[1]);
    const float inverse = scale > 0 ? 1 / scale : 0;
    uint8_t four[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const int32_t code = shifted_integer((x[i] - minimum) * inverse + SHIFT);
        four[i] = (uint8_t)(code < 0 ? 0 : code > STEPS ? STEPS : code);
    }
    for (int i = 0; i < GROUP_BYTES; i++) codes[i] = (uint8_t)(four[i] | four[GROUP_BYTES + i] << 4);
}

/* A row of weights [K] as int4. */
static OUTLINE void int4_round(const float *x, int64_t K, uint8_t *codes, uint16_t *factors) {
    for (int64_t g = 0; g < K / GROUP; g++)
        int4_round_group(x + g * GROUP, codes + g * GROUP_BYTES, factors + g * GROUP_FACTORS);
}
