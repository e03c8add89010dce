/* From dot products of a tile to softmax weights. Arrays have room for TILE floats; n ≤ TILE of them are meant. */
#pragma once
#include "rows.h"
#include <math.h>

#define MAX_LOGIT 3e38f

static inline vf vf_clamp(vf x, float low, float high) { /* not a number becomes low */
    return vf_min(vf_max(x, vf_set1(low)), vf_set1(high));
}

/* e^x within 2 ulp; 0 below −87, e^88 above 88. Constants: Cephes expf (ln 2 in two parts, so no FMA is needed). */
static inline vf vf_exp(vf x) {
    const vf magic = vf_set1(12582912.0f); /* 1.5·2^23: adding it rounds to an integer in the low bits */
    vf bounded = vf_clamp(x, -87.0f, 88.0f);
    vf t = vf_add(vf_mul(bounded, vf_set1(1.44269504088896341f)), magic);
    vf n = vf_sub(t, magic);
    vf r = vf_sub(vf_sub(bounded, vf_mul(n, vf_set1(0.693359375f))), vf_mul(n, vf_set1(-2.12194440e-4f)));
    vf y = vf_set1(1.9875691500e-4f);
    y = vf_fma(y, r, vf_set1(1.3981999507e-3f));
    y = vf_fma(y, r, vf_set1(8.3334519073e-3f));
    y = vf_fma(y, r, vf_set1(4.1665795894e-2f));
    y = vf_fma(y, r, vf_set1(1.6666665459e-1f));
    y = vf_fma(y, r, vf_set1(5.0000001201e-1f));
    y = vf_add(vf_fma(y, vf_mul(r, r), r), vf_set1(1));
    return vf_gt(vf_set1(-87.0f), x, vf_set1(0), vf_ldexp(y, t));
}

/* scale·dot, or cap·tanh(scale·dot / cap) where cap > 0. */
static inline vf scaled_logits(vf dots, float scale, float cap) {
    vf x = vf_clamp(vf_mul(dots, vf_set1(scale)), -MAX_LOGIT, MAX_LOGIT);
    if (cap <= 0) return x;
    vf e = vf_exp(vf_mul(x, vf_set1(2 / cap)));
    return vf_mul(vf_set1(cap), vf_sub(vf_set1(1), vf_div(vf_set1(2), vf_add(e, vf_set1(1)))));
}

static inline void logits_scale(float *dots, int n, float scale, float cap) {
    for (int r = 0; r < n; r += VW) vf_store(dots + r, scaled_logits(vf_load(dots + r), scale, cap));
}

/* ln x of positive normal numbers, within 2 ulp or 1e-7. Constants: Cephes logf. */
static inline vf vf_log(vf x) {
    vf e, m = vf_split(x, &e); /* 1 ≤ m < 2 */
    const vf large = vf_set1(1.41421356237f);
    e = vf_gt(m, large, vf_add(e, vf_set1(1)), e);
    m = vf_sub(vf_gt(m, large, vf_mul(m, vf_set1(0.5f)), m), vf_set1(1));
    const vf z = vf_mul(m, m);
    vf y = vf_set1(7.0376836292e-2f);
    y = vf_fma(y, m, vf_set1(-1.1514610310e-1f));
    y = vf_fma(y, m, vf_set1(1.1676998740e-1f));
    y = vf_fma(y, m, vf_set1(-1.2420140846e-1f));
    y = vf_fma(y, m, vf_set1(1.4249322787e-1f));
    y = vf_fma(y, m, vf_set1(-1.6668057665e-1f));
    y = vf_fma(y, m, vf_set1(2.0000714765e-1f));
    y = vf_fma(y, m, vf_set1(-2.4999993993e-1f));
    y = vf_fma(y, m, vf_set1(3.3333331174e-1f));
    y = vf_mul(vf_mul(y, m), z);
    y = vf_fma(e, vf_set1(-2.12194440e-4f), y);
    y = vf_fma(z, vf_set1(-0.5f), y);
    return vf_fma(e, vf_set1(0.693359375f), vf_add(m, y));
}

/* −ln u → −ln π, π = rate + (1 − rate)·u: the uniform tail may have taken the row too. */
static inline vf with_tail(vf log_u, float rate) {
    vf u = vf_exp(vf_sub(vf_set1(0), log_u));
    return vf_sub(vf_set1(0), vf_log(vf_fma(vf_set1(1 - rate), u, vf_set1(rate))));
}

/* What the error of the output is estimated from: out = p²·(1 − π) of softmax terms p and −ln π; sums[0] and sums[1]
 * become factor·sums + Σ out, Σ out·|v|². */
static inline void error_weights(const float *p, const float *log_pi, const float *values, int n, float factor,
        float *out, float *sums) {
    vf all = vf_set1(0), with_values = vf_set1(0);
    float part[4];
    for (int r = 0; r < n; r += VW) {
        vf x = vf_load(p + r), rest = vf_sub(vf_set1(1), vf_exp(vf_sub(vf_set1(0), vf_load(log_pi + r))));
        x = vf_mul(vf_mul(x, x), vf_gt(rest, vf_set1(0), rest, vf_set1(0)));
        vf_store(out + r, x);
    }
    for (int r = n; r % VW; r++) out[r] = 0;
    for (int r = 0; r < n; r += VW) {
        vf x = vf_load(out + r); /* 0 behind the last row, where the other numbers may be none */
        all = vf_add(all, x);
        with_values = vf_fma(x, vf_gt(x, vf_set1(0), vf_load(values + r), vf_set1(0)), with_values);
    }
    vf_sum4(all, with_values, all, with_values, part);
    sums[0] = sums[0] * factor + part[0];
    sums[1] = sums[1] * factor + part[1];
}

/* One step of the online softmax: logits → exp(logit − top), where top[0] becomes the maximum so far and sum[0] grows
 * by the new terms. Returns by what everything accumulated before has to be multiplied. */
static inline float softmax_step(float *logits, int n, float *top, float *sum) {
    float old = *top, highest = old, factor = 1, parts[VW];
    int end = (n + VW - 1) / VW * VW;
    for (int r = n; r < end; r++) logits[r] = -INFINITY;
    vf most = vf_load(logits), added = vf_set1(0);
    for (int r = VW; r < end; r += VW) {
        vf x = vf_load(logits + r);
        most = vf_max(x, most);
    }
    vf_store(parts, most);
    for (int i = 0; i < VW; i++) highest = parts[i] > highest ? parts[i] : highest;
    for (int r = 0; r < end; r += VW) {
        vf p = vf_exp(vf_sub(vf_load(logits + r), vf_set1(highest)));
        vf_store(logits + r, p);
        added = vf_add(added, p);
    }
    if (highest > old) {
        vf_store(parts, vf_exp(vf_set1(old - highest)));
        factor = parts[0];
    }
    vf_sum4(added, added, added, added, parts);
    *top = highest;
    *sum = *sum * factor + parts[0];
    return factor;
}
