/* The samples of a tile: rows that query heads of a group have sampled, head by head, and their softmax terms.
 *
 * The samples of several heads go through each loop together. A head has 20 to 30 of a tile, three vectors, whose long
 * chains of square roots and table reads would be waited for, and a loop that ends after so few costs a branch that
 * nobody foresees. Loops are short for the same reason: more vectors are under way at a time. */
#pragma once
#include "scan.h"
#include "signature.h"

#define HEADS 4 /* at once: not more than VW */

typedef struct { /* a query head, and what the probability of its rows depends on */
    const float *q;           /* packed */
    float rate;               /* of the uniform tail */
    float q_mu, norm;         /* by tables: q·μ, |q| */
    const signed_t *about;    /* by signatures */
    const float *means;       /* likewise: [cells] q·μ, q times the scale */
} head_t;

/* What is measured of a tile. Up to four rows are measured at once: there is room behind the last. */
typedef struct {
    uint16_t first[TILE];     /* the first head that has sampled a row */
    float squares[TILE + 3];  /* |k − μ|² */
    float products[(HEADS + 1) * TILE + 3]; /* q·k with the query of that head, then of the samples that are left */
    float factors[TILE];      /* of signatures */
    int32_t cells[TILE];      /* likewise: number of the cell; 0 behind the last row */
} measured_t;

/* Samples of HEADS heads. Those of head h begin at h·TILE; what stands behind the last of them may be read. */
typedef struct {
    int n[HEADS];
    int vectors;
    int from[(HEADS + 1) * TILE / VW]; /* where the samples of a vector begin */
    int32_t row[HEADS * TILE];         /* of the tile */
    int32_t product[HEADS * TILE];     /* where among the products */
    float p[HEADS * TILE];             /* exp(logit − top) */
    float log_pi[HEADS * TILE];
    float by_jitter[HEADS * TILE], exponents[HEADS * TILE]; /* of signatures: see signature_positions */
    int shared;                        /* samples of rows that an earlier head has sampled too */
    row_t shared_rows[HEADS * TILE];
    uint16_t shared_heads[HEADS * TILE];
} samples_t;

/* What the weights of samples depend on beside the heads. */
typedef struct {
    float scale, cap;
    const float *table; /* −ln u, or −ln Φ: for signature_weight */
    int cells;
    int by_signatures, D, bits;
    float share;
} weigh_t;

static inline void samples_start(samples_t *s) {
    memset(s->row, 0, sizeof s->row);
    memset(s->product, 0, sizeof s->product);
}

/* The samples of up to HEADS heads, the first of which has this number in its group: sampled and shared [heads], bits of
 * the tile. Sets `first` where it is not 0. */
static inline void samples_list(samples_t *s, const uint64_t *sampled, const uint64_t *shared, int heads, int number,
        const row_t *rows, uint16_t *first) {
    int k = 0, vectors = 0;
    for (int h = 0; h < heads; h++) {
        const uint64_t all = sampled[h];
        int32_t *product = s->product + h * TILE;
        s->n[h] = list_bits(all, s->row + h * TILE, product);
        for (int i = 0; i < TILE / VW; i++) s->from[vectors + i] = h * TILE + i * VW;
        vectors += (s->n[h] + VW - 1) / VW;
        if (number + h == 0) continue;
        for (uint64_t left = shared[h]; left; left &= left - 1, k++) {
            product[count_bits(all & ~left & (left - 1))] = TILE + k;
            s->shared_rows[k] = rows[lowest_bit(left)], s->shared_heads[k] = (uint16_t)(number + h);
        }
        for (uint64_t left = all ^ shared[h]; left; left &= left - 1) first[lowest_bit(left)] = (uint16_t)(number + h);
    }
    for (int h = heads; h < HEADS; h++) s->n[h] = 0;
    s->shared = k, s->vectors = vectors;
}

/* In how many turns (rows_add_some) the rows ahead are fetched: in two if that suffices. Every sample reads K and
 * V; passes fetch as many bytes as they read, those over V half of them if there are two turns. */
static inline int samples_turns(int samples, int ahead, int64_t row_bytes) {
    return 3 * samples * row_bytes >= 4 * ahead * ((row_bytes + 63) / 64 * 64) ? 2 : 1;
}

/* Where in the table over sin(θ/2) the −ln u of keys stands. */
static INLINE vf table_position(vf dots, vf squares, const head_t *head, float cells) {
    vf cosine = vf_div(vf_sub(dots, vf_set1(head->q_mu)), vf_mul(vf_sqrt(squares), vf_set1(head->norm)));
    cosine = vf_gt(vf_set1(INFINITY), vf_mul(cosine, cosine), cosine, vf_set1(0));
    vf half = vf_mul(vf_sub(vf_set1(1), vf_clamp(cosine, -1, 1)), vf_set1(0.5f));
    return vf_mul(vf_sqrt(half), vf_set1(cells));
}

/* Softmax terms of all samples. top and total [heads]: highest logit and Σ exp(logit − top) so far; factors: by what has
 * to be multiplied what was accumulated before. */
static OUTLINE void samples_weigh(samples_t *s, const measured_t *measured, const head_t *heads, int count,
        const weigh_t *how, float *top, float *total, float *factors) {
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float most[HEADS][VW], sums[HEADS][VW], highest[HEADS], change[VW] = {0}, added[HEADS];
    UNROLL for (int h = 0; h < HEADS; h++) vf_store(most[h], vf_set1(-INFINITY)), vf_store(sums[h], vf_set1(0));
    for (int v = 0; v < s->vectors; v++) {
        const int at = s->from[v], h = at / TILE;
        const head_t *head = heads + h;
        const vf dots = vf_pick(measured->products, s->product + at), squares = vf_pick(measured->squares, s->row + at);
        if (how->by_signatures) {
            const vf means = vf_pick_by(head->means, measured->cells, s->row + at);
            const vf factors = vf_pick(measured->factors, s->row + at);
            vf by_noise, by_jitter, exponent;
            signature_positions(dots, squares, means, factors, head->about, how->scale, how->D, how->bits, how->share,
                how->cells, &by_noise, &by_jitter, &exponent);
            vf_store(s->log_pi + at, by_noise), vf_store(s->by_jitter + at, by_jitter);
            vf_store(s->exponents + at, exponent);
        } else
            vf_store(s->log_pi + at, table_position(dots, squares, head, (float)how->cells));
        vf_store(s->p + at, scaled_logits(dots, how->scale, how->cap));
    }
    for (int v = 0; v < s->vectors; v++) {
        const int at = s->from[v], h = at / TILE;
        vf log_pi = vf_load(s->log_pi + at);
        if (how->by_signatures)
            log_pi = signature_weight(log_pi, vf_load(s->by_jitter + at), vf_load(s->exponents + at), how->table,
                how->cells);
        else
            log_pi = vf_read(how->table, how->cells, log_pi);
        if (heads[h].rate > 0) log_pi = with_tail(log_pi, heads[h].rate);
        vf_store(s->log_pi + at, log_pi);
        vf x = vf_add(vf_load(s->p + at), log_pi);
        x = vf_gt(vf_set1((float)(s->n[h] - at % TILE)), vf_load(lanes), x, vf_set1(-INFINITY));
        vf_store(most[h], vf_max(x, vf_load(most[h])));
        vf_store(s->p + at, x);
    }
    for (int h = 0; h < count; h++) {
        highest[h] = top[h];
        for (int i = 0; i < VW; i++) highest[h] = most[h][i] > highest[h] ? most[h][i] : highest[h];
        change[h] = highest[h] > top[h] ? top[h] - highest[h] : 0;
        top[h] = highest[h];
    }
    vf_store(change, vf_exp(vf_load(change)));
    for (int v = 0; v < s->vectors; v++) {
        const int at = s->from[v], h = at / TILE;
        const vf p = vf_exp(vf_sub(vf_load(s->p + at), vf_set1(highest[h])));
        vf_store(s->p + at, p);
        vf_store(sums[h], vf_add(vf_load(sums[h]), p));
    }
    vf_sum4(vf_load(sums[0]), vf_load(sums[1]), vf_load(sums[2]), vf_load(sums[3]), added);
    for (int h = 0; h < count; h++) {
        factors[h] = change[h];
        total[h] = total[h] * change[h] + added[h];
    }
}
