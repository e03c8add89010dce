# Codes of rows and queries (paper section 4.2): simd/hash.h over blocks of rows and of tables.


cdef struct HashJob:
    const float* panels  # [table block][K][D][VW]
    const float* bias    # [heads][table block][K][VW]
    int D
    int K
    int L
    int blocks           # table blocks


cdef object _on_cache_lines(shape):
    """Zeroed float32 array that starts on a cache line: a load that crosses lines costs twice."""
    memory = np.zeros(np.prod(shape) + 16, dtype=np.float32)
    first = -(memory.ctypes.data // 4) % 16
    return memory[first : first + np.prod(shape)].reshape(shape)


def pack_projection(const float[:, ::1] matrix, int K, int L):
    """float32 [D, L·K] → float32 [table block, K, D, VW]."""
    cdef int D = matrix.shape[0], block
    packed = _on_cache_lines((table_blocks(L), K, D, VW))
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
                     float* packed, uint32_t* codes, uint16_t* out, int64_t table_stride,
                     int64_t row_stride) noexcept nogil:
    """Codes of n ≤ HASH_BLOCK keys in table blocks [first, last): out[table·table_stride + row·row_stride]."""
    cdef int block = first, tables, t, lane, table, r
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
    cdef int64_t plane = out.strides[0] // sizeof(uint16_t), stride = out.strides[1] // sizeof(uint16_t)
    cdef int64_t count = stop - start, parts = (count + HASH_BLOCK - 1) // HASH_BLOCK, item
    cdef HashJob job
    if count == 0 or heads == 0:
        return
    cdef float[:, :, :, ::1] biases = _packed_bias(bias[first_head : first_head + heads], heads, K, L)
    cdef float[:, ::1] scratch = _hash_scratch(threads, rows.head_dim)
    job.panels, job.bias, job.D, job.K, job.L, job.blocks = (
        &packed[0, 0, 0, 0], &biases[0, 0, 0, 0], rows.head_dim, K, L, table_blocks(L))
    threads = _useful(threads, <double>count * heads * job.D * K * L * 0.03)
    for item in prange(heads * parts, nogil=True, schedule="dynamic", num_threads=threads):
        _hash_stored(&job, rows, item // parts, first_head, start, item % parts * HASH_BLOCK, count,
                     &scratch[threadid(), 0], &out[0, 0, 0] + item // parts * plane, stride)


cdef void _hash_stored(const HashJob* job, const rows_t* rows, int head, int first_head, int64_t start, int64_t done,
                       int64_t count, float* scratch, uint16_t* out, int64_t table_stride) noexcept nogil:
    cdef row_t at[HASH_BLOCK]
    cdef int n = <int>min(<int64_t>HASH_BLOCK, count - done)
    rows_from(rows, first_head + head, start + done, n, at)
    _hash_item(job, at, n, rows.type, head, 0, job.blocks, scratch, <uint32_t*>(scratch + HASH_BLOCK * job.D),
               out + done, table_stride, 1)


def hash_queries(const float[:, :, ::1] q, const float[:, :, :, ::1] packed, int K, int L, int threads):
    """uint16 [B, H, L] of q float32 [B, H, D]. An item is a block of queries and a few tables: one sequence has few
    queries, and reading the projection is most of the work."""
    cdef int D = q.shape[2]
    cdef int64_t count = q.shape[0] * q.shape[1], parts = (count + HASH_BLOCK - 1) // HASH_BLOCK, item
    cdef int groups = (table_blocks(L) + HASH_TABLES - 1) // HASH_TABLES
    codes = np.empty((q.shape[0], q.shape[1], L), dtype=np.uint16)
    cdef uint16_t[:, :, ::1] out = codes
    cdef HashJob job
    cdef float[:, :, :, ::1] biases = _packed_bias(None, 1, K, L)
    cdef float[:, ::1] scratch = _hash_scratch(threads, D)
    job.panels, job.bias, job.D, job.K, job.L, job.blocks = (
        &packed[0, 0, 0, 0], &biases[0, 0, 0, 0], D, K, L, table_blocks(L))
    threads = _useful(threads, <double>count * D * K * L * 0.03)
    for item in prange(parts * groups, nogil=True, schedule="dynamic", num_threads=threads):
        _hash_some_queries(&job, &q[0, 0, 0], item // groups * HASH_BLOCK, count, item % groups,
                           &scratch[threadid(), 0], &out[0, 0, 0])
    return codes


cdef void _hash_some_queries(const HashJob* job, const float* q, int64_t done, int64_t count, int group,
                             float* scratch, uint16_t* out) noexcept nogil:
    cdef row_t at[HASH_BLOCK]
    cdef int n = <int>min(<int64_t>HASH_BLOCK, count - done), r
    cdef int first = group * HASH_TABLES
    for r in range(n):
        at[r] = <row_t>(q + (done + r) * job.D)
    _hash_item(job, at, n, FLOAT32, 0, first, min(first + <int>HASH_TABLES, job.blocks), scratch,
               <uint32_t*>(scratch + HASH_BLOCK * job.D), out + done * job.L, 1, job.L)


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
