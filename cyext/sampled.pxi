# Attention over sampled rows, beside rows that are attended exactly. Whoever samples leaves one bit per row and query
# head (lsh.pxi, signature.pxi) and says what the probability of a row depends on; attention walks the rows that any head
# of a group has sampled, so a row that several heads share is read once.


cdef class Parts:
    """What is sampled of all sequences, and room for the bits of their rows."""

    cdef Part* at
    cdef int64_t count
    cdef int64_t rows
    cdef int64_t longest
    cdef list held
    cdef list first  # first part of each sequence, and the end

    def __cinit__(self, int64_t most):
        memory = Memory(most * sizeof(Part))
        self.held, self.first, self.count, self.longest, self.rows = [memory], [], 0, 0, 0
        self.at = <Part*>memory.at

    cdef Part* add(self, int64_t b, const rows_t* rows, int64_t start, int64_t n, int H):
        cdef Part* part = self.at + self.count
        part.b, part.rows, part.start, part.n, part.words = b, rows, start, n, (n + 63) // 64
        cdef Memory bits = Memory(part.words * H * sizeof(uint64_t))
        part.bits = <uint64_t*>bits.at
        self.held.append(bits)
        self.longest = max(self.longest, n)
        self.count += 1
        self.rows += n
        return part


cdef enum:
    TAIL_ROWS = 8192  # of an item


cdef struct TailItem:
    const Part* part
    int64_t kv_head
    int64_t first    # row, relative to the part


cdef struct TailJob:
    const TailItem* items
    const uint64_t* limits  # [B][H], of the hash
    uint64_t hash_seed
    uint64_t layer
    int H
    int G
    int64_t* times


cdef _take_tail(Parts parts, const double[:, ::1] rates, key, int Hkv, int threads, int64_t* times):
    """Set the bits of the uniform tail, at these rates float64 [B, H]. Before any others: it writes whole words."""
    cdef int64_t B = rates.shape[0], H = rates.shape[1], i, p, h, first, count = 0
    cdef Memory limits = Memory(B * H * sizeof(uint64_t))
    cdef uint64_t* limit = <uint64_t*>limits.at
    cdef bint any_tail = False
    for i in range(B * H):
        limit[i] = <uint64_t>floor((&rates[0, 0])[i] * 4294967296.0)
        any_tail |= limit[i] > 0
    if not any_tail:
        return
    for p in range(parts.count):
        count += (parts.at[p].n + TAIL_ROWS - 1) // TAIL_ROWS * Hkv
    if count == 0:
        return
    cdef Memory items = Memory(count * sizeof(TailItem))
    cdef TailItem* item = <TailItem*>items.at
    for p in range(parts.count):
        for h in range(Hkv):
            for first in range(0, parts.at[p].n, TAIL_ROWS):
                item.part, item.kv_head, item.first = parts.at + p, h, first
                item += 1
    cdef TailJob job = TailJob(<TailItem*>items.at, limit, key[0], key[1], H, H // Hkv, times)
    with nogil:
        crew_run(threads, <double>parts.rows * Hkv * 1.5, count, _tail_item, &job)


cdef void _tail_item(const void* work, int64_t at, int worker) noexcept nogil:
    cdef const TailJob* job = <const TailJob*>work
    cdef const TailItem* item = job.items + at
    cdef const Part* part = item.part
    cdef int64_t began = now_ns(), head = item.kv_head * job.G
    tail_words(part.start + item.first, min(<int64_t>TAIL_ROWS, part.n - item.first),
               tail_seed(job.hash_seed, job.layer, item.kv_head), job.limits + part.b * job.H + head, job.G,
               part.bits + head * part.words + item.first // 64, part.words)
    job.times[worker * 8] += now_ns() - began


cdef struct Head:  # a query head, and what the probability of its rows depends on
    const float* q          # packed
    float rate              # of the uniform tail
    const signed_t* signed  # by signatures
    const float* means      # [cells]: q·μ, q times the scale
    float q_mu              # by tables: q·μ
    float norm              # |q|
    uint64_t sampled        # rows of the tile at hand
    uint64_t shared         # of them, those that an earlier head has sampled too


cdef void _attend_sampled(int64_t item, const AttendJob* job) noexcept nogil:
    """The sampled rows of a piece. While a tile is worked on, the next one is fetched."""
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef const Piece* piece = view.pieces + item
    cdef const Part* part = piece.part
    cdef const rows_t* rows = piece.rows
    cdef Head* heads = job.heads + item * shape.G
    cdef scan_t scan
    cdef fetch_t fetch
    cdef Tile tiles[2]
    cdef Tile* tile = tiles
    cdef Tile* ahead = tiles + 1
    cdef float mu[MAX_PACKED]
    cdef int g
    scan_start(&scan, part.bits + piece.kv_head * shape.G * part.words, part.words, shape.G, piece.start, piece.stop)
    for g in range(shape.G):
        view.top[item * shape.G + g] = -INFINITY
    _take(&scan, piece, tile)
    if tile.taken.n == 0:
        return
    _set_heads(piece, job, heads, mu)
    fetch_start(&fetch, tile.rows, tile.taken.n, rows.row_bytes, 1)
    fetch_lines(&fetch, ALL_LINES)
    while tile.taken.n > 0:
        _take(&scan, piece, ahead)
        fetch_start(&fetch, ahead.rows, ahead.taken.n, rows.row_bytes, 1)
        _share(tile, heads, shape.G, scan.bits, part.words)
        _measure(tile, piece, shape, heads.q, view.spread != NULL, mu, &fetch)
        for g in range(shape.G):
            _attend_head(tile, item * shape.G + g, heads + g, rows, job, part, &fetch)
        fetch_lines(&fetch, ALL_LINES)
        tile, ahead = ahead, tile


cdef void _set_heads(const Piece* piece, const AttendJob* job, Head* heads, float* mu) noexcept nogil:
    """What holds for all rows of the piece. mu: the packed mean, where there is one."""
    cdef const Shape* shape = job.shape
    cdef const float* q = _queries_of(job.queries, piece, shape)
    cdef const Part* part = piece.part
    cdef const Unit* unit
    cdef int g
    if part.units == NULL:
        pack(part.mu + piece.kv_head * shape.D, shape.D, piece.rows.type, mu)
    for g in range(shape.G):
        heads[g].q, heads[g].rate = q + g * shape.packed, job.rate
        if part.units == NULL:
            heads[g].q_mu = packed_dot(heads[g].q, mu, shape.D)
            heads[g].norm = sqrtf(packed_dot(heads[g].q, heads[g].q, shape.D))
        else:
            unit = part.units + piece.kv_head
            heads[g].signed, heads[g].means = unit.heads + g, unit.means + g * unit.count
            heads[g].rate = heads[g].signed.rate


cdef struct Tile:  # rows that some head of the group has sampled
    taken_t taken              # ids: relative to the part
    row_t rows[TILE]
    uint16_t first[TILE]       # of the heads that have sampled a row
    float products[TILE + 1]   # q·k with the query of that head; written two at a time
    float squares[TILE + 1]    # |k − μ|²; likewise
    float values[TILE]         # |v|²
    float factors[TILE]        # of signatures
    int64_t cells[TILE]


cdef inline void _take(scan_t* scan, const Piece* piece, Tile* tile) noexcept nogil:
    """The next rows of a piece."""
    cdef int r
    scan_take(scan, &tile.taken)
    for r in range(tile.taken.n):
        tile.rows[r] = row_at(piece.rows, piece.kv_head, piece.part.start + tile.taken.ids[r])


cdef inline void _share(Tile* tile, Head* heads, int G, const uint64_t* bits, int64_t words) noexcept nogil:
    """Which rows of a tile each head has sampled."""
    cdef uint8_t own[TILE]
    cdef uint64_t before = 0
    cdef int g, i
    for g in range(G):
        heads[g].sampled = rows_of_head(&tile.taken, bits + g * words)
        heads[g].shared = heads[g].sampled & before
        for i in range(list_bits(heads[g].sampled ^ heads[g].shared, own)):
            tile.first[own[i]] = <uint16_t>g
        before |= heads[g].sampled


cdef void _measure(Tile* tile, const Piece* piece, const Shape* shape, const float* q, bint with_values, float* mu,
                   fetch_t* fetch) noexcept nogil:
    """What the heads share of a tile. A tile may span several cells, each of which has a mean."""
    cdef const rows_t* rows = piece.rows
    cdef const Unit* unit
    cdef const Cell* cell
    cdef row_t values[TILE]
    cdef float mean[MAX_PACKED]
    cdef int r, last, d
    cdef int64_t half = half_bytes(shape.D, rows.type)
    if piece.part.units == NULL:
        rows_measure(mu, q, shape.packed, tile.first, tile.rows, tile.taken.n, shape.D, rows.type, fetch, tile.squares,
                     tile.products)
    else:
        unit = piece.part.units + piece.kv_head
        r = 0
        while r < tile.taken.n:
            cell, last = unit.cells + tile.taken.ids[r] // CELL_ROWS, r
            while last < tile.taken.n and tile.taken.ids[last] // CELL_ROWS == tile.taken.ids[r] // CELL_ROWS:
                tile.cells[last] = tile.taken.ids[last] // CELL_ROWS
                tile.factors[last] = bf16_to_float(_factors_of(cell, unit.kv_head)[tile.taken.ids[last] % CELL_ROWS])
                last = last + 1
            for d in range(shape.D):
                mean[d] = bf16_to_float(_mean_of(cell, unit.kv_head)[d])
            pack(mean, shape.D, rows.type, mu)
            rows_measure(mu, q, shape.packed, tile.first + r, tile.rows + r, last - r, shape.D, rows.type, fetch,
                         tile.squares + r, tile.products + r)
            r = last
    if with_values:
        for r in range(tile.taken.n):
            values[r] = tile.rows[r] + half
        memset(mean, 0, shape.packed * sizeof(float))
        rows_distance(mean, values, tile.taken.n, shape.D, rows.type, fetch, tile.values)


cdef void _dot_shared(const Tile* tile, const Head* head, int D, int type, fetch_t* fetch, float* dots) noexcept nogil:
    """q·k of rows that were measured with the query of an earlier head, to where they stand among the rows of this one."""
    cdef uint8_t shared[TILE]
    cdef row_t rows[TILE]
    cdef float products[TILE]
    cdef int r, n = list_bits(head.shared, shared)
    for r in range(n):
        rows[r] = tile.rows[shared[r]]
    rows_dot(head.q, 0, 1, rows, n, D, type, fetch, products)
    for r in range(n):
        dots[count_bits(head.sampled & ((<uint64_t>1 << shared[r]) - 1))] = products[r]


cdef void _attend_head(const Tile* tile, int64_t at, const Head* head, const rows_t* rows, const AttendJob* job,
                       const Part* part, fetch_t* fetch) noexcept nogil:
    """The rows of a tile that a query head has sampled, into its partial result `at`."""
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef uint8_t picked[TILE]
    cdef row_t own[TILE]
    cdef float dots[2 * TILE]
    cdef float log_pi[TILE]
    cdef float squares[TILE]
    cdef float others[TILE]   # q·μ of the cells
    cdef float factors[TILE]
    cdef float factor[2]
    cdef int r, n = list_bits(head.sampled, picked)
    if n == 0:
        return
    view.sampled[at] += n
    for r in range(n):
        own[r], squares[r], dots[r] = tile.rows[picked[r]], tile.squares[picked[r]], tile.products[picked[r]]
    if head.shared:
        _dot_shared(tile, head, shape.D, rows.type, fetch, dots)
    if part.units == NULL:
        logits_weights(dots, squares, n, head.q_mu, head.norm, job.table, job.cells, log_pi)
    else:
        for r in range(n):
            others[r], factors[r] = head.means[tile.cells[picked[r]]], tile.factors[picked[r]]
        signature_weights(dots, squares, others, factors, n, head.signed, shape.scale, shape.D, job.bits, job.share,
                          job.table, job.cells, log_pi)
    if head.rate > 0:
        logits_tail(log_pi, n, head.rate)
    logits_scale(dots, n, shape.scale, shape.cap)
    for r in range(n):
        dots[r] += log_pi[r]
    factor[0] = softmax_step(dots, n, view.top + at, view.total + at)
    factor[1] = factor[0] * factor[0]
    if view.spread != NULL:
        for r in range(n):
            squares[r] = tile.values[picked[r]]
        error_weights(dots, log_pi, squares, n, factor[1], dots + TILE, view.spread + 2 * at)
    rows_add(dots, 1 if view.spread == NULL else 2, own, n, shape.D, rows.type, fetch, factor,
             view.out + at * shape.packed, view.with_values - view.out)


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


cdef struct AttendJob:
    const Shape* shape
    const float* queries  # of _packed_queries
    const Partial* view
    const float* table    # −ln u
    int cells
    float rate            # of the uniform tail, where samples come from tables
    int bits              # of signatures
    float share
    Head* heads           # [piece][G]: room
    int64_t* times        # [worker][8] ns: retrieve, attend, window


cdef void _attend_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const AttendJob* job = <const AttendJob*>work
    cdef int64_t began = now_ns()
    cdef bint exactly = job.view.pieces[item].part == NULL
    if exactly:
        _attend_run(item, job.shape, job.queries, job.view)
    else:
        _attend_sampled(item, job)
    job.times[worker * 8 + 1 + exactly] += now_ns() - began


cdef tuple _attend_all(const float[:, :, ::1] q, Parts parts, Tables sources, tables, runs, const float[::1] weights,
                       const AttendJob* about, float rate, float scale, float softcap, int threads, bint with_error,
                       Memory times_memory, int64_t began):
    """Output float32 [B, H, D], LSE and estimated error float32 [B, H], sampled int64 [B, H], ns of retrieve, attend,
    window, merge (of all threads together), and of the call.

    sources: the tables of the parts, then those of the runs. about: bits and share of signatures."""
    cdef int64_t started, count, rows
    cdef int64_t* times = <int64_t*>times_memory.at
    flat = [run for of_sequence in runs for run in of_sequence]
    everything = tables + [run[0] for run in flat]
    cdef Shape shape = _shape(q, everything, scale, softcap)
    cdef Memory queries = _packed_queries(q, everything)
    count = _all_pieces(parts, runs, sources, &shape, NULL, NULL)
    rows = parts.rows + sum([stop - start for _, start, stop in flat])
    cdef Partials partials = Partials(count, shape.B * shape.Hkv, shape.G, shape.packed, with_error)
    cdef Partial* view = &partials.view
    view.first[shape.B * shape.Hkv] = _all_pieces(parts, runs, sources, &shape, view.pieces, view.first)
    cdef Memory heads = Memory(count * shape.G * sizeof(Head))
    cdef AttendJob job
    job.shape, job.queries, job.view, job.table, job.cells = (
        &shape, <const float*>queries.at, view, &weights[0], weights.shape[0] - 1)
    job.rate, job.bits, job.share, job.heads, job.times = rate, 0, 0, <Head*>heads.at, times
    if about != NULL:
        job.bits, job.share = about.bits, about.share
    with nogil:
        crew_run(threads, <double>rows * shape.H, count, _attend_item, &job)

    started = now_ns()
    out, lse, error, sampled = _merge(view, &shape, count, threads)
    stages = (*[sum([times[8 * i + stage] for i in range(threads)]) for stage in range(3)],
              (now_ns() - started) * threads)
    return out, lse, error, sampled, stages, now_ns() - began


cdef list _sampled_rows(Parts parts, int64_t B, int64_t H):
    """Rows whose bits are set, of every sequence and query head: int64, ascending."""
    cdef int64_t b, h, p, word
    cdef uint64_t left
    cdef const Part* part
    result = []
    for b in range(B):
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
