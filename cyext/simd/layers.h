/* What stands between the products of a decode step: norms, rotary embedding, residuals, and the gate of an MLP. */
#pragma once
#include "logits.h"

enum { SILU = 0, GELU_TANH = 1 }; /* activations */

/* out = x / √(mean x² + eps) · weight, n floats each; out may be x. Lanes are summed in one order. */
static OUTLINE void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    float sums[4] = {0}, total = 0;
    vf a = vf_set1(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW) {
        a = vf_fma(vf_load(x + i), vf_load(x + i), a);
        b = vf_fma(vf_load(x + i + VW), vf_load(x + i + VW), b);
        c = vf_fma(vf_load(x + i + 2 * VW), vf_load(x + i + 2 * VW), c);
        d = vf_fma(vf_load(x + i + 3 * VW), vf_load(x + i + 3 * VW), d);
    }
    for (; i < n; i++) total += x[i] * x[i];
    vf_sum4(a, b, c, d, sums);
    total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const float factor = 1 / sqrtf(total / (float)n + eps);
    for (i = 0; i + VW <= n; i += VW)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), vf_set1(factor)), vf_load(weight + i)));
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

/* x += y, n floats each. */
static inline void add_to(float *x, const float *y, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) vf_store(x + i, vf_add(vf_load(x + i), vf_load(y + i)));
    for (; i < n; i++) x[i] += y[i];
}

/* Rotary embedding of the first n elements of x, in the order of transformers: element i turns with i + n/2. */
static inline void rotate(float *x, const float *cosine, const float *sine, int n) {
    const int half = n / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

static INLINE vf gated(vf gate, vf up, int activation) {
    vf at = gate; /* both activations are gate·σ(at) */
    if (activation == GELU_TANH) {
        vf cube = vf_mul(vf_mul(gate, gate), gate);
        at = vf_mul(vf_set1(1.5957691216f), vf_fma(cube, vf_set1(0.044715f), gate)); /* 2·√(2/π) */
    }
    vf open = vf_add(vf_set1(1), vf_exp(vf_sub(vf_set1(0), at)));
    return vf_mul(vf_div(gate, open), up);
}

/* gate = activation(gate)·up, n floats each. */
static OUTLINE void gate_values(float *gate, const float *up, int64_t n, int activation) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) vf_store(gate + i, gated(vf_load(gate + i), vf_load(up + i), activation));
    if (i < n) {
        float part[2][VW] = {{0}};
        memcpy(part[0], gate + i, sizeof(float) * (size_t)(n - i));
        memcpy(part[1], up + i, sizeof(float) * (size_t)(n - i));
        vf_store(part[0], gated(vf_load(part[0]), vf_load(part[1]), activation));
        memcpy(gate + i, part[0], sizeof(float) * (size_t)(n - i));
    }
}
