# Linear layers of a decode step: a few vectors times weights that take the same input: simd/product.h. Items are rows of
# one weight, about the same number of bytes each. A vector is multiplied in the same order whatever stands beside it.


cdef struct ProductJob:
    const product_t* weights
    const int64_t* first_item  # of each weight, and the end
    int64_t rows               # of an item
    int64_t K
    int type
    const float* x             # [M][packed]
    int64_t packed
    int64_t M


def multiply(const float[:, ::1] x, weights, int threads):
    """float32 [Σ M·N]: x [M, K] times each weight, one [M, N] after the other."""
    result = np.empty(x.shape[0] * sum(weights.outer), dtype=np.float32)
    cdef float[::1] out = result
    if result.size:
        _multiply(&x[0, 0], x.shape[0], weights, threads, &out[0])
    return result


cdef _multiply(const float* x, int64_t M, weights, int threads, float* out):
    """`multiply` of x [M, K], where there is a product at all."""
    cdef const int64_t[:, ::1] addresses = weights.addresses
    cdef int64_t count = addresses.shape[0], i, m, items = 0, values = 0
    cdef int type = weights.type
    cdef Memory memory = Memory(count * sizeof(product_t)), firsts = Memory((count + 1) * sizeof(int64_t))
    cdef product_t* at = <product_t*>memory.at
    cdef int64_t* first_item = <int64_t*>firsts.at
    cdef ProductJob job
    job.weights, job.first_item, job.type = at, first_item, type
    job.M, job.K = M, weights.inner
    job.packed = vector_length(job.K, type)
    job.rows = max(<int64_t>4, PRODUCT_BYTES // weight_bytes(job.K, type) // 4 * 4)
    cdef Memory packed = Memory((M + 1) * job.packed * sizeof(float))  # one beyond the last is read
    job.x = <const float*>packed.at
    for m in range(M):
        pack_vector(x + m * job.K, job.K, type, <float*>packed.at + m * job.packed)
    for i in range(count):
        at[i].weight, at[i].scale = <const char*>addresses[i, 0], <const uint16_t*>addresses[i, 1]
        at[i].N, at[i].out = addresses[i, 2], out + values
        values += M * at[i].N
        first_item[i] = items
        items += (at[i].N + job.rows - 1) // job.rows
    first_item[count] = items
    cdef double ns = values * weight_bytes(job.K, type) * NS_PER_BYTE
    with nogil:
        crew_run(threads, ns, items, _product_item, &job)


cdef void _product_item(const void* work, int64_t item, int worker) noexcept nogil:
    """Some rows of a weight, by all vectors."""
    cdef const ProductJob* job = <const ProductJob*>work
    cdef const product_t* weight
    cdef int64_t i = 0, m = 0, first
    cdef int count
    while item >= job.first_item[i + 1]:
        i = i + 1
    weight = job.weights + i
    first = (item - job.first_item[i]) * job.rows
    while m < job.M:
        count = <int>min(<int64_t>4, job.M - m)
        product(weight, first, min(first + job.rows, weight.N), job.K, job.type, job.x + m * job.packed, job.packed,
                count, weight.out + m * weight.N)
        m = m + count


# Float32 weights to 4-bit ones and back: simd/int4.h. Items are rows, about the same number of bytes each.


cdef struct Int4Job:
    float* values             # [N][K]
    uint8_t* codes            # [N][K/2]
    uint16_t* factors         # [N][K/32][2]
    int64_t N, K
    int64_t rows              # of an item


def round_int4(const float[:, ::1] values, uint8_t[:, ::1] codes, factors, int threads):
    """Codes [N, K/2] and factors float16 [N, K/32, 2] of values [N, K]."""
    cdef uint16_t[:, :, ::1] bits = factors.view(np.uint16)
    cdef Int4Job job
    job.N, job.K = values.shape[0], values.shape[1]
    if job.N:
        job.values, job.codes, job.factors = <float*>&values[0, 0], &codes[0, 0], &bits[0, 0, 0]
        _int4_run(&job, threads, _round_item)


def widen_int4(const uint8_t[:, ::1] codes, factors, float[:, ::1] out, int threads):
    """out [N, K] = minimum + scale·code, for codes [N, K/2] and factors float16 [N, K/32, 2]."""
    cdef const uint16_t[:, :, ::1] bits = factors.view(np.uint16)
    cdef Int4Job job
    job.N, job.K = out.shape[0], out.shape[1]
    if job.N:
        job.values, job.codes, job.factors = &out[0, 0], <uint8_t*>&codes[0, 0], <uint16_t*>&bits[0, 0, 0]
        _int4_run(&job, threads, _widen_item)


cdef void _int4_run(Int4Job* job, int threads, crew_work work) noexcept:
    job.rows = max(<int64_t>1, PRODUCT_BYTES // (4 * job.K))
    with nogil:
        crew_run(threads, 4.0 * job.N * job.K * NS_PER_BYTE, (job.N + job.rows - 1) // job.rows, work, job)


cdef void _round_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const Int4Job* job = <const Int4Job*>work
    cdef int64_t r
    for r in range(item * job.rows, min(item * job.rows + job.rows, job.N)):
        int4_round(job.values + r * job.K, job.K, job.codes + r * int4_code_bytes(job.K),
                   job.factors + r * int4_factors(job.K))


cdef void _widen_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const Int4Job* job = <const Int4Job*>work
    cdef int64_t r
    for r in range(item * job.rows, min(item * job.rows + job.rows, job.N)):
        int4_widen(job.codes + r * int4_code_bytes(job.K), job.factors + r * int4_factors(job.K), job.K,
                   job.values + r * job.K)
