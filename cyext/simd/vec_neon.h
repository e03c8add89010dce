/* aarch64: the portable vectors are NEON registers already; what NEON adds is the fused multiply-add, which makes
 * hash codes equal those of AVX2 and AVX-512. Tested under emulation (scripts/test_neon.sh), of unknown speed. */
#pragma once
#include <arm_neon.h>
#define vf_fma vf_fma_portable
#define HAS_NIBBLE_SUMS
#define HAS_INT4_DOT
#include "vec_portable.h"
#undef vf_fma
#undef HASH_ROWS
#undef HASH_TABLES
#define HASH_ROWS 8 /* 24 accumulators of 32 registers */
#define HASH_TABLES 3

static inline vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

/* A load takes one nibble of 32 rows; after eight loads the bytes are full. */
static inline void nibble_sums(const uint8_t *codes, int nibbles, const uint8_t *tables, int64_t stride, int heads,
        uint16_t *out) {
    for (int h = 0; h < heads; h++) {
        uint16x8_t total[4] = {vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0)};
        for (int first = 0; first < nibbles; first += 8) {
            uint8x16_t low = vdupq_n_u8(0), high = vdupq_n_u8(0);
            for (int j = first; j < first + 8; j++) {
                const uint8x16_t code = vld1q_u8(codes + 16 * j), table = vld1q_u8(tables + h * stride + 16 * j);
                low = vaddq_u8(low, vqtbl1q_u8(table, vandq_u8(code, vdupq_n_u8(15))));
                high = vaddq_u8(high, vqtbl1q_u8(table, vshrq_n_u8(code, 4)));
            }
            total[0] = vaddw_u8(total[0], vget_low_u8(low)), total[1] = vaddw_u8(total[1], vget_high_u8(low));
            total[2] = vaddw_u8(total[2], vget_low_u8(high)), total[3] = vaddw_u8(total[3], vget_high_u8(high));
        }
        for (int i = 0; i < 4; i++) vst1q_u16(out + 32 * h + 8 * i, total[i]);
    }
}

static inline vi int4_dot(vb codes_low, vb codes_high, const int8_t *low, const int8_t *high) {
    const int8x16_t a = (int8x16_t)codes_low, b = (int8x16_t)codes_high, x = vld1q_s8(low), y = vld1q_s8(high);
    const int16x8_t first = vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(x)), vget_low_s8(b), vget_low_s8(y));
    const int16x8_t second = vmlal_high_s8(vmull_high_s8(a, x), b, y);
    return (vi)vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second));
}
