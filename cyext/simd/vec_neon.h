/* aarch64: the portable vectors are NEON registers already; what NEON adds is the fused multiply-add, which makes
 * hash codes equal those of AVX2 and AVX-512. Tested under emulation (scripts/test_neon.sh), of unknown speed. */
#pragma once
#include <arm_neon.h>
#define vf_fma vf_fma_portable
#include "vec_portable.h"
#undef vf_fma
#undef HASH_ROWS
#undef HASH_TABLES
#define HASH_ROWS 8 /* 24 accumulators of 32 registers */
#define HASH_TABLES 3

static inline vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
