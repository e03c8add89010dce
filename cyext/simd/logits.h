/* From dot products of a tile to softmax weights. Arrays have room for TILE floats; n ≤ TILE of them are meant. */
#pragma once
#include "rows.h"
#include <math.h>

#define MAX_LOGIT 3e38f

static inline vf vf_clamp(vf x, float low, float high) { /* not a number becomes low */
    x = vf_gt(x, vf_set1(low), x, vf_set1(low));
    return vf_gt(x, vf_set1(high), vf_set1(high), x);
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

/* dots → scale·dot, or cap·tanh(scale·dot / cap) where cap > 0. */
static inline void logits_scale(float *dots, int n, float scale, float cap) {
    for (int r = 0; r < n; r += VW) {
        vf x = vf_clamp(vf_mul(vf_load(dots + r), vf_set1(scale)), -MAX_LOGIT, MAX_LOGIT);
        if (cap > 0) {
            vf e = vf_exp(vf_mul(x, vf_set1(2 / cap)));
            x = vf_mul(vf_set1(cap), vf_sub(vf_set1(1), vf_div(vf_set1(2), vf_add(e, vf_set1(1)))));
        }
        vf_store(dots + r, x);
    }
}

/* Per key −ln u, from the table over sin(θ/2) with `cells` uniform cells: dots = q·k, squares = |k − μ|². */
static inline void logits_weights(const float *dots, const float *squares, int n, float q_mu, float q_norm,
        const float *table, int cells, float *out) {
    for (int r = 0; r < n; r += VW) {
        vf norms = vf_mul(vf_sqrt(vf_load(squares + r)), vf_set1(q_norm));
        vf cosine = vf_div(vf_sub(vf_load(dots + r), vf_set1(q_mu)), norms);
        cosine = vf_gt(norms, vf_set1(0), cosine, vf_set1(0));
        cosine = vf_gt(vf_set1(INFINITY), vf_mul(cosine, cosine), cosine, vf_set1(0));
        vf half = vf_mul(vf_sub(vf_set1(1), vf_clamp(cosine, -1, 1)), vf_set1(0.5f));
        vf_store(out + r, vf_mul(vf_sqrt(half), vf_set1((float)cells)));
    }
    for (int r = 0; r < n; r++) {
        int cell = (int)out[r];
        if (cell > cells - 1) cell = cells - 1;
        out[r] = table[cell] + (out[r] - (float)cell) * (table[cell + 1] - table[cell]);
    }
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
        most = vf_gt(x, most, x, most);
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
