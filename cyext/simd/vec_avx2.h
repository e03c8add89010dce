/* Vectors of 8 floats: AVX2 and FMA. The functions are described in vec_portable.h. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define VW 8
#define HASH_ROWS 4 /* 12 accumulators, 3 panel vectors and a broadcast fill the 16 registers */
#define HASH_TABLES 3

typedef __m256 vf;

static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
/* The value, in a register: GCC would rather read memory again for each use. */
static inline vf vf_keep(vf a) { __asm__("" : "+x"(a)); return a; }
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_gt(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline void vf_or_gt(uint32_t *codes, vf a, vf b, int k) {
    __m256i bit = _mm256_and_si256(_mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ)), _mm256_set1_epi32(1 << k));
    __m256i *at = (__m256i *)codes;
    _mm256_storeu_si256(at, _mm256_or_si256(_mm256_loadu_si256(at), bit));
}
static inline vf vf_ldexp(vf y, vf t) {
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), n));
}
static inline void vf_load_bf16(const uint16_t *p, vf *even, vf *odd) {
    __m256i v = _mm256_loadu_si256((const __m256i *)p);
    __asm__("" : "+x"(v));
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u)));
}
static inline void vf_load_int8(const int8_t *p, vf *first, vf *second) {
    *first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
    *second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))));
}
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
static inline void vf_sum4(vf a, vf b, vf c, vf d, float *out) {
    vf sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
#define HAS_LIST_BITS
static uint64_t bits_of_byte[256]; /* their positions, a byte each */
static __attribute__((constructor)) void fill_bits_of_byte(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, n = 0; bit < 8; bit++)
            if (byte >> bit & 1) bits_of_byte[byte] |= (uint64_t)bit << 8 * n++;
}
static inline int list_bits(uint64_t word, int32_t *a, int32_t *b) {
    int n = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 64; i += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(bits_of_byte + (word >> i & 255)));
        const __m256i bits = _mm256_add_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(i));
        _mm256_storeu_si256((__m256i *)(a + n), bits);
        _mm256_storeu_si256((__m256i *)(b + n), bits);
        n += __builtin_popcountll(word >> i & 255);
    }
    return n;
}
static inline vf vf_pick(const float *base, const int32_t *index) {
    return _mm256_i32gather_ps(base, _mm256_loadu_si256((const __m256i *)index), 4);
}
static inline vf vf_pick_by(const float *base, const int32_t *index, const int32_t *which) {
    const __m256i at = _mm256_i32gather_epi32(index, _mm256_loadu_si256((const __m256i *)which), 4);
    return _mm256_i32gather_ps(base, at, 4);
}
static inline vf vf_read(const float *table, int cells, vf at) {
    const __m256i cell = _mm256_min_epi32(_mm256_cvttps_epi32(at), _mm256_set1_epi32(cells - 1));
    const __m256 from = _mm256_i32gather_ps(table, cell, 4), to = _mm256_i32gather_ps(table + 1, cell, 4);
    const __m256 part = _mm256_sub_ps(at, _mm256_cvtepi32_ps(cell));
    return _mm256_add_ps(from, _mm256_mul_ps(part, _mm256_sub_ps(to, from)));
}

static inline vf vf_split(vf x, vf *e) {
    __m256i bits = _mm256_castps_si256(x);
    *e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
    bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x3f800000)));
}
static inline vf vf_widen_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline void vf_store_i16(int16_t *p, vf a, vf b) {
    __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
}
static inline uint64_t scores_reach(const int16_t *scores, int16_t bound) {
    const __m256i below = _mm256_set1_epi16((int16_t)(bound - 1));
    uint64_t word = 0;
    for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(scores + 32 * i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(scores + 32 * i + 16));
        a = _mm256_packs_epi16(_mm256_cmpgt_epi16(a, below), _mm256_cmpgt_epi16(b, below));
        word |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(a, 0xd8)) << (32 * i);
    }
    return word;
}
/* A load takes two nibbles of 32 rows, one per 128-bit lane; after eight loads the bytes are full. Unrolled, and with
 * values kept in registers, 4 heads take 23 instructions; GCC 12 reads tables twice and copies sums otherwise: 41. */
static inline __attribute__((always_inline)) void nibble_sums(const uint8_t *codes, int nibbles, const uint8_t *tables,
        int64_t stride, int heads, uint16_t *out) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int first = 0; first < nibbles; first += 16) {
        const int last = first + 16 < nibbles ? first + 16 : nibbles;
        __m256i sum[4][2];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h][0] = sum[h][1] = _mm256_setzero_si256();
        for (int block = first; block < last; block += 8)
#pragma GCC unroll 4
            for (int j = block; j < block + 8; j += 2) {
                __m256i pair = _mm256_loadu_si256((const __m256i *)(codes + 16 * j));
                __asm__("" : "+x"(pair));
                const __m256i a = _mm256_and_si256(pair, low), b = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) {
                    __m256i table = _mm256_loadu_si256((const __m256i *)(tables + h * stride + 16 * j));
                    __asm__("" : "+x"(table));
                    sum[h][0] = _mm256_add_epi8(sum[h][0], _mm256_shuffle_epi8(table, a));
                    sum[h][1] = _mm256_add_epi8(sum[h][1], _mm256_shuffle_epi8(table, b));
                    __asm__("" : "+x"(sum[h][0]), "+x"(sum[h][1]));
                }
            }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m256i *to = (__m256i *)(out + 32 * h + 16 * half);
                const __m256i even = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(sum[h][half]));
                __m256i both = _mm256_add_epi16(even, _mm256_cvtepu8_epi16(_mm256_extracti128_si256(sum[h][half], 1)));
                if (first) both = _mm256_add_epi16(both, _mm256_loadu_si256(to));
                _mm256_storeu_si256(to, both);
            }
    }
}

static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
typedef struct { __m256i low[2], high[2]; } int4_codes_t; /* of two groups each */
typedef __m256 int4_pairs_t;
typedef struct { __m256 lanes[2], offsets; } int4_sum_t;
static inline int4_sum_t int4_zero(void) {
    return (int4_sum_t){{_mm256_setzero_ps(), _mm256_setzero_ps()}, _mm256_setzero_ps()};
}
static inline __m256i two_groups(const uint8_t *p, int left) {
    if (left >= 2) return _mm256_loadu_si256((const __m256i *)p);
    return left == 1 ? _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p)) : _mm256_setzero_si256();
}
static inline int4_codes_t int4_codes(const uint8_t *p, int left) {
    const __m256i mask = _mm256_set1_epi8(15), a = two_groups(p, left), b = two_groups(p + 32, left - 2);
    return (int4_codes_t){{_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)},
        {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)}};
}
static inline int4_pairs_t int4_pairs(const uint16_t *p, int left) {
    if (left == 4) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    const __m128i there = _mm_cmpgt_epi32(_mm_set1_epi32(left), _mm_setr_epi32(0, 1, 2, 3));
    return _mm256_cvtph_ps(_mm_maskload_epi32((const int *)(const void *)p, there));
}
static inline __m256 int4_dots(__m256i codes_low, __m256i codes_high, const int8_t *low, const int8_t *high) {
    const __m256i first = _mm256_maddubs_epi16(codes_low, _mm256_loadu_si256((const __m256i *)low));
    const __m256i second = _mm256_maddubs_epi16(codes_high, _mm256_loadu_si256((const __m256i *)high));
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1)));
}
static inline int4_sum_t int4_add(int4_sum_t sum, int4_codes_t codes, int4_pairs_t pairs, const int8_t *low,
        const int8_t *high, const float *factors) {
    const __m256 scaled = _mm256_mul_ps(pairs, _mm256_loadu_ps(factors));
    const __m256 a = _mm256_permutevar8x32_ps(scaled, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2));
    const __m256 b = _mm256_permutevar8x32_ps(scaled, _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6));
    const __m256 dots = int4_dots(codes.low[0], codes.high[0], low, high);
    sum.lanes[0] = _mm256_add_ps(sum.lanes[0], _mm256_mul_ps(dots, a));
    const __m256 more = int4_dots(codes.low[1], codes.high[1], low + 32, high + 32);
    sum.lanes[1] = _mm256_add_ps(sum.lanes[1], _mm256_mul_ps(more, b));
    sum.offsets = _mm256_add_ps(sum.offsets, scaled);
    return sum;
}
static inline float int4_total(int4_sum_t sum) {
    const __m256 eight = _mm256_add_ps(sum.lanes[0], sum.lanes[1]), offsets = sum.offsets;
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(_mm256_castps256_ps128(offsets), _mm256_extractf128_ps(offsets, 1));
    const __m128 sums = _mm_hadd_ps(four, _mm_shuffle_ps(two, two, 0xdd)); /* every second offset is a minimum's */
    const __m128 all = _mm_hadd_ps(sums, sums);
    return _mm_cvtss_f32(all) + _mm_cvtss_f32(_mm_movehl_ps(sums, sums));
}

static inline uint64_t counters_take(uint8_t *counters) {
    const __m256i two = _mm256_set1_epi8(2);
    __m256i *at = (__m256i *)counters;
    __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
    _mm256_storeu_si256(at, _mm256_setzero_si256());
    _mm256_storeu_si256(at + 1, _mm256_setzero_si256());
    uint32_t a = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(low, two), low));
    uint32_t b = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(high, two), high));
    return a | (uint64_t)b << 32;
}
