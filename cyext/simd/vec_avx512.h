/* Vectors of 16 floats: AVX-512 F, BW, VL and DQ. The functions are described in vec_portable.h. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define VW 16
#define HASH_ROWS 8 /* 24 accumulators of 32 registers */
#define HASH_TABLES 3

typedef __m512 vf;

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
/* The value, in a register: GCC would rather read memory again for each use. */
static inline vf vf_keep(vf a) { __asm__("" : "+v"(a)); return a; }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_gt(vf a, vf b, vf x, vf y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline void vf_or_gt(uint32_t *codes, vf a, vf b, int k) {
    __m512i old = _mm512_loadu_si512(codes);
    __mmask16 set = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
    _mm512_storeu_si512(codes, _mm512_mask_or_epi32(old, set, old, _mm512_set1_epi32(1 << k)));
}
static inline vf vf_ldexp(vf y, vf t) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), n));
}
static inline void vf_load_bf16(const uint16_t *p, vf *even, vf *odd) {
    __m512i v = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u)));
}
static inline void vf_load_int8(const int8_t *p, vf *first, vf *second) {
    *first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
    *second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 16))));
}
static inline void vf_load_part(const float *p, int n, vf *first, vf *second) {
    uint32_t mask = (1u << n) - 1;
    *first = _mm512_maskz_loadu_ps((__mmask16)mask, p);
    *second = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), p + VW);
}
static inline void vf_load_bf16_part(const uint16_t *p, int n, vf *even, vf *odd) {
    __m512i v = _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u)));
}
static inline __m256 half_sum(vf a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
static inline void vf_sum4(vf a, vf b, vf c, vf d, float *out) {
    __m256 low = _mm256_hadd_ps(half_sum(a), half_sum(b)), high = _mm256_hadd_ps(half_sum(c), half_sum(d));
    __m256 sums = _mm256_hadd_ps(low, high);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
#define HAS_LIST_BITS
static inline int list_bits(uint64_t word, int32_t *a, int32_t *b) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int n = 0;
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += 16) {
        const __mmask16 of_word = (__mmask16)(word >> i);
        const __m512i bits = _mm512_maskz_compress_epi32(of_word, _mm512_add_epi32(lanes, _mm512_set1_epi32(i)));
        _mm512_storeu_si512(a + n, bits);
        _mm512_storeu_si512(b + n, bits);
        n += __builtin_popcount(of_word);
    }
    return n;
}
static inline vf vf_pick(const float *base, const int32_t *index) {
    return _mm512_i32gather_ps(_mm512_loadu_si512(index), base, 4);
}
static inline vf vf_pick_by(const float *base, const int32_t *index, const int32_t *which) {
    return _mm512_i32gather_ps(_mm512_i32gather_epi32(_mm512_loadu_si512(which), index, 4), base, 4);
}
static inline vf vf_read(const float *table, int cells, vf at) {
    const __m512i cell = _mm512_min_epi32(_mm512_cvttps_epi32(at), _mm512_set1_epi32(cells - 1));
    const __m512 from = _mm512_i32gather_ps(cell, table, 4), to = _mm512_i32gather_ps(cell, table + 1, 4);
    const __m512 part = _mm512_sub_ps(at, _mm512_cvtepi32_ps(cell));
    return _mm512_add_ps(from, _mm512_mul_ps(part, _mm512_sub_ps(to, from)));
}

static inline vf vf_split(vf x, vf *e) {
    *e = _mm512_getexp_ps(x);
    return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
}
static inline vf vf_widen_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline void vf_store_i16(int16_t *p, vf a, vf b) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
    _mm256_storeu_si256((__m256i *)(p + 16), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(b)));
}
static inline uint64_t scores_reach(const int16_t *scores, int16_t bound) {
    const __m512i least = _mm512_set1_epi16(bound);
    const uint32_t a = _mm512_cmpge_epi16_mask(_mm512_loadu_si512(scores), least);
    const uint32_t b = _mm512_cmpge_epi16_mask(_mm512_loadu_si512(scores + 32), least);
    return a | (uint64_t)b << 32;
}
/* A load takes four nibbles of 32 rows, one per 128-bit lane; after eight loads the bytes are full. */
static inline __attribute__((always_inline)) void nibble_sums(const uint8_t *codes, int nibbles, const uint8_t *tables,
        int64_t stride, int heads, uint16_t *out) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i total[4][2];
    for (int first = 0; first < nibbles; first += 32) {
        const int last = first + 32 < nibbles ? first + 32 : nibbles;
        __m512i sum[4][2];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h][0] = sum[h][1] = _mm512_setzero_si512();
        for (int j = first; j < last; j += 4) {
            const __m512i four = _mm512_loadu_si512(codes + 16 * j);
            const __m512i a = _mm512_and_si512(four, low), b = _mm512_and_si512(_mm512_srli_epi16(four, 4), low);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                const __m512i table = _mm512_loadu_si512(tables + h * stride + 16 * j);
                sum[h][0] = _mm512_add_epi8(sum[h][0], _mm512_shuffle_epi8(table, a));
                sum[h][1] = _mm512_add_epi8(sum[h][1], _mm512_shuffle_epi8(table, b));
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            for (int half = 0; half < 2; half++) {
                const __m512i two = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(sum[h][half]));
                const __m512i both = _mm512_add_epi16(two, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(sum[h][half], 1)));
                total[h][half] = first ? _mm512_add_epi16(total[h][half], both) : both;
            }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
        for (int half = 0; half < 2; half++) {
            const __m512i both = total[h][half];
            const __m256i sum = _mm256_add_epi16(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
            _mm256_storeu_si256((__m256i *)(out + 32 * h + 16 * half), sum);
        }
}

static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
typedef struct { __m512i low, high; } int4_codes_t; /* of four groups */
typedef __m256 int4_pairs_t;
typedef struct { __m512 lanes; __m256 offsets; } int4_sum_t;
static inline int4_sum_t int4_zero(void) { return (int4_sum_t){_mm512_setzero_ps(), _mm256_setzero_ps()}; }
static inline int4_codes_t int4_codes(const uint8_t *p, int left) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i both = left == 4 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi64((__mmask8)((1 << 2 * left) - 1), p);
    return (int4_codes_t){_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}
static inline int4_pairs_t int4_pairs(const uint16_t *p, int left) {
    if (left == 4) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    return _mm256_cvtph_ps(_mm_maskz_loadu_epi32((__mmask8)((1 << left) - 1), p));
}
static inline int4_sum_t int4_add(int4_sum_t sum, int4_codes_t codes, int4_pairs_t pairs, const int8_t *low,
        const int8_t *high, const float *factors) {
    const __m512i first = _mm512_maddubs_epi16(codes.low, _mm512_loadu_si512(low));
    const __m512i second = _mm512_maddubs_epi16(codes.high, _mm512_loadu_si512(high));
    const __m512 dots = _mm512_cvtepi32_ps(_mm512_madd_epi16(_mm512_add_epi16(first, second), _mm512_set1_epi16(1)));
    const __m256 scaled = _mm256_mul_ps(pairs, _mm256_loadu_ps(factors));
    const __m512i of_group = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    const __m512 scales = _mm512_permutexvar_ps(of_group, _mm512_castps256_ps512(scaled));
    sum.lanes = _mm512_add_ps(sum.lanes, _mm512_mul_ps(dots, scales));
    sum.offsets = _mm256_add_ps(sum.offsets, scaled);
    return sum;
}
static inline float int4_total(int4_sum_t sum) {
    const __m256 eight = half_sum(sum.lanes), offsets = sum.offsets;
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(_mm256_castps256_ps128(offsets), _mm256_extractf128_ps(offsets, 1));
    const __m128 sums = _mm_hadd_ps(four, _mm_shuffle_ps(two, two, 0xdd));
    const __m128 all = _mm_hadd_ps(sums, sums);
    return _mm_cvtss_f32(all) + _mm_cvtss_f32(_mm_movehl_ps(sums, sums));
}

static inline uint64_t counters_take(uint8_t *counters) {
    __m512i v = _mm512_loadu_si512(counters);
    _mm512_storeu_si512(counters, _mm512_setzero_si512());
    return _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8(2));
}
