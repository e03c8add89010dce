# Attention estimated from sampled rows (paper section 4.1), beside rows that are attended exactly: retrieve → attend →
# merge, stages of one call.
# A part is a segment or a tail of one sequence. Retrieval leaves one bit per row and query head; attention walks the
# rows that any head of a group has sampled, so a row that several heads share is read once.


cdef struct Lists:  # where the ids of the L buckets of one query stand; scratch of a thread
    const uint16_t** ids
    int* sizes
    uint8_t* counters


cdef class Parts:
    """All segments and tails of a call, and room for the bits of their rows."""

    cdef Part* at
    cdef int64_t count
    cdef int64_t rows
    cdef int64_t longest
    cdef list held
    cdef list first  # first part of each sequence, and the end

    def __cinit__(self, groups, Tables sources, int H):
        cdef int64_t b
        self.count = sum(len(group.segments) + (group.tail is not None) for group in groups)
        memory = Memory(self.count * sizeof(Part))
        self.held, self.first, self.longest, self.rows = [memory], [], 0, 0
        self.at = <Part*>memory.at
        self.count = 0
        for b, group in enumerate(groups):
            self.first.append(self.count)
            for segment in group.segments:
                self._add(b, group, sources.of(b), segment.start, segment.n, H).buckets = 1 << <int>segment.K
                self._set_segment(segment.offsets, segment.ids)
            if group.tail is not None:
                self._add(b, group, sources.of(b), group.tail.start, group.tail.n, H)
                self._set_tail(group.tail.codes)
        self.first.append(self.count)

    cdef Part* _add(self, int64_t b, group, const rows_t* rows, int64_t start, int64_t n, int H):
        cdef Part* part = self.at + self.count
        cdef const float[:, ::1] mu = group.mu
        part.b, part.rows, part.start, part.n, part.words = b, rows, start, n, (n + 63) // 64
        cdef Memory bits = Memory(part.words * H * sizeof(uint64_t))
        part.bits, part.mu = <uint64_t*>bits.at, &mu[0, 0]
        self.held.append((bits, group.mu))
        self.longest = max(self.longest, n)
        self.count += 1
        self.rows += n
        return part

    cdef void _set_segment(self, const uint16_t[:, :, ::1] offsets, const uint16_t[:, :, ::1] ids):
        cdef Part* part = self.at + self.count - 1
        part.offsets, part.ids = &offsets[0, 0, 0], &ids[0, 0, 0]

    cdef void _set_tail(self, const uint16_t[:, :, ::1] codes):
        cdef Part* part = self.at + self.count - 1
        part.codes, part.capacity = &codes[0, 0, 0], codes.shape[2]


cdef void _retrieve_all(Parts parts, const uint16_t[:, :, ::1] codes, int Hkv, int threads, int64_t* times):
    """Fill the bits of every part. Items are (part, query head)."""
    cdef RetrieveJob job
    job.parts, job.codes, job.H, job.Hkv, job.L = parts.at, &codes[0, 0, 0], codes.shape[1], Hkv, codes.shape[2]
    # ids, sizes, counters: each starts on its own cache line
    job.pointers, job.numbers = (job.L * 8 // 64 + 1) * 64, (job.L * 4 // 64 + 1) * 64
    job.scratch_bytes = job.pointers + job.numbers + (parts.longest // 64 + 1) * 64
    cdef double ns = <double>parts.rows * job.H + job.L * job.H * 10
    cdef Memory scratch = Memory(threads * job.scratch_bytes)
    job.scratch, job.times = scratch.at, times
    with nogil:
        crew_run(threads, ns, parts.count * job.H, _retrieve_item, &job)


cdef struct RetrieveJob:
    const Part* parts
    const uint16_t* codes  # [B][H][L]
    int H
    int Hkv
    int L
    char* scratch          # of each worker
    int64_t scratch_bytes
    int64_t pointers       # bytes of a worker's lists: see _retrieve_all
    int64_t numbers
    int64_t* times         # [worker][8] ns: retrieve, attend, window


cdef void _retrieve_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const RetrieveJob* job = <const RetrieveJob*>work
    cdef const Part* part = job.parts + item // job.H
    cdef int64_t began = now_ns(), head = item % job.H
    _retrieve(part, head, head * job.Hkv // job.H, job.L, job.codes + (part.b * job.H + head) * job.L,
              job.scratch + worker * job.scratch_bytes, job.pointers, job.numbers)
    job.times[worker * 8] += now_ns() - began


cdef void _retrieve(const Part* part, int64_t head, int64_t kv_head, int L, const uint16_t* codes, char* scratch,
                    int64_t pointers, int64_t numbers) noexcept nogil:
    """The bits of one query head, whose codes [L] these are."""
    cdef Lists lists
    cdef uint64_t* bits = part.bits + head * part.words
    cdef const uint16_t* tail = part.codes + kv_head * L * part.capacity
    cdef int64_t word
    lists.ids, lists.sizes = <const uint16_t**>scratch, <int*>(scratch + pointers)
    lists.counters = <uint8_t*>(scratch + pointers + numbers)
    if part.codes == NULL:
        _count_hits(part, kv_head, L, codes, &lists)
        for word in range(part.words):
            bits[word] = counters_take(lists.counters + 64 * word)
    else:
        for word in range(part.words):
            bits[word] = compare_codes(tail + 64 * word, part.capacity, <int>min(<int64_t>64, part.n - 64 * word), L,
                                       codes)


cdef void _count_hits(const Part* part, int64_t kv_head, int L, const uint16_t* codes, Lists* lists) noexcept nogil:
    """counters[row] = tables in which the row shares the query's bucket (exact up to 2, then at least 2)."""
    cdef const uint16_t* offsets = part.offsets + kv_head * L * (part.buckets + 1)
    cdef int64_t l, cell
    for l in range(L):  # scattered, one line each
        prefetch(<const char*>(offsets + l * (part.buckets + 1) + codes[l]), 1)
    for l in range(L):
        cell = (kv_head * L + l) * (part.buckets + 1) + codes[l]
        lists.ids[l] = part.ids + (kv_head * L + l) * part.n + part.offsets[cell]
        lists.sizes[l] = part.offsets[cell + 1] - part.offsets[cell]
        prefetch(<const char*>lists.ids[l], 1)
    for l in range(L):
        if l > 0 and l % COUNTER_PASS == 0:
            counters_clamp(lists.counters, part.n)
        if l + 8 < L:
            prefetch(<const char*>lists.ids[l + 8], 2 * lists.sizes[l + 8])
        count_ids(lists.counters, lists.ids[l], lists.sizes[l])


cdef struct Scan:  # walks the rows that any of G query heads has sampled, in order
    const uint64_t* bits  # [G][words]
    int64_t words
    int G
    int64_t word
    int64_t end
    uint64_t left         # rows of the current word that are still to come


cdef int _next_tile(Scan* scan, int64_t* rows) noexcept nogil:
    """Up to TILE further rows, relative to the part; returns how many."""
    cdef int n = 0, g
    while n < TILE:
        while scan.left == 0:
            scan.word += 1
            if scan.word >= scan.end:
                return n
            for g in range(scan.G):
                scan.left |= scan.bits[g * scan.words + scan.word]
        rows[n] = scan.word * 64 + lowest_bit(scan.left)
        scan.left &= scan.left - 1
        n = n + 1
    return n


cdef void _attend_sampled(const Piece* piece, const Shape* shape, const float* queries, const float* table, int cells,
                          float* angles, float* out, float* top, float* total, int64_t* sampled) noexcept nogil:
    """The sampled rows of the piece. While a tile is worked on, the next one is fetched. angles: room for [2][G]."""
    cdef const Part* part = piece.part
    cdef const rows_t* rows = piece.rows
    cdef const float* q = _queries_of(queries, piece, shape)
    cdef Scan scan
    cdef fetch_t fetch
    cdef int64_t ids[2][TILE]
    cdef row_t tile[2][TILE]
    cdef float squares[TILE]
    cdef float mu[MAX_PACKED]
    cdef float* with_mu = angles           # q·μ
    cdef float* norms = angles + shape.G   # |q|
    cdef int n, ahead, g, now = 0
    scan.bits, scan.words = part.bits + piece.kv_head * shape.G * part.words, part.words
    scan.G, scan.left, scan.word, scan.end = shape.G, 0, piece.start // 64 - 1, (piece.stop + 63) // 64
    for g in range(shape.G):
        top[g] = -INFINITY
    n = _next_tile(&scan, ids[0])
    if n == 0:
        return
    pack(part.mu + piece.kv_head * shape.D, shape.D, rows.type, mu)
    for g in range(shape.G):
        with_mu[g] = packed_dot(q + g * shape.packed, mu, shape.D)
        norms[g] = sqrtf(packed_dot(q + g * shape.packed, q + g * shape.packed, shape.D))
    _rows_of_ids(rows, piece.kv_head, part.start, ids[0], n, tile[0])
    fetch_start(&fetch, tile[0], n, rows.row_bytes)
    fetch_lines(&fetch, ALL_LINES)
    while n > 0:
        ahead = _next_tile(&scan, ids[1 - now])
        _rows_of_ids(rows, piece.kv_head, part.start, ids[1 - now], ahead, tile[1 - now])
        fetch_start(&fetch, tile[1 - now], ahead, rows.row_bytes)
        rows_distance(mu, tile[now], n, shape.D, rows.type, &fetch, squares)
        for g in range(shape.G):
            sampled[g] += _attend_head(scan.bits + g * part.words, ids[now], tile[now], squares, n,
                                       q + g * shape.packed, with_mu[g], norms[g], rows, shape, table, cells,
                                       &fetch, out + g * shape.packed, top + g, total + g)
        fetch_lines(&fetch, ALL_LINES)
        n, now = ahead, 1 - now


cdef inline void _rows_of_ids(const rows_t* rows, int64_t kv_head, int64_t start, const int64_t* ids, int n,
                        row_t* tile) noexcept nogil:
    """Addresses of rows start + ids."""
    cdef int r
    for r in range(n):
        tile[r] = row_at(rows, kv_head, start + ids[r])


cdef int _attend_head(const uint64_t* bits, const int64_t* ids, const row_t* tile, const float* squares, int n,
                      const float* q, float q_mu, float q_norm, const rows_t* rows, const Shape* shape,
                      const float* table, int cells, fetch_t* fetch, float* out, float* top,
                      float* total) noexcept nogil:
    """The rows of a tile that this query head has sampled; returns how many."""
    cdef uint8_t picked[TILE]
    cdef row_t own[TILE]
    cdef float dots[TILE]
    cdef float extra[TILE]
    cdef float own_squares[TILE]
    cdef int r, count = 0
    for r in range(n):
        picked[count] = <uint8_t>r
        count = count + <int>(bits[ids[r] >> 6] >> (ids[r] & 63) & 1)
    if count == 0:
        return 0
    for r in range(count):
        own[r], own_squares[r] = tile[picked[r]], squares[picked[r]]
    rows_dot(q, 0, 1, own, count, shape.D, rows.type, fetch, dots)
    logits_weights(dots, own_squares, count, q_mu, q_norm, table, cells, extra)
    _accumulate(dots, 1, extra, own, count, rows, shape, fetch, out, top, total)
    return count


cdef int64_t _all_pieces(Parts parts, runs, Tables sources, const Shape* shape, Piece* pieces, int64_t* first):
    """Pieces by sequence, kv head, run or part, and rows; only counted if `pieces` is NULL."""
    cdef int64_t count = 0, b, h, p, run = shape.B, start, stop
    cdef const Part* part
    for b in range(shape.B):
        for h in range(shape.Hkv):
            if first != NULL:
                first[b * shape.Hkv + h] = count
            for i, (_, start, stop) in enumerate(runs[b]):
                count += _cut(sources.of(run + <int64_t>i), b, h, start, stop, NULL,
                              pieces + count if pieces != NULL else NULL)
            for p in range(parts.first[b], parts.first[b + 1]):
                part = parts.at + p
                count += _cut(part.rows, b, h, 0, part.n, part, pieces + count if pieces != NULL else NULL)
        run += len(runs[b])
    return count


def lsh_attend(const float[:, :, ::1] q, const uint16_t[:, :, ::1] codes, groups, const float[::1] weights,
               double rate, key, float scale, float softcap, int threads, runs, bint with_error):
    """Output float32 [B, H, D], LSE float32 [B, H], sampled int64 [B, H], ns of retrieve, attend, window, merge (of all
    threads together), and of the call."""
    cdef int64_t began = now_ns(), started, count, rows
    flat = [run for of_sequence in runs for run in of_sequence]
    tables = [group.table for group in groups] + [run[0] for run in flat]
    cdef Shape shape = _shape(q, tables, scale, softcap)
    cdef Tables sources = Tables(tables)
    cdef Memory queries = _packed_queries(q, tables)
    cdef Memory times_memory = Memory(threads * 64)
    cdef int64_t* times = <int64_t*>times_memory.at
    cdef Parts parts = Parts(groups, sources, shape.H)
    _retrieve_all(parts, codes, shape.Hkv, threads, times)

    count = _all_pieces(parts, runs, sources, &shape, NULL, NULL)
    rows = parts.rows + sum([stop - start for _, start, stop in flat])
    cdef Partials partials = Partials(count, shape.B * shape.Hkv, shape.G, shape.packed)
    cdef Partial* view = &partials.view
    view.first[shape.B * shape.Hkv] = _all_pieces(parts, runs, sources, &shape, view.pieces, view.first)
    cdef Memory angles = Memory(count * 2 * shape.G * sizeof(float))
    cdef AttendJob job = AttendJob(&shape, <const float*>queries.at, view, &weights[0], weights.shape[0] - 1,
                                   <float*>angles.at, times)
    with nogil:
        crew_run(threads, <double>rows * shape.H, count, _attend_item, &job)

    started = now_ns()
    out, lse, sampled = _merge(view, &shape, count, threads)
    stages = (*[sum([times[8 * i + stage] for i in range(threads)]) for stage in range(3)],
              (now_ns() - started) * threads)
    return out, lse, np.full_like(lse, np.nan), sampled, stages, now_ns() - began


cdef struct AttendJob:
    const Shape* shape
    const float* queries  # of _packed_queries
    const Partial* view
    const float* table    # −ln u
    int cells
    float* angles         # [piece][2][G]: room
    int64_t* times        # [worker][8] ns: retrieve, attend, window


cdef void _attend_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const AttendJob* job = <const AttendJob*>work
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef int64_t began = now_ns()
    if view.pieces[item].part == NULL:
        _attend_run(item, shape, job.queries, view)
        job.times[worker * 8 + 2] += now_ns() - began
    else:
        _attend_sampled(&view.pieces[item], shape, job.queries, job.table, job.cells, job.angles + item * 2 * shape.G,
                        view.out + item * shape.G * shape.packed, view.top + item * shape.G,
                        view.total + item * shape.G, view.sampled + item * shape.G)
        job.times[worker * 8 + 1] += now_ns() - began


def lsh_sample(const uint16_t[:, :, ::1] codes, groups, int threads, double rate, key):
    """Sampled rows of every sequence and query head: int64, ascending."""
    tables = [group.table for group in groups]
    cdef Tables sources = Tables(tables)
    cdef int H = codes.shape[1], Hkv = tables[0].kv_heads if tables else H
    cdef Memory times = Memory(threads * 64)
    cdef Parts parts = Parts(groups, sources, H)
    cdef int64_t b, h, p, word
    cdef uint64_t left
    cdef const Part* part
    _retrieve_all(parts, codes, Hkv, threads, <int64_t*>times.at)
    result = []
    for b in range(codes.shape[0]):
        result.append([])
        for h in range(H):
            rows = []
            for p in range(parts.first[b], parts.first[b + 1]):
                part = parts.at + p
                for word in range(part.words):
                    left = part.bits[h * part.words + word]
                    while left:
                        rows.append(part.start + 64 * word + lowest_bit(left))
                        left &= left - 1
            result[b].append(np.array(rows, dtype=np.int64))
    return result
