# Exact attention over runs of rows, and what the sampler shares with it: pieces, partial results and their merge.
# A piece is at most PIECE_ROWS (or SAMPLED_PIECE_ROWS) rows of one kv head, for all its query heads. Pieces are cut by
# row counts alone and merged in order, so results do not depend on threads.

cdef enum:
    PIECE_ROWS = 4096  # 2 MB of bfloat16 rows at D = 128: a merge costs little, and 16 threads find work at 16k rows
    SAMPLED_PIECE_ROWS = 8192  # of which few are read


cdef struct Shape:
    int64_t B
    int H         # query heads of a sequence
    int Hkv
    int G         # query heads of a kv head
    int D
    int packed    # floats of a packed vector
    float scale
    float cap     # 0 = none


cdef struct Part:  # rows of one sequence that are sampled: see sampled.pxi
    const rows_t* rows
    int64_t b
    int64_t start              # first row
    int64_t n
    int64_t words              # of bits per query head
    uint64_t* bits             # [H][words]
    # by signatures (signature.pxi)
    const Unit* units          # [Hkv]; NULL for tables
    # by tables, a segment or a tail (lsh.pxi)
    const float* mu            # [Hkv][D]
    const uint16_t* offsets    # segment: [Hkv][L][buckets + 1]
    const uint16_t* ids        # segment: [Hkv][L][n]
    const uint16_t* codes      # tail: [Hkv][L][capacity]; NULL for a segment
    int64_t buckets
    int64_t capacity


cdef struct Piece:
    const rows_t* rows
    int64_t b
    int64_t kv_head
    int64_t start  # rows [start, stop); for the sampler, relative to the part
    int64_t stop
    const Part* part


cdef struct Partial:
    Piece* pieces
    int64_t* first    # [B·Hkv + 1] first piece of each sequence and kv head
    float* out        # [piece][G][packed], not normalised
    float* top        # [piece][G] highest logit
    float* total      # [piece][G] Σ exp(logit − top)
    int64_t* sampled  # [piece][G]
    # Of the sampled rows, p = exp(logit − top): the error is estimated from these. NULL where it is not.
    float* with_values  # [piece][G][packed]: Σ p²(1−π)·v
    float* spread       # [piece][G][2]: Σ p²(1−π), Σ p²(1−π)·|v|²


cdef Shape _shape(const float[:, :, ::1] q, tables, float scale, float cap):
    cdef Shape shape
    shape.B, shape.H, shape.D = q.shape[0], q.shape[1], q.shape[2]
    shape.Hkv = tables[0].kv_heads if tables else shape.H
    shape.G, shape.packed = shape.H // shape.Hkv, packed_length(shape.D)
    shape.scale, shape.cap = scale, cap
    return shape


cdef int64_t _log2(int64_t n) noexcept:
    """−1 if n is not a power of two."""
    return lowest_bit(n) if n & (n - 1) == 0 else -1


cdef class Tables:
    """Addresses and shapes of row tables, for the kernels."""

    cdef Memory memory
    cdef list held

    def __cinit__(self, tables):
        cdef const int64_t[::1] addresses
        cdef rows_t* rows
        self.memory, self.held = Memory(len(tables) * sizeof(rows_t)), []
        for i, table in enumerate(tables):
            held = table.addresses
            addresses = held
            self.held.append(held)
            rows = <rows_t*>self.memory.at + <int64_t>i
            rows.blocks = &addresses[0] if addresses.shape[0] else NULL
            rows.block_rows, rows.head_dim, rows.type = table.block_rows, table.head_dim, table.type
            rows.block_shift = _log2(rows.block_rows)
            rows.row_bytes = 2 * half_bytes(rows.head_dim, rows.type)

    cdef const rows_t* of(self, int64_t i) noexcept:
        return <const rows_t*>self.memory.at + i


cdef Memory _packed_queries(const float[:, :, ::1] q, tables):
    """float32 [2][B·H][packed]: packed for bfloat16 rows, then for others; what no table needs is zero."""
    cdef int64_t i, count = q.shape[0] * q.shape[1]
    cdef int D = q.shape[2], type
    memory = Memory(2 * count * packed_length(D) * sizeof(float))
    for type in {table.type for table in tables}:
        for i in range(count):
            pack(&q[0, 0, 0] + i * D, D, type, <float*>memory.at + ((type != BFLOAT16) * count + i) * packed_length(D))
    return memory


cdef inline const float* _queries_of(const float* queries, const Piece* piece, const Shape* shape) noexcept nogil:
    """The packed queries of the piece's group, for its type of rows."""
    cdef int64_t other = piece.rows.type != BFLOAT16
    return queries + ((other * shape.B + piece.b) * shape.H + piece.kv_head * shape.G) * shape.packed


cdef class Partials:
    """Room for pieces and their results."""

    cdef Partial view
    cdef list held

    def __cinit__(self, int64_t pieces, int64_t groups, int G, int packed, bint with_error=False):
        cdef int64_t floats = pieces * G * packed
        cdef Memory a = Memory(pieces * sizeof(Piece)), b = Memory((groups + 1) * sizeof(int64_t))
        cdef Memory c = Memory((1 + with_error) * floats * sizeof(float)), d = Memory(pieces * G * sizeof(float))
        cdef Memory e = Memory(pieces * G * sizeof(float)), f = Memory(pieces * G * sizeof(int64_t))
        self.view.pieces, self.view.first, self.view.out = <Piece*>a.at, <int64_t*>b.at, <float*>c.at
        self.view.top, self.view.total, self.view.sampled = <float*>d.at, <float*>e.at, <int64_t*>f.at
        self.held = [a, b, c, d, e, f]
        self.view.with_values = self.view.spread = NULL
        if with_error:
            spread = Memory(pieces * G * 2 * sizeof(float))
            self.view.with_values, self.view.spread = self.view.out + floats, <float*>(<Memory>spread).at
            self.held.append(spread)


cdef int64_t _cut(const rows_t* rows, int64_t b, int64_t kv_head, int64_t start, int64_t stop, const Part* part,
                  Piece* pieces) noexcept nogil:
    """Cut rows [start, stop) into pieces; returns how many. Only counts if `pieces` is NULL."""
    cdef int64_t size = PIECE_ROWS if part == NULL else SAMPLED_PIECE_ROWS
    cdef int64_t count = (stop - start + size - 1) // size, i
    if pieces != NULL:
        for i in range(count):
            pieces[i].rows, pieces[i].b, pieces[i].kv_head, pieces[i].part = rows, b, kv_head, part
            pieces[i].start = start + i * size
            pieces[i].stop = min(stop, start + (i + 1) * size)
    return count


def exact_attend(const float[:, :, ::1] q, runs, float scale, float softcap, int threads):
    """Output float32 [B, H, D], LSE float32 [B, H] and nanoseconds."""
    cdef int64_t began = now_ns(), count = 0, rows = 0, start, stop, i, h, b
    flat = [run for of_sequence in runs for run in of_sequence]
    tables = [run[0] for run in flat]
    cdef Shape shape = _shape(q, tables, scale, softcap)
    cdef Tables sources = Tables(tables)
    cdef Memory queries = _packed_queries(q, tables)
    for _, start, stop in flat:
        count += shape.Hkv * _cut(NULL, 0, 0, start, stop, NULL, NULL)
        rows += stop - start
    cdef Partials partials = Partials(count, shape.B * shape.Hkv, shape.G, shape.packed)
    cdef Partial* view = &partials.view
    count, i = 0, 0
    for b, of_sequence in enumerate(runs):
        for h in range(shape.Hkv):
            view.first[b * shape.Hkv + h] = count
            for j, (_, start, stop) in enumerate(of_sequence):
                count += _cut(sources.of(i + <int64_t>j), b, h, start, stop, NULL, view.pieces + count)
        i += len(of_sequence)
    view.first[shape.B * shape.Hkv] = count
    cdef double ns = <double>rows * shape.H * (5 + shape.D * 0.05)
    cdef ExactJob job = ExactJob(&shape, <const float*>queries.at, view)
    with nogil:
        crew_run(threads, ns, count, _exact_item, &job)
    out, lse, _, _ = _merge(view, &shape, count, threads)
    return out, lse, now_ns() - began


cdef struct ExactJob:
    const Shape* shape
    const float* queries  # of _packed_queries
    const Partial* view


cdef void _exact_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const ExactJob* job = <const ExactJob*>work
    _attend_run(item, job.shape, job.queries, job.view)


cdef void _attend_run(int64_t item, const Shape* shape, const float* queries, const Partial* view) noexcept nogil:
    """All rows of a piece, tile by tile, up to four query heads at a time: a row is decoded once for them."""
    cdef const Piece* piece = view.pieces + item
    cdef const rows_t* rows = piece.rows
    cdef float* out = view.out + item * shape.G * shape.packed
    cdef float* top = view.top + item * shape.G
    cdef float* total = view.total + item * shape.G
    cdef const float* q = _queries_of(queries, piece, shape)
    cdef row_t tile[2][TILE]
    cdef float weights[4 * TILE]
    cdef float factor[4]
    cdef fetch_t fetch
    cdef int64_t at = piece.start
    cdef int n = <int>min(<int64_t>TILE, piece.stop - at), ahead, g, heads, i, now = 0
    rows_from(rows, piece.kv_head, at, n, tile[0])
    for g in range(shape.G):
        top[g] = -INFINITY
    while n > 0:
        at = at + n
        ahead = <int>max(<int64_t>0, min(<int64_t>TILE, piece.stop - at))
        rows_from(rows, piece.kv_head, at, ahead, tile[1 - now])
        fetch_start(&fetch, tile[1 - now], ahead, rows.row_bytes, (shape.G + 3) // 4)
        g = 0
        while g < shape.G:
            heads = 4 if g + 3 < shape.G else 2 if g + 1 < shape.G else 1
            rows_dot(q + g * shape.packed, shape.packed, heads, tile[now], n, shape.D, rows.type, &fetch, weights)
            for i in range(heads):
                logits_scale(weights + i * TILE, n, shape.scale, shape.cap)
                factor[i] = softmax_step(weights + i * TILE, n, top + g + i, total + g + i)
            rows_add(weights, heads, tile[now], n, shape.D, rows.type, &fetch, factor, out + g * shape.packed,
                     shape.packed)
            g = g + heads
        fetch_rest(&fetch)
        n, now = ahead, 1 - now


cdef tuple _merge(const Partial* view, const Shape* shape, int64_t pieces, int threads):
    """Output float32 [B, H, D], LSE and estimated error float32 [B, H], sampled int64 [B, H]."""
    cdef int64_t heads = shape.B * shape.H
    all_out = np.zeros((shape.B, shape.H, shape.D), dtype=np.float32)
    all_lse = np.empty((shape.B, shape.H), dtype=np.float32)
    all_error = np.zeros((shape.B, shape.H), dtype=np.float32)
    all_sampled = np.zeros((shape.B, shape.H), dtype=np.int64)
    cdef float[:, :, ::1] out = all_out
    cdef float[:, ::1] lse = all_lse, error = all_error
    cdef int64_t[:, ::1] sampled = all_sampled
    cdef double ns = <double>pieces * shape.G * (20 + shape.packed * 0.2)
    cdef MergeJob job = MergeJob(view, shape, &out[0, 0, 0], &lse[0, 0], &error[0, 0], &sampled[0, 0])
    with nogil:
        crew_run(threads, ns, heads, _merge_head, &job)
    return all_out, all_lse, all_error, all_sampled


cdef struct MergeJob:
    const Partial* view
    const Shape* shape
    float* out         # [B·H][D]
    float* lse         # [B·H]
    float* error       # [B·H]
    int64_t* sampled   # [B·H]


cdef void _merge_head(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const MergeJob* job = <const MergeJob*>work
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef float* out = job.out + item * shape.D
    cdef float* lse = job.lse + item
    cdef int64_t* sampled = job.sampled + item
    cdef int64_t group = item // shape.G, g = item % shape.G, i, at
    cdef float top = -INFINITY, total = 0, weight
    cdef int d
    lse[0] = -INFINITY
    for i in range(view.first[group], view.first[group + 1]):
        top = max(top, view.top[i * shape.G + g])
        sampled[0] += view.sampled[i * shape.G + g]
    if top == -INFINITY:
        return
    for i in range(view.first[group], view.first[group + 1]):
        at = i * shape.G + g
        weight = expf(view.top[at] - top)
        total += weight * view.total[at]
        if weight > 0:
            add_packed(view.out + at * shape.packed, shape.D, view.pieces[i].rows.type, weight, out)
    for d in range(shape.D):
        out[d] /= total
    lse[0] = top + logf(total)
    if view.spread != NULL:
        job.error[item] = _estimated_error(job, group, g, top, total, out)


cdef float _estimated_error(const MergeJob* job, int64_t group, int64_t g, float top, float total,
                            const float* out) noexcept nogil:
    """√(Σ ŵ²(1−π)·|v − out|²) / |out| over the sampled rows of a head."""
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef float with_values[MAX_PACKED]
    cdef double weight, spread = 0, variance = 0, norm = 0
    cdef int64_t i, at
    cdef int d
    memset(with_values, 0, shape.D * sizeof(float))
    for i in range(view.first[group], view.first[group + 1]):
        at = i * shape.G + g
        if view.pieces[i].part == NULL or view.top[at] == -INFINITY:
            continue
        weight = expf(view.top[at] - top)
        weight *= weight
        spread += weight * view.spread[2 * at]
        variance += weight * view.spread[2 * at + 1]
        add_packed(view.with_values + at * shape.packed, shape.D, view.pieces[i].rows.type, <float>weight, with_values)
    for d in range(shape.D):
        variance += out[d] * (spread * out[d] - 2 * <double>with_values[d])
        norm += <double>out[d] * out[d]
    if variance <= 0:
        return 0
    return <float>(sqrt(variance / norm) / total) if norm > 0 else INFINITY
