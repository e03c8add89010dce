/* Signatures of keys (RaBitQ): signs of projections, packed by nibbles, and the scores that a query gives them.
 *
 * Keys come in cells of 256 with one mean, and in groups of 32 whose bits stand side by side: for each nibble of the
 * signature 16 bytes, byte i with the nibble of key i in its low half and that of key 16 + i in its high half. So one
 * shuffle looks up a nibble of 16 keys (`nibble_sums` of each tier), and a shift by four finds the other 16. */
#pragma once
#include "logits.h"
#include "tail.h"

#define CELL_ROWS 256
#define GROUP_ROWS 32
#define MOST_BITS 512
#define MOST_NIBBLE 31 /* in a look-up table: eight of them fit in a byte */
#define TOP_SCORE 32767
#define JITTER_ROWS (1 << 17) /* of the pool; these two as in magicpig_cli/kernels/signature_shape.py */
#define JITTER_NATS 12.5f
#define ROUNDING 8 /* units that a score may be off by, at most */
#define SUBSET_ROWS 2048 /* that the threshold is taken from, and how many are expected above it: at least */
#define EXPECTED_ROWS 32
#define Z_LOW (-11.0f) /* of the table of −ln Φ, as in magicpig_cli/kernels/signature_shape.py */
#define Z_HIGH 7.0f

/* --- keys → signatures --- */

static inline float bf16_to_float(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t float_to_bf16(float x) { /* to nearest even; what is not finite becomes 0 */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return 0;
    return nearest_bf16(bits);
}

static inline void widen_row(row_t row, int D, int type, float *out) {
    if (type == FLOAT32) memcpy(out, row, sizeof(float) * (size_t)D);
    else if (type == BFLOAT16)
        for (int d = 0; d < D; d++) {
            uint16_t upper;
            memcpy(&upper, row + 2 * d, 2);
            out[d] = bf16_to_float(upper);
        }
    else {
        const float scale = scale_at(row, D);
        for (int d = 0; d < D; d++) out[d] = scale * (float)((const int8_t *)row)[d];
    }
}

/* Mean of CELL_ROWS keys [row][D] as bfloat16, by sums in the order of rows. */
static inline void cell_mean(const float *keys, int D, double *sums, uint16_t *mean) {
    for (int d = 0; d < D; d++) sums[d] = 0;
    for (int r = 0; r < CELL_ROWS; r++)
        for (int d = 0; d < D; d++) sums[d] += (double)keys[(int64_t)r * D + d];
    for (int d = 0; d < D; d++) mean[d] = float_to_bf16((float)(sums[d] / CELL_ROWS));
}

/* float32 [bits, D] → [bits/4][D][4]: what four projections take of a dimension stands side by side. */
static inline void pack_basis_rows(const float *matrix, int bits, int D, float *out) {
    for (int bit = 0; bit < bits; bit++)
        for (int d = 0; d < D; d++) out[((int64_t)(bit / 4) * D + d) * 4 + bit % 4] = matrix[(int64_t)bit * D + d];
}

/* Projections of 2·VW vectors, x[d·stride + lane], by a panel [D][4]; summed over d in order. */
static INLINE void project_four(const float *x, int64_t stride, const float *panel, int D, vf sums[4][2]) {
    UNROLL for (int k = 0; k < 4; k++) sums[k][0] = sums[k][1] = vf_set1(0);
    for (int d = 0; d < D; d++) {
        const vf a = vf_load(x + d * stride), b = vf_load(x + d * stride + VW);
        UNROLL for (int k = 0; k < 4; k++) {
            const vf factor = vf_set1(panel[4 * d + k]);
            sums[k][0] = vf_fma(factor, a, sums[k][0]);
            sums[k][1] = vf_fma(factor, b, sums[k][1]);
        }
    }
}

/* out[bit][2·VW] of x [D][2·VW] */
static OUTLINE void project_vectors(const float *x, const float *panels, int D, int nibbles, float *out) {
    for (int j = 0; j < nibbles; j++) {
        vf sums[4][2];
        project_four(x, CHUNK, panels + (int64_t)j * D * 4, D, sums);
        UNROLL for (int k = 0; k < 4; k++) {
            vf_store(out + (4 * j + k) * CHUNK, sums[k][0]);
            vf_store(out + (4 * j + k) * CHUNK + VW, sums[k][1]);
        }
    }
}

static INLINE vf vf_size(vf x) { return vf_gt(x, vf_set1(0), x, vf_sub(vf_set1(0), x)); }

/* Signs of the projections of GROUP_ROWS vectors x [D][GROUP_ROWS] as codes [nibbles][16], and Σ|projection| of each. */
static OUTLINE void sign_group(const float *x, const float *panels, int D, int nibbles, uint8_t *codes, float *sizes) {
    uint8_t nibble[MOST_BITS / 4][GROUP_ROWS];
    for (int first = 0; first < GROUP_ROWS; first += CHUNK) {
        vf size[2] = {vf_set1(0), vf_set1(0)};
        for (int j = 0; j < nibbles; j++) {
            vf sums[4][2];
            uint32_t bits[CHUNK] = {0};
            project_four(x + first, GROUP_ROWS, panels + (int64_t)j * D * 4, D, sums);
            UNROLL for (int k = 0; k < 4; k++)
                UNROLL for (int half = 0; half < 2; half++) {
                    size[half] = vf_add(size[half], vf_size(sums[k][half]));
                    vf_or_gt(bits + half * VW, sums[k][half], vf_set1(0), k);
                }
            for (int i = 0; i < CHUNK; i++) nibble[j][first + i] = (uint8_t)bits[i];
        }
        vf_store(sizes + first, size[0]);
        vf_store(sizes + first + VW, size[1]);
    }
    for (int j = 0; j < nibbles; j++)
        for (int i = 0; i < 16; i++) codes[16 * j + i] = (uint8_t)(nibble[j][i] | nibble[j][16 + i] << 4);
}

/* Signatures of a cell of keys [CELL_ROWS][D] with this mean. x: room for [D][GROUP_ROWS]. */
static OUTLINE void sign_cell(const float *keys, const uint16_t *mean, const float *panels, int D, int nibbles,
        float *x, uint8_t *codes, uint16_t *factors) {
    for (int first = 0; first < CELL_ROWS; first += GROUP_ROWS) {
        float sizes[GROUP_ROWS], squares[GROUP_ROWS] = {0};
        for (int r = 0; r < GROUP_ROWS; r++)
            for (int d = 0; d < D; d++)
                x[d * GROUP_ROWS + r] = keys[(int64_t)(first + r) * D + d] - bf16_to_float(mean[d]);
        for (int d = 0; d < D; d++)
            for (int r = 0; r < GROUP_ROWS; r++) squares[r] += x[d * GROUP_ROWS + r] * x[d * GROUP_ROWS + r];
        sign_group(x, panels, D, nibbles, codes + (int64_t)first / GROUP_ROWS * nibbles * 16, sizes);
        for (int r = 0; r < GROUP_ROWS; r++) factors[first + r] = sizes[r] > 0 ? float_to_bf16(squares[r] / sizes[r]) : 0;
    }
}

/* --- query → scores --- */

typedef struct { /* what a query head makes of signatures */
    float step, offset; /* ⟨b, P·q⟩ is step·Σ table[j][nibble j of b] + offset, about */
    float noise;        /* variance of that, by rounding */
    float unit;         /* of a score, in logits */
    uint16_t lift;      /* what a sum is multiplied by, so that it fills 16 bits */
    uint16_t centre;    /* the multiple that stands for 0 */
    int16_t share;      /* 2^15 times what the product of a centred multiple and a factor is in units */
    int16_t jitter;     /* 2^15 times what a unit of the jitter is in units */
    float norm;         /* |q|², q times the scale */
    float tau;          /* threshold, in logits; infinite: none */
    float rate;         /* of the uniform tail; 1: everything is taken */
} signed_t;

/* projected[bit·stride] → table [nibbles][16] */
static inline void look_up_tables(const float *projected, int64_t stride, int nibbles, uint8_t *table, signed_t *head) {
    float p[MOST_BITS], half[MOST_BITS / 4], most = 0, sum = 0;
    for (int bit = 0; bit < 4 * nibbles; bit++) {
        p[bit] = projected[bit * stride];
        if (!isfinite(p[bit])) p[bit] = 0;
    }
    for (int j = 0; j < nibbles; j++) {
        half[j] = fabsf(p[4 * j]) + fabsf(p[4 * j + 1]) + fabsf(p[4 * j + 2]) + fabsf(p[4 * j + 3]);
        most = half[j] > most ? half[j] : most;
        sum += half[j];
    }
    const float per_unit = most > 0 ? MOST_NIBBLE / (2 * most) : 0;
    for (int j = 0; j < nibbles; j++)
        for (int c = 0; c < 16; c++) {
            float entry = half[j];
            for (int k = 0; k < 4; k++) entry += c >> k & 1 ? p[4 * j + k] : -p[4 * j + k];
            entry = entry * per_unit + 0.5f;
            table[16 * j + c] = (uint8_t)(entry < MOST_NIBBLE ? entry : MOST_NIBBLE);
        }
    head->step = 2 * most / MOST_NIBBLE, head->offset = -sum;
    head->noise = (float)nibbles * head->step * head->step / 12;
}

static inline float largest_size(const float *x, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

/* a·b / 2^15, rounded: one instruction on vectors, which GCC finds. */
static inline int16_t product_of_shares(int16_t a, int16_t b) { return (int16_t)((((int32_t)a * b >> 14) + 1) >> 1); }

static inline int16_t to_int16(float x) { return (int16_t)lrintf(x); }

/* The unit in which no score exceeds TOP_SCORE, and how sums become scores in it (see `score_heads`): what they are
 * multiplied by is as large as 16 bits allow. of_means: the largest |q·μ|; factor: the largest of all rows. */
static inline void set_unit(signed_t *head, int nibbles, float of_means, float factor) {
    const float centre = head->step > 0 ? -head->offset / head->step : 0;
    const float sums = (float)nibbles / 2 + centre; /* from the centre, at most */
    const float most = of_means + factor * head->step * sums + JITTER_NATS;
    head->lift = 1;
    while (2 * head->lift * sums <= TOP_SCORE) head->lift = (uint16_t)(2 * head->lift);
    head->centre = (uint16_t)to_int16(centre * head->lift);
    head->unit = 1, head->share = 0;
    if (isfinite(most)) {
        const float part = factor * head->step / head->lift * (32768.0f / TOP_SCORE); /* what a product is in logits */
        head->unit = fmaxf(most / (TOP_SCORE - ROUNDING), part);
        head->share = to_int16(fminf(part / head->unit * 32768, TOP_SCORE));
    }
    head->jitter = to_int16(JITTER_NATS / TOP_SCORE / head->unit * 32768);
}

/* Factors of GROUP_ROWS rows as shares of the largest of all rows: per_share times as much, up to TOP_SCORE. */
static INLINE void factor_shares(const uint16_t *factors, float per_share, int16_t *shares) {
    const vf scale = vf_set1(per_share);
    for (int r = 0; r < GROUP_ROWS; r += CHUNK)
        vf_store_i16(shares + r, vf_mul(vf_widen_bf16(factors + r), scale), vf_mul(vf_widen_bf16(factors + r + VW), scale));
}

/* Where row 0 of a kv head takes its jitter from: the first row of a group (magicpig_cli/kernels/jitter.py). */
static inline int64_t jitter_start(uint64_t hash_seed, uint64_t layer, uint64_t kv_head) {
    return (int64_t)(tail_mix(tail_seed(hash_seed, layer, kv_head)) & (JITTER_ROWS - GROUP_ROWS));
}

/* Scores of a cell for up to four heads: tables [heads] `bytes` apart, of_means[h·cells], out[h·stride + row].
 * Meanwhile as many codes are fetched from `ahead` on: cells may lie in places of their own. jitter: the pool, of which
 * the first row takes that at `start`.
 *
 * All in 16 bits: lift·Σ table, less the centre, times the factor's share of the largest, in units, and the mean's part
 * and the jitter. */
static INLINE void score_heads(const uint8_t *codes, const uint16_t *factors, float per_share, const uint8_t *ahead,
        int nibbles, const uint8_t *tables, const signed_t *head, const float *of_means, int64_t cells, int heads,
        const int16_t *jitter, int64_t start, int16_t *out, int64_t stride) {
    const int64_t bytes = (int64_t)nibbles * 16;
    int16_t mean[4];
    for (int h = 0; h < heads; h++) mean[h] = to_int16(of_means[h * cells] / head[h].unit);
    for (int first = 0; first < CELL_ROWS; first += GROUP_ROWS, codes += bytes, ahead += bytes) {
        uint16_t sums[4 * GROUP_ROWS];
        int16_t shares[GROUP_ROWS];
        prefetch((const char *)ahead, bytes);
        factor_shares(factors + first, per_share, shares);
        nibble_sums(codes, nibbles, tables, bytes, heads, sums);
        const int16_t *added = jitter + ((start + first) & (JITTER_ROWS - 1));
        UNROLL for (int h = 0; h < heads; h++) {
            const uint16_t lift = head[h].lift, centre = head[h].centre;
            const int16_t share = head[h].share, of_jitter = head[h].jitter;
            int16_t *to = out + h * stride + first;
            for (int r = 0; r < GROUP_ROWS; r++) {
                const int16_t from_centre = (int16_t)(uint16_t)(sums[h * GROUP_ROWS + r] * lift - centre);
                to[r] = (int16_t)(mean[h] + product_of_shares(product_of_shares(from_centre, shares[r]), share)
                                  + product_of_shares(added[r], of_jitter));
            }
        }
    }
}

static OUTLINE void score_cell(const uint8_t *codes, const uint16_t *factors, float largest, const uint8_t *ahead,
        int nibbles, const uint8_t *tables, const signed_t *head, const float *of_means, int64_t cells, int heads,
        const int16_t *jitter, int64_t start, int16_t *out, int64_t stride) {
    const float per_share = largest > 0 ? TOP_SCORE / largest : 0;
#define SCORE(H) \
    score_heads(codes, factors, per_share, ahead, nibbles, tables, head, of_means, cells, H, jitter, start, out, stride)
    if (heads == 4) SCORE(4);
    else if (heads == 3) SCORE(3);
    else if (heads == 2) SCORE(2);
    else SCORE(1);
#undef SCORE
}

static OUTLINE int64_t scores_at_least(const int16_t *scores, int64_t n, int16_t bound) {
    int64_t count = 0;
    for (int64_t first = 0; first < n; first += 8192) { /* counted in 16 bits within */
        const int64_t last = first + 8192 < n ? first + 8192 : n;
        int16_t here = 0;
        for (int64_t i = first; i < last; i++) here += scores[i] >= bound;
        count += here;
    }
    return count;
}

/* The score that a share of the rows reaches, taken from every so-manieth of them. TOP_SCORE + 1: none is to be taken;
 * −TOP_SCORE − 1: all. subset: room for n scores. */
static OUTLINE int score_bound(const int16_t *scores, int64_t n, double share, int16_t *subset) {
    if (share <= 0 || n == 0) return TOP_SCORE + 1;
    const double wanted = ceil(EXPECTED_ROWS / share);
    const int64_t rows = wanted > SUBSET_ROWS ? wanted < (double)n ? (int64_t)wanted : n : SUBSET_ROWS;
    const int64_t stride = n / rows > 1 ? n / rows : 1;
    int64_t size = 0, count;
    for (int64_t r = 0; r < n; r += stride) subset[size++] = scores[r];
    count = (int64_t)floor(share * (double)size + 0.5);
    if (count >= size) return -TOP_SCORE - 1;
    if (count < 1) count = 1;
    int low = -TOP_SCORE - 1, high = TOP_SCORE + 1; /* reached by `count`; not reached by so many */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (scores_at_least(subset, size, (int16_t)middle) >= count) low = middle;
        else high = middle;
    }
    return low;
}

/* bits [n/64] |= scores that reach the bound. */
static OUTLINE void take_scores(const int16_t *scores, int64_t n, int bound, uint64_t *bits) {
    for (int64_t word = 0; word < n / 64; word++)
        if (bound < -TOP_SCORE) bits[word] = ~(uint64_t)0;
        else if (bound <= TOP_SCORE) bits[word] |= scores_reach(scores + 64 * word, (int16_t)bound);
}

/* The same where somebody else has compared with the bound. */
static OUTLINE void take_bits(const uint64_t *taken, int64_t n, int bound, uint64_t *bits) {
    for (int64_t word = 0; word < n / 64; word++)
        if (bound < -TOP_SCORE) bits[word] = ~(uint64_t)0;
        else if (bound <= TOP_SCORE) bits[word] |= taken[word];
}

/* --- weights of sampled rows --- */

/* Per key −ln u of `estimator.signature_probability`, u = Φ(z) + exp(s − τ + σ²/2)·Φ(−x), z = (s − τ)/σ, x = z + σ, from
 * the table of −ln Φ with `cells` uniform cells, in two steps: where the table is to be read, and what follows.
 * dots = q·k without the scale, x2 = |k − μ|², mean = q·μ with the scale, f the factors as stored. bits and share: B and
 * c of docs/method.md (3).
 *
 * Where x > 0 the exponent is (x² − z²)/2, with the x that the table is read at: its end is x = 11, at σ above 4. */
static INLINE void signature_positions(vf dots, vf x2, vf mean, vf f, const signed_t *head, float scale, int D, int bits,
        float share, int cells, vf *by_noise, vf *by_jitter, vf *exponent) {
    const float per_dimension = 1 / (float)(D > 1 ? D - 1 : 1);
    const vf zero = vf_set1(0), half = vf_set1(0.5f), low = vf_set1(Z_LOW);
    const vf per_z = vf_set1((float)cells / (Z_HIGH - Z_LOW));
    const vf s = vf_mul(dots, vf_set1(scale)), along = vf_sub(s, mean), f2 = vf_mul(f, f);
    const vf part = vf_gt(x2, zero, vf_div(vf_mul(along, along), x2), zero);
    const vf across = vf_sub(vf_set1(head->norm), part);
    const vf free = vf_sub(vf_mul(vf_set1((float)bits), f2), vf_mul(vf_set1(share), x2));
    vf variance = vf_mul(vf_mul(vf_gt(across, zero, across, zero), vf_gt(free, zero, free, zero)),
                         vf_set1(per_dimension));
    variance = vf_add(vf_fma(vf_set1(head->noise), f2, variance), vf_set1(head->unit * head->unit / 3));
    const vf sigma = vf_sqrt(variance), above = vf_sub(s, vf_set1(head->tau)), z = vf_div(above, sigma);
    const vf x = vf_add(z, sigma), read = vf_clamp(vf_sub(zero, x), Z_LOW, Z_HIGH);
    const vf end = vf_gt(x, vf_sub(zero, low), vf_sub(zero, low), x);
    const vf squared = vf_mul(half, vf_mul(vf_sub(end, z), vf_add(end, z)));
    *exponent = vf_gt(x, zero, squared, vf_fma(half, variance, above));
    *by_jitter = vf_mul(vf_sub(read, low), per_z);
    *by_noise = vf_mul(vf_sub(vf_clamp(z, Z_LOW, Z_HIGH), low), per_z);
}

static INLINE vf signature_weight(vf by_noise, vf by_jitter, vf exponent, const float *table, int cells) {
    const vf zero = vf_set1(0), one = vf_set1(1), least = vf_set1(200);
    const vf a = vf_read(table, cells, by_noise);
    vf b = vf_sub(vf_read(table, cells, by_jitter), exponent);
    b = vf_gt(least, b, b, least);
    const vf apart = vf_gt(a, b, vf_sub(b, a), vf_sub(a, b));
    const vf u = vf_sub(vf_gt(a, b, b, a), vf_log(vf_add(one, vf_exp(apart))));
    return vf_gt(u, zero, u, zero);
}
