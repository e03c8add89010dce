# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Native kernels of one instruction set. Names and arguments are those of magicpig_cli/kernels/reference.

This source is compiled once per tier; what differs is the header behind MAGICPIG_VEC. Arguments are trusted: the door
(magicpig_cli/kernels) has checked them. Work is cut into items by row counts; threads take items, so that no result
depends on how many threads there are.
"""

import numpy as np

from libc.math cimport INFINITY, expf, floor, isfinite, logf, sqrt, sqrtf
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from magicpig_cli.kernels.memory import kept_array


cdef extern from *:
    """
    #define TIER_NAME MAGICPIG_TIER
    """
    const char* TIER_NAME


cdef extern from "stdlib.h" nogil:
    void* aligned_alloc(size_t alignment, size_t size)


cdef extern from "cpu.h" nogil:
    int cpu_has_avx2()
    int cpu_has_avx512()
    int cpu_has_neon()
    int64_t now_ns()


cdef extern from "crew.h" nogil:
    ctypedef void (*crew_work)(const void* job, int64_t item, int worker) noexcept nogil
    void crew_run(int threads, double ns, int64_t items, crew_work work, const void* job)


cdef extern from "rows.h" nogil:
    enum: VW
    enum: TILE
    enum: MAX_PACKED
    enum: BFLOAT16
    enum: FLOAT32
    enum: INT8
    ctypedef const char* row_t
    ctypedef struct rows_t:
        const int64_t* blocks
        int64_t block_rows
        int64_t block_shift
        int64_t row_bytes
        int32_t head_dim
        int32_t type
    ctypedef struct fetch_t:
        pass
    row_t row_at(const rows_t* rows, int64_t head, int64_t row)
    void rows_from(const rows_t* rows, int64_t head, int64_t first, int n, row_t* out)
    int64_t value_bytes(int type)
    int64_t half_bytes(int head_dim, int type)
    int packed_length(int head_dim)
    void pack(const float* x, int head_dim, int type, float* out)
    void add_packed(const float* x, int head_dim, int type, float factor, float* out)
    void store_values(const float* x, int head_dim, int type, char* half)
    void prefetch(const char* at, int64_t bytes)
    void fetch_start(fetch_t* fetch, const row_t* rows, int n, int64_t bytes, int passes)
    void fetch_rest(fetch_t* fetch)
    void rows_dot(const float* x, int64_t stride, int heads, const row_t* rows, int n, int head_dim, int type,
                  fetch_t* fetch, float* out)
    void rows_distance(const float* x, const row_t* rows, int n, int head_dim, int type, fetch_t* fetch, float* out)
    void rows_measure(const float* x, const float* q, int64_t stride, const uint16_t* which, const row_t* rows,
                      int n, int head_dim, int type, fetch_t* fetch, float* distances, float* products)
    void rows_products(const float* q, int64_t stride, const uint16_t* which, const row_t* rows, int n, int head_dim,
                       int type, fetch_t* fetch, float* products)
    void rows_add_some(float* p, int heads, const row_t* rows, const int32_t* which, int n, int head_dim, int type,
                       fetch_t* fetch, const float* factor, float* total, int64_t stride)
    void rows_add(float* p, int heads, const row_t* rows, int n, int head_dim, int type, fetch_t* fetch,
                  const float* factor, float* total, int64_t stride)
    float packed_dot(const float* x, const float* y, int head_dim)


cdef double NS_PER_BYTE = 0.08  # that one core reads from memory, about


cdef extern from "product.h" nogil:
    enum: PRODUCT_BYTES
    ctypedef struct product_t:
        const char* weight
        const uint16_t* scale
        int64_t N
        float* out
    int64_t weight_bytes(int64_t K, int type)
    int64_t vector_length(int64_t K, int type)
    void pack_vector(const float* x, int64_t K, int type, float* out)
    int64_t int4_code_bytes(int64_t K)
    int64_t int4_factors(int64_t K)
    void int4_round(const float* x, int64_t K, uint8_t* codes, uint16_t* factors)
    void int4_widen(const uint8_t* codes, const uint16_t* factors, int64_t K, float* out)
    void product(const product_t* p, int64_t first, int64_t last, int64_t K, int type, const float* x, int64_t packed,
                 int count, float* out)


cdef extern from "layers.h" nogil:
    void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out)
    void add_to(float* x, const float* y, int64_t n)
    void rotate(float* x, const float* cosine, const float* sine, int n)
    void gate_values(float* gate, const float* up, int64_t n, int activation)


cdef extern from "logits.h" nogil:
    void logits_scale(float* dots, int n, float scale, float cap)
    void error_weights(const float* p, const float* log_pi, const float* values, int n, float factor, float* out,
                       float* sums)
    float softmax_step(float* logits, int n, float* top, float* total)


cdef extern from "hash.h" nogil:
    enum: HASH_ROWS
    enum: HASH_TABLES
    enum: HASH_BLOCK
    int table_blocks(int tables)
    void pack_projection_block(const float* matrix, int D, int K, int L, int block, float* out)
    void hash_pack(const row_t* rows, int n, int D, int type, float* out)
    void hash_tables(const float* rows, int n, const float* panel, int D, int K, int tables, const float* bias,
                     uint32_t* codes, float* raw)


cdef extern from "signature.h" nogil:
    enum: CELL_ROWS
    enum: GROUP_ROWS
    enum: TOP_SCORE
    ctypedef struct signed_t:
        float step
        float offset
        float noise
        float unit
        uint16_t lift
        uint16_t centre
        int16_t share
        int16_t jitter
        float norm
        float tau
        float rate
    float bf16_to_float(uint16_t upper)
    void pack_basis_rows(const float* matrix, int bits, int D, float* out)
    void widen_row(row_t row, int D, int type, float* out)
    void cell_mean(const float* keys, int D, double* sums, uint16_t* mean)
    void sign_cell(const float* keys, const uint16_t* mean, const float* panels, int D, int nibbles, float* x,
                   uint8_t* codes, uint16_t* factors)
    void project_vectors(const float* x, const float* panels, int D, int nibbles, float* out)
    void look_up_tables(const float* projected, int64_t stride, int nibbles, uint8_t* table, signed_t* head)
    float largest_size(const float* x, int64_t n)
    void set_unit(signed_t* head, int nibbles, float of_means, float factor)
    int64_t jitter_start(uint64_t hash_seed, uint64_t layer, uint64_t kv_head)
    void score_cell(const uint8_t* codes, const uint16_t* factors, float largest, const uint8_t* ahead, int nibbles,
                    const uint8_t* tables, const signed_t* head, const float* of_means, int64_t cells, int heads,
                    const int16_t* jitter, int64_t start, int16_t* out, int64_t stride)
    int score_bound(const int16_t* scores, int64_t n, double share, int16_t* subset)
    void take_scores(const int16_t* scores, int64_t n, int bound, uint64_t* bits)
    void take_bits(const uint64_t* taken, int64_t n, int bound, uint64_t* bits)
    int16_t to_int16(float x)


cdef extern from "tail.h" nogil:
    uint64_t tail_seed(uint64_t hash_seed, uint64_t layer, uint64_t kv_head)
    void tail_words(int64_t first, int64_t n, uint64_t seed, const uint64_t* limits, int heads, uint64_t* bits,
                    int64_t words)


cdef extern from "samples.h" nogil:
    enum: HEADS
    ctypedef struct head_t:
        const float* q
        float rate
        float q_mu
        float norm
        const signed_t* about
        const float* means
    ctypedef struct measured_t:
        float* squares
        float* products
        uint16_t* first
        float* factors
        int32_t* cells
    ctypedef struct samples_t:
        int* n
        int32_t* row
        int shared
        row_t* shared_rows
        uint16_t* shared_heads
        float* p
        float* log_pi
    ctypedef struct weigh_t:
        float scale
        float cap
        const float* table
        int cells
        int by_signatures
        int D
        int bits
        float share
    void samples_start(samples_t* samples)
    void samples_list(samples_t* samples, const uint64_t* sampled, const uint64_t* shared, int heads, int number,
                      const row_t* rows, uint16_t* first)
    int samples_turns(int samples, int ahead, int64_t row_bytes)
    void samples_weigh(samples_t* samples, const measured_t* measured, const head_t* heads, int count,
                       const weigh_t* how, float* top, float* total, float* factors)


cdef extern from "probe.h" nogil:
    float read_bytes(const char* at, int64_t bytes)
    float read_tiles(const row_t* rows, int64_t n, int64_t row_bytes, int64_t ahead)


cdef extern from "retrieve.h" nogil:
    enum: COUNTER_PASS
    void count_ids(uint8_t* counters, const uint16_t* ids, int n)
    void counters_clamp(uint8_t* counters, int64_t n)
    uint64_t compare_codes(const uint16_t* codes, int64_t stride, int n, int L, const uint16_t* query)
    uint64_t counters_take(uint8_t* counters)


cdef extern from "scan.h" nogil:
    int lowest_bit(uint64_t word)
    int count_bits(uint64_t word)
    ctypedef struct scan_t:
        const uint64_t* bits
    ctypedef struct taken_t:
        int n
        int32_t* ids
        row_t* rows
    void scan_start(scan_t* scan, const uint64_t* bits, int64_t words, int heads, int64_t first, int64_t stop,
                    const rows_t* rows, int64_t kv_head, int64_t start)
    void scan_take(scan_t* scan, int with_ids, taken_t* tile, uint64_t* sampled)


TIER = TIER_NAME.decode()


def supported():
    """Tiers that this CPU and operating system can run."""
    tiers = ["portable"]
    if cpu_has_neon():
        tiers.append("neon")
    if cpu_has_avx2():
        tiers.append("avx2")
    if cpu_has_avx512():
        tiers.append("avx512")
    return tiers


cdef class Memory:
    """Bytes for the time of a call, aligned to a cache line, zero unless that is not needed."""

    cdef char* at

    def __cinit__(self, int64_t size, bint zero=True):
        size = (size // 64 + 1) * 64
        self.at = <char*>aligned_alloc(64, size)
        if self.at == NULL:
            raise MemoryError(f"no {size} bytes for intermediate results of attention")
        if zero:
            memset(self.at, 0, size)

    def __dealloc__(self):
        free(self.at)


include "rows.pxi"
include "attend.pxi"
include "hash.pxi"
include "segment.pxi"
include "sampled.pxi"
include "lsh.pxi"
include "signature.pxi"
include "elsewhere.pxi"
include "product.pxi"
include "block.pxi"
include "probe.pxi"
