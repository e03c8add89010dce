# Codes of rows and queries (paper section 4.2): simd/hash.h over blocks of rows and of tables.


cdef struct HashJob:
    const float* panels  # [table block][K][D][VW]
    const float* bias    # [heads][table block][K][VW]
    int D
    int K
    int L
    int blocks           # table blocks
    float* scratch       # of each worker: packed rows, then codes
    int64_t scratch_floats
    uint16_t* out
    int64_t count        # rows or queries
    # of stored rows
    const rows_t* rows
    int64_t start        # first row
    int first_head
    int64_t plane        # of out, from one head to the next
    int64_t stride       # of out, from one table to the next
    # of queries
    const float* q       # [count][D]


cdef void _set_job(HashJob* job, const float[:, :, :, ::1] packed, const float[:, :, :, ::1] bias,
                   float[:, ::1] scratch, int D, int K, int L, int64_t count) noexcept:
    job.panels, job.bias, job.D, job.K, job.L, job.blocks = (
        &packed[0, 0, 0, 0], &bias[0, 0, 0, 0], D, K, L, table_blocks(L))
    job.scratch, job.scratch_floats, job.count = &scratch[0, 0], scratch.shape[1], count


def pack_projection(const float[:, ::1] matrix, int K, int L):
    """float32 [D, L·K] → float32 [table block, K, D, VW]."""
    cdef int D = matrix.shape[0], block
    packed = kept_array((table_blocks(L), K, D, VW), np.float32)
    cdef float[:, :, :, ::1] view = packed
    for block in range(table_blocks(L)):
        pack_projection_block(&matrix[0, 0], D, K, L, block, &view[block, 0, 0, 0])
    return packed


cdef object _packed_bias(bias, int heads, int K, int L):
    """float32 [Hkv, L·K] → [Hkv, table block, K, VW]; None is zero."""
    packed = np.zeros((heads, table_blocks(L) * VW, K), dtype=np.float32)
    if bias is not None:
        packed[:, :L] = bias.reshape(heads, L, K)
    return np.ascontiguousarray(packed.reshape(heads, table_blocks(L), VW, K).transpose(0, 1, 3, 2))


cdef void _hash_item(const HashJob* job, const row_t* rows, int n, int type, int head, int first, int last,
                     int worker, uint16_t* out, int64_t table_stride, int64_t row_stride) noexcept nogil:
    """Codes of n ≤ HASH_BLOCK keys in table blocks [first, last): out[table·table_stride + row·row_stride]."""
    cdef int block = first, tables, t, lane, table, r
    cdef float* packed = job.scratch + worker * job.scratch_floats
    cdef uint32_t* codes = <uint32_t*>(packed + HASH_BLOCK * job.D)
    cdef int64_t panel = <int64_t>job.K * job.D * VW
    cdef const uint32_t* code
    hash_pack(rows, n, job.D, type, packed)
    while block < last:
        tables = min(<int>HASH_TABLES, last - block)
        memset(codes, 0, tables * HASH_BLOCK * VW * sizeof(uint32_t))
        hash_tables(packed, n, job.panels + block * panel, job.D, job.K, tables,
                    job.bias + (<int64_t>head * job.blocks + block) * job.K * VW, codes, NULL)
        for t in range(tables):
            for lane in range(VW):
                table = (block + t) * VW + lane
                if table < job.L:
                    code = codes + <int64_t>t * HASH_BLOCK * VW + lane
                    for r in range(n):
                        out[table * table_stride + r * row_stride] = <uint16_t>code[r * VW]
        block = block + tables


cdef object _hash_scratch(int threads, int D):
    """Per thread: packed rows, then codes."""
    return np.empty((threads, HASH_BLOCK * D + HASH_TABLES * HASH_BLOCK * VW + 16), dtype=np.float32)


def hash_rows(table, int64_t start, int64_t stop, const float[:, :, :, ::1] packed, int K, int L, bias, int threads,
              uint16_t[:, :, :] out, int first_head):
    """Codes of the keys in rows [start, stop) into out uint16 [heads, L, n], of the kv heads from first_head on."""
    cdef Tables source = Tables([table])
    cdef const rows_t* rows = source.of(0)
    cdef int heads = out.shape[0]
    cdef int64_t count = stop - start, parts = (count + HASH_BLOCK - 1) // HASH_BLOCK
    cdef HashJob job
    if count == 0 or heads == 0:
        return
    cdef float[:, :, :, ::1] biases = _packed_bias(bias[first_head : first_head + heads], heads, K, L)
    cdef float[:, ::1] scratch = _hash_scratch(threads, rows.head_dim)
    _set_job(&job, packed, biases, scratch, rows.head_dim, K, L, count)
    job.rows, job.start, job.first_head, job.out = rows, start, first_head, &out[0, 0, 0]
    job.plane, job.stride = out.strides[0] // sizeof(uint16_t), out.strides[1] // sizeof(uint16_t)
    cdef double ns = <double>count * heads * job.D * K * L * 0.03
    with nogil:
        crew_run(threads, ns, heads * parts, _hash_stored, &job)


cdef void _hash_stored(const void* work, int64_t item, int worker) noexcept nogil:
    """A block of rows of one head, in all tables."""
    cdef const HashJob* job = <const HashJob*>work
    cdef int64_t parts = (job.count + HASH_BLOCK - 1) // HASH_BLOCK, done = item % parts * HASH_BLOCK
    cdef int head = <int>(item // parts), n = <int>min(<int64_t>HASH_BLOCK, job.count - done)
    cdef row_t at[HASH_BLOCK]
    rows_from(job.rows, job.first_head + head, job.start + done, n, at)
    _hash_item(job, at, n, job.rows.type, head, 0, job.blocks, worker, job.out + head * job.plane + done, job.stride, 1)


def hash_queries(const float[:, :, ::1] q, const float[:, :, :, ::1] packed, int K, int L, int threads):
    """uint16 [B, H, L] of q float32 [B, H, D]. An item is a block of queries and a few tables: one sequence has few
    queries, and reading the projection is most of the work."""
    cdef int D = q.shape[2]
    cdef int64_t count = q.shape[0] * q.shape[1], parts = (count + HASH_BLOCK - 1) // HASH_BLOCK
    codes = np.empty((q.shape[0], q.shape[1], L), dtype=np.uint16)
    cdef uint16_t[:, :, ::1] out = codes
    cdef HashJob job
    cdef float[:, :, :, ::1] biases = _packed_bias(None, 1, K, L)
    cdef float[:, ::1] scratch = _hash_scratch(threads, D)
    _set_job(&job, packed, biases, scratch, D, K, L, count)
    job.q, job.out = &q[0, 0, 0], &out[0, 0, 0]
    cdef double ns = <double>count * D * K * L * 0.03
    with nogil:
        crew_run(threads, ns, parts * _query_groups(&job), _hash_some_queries, &job)
    return codes


cdef inline int _query_groups(const HashJob* job) noexcept nogil:
    """Groups of table blocks that are hashed at once."""
    return (job.blocks + HASH_TABLES - 1) // HASH_TABLES


cdef void _hash_some_queries(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const HashJob* job = <const HashJob*>work
    cdef int64_t done = item // _query_groups(job) * HASH_BLOCK
    cdef int n = <int>min(<int64_t>HASH_BLOCK, job.count - done), r
    cdef int first = <int>(item % _query_groups(job)) * HASH_TABLES
    cdef row_t at[HASH_BLOCK]
    for r in range(n):
        at[r] = <row_t>(job.q + (done + r) * job.D)
    _hash_item(job, at, n, FLOAT32, 0, first, min(first + <int>HASH_TABLES, job.blocks), worker,
               job.out + done * job.L, 1, job.L)


def project(const float[:, ::1] x, const float[:, :, :, ::1] packed, int K, int L):
    """float32 [n, L·K] of x float32 [n, D], in the arithmetic of the hash."""
    cdef int D = x.shape[1], n = x.shape[0], row, block
    cdef row_t at[1]
    cdef int64_t panel = <int64_t>K * D * VW
    raw = np.zeros((n, table_blocks(L), K, VW), dtype=np.float32)
    cdef float[:, :, :, ::1] to = raw
    cdef float[:, :, :, ::1] zero = _packed_bias(None, 1, K, L)
    cdef float[::1] packed_row = np.zeros(HASH_ROWS * D, dtype=np.float32)
    cdef float[:, :, ::1] planes = np.zeros((K, HASH_BLOCK, VW), dtype=np.float32)
    cdef uint32_t[::1] unused = np.zeros(HASH_BLOCK * VW, dtype=np.uint32)
    for row in range(n):
        at[0] = <row_t>&x[row, 0]
        hash_pack(at, 1, D, FLOAT32, &packed_row[0])
        for block in range(table_blocks(L)):
            hash_tables(&packed_row[0], 1, &packed[block, 0, 0, 0], D, K, 1, &zero[0, block, 0, 0],
                        &unused[0], &planes[0, 0, 0])
            to[row, block] = planes[:, 0, :]
    return np.ascontiguousarray(raw.transpose(0, 1, 3, 2).reshape(n, -1, K)[:, :L].reshape(n, L * K))
