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
    TAIL_ROWS = 8192       # of an item
    ITEMS_OF_THREAD = 16   # of attention, where there are pieces enough


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


cdef struct Tile:  # rows of a piece that some head of its group has sampled
    const Piece* piece
    taken_t taken          # numbered from the first row of the part
    uint64_t* sampled      # [G] which rows are whose
    measured_t measured
    float values[TILE]     # |v|²


cdef struct Walk:  # over the sampled rows of pieces
    scan_t scan
    const Piece* piece     # that the scan is at
    const Piece* end


cdef struct Room:  # of a worker
    head_t* heads          # [G]
    uint64_t* sampled      # [2][G] of two tiles
    uint64_t* shared       # [G] rows of the tile at hand that an earlier head has sampled too
    samples_t* samples     # [batches]


cdef inline int _batches(int G) noexcept nogil:
    """Of up to HEADS query heads."""
    return (G + HEADS - 1) // HEADS


cdef void _attend_sampled(int64_t first, int64_t last, const AttendJob* job, Room* room) noexcept nogil:
    """The sampled rows of pieces [first, last). While a tile is worked on, the next one is fetched, of whichever piece."""
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef const Piece* piece = NULL
    cdef fetch_t fetch
    cdef Walk walk
    cdef Tile tiles[2]
    cdef Tile* tile = tiles
    cdef Tile* ahead = tiles + 1
    cdef float mu[MAX_PACKED]
    cdef int64_t at, row_bytes
    cdef int batch, samples
    tile.sampled, ahead.sampled = room.sampled, room.sampled + shape.G
    for at in range(first * shape.G, last * shape.G):
        view.top[at] = -INFINITY
    walk.piece, walk.end = view.pieces + first - 1, view.pieces + last
    _next_piece(&walk, shape.G)
    _take(&walk, shape.G, tile)
    if tile.taken.n == 0:
        return
    fetch_start(&fetch, tile.taken.rows, tile.taken.n, tile.piece.rows.row_bytes, 1)
    fetch_rest(&fetch)
    while tile.taken.n > 0:
        _take(&walk, shape.G, ahead)
        samples = _list(tile, room, shape.G)
        row_bytes = ahead.piece.rows.row_bytes if ahead.taken.n else 0
        fetch_start(&fetch, ahead.taken.rows, ahead.taken.n, row_bytes,
                    samples_turns(samples, ahead.taken.n, row_bytes))
        if tile.piece != piece:
            piece = tile.piece
            _set_heads(piece, job, room.heads, mu)
        _measure(tile, piece, shape, room.heads[0].q, view.spread != NULL, mu, &fetch)
        for batch in range(_batches(shape.G)):
            _attend_heads(tile, room, batch, job, &fetch)
        fetch_rest(&fetch)
        tile, ahead = ahead, tile


cdef inline bint _next_piece(Walk* walk, int G) noexcept nogil:
    """To the next piece of which rows are sampled; false if there is none."""
    cdef const Piece* piece
    walk.piece = walk.piece + 1
    while walk.piece < walk.end and walk.piece.part == NULL:
        walk.piece = walk.piece + 1
    if walk.piece >= walk.end:
        return False
    piece = walk.piece
    scan_start(&walk.scan, piece.part.bits + piece.kv_head * G * piece.part.words, piece.part.words, G, piece.start,
               piece.stop, piece.rows, piece.kv_head, piece.part.start)
    return True


cdef void _set_heads(const Piece* piece, const AttendJob* job, head_t* heads, float* mu) noexcept nogil:
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
            heads[g].about, heads[g].means = unit.heads + g, unit.means + g * unit.count
            heads[g].rate = heads[g].about.rate


cdef inline void _take(Walk* walk, int G, Tile* tile) noexcept nogil:
    """The next rows of a piece, or of one after it; none are left if there are none."""
    tile.taken.n = 0
    while walk.piece < walk.end:
        scan_take(&walk.scan, walk.piece.part.units != NULL, &tile.taken, tile.sampled)
        if tile.taken.n or not _next_piece(walk, G):
            break
    tile.piece = walk.piece


cdef inline int _list(Tile* tile, Room* room, int G) noexcept nogil:
    """The samples of a tile; returns how many."""
    cdef uint64_t before = 0
    cdef int g, batch, samples = 0
    for g in range(G):
        room.shared[g] = tile.sampled[g] & before
        before |= tile.sampled[g]
        samples += count_bits(tile.sampled[g])
    memset(tile.measured.first, 0, TILE * sizeof(uint16_t))
    for batch in range(_batches(G)):
        g = batch * HEADS
        samples_list(room.samples + batch, tile.sampled + g, room.shared + g, min(<int>HEADS, G - g), g,
                     tile.taken.rows, tile.measured.first)
    return samples


cdef void _measure(Tile* tile, const Piece* piece, const Shape* shape, const float* q, bint with_values, float* mu,
                   fetch_t* fetch) noexcept nogil:
    """What the heads share of a tile. A tile may span several cells, each of which has a mean."""
    cdef const rows_t* rows = piece.rows
    cdef const Unit* unit
    cdef const Cell* cell
    cdef const taken_t* taken = &tile.taken
    cdef measured_t* measured = &tile.measured
    cdef row_t values[TILE]
    cdef float mean[MAX_PACKED]
    cdef int r, last, d
    cdef int64_t half = half_bytes(shape.D, rows.type), number
    if piece.part.units == NULL:
        rows_measure(mu, q, shape.packed, measured.first, taken.rows, taken.n, shape.D, rows.type, fetch,
                     measured.squares, measured.products)
    else:
        unit = piece.part.units + piece.kv_head
        memset(measured.cells, 0, TILE * sizeof(int32_t))
        r = 0
        while r < taken.n:
            number, last = taken.ids[r] // CELL_ROWS, r
            cell = unit.cells + number
            while last < taken.n and taken.ids[last] // CELL_ROWS == number:
                measured.cells[last] = <int32_t>number
                measured.factors[last] = bf16_to_float(_factors_of(cell, unit.kv_head)[taken.ids[last] % CELL_ROWS])
                last = last + 1
            for d in range(shape.D):
                mean[d] = bf16_to_float(_mean_of(cell, unit.kv_head)[d])
            pack(mean, shape.D, rows.type, mu)
            rows_measure(mu, q, shape.packed, measured.first + r, taken.rows + r, last - r, shape.D, rows.type, fetch,
                         measured.squares + r, measured.products + r)
            r = last
    if with_values:
        for r in range(taken.n):
            values[r] = taken.rows[r] + half
        memset(mean, 0, shape.packed * sizeof(float))
        rows_distance(mean, values, taken.n, shape.D, rows.type, fetch, tile.values)


cdef void _attend_heads(Tile* tile, Room* room, int batch, const AttendJob* job, fetch_t* fetch) noexcept nogil:
    """The rows of a tile that up to HEADS query heads have sampled, into their partial results."""
    cdef const Partial* view = job.view
    cdef const Shape* shape = job.shape
    cdef const Piece* piece = tile.piece
    cdef samples_t* samples = room.samples + batch
    cdef const head_t* heads = room.heads + batch * HEADS
    cdef int64_t at = (piece - view.pieces) * shape.G + batch * HEADS
    cdef int count = min(<int>HEADS, shape.G - batch * HEADS), h, type = piece.rows.type
    cdef float factors[HEADS]
    rows_products(room.heads[0].q, shape.packed, samples.shared_heads, samples.shared_rows, samples.shared, shape.D,
                  type, fetch, tile.measured.products + TILE)
    samples_weigh(samples, &tile.measured, heads, count, &job.weigh, view.top + at, view.total + at, factors)
    for h in range(count):
        view.sampled[at + h] += samples.n[h]
        if samples.n[h] == 0:
            continue
        if view.spread != NULL:
            _with_error(tile, samples, h, view, at + h, shape, factors[h], fetch)
        else:
            rows_add_some(samples.p + h * TILE, 1, tile.taken.rows, samples.row + h * TILE, samples.n[h], shape.D, type,
                          fetch, factors + h, view.out + (at + h) * shape.packed, 0)


cdef void _with_error(const Tile* tile, const samples_t* samples, int h, const Partial* view, int64_t at,
                      const Shape* shape, float by, fetch_t* fetch) noexcept nogil:
    """The rows of a head, and what the error is estimated from."""
    cdef float p[2 * TILE]
    cdef float values[TILE]
    cdef float factors[2]
    cdef int r, n = samples.n[h]
    factors[0], factors[1] = by, by * by
    for r in range(n):
        values[r] = tile.values[samples.row[h * TILE + r]]
    memcpy(p, samples.p + h * TILE, TILE * sizeof(float))
    error_weights(p, samples.log_pi + h * TILE, values, n, factors[1], p + TILE, view.spread + 2 * at)
    rows_add_some(p, 2, tile.taken.rows, samples.row + h * TILE, n, shape.D, tile.piece.rows.type, fetch, factors,
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
    weigh_t weigh
    float rate            # of the uniform tail, where samples come from tables
    Room* rooms           # [worker]
    int64_t pieces
    int64_t each          # pieces of an item: what is at hand at the end of one is fetched while another is worked on
    int64_t* times        # [worker][8] ns: retrieve, attend, window


cdef void _attend_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const AttendJob* job = <const AttendJob*>work
    cdef int64_t first = item * job.each, last = min(first + job.each, job.pieces), at
    cdef int64_t began = now_ns(), then
    _attend_sampled(first, last, job, job.rooms + worker)
    then = now_ns()
    job.times[worker * 8 + 1] += then - began
    for at in range(first, last):
        if job.view.pieces[at].part == NULL:
            _attend_run(at, job.shape, job.queries, job.view)
    job.times[worker * 8 + 2] += now_ns() - then


cdef tuple _attend_all(const float[:, :, ::1] q, Parts parts, Tables sources, tables, runs, const float[::1] weights,
                       const weigh_t* about, float rate, float scale, float softcap, int threads, bint with_error,
                       Memory times_memory, int64_t began):
    """Output float32 [B, H, D], LSE and estimated error float32 [B, H], sampled int64 [B, H], ns of retrieve, attend,
    window, merge (of all threads together), and of the call.

    sources: the tables of the parts, then those of the runs. about: bits and share of signatures."""
    cdef int64_t started, count, rows, i
    cdef Room* room
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
    cdef int64_t batches = _batches(shape.G)
    cdef Memory heads = Memory(threads * shape.G * sizeof(head_t)), rooms = Memory(threads * sizeof(Room))
    cdef Memory masks = Memory(3 * threads * shape.G * sizeof(uint64_t))
    cdef Memory samples = Memory(threads * batches * sizeof(samples_t), zero=False)
    for i in range(threads * batches):
        samples_start(<samples_t*>samples.at + i)
    for i in range(threads):
        room = <Room*>rooms.at + i
        room.heads, room.samples = <head_t*>heads.at + i * shape.G, <samples_t*>samples.at + i * batches
        room.sampled, room.shared = <uint64_t*>masks.at + 3 * i * shape.G, <uint64_t*>masks.at + (3 * i + 2) * shape.G
    cdef AttendJob job
    job.shape, job.queries, job.view, job.rate, job.rooms, job.times = (
        &shape, <const float*>queries.at, view, rate, <Room*>rooms.at, times)
    job.weigh = weigh_t(scale, softcap, &weights[0], weights.shape[0] - 1, about != NULL, shape.D, 0, 0)
    job.pieces, job.each = count, max(1, count // (threads * ITEMS_OF_THREAD) if threads > 1 else count)
    if about != NULL:
        job.weigh.bits, job.weigh.share = about.bits, about.share
    with nogil:
        crew_run(threads, <double>rows * shape.H, (count + job.each - 1) // job.each, _attend_item, &job)

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
