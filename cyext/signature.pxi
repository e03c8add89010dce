# Signatures of rows, and rows sampled by them (RaBitQ): simd/signature.h over cells of rows and over query heads.
# A unit is a kv head of a sequence with its query heads. Their look-up tables and the means' part of the scores come
# first, then the scores of all rows, unit by unit as long as these stay in the cache, then threshold and bits.


cdef enum:
    MEAN_CELLS = 64     # in an item: a tile of means
    SCORED_CELLS = 32   # in an item: 8,192 rows
    SCORE_BYTES = 1 << 20  # of scores at a time and thread; they are read again from the L2 cache


cdef struct Cell:       # of SignatureBlock.cells: addresses for kv head 0, and bytes to the next
    int64_t codes
    int64_t codes_plane
    int64_t factors
    int64_t factors_plane
    int64_t means
    int64_t means_plane


cdef inline const uint8_t* _codes_of(const Cell* cell, int64_t kv_head) noexcept nogil:
    return <const uint8_t*>cell.codes + kv_head * cell.codes_plane


cdef inline const uint16_t* _factors_of(const Cell* cell, int64_t kv_head) noexcept nogil:
    return <const uint16_t*>(cell.factors + kv_head * cell.factors_plane)


cdef inline const uint16_t* _mean_of(const Cell* cell, int64_t kv_head) noexcept nogil:
    return <const uint16_t*>(cell.means + kv_head * cell.means_plane)


def pack_basis(const float[:, ::1] matrix):
    """float32 [bits, D] → [bits/4, D, 4]."""
    cdef int bits = matrix.shape[0], D = matrix.shape[1]
    packed = kept_array((bits // 4, D, 4), np.float32)
    cdef float[:, :, ::1] view = packed
    pack_basis_rows(&matrix[0, 0], bits, D, &view[0, 0, 0])
    return packed


cdef struct SignJob:
    const rows_t* rows
    const float* panels
    int nibbles
    int64_t start
    int64_t cells
    int64_t n          # of a head
    char* scratch      # of each worker: keys, a group of them, sums
    int64_t scratch_bytes
    uint8_t* codes     # [Hkv][n/32][nibbles][16]
    uint16_t* factors  # [Hkv][n]
    uint16_t* means    # [Hkv][cells][D]


def sign_rows(table, int64_t start, int64_t stop, const float[:, :, ::1] packed, uint8_t[:, :, :, ::1] codes,
              uint16_t[:, ::1] factors, uint16_t[:, :, ::1] means, int threads):
    """Signatures of the keys in rows [start, stop). Items are cells of a kv head."""
    cdef Tables source = Tables([table])
    cdef int D = packed.shape[1]
    cdef SignJob job
    if stop == start:
        return
    job.rows, job.panels, job.nibbles, job.start = source.of(0), &packed[0, 0, 0], packed.shape[0], start
    job.cells, job.n = (stop - start) // CELL_ROWS, stop - start
    job.codes, job.factors, job.means = &codes[0, 0, 0, 0], &factors[0, 0], &means[0, 0, 0]
    job.scratch_bytes = (CELL_ROWS + GROUP_ROWS) * D * sizeof(float) + (D + 8) // 8 * 8 * sizeof(double)
    cdef Memory scratch = Memory(threads * job.scratch_bytes)
    job.scratch = scratch.at
    cdef double ns = <double>job.n * codes.shape[0] * D * packed.shape[0] * 4 * 0.03
    cdef int64_t items = job.cells * codes.shape[0]
    with nogil:
        crew_run(threads, ns, items, _sign_item, &job)


cdef void _sign_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const SignJob* job = <const SignJob*>work
    cdef int64_t head = item // job.cells, cell = item % job.cells, r
    cdef int D = job.rows.head_dim
    cdef double* sums = <double*>(job.scratch + worker * job.scratch_bytes)
    cdef float* keys = <float*>(sums + (D + 8) // 8 * 8)
    cdef uint16_t* mean = job.means + item * D
    cdef row_t at[CELL_ROWS]
    rows_from(job.rows, head, job.start + cell * CELL_ROWS, CELL_ROWS, at)
    for r in range(CELL_ROWS):
        widen_row(at[r], D, job.rows.type, keys + r * D)
    cell_mean(keys, D, sums, mean)
    sign_cell(keys, mean, job.panels, D, job.nibbles, keys + CELL_ROWS * D, job.codes + item * CELL_ROWS // 2 * job.nibbles,
              job.factors + item * CELL_ROWS)


cdef struct Unit:
    const Cell* cells
    int64_t count       # of cells
    int64_t kv_head
    const float* q      # [G][D], times the scale
    const float* packed # the same, packed for bfloat16
    signed_t* heads     # [G]
    uint8_t* tables     # [G][nibbles][16]
    float* means        # [G][cells]: q·μ
    int64_t start       # of the jitter of row 0
    float largest       # factor
    int16_t* scores     # [G][n]
    uint64_t* bits      # [G][words]; NULL where only scores are asked for
    const double* shares      # [G]: of rows, for the threshold
    const uint64_t* taken     # [G][words]: by the threshold, where somebody else has compared; NULL: nobody has
    const int32_t* bounds     # [G]: their thresholds


cdef struct SignedItem:
    int64_t unit
    int64_t first       # cell; −1: the look-up tables


cdef struct ScanJob:
    const Unit* units
    const SignedItem* items
    const float* panels
    const int16_t* jitter
    int D
    int G
    int nibbles
    int packed          # floats of a packed query
    char* scratch       # of each worker
    int64_t scratch_bytes
    int64_t* times      # [worker][8] ns: retrieve first


cdef class Signed:
    """The query heads of a call and what the signatures of their sequences are to them."""

    cdef ScanJob job
    cdef Unit* units
    cdef signed_t* heads  # [B][H]
    cdef int64_t count    # of units
    cdef int64_t rows     # of all sequences
    cdef int64_t longest
    cdef list held

    def __cinit__(self, const float[:, :, ::1] q, const float[:, :, ::1] panels, groups, const int16_t[::1] jitter, key,
                  float scale):
        cdef int64_t B = q.shape[0], H = q.shape[1], Hkv = groups[0].table.kv_heads if groups else H, b, h, u, cells = 0
        cdef int64_t D = q.shape[2], nibbles = panels.shape[0], padded = packed_length(D), i, done = 0
        cdef const int64_t[:, ::1] cells_view
        cdef Unit* unit
        cdef Memory heads = Memory(B * H * sizeof(signed_t)), tables = Memory(B * H * nibbles * 16)
        cdef Memory scaled = Memory(B * H * D * sizeof(float)), packed = Memory(B * H * padded * sizeof(float))
        for group in groups:
            cells += group.cells.shape[0]
        cdef Memory means = Memory(H * cells * sizeof(float)), units = Memory(B * Hkv * sizeof(Unit))
        cdef const uint16_t[::1] largest
        self.job.D, self.job.G, self.job.nibbles, self.job.packed = D, H // Hkv, nibbles, padded
        self.job.panels, self.job.jitter = &panels[0, 0, 0], &jitter[0]
        self.units, self.heads, self.count, self.rows, self.longest = (
            <Unit*>units.at, <signed_t*>heads.at, B * Hkv, cells * CELL_ROWS, 0)
        self.job.units = self.units
        self.held = [jitter, heads, tables, scaled, packed, means, units]
        for i in range(B * H * D):
            (<float*>scaled.at)[i] = (&q[0, 0, 0])[i] * scale
        for i in range(B * H):
            pack(<float*>scaled.at + i * D, D, BFLOAT16, <float*>packed.at + i * padded)
        for b, group in enumerate(groups):
            cells_view, largest = group.cells, group.largest
            self.held.append(group)
            for h in range(Hkv):
                unit, u = self.units + b * Hkv + h, b * H + h * self.job.G
                unit.cells, unit.count, unit.kv_head = NULL, cells_view.shape[0], h
                if unit.count:
                    unit.cells = <const Cell*>&cells_view[0, 0]
                unit.q, unit.packed = <float*>scaled.at + u * D, <float*>packed.at + u * padded
                unit.heads, unit.tables = self.heads + u, <uint8_t*>tables.at + u * nibbles * 16
                unit.means = <float*>means.at + done
                unit.largest = bf16_to_float(largest[h])
                unit.start = jitter_start(key[0], key[1], h)
                done += self.job.G * unit.count
                self.longest = max(self.longest, unit.count * CELL_ROWS)

    cdef void prepare(self, int threads, int64_t* times):
        """Look-up tables of all heads, and means·q of all cells."""
        cdef int64_t u, first, count = 0
        for u in range(self.count):
            count += 1 + (self.units[u].count + MEAN_CELLS - 1) // MEAN_CELLS
        cdef Memory items = Memory(count * sizeof(SignedItem))
        cdef SignedItem* item = <SignedItem*>items.at
        cdef int64_t W = 2 * VW
        self.job.scratch_bytes = (self.job.D + 4 * self.job.nibbles) * W * sizeof(float)
        cdef Memory scratch = Memory(threads * self.job.scratch_bytes)
        self.job.scratch, self.job.items, self.job.times = scratch.at, item, times
        for u in range(self.count):
            item.unit, item.first = u, -1
            item += 1
            for first in range(0, self.units[u].count, MEAN_CELLS):
                item.unit, item.first = u, first
                item += 1
        cdef double ns = <double>self.rows * self.job.D * 0.001 * self.job.G + self.count * self.job.D * self.job.nibbles
        with nogil:
            crew_run(threads, ns, count, _prepare_item, &self.job)
            for u in range(self.count):
                _set_unit(&self.job, self.units + u)

    cdef void scan(self, int threads, int64_t* times):
        """Scores of all rows, thresholds, and bits; of units with bits taken only these."""
        cdef int64_t u, i, first, end = 0, bytes, count, most = SCORE_BYTES * <int64_t>threads, begin
        cdef int G = self.job.G
        cdef double ns
        cdef int64_t room = max(most, 2 * G * self.longest)
        cdef int64_t most_items = max(room // (2 * G * CELL_ROWS), self.count * G)  # cells to score, or heads
        cdef Memory scores = Memory(room, zero=False), items = Memory(most_items * sizeof(SignedItem))
        cdef SignedItem* item = <SignedItem*>items.at
        self.job.scratch_bytes = (2 * self.longest // 64 + 1) * 64
        cdef Memory scratch = Memory(threads * self.job.scratch_bytes, zero=False)
        self.job.scratch, self.job.items, self.job.times = scratch.at, item, times
        begin = 0
        while begin < self.count:
            end, bytes, count = begin, 0, 0
            while end < self.count and (end == begin or bytes + 2 * G * self.units[end].count * CELL_ROWS <= room):
                if self.units[end].taken == NULL:
                    self.units[end].scores = <int16_t*>(scores.at + bytes)
                    bytes += 2 * G * self.units[end].count * CELL_ROWS
                    for first in range(0, self.units[end].count, SCORED_CELLS):
                        item[count].unit, item[count].first = end, first
                        count += 1
                end += 1
            ns = <double>bytes / 2 * self.job.nibbles * 0.012
            with nogil:
                crew_run(threads, ns, count, _score_item, &self.job)
                for i in range((end - begin) * G):
                    item[i].unit, item[i].first = begin + i // G, i % G
                crew_run(threads, <double>bytes * 0.02 + <double>(end - begin) * G * 3000, (end - begin) * G, _take_item,
                         &self.job)
            begin = end


cdef void _prepare_item(const void* work, int64_t at, int worker) noexcept nogil:
    cdef const ScanJob* job = <const ScanJob*>work
    cdef const SignedItem* item = job.items + at
    cdef const Unit* unit = job.units + item.unit
    cdef int64_t began = now_ns()
    if item.first < 0:
        _make_tables(job, unit, <float*>(job.scratch + worker * job.scratch_bytes))
    else:
        _with_means(job, unit, item.first, <int>min(<int64_t>MEAN_CELLS, unit.count - item.first))
    job.times[worker * 8] += now_ns() - began


cdef void _make_tables(const ScanJob* job, const Unit* unit, float* x) noexcept nogil:
    """The queries' projections, and look-up tables of them. x: room."""
    cdef int g = 0, lane, d, heads, W = 2 * VW
    cdef float* projected = x + job.D * W
    cdef const float* q
    while g < job.G:
        heads = min(W, job.G - g)
        memset(x, 0, job.D * W * sizeof(float))
        for lane in range(heads):
            q = unit.q + (g + lane) * job.D
            unit.heads[g + lane].norm = 0
            for d in range(job.D):
                x[d * W + lane] = q[d]
                unit.heads[g + lane].norm += q[d] * q[d]
        project_vectors(x, job.panels, job.D, job.nibbles, projected)
        for lane in range(heads):
            look_up_tables(projected + lane, W, job.nibbles, unit.tables + <int64_t>(g + lane) * job.nibbles * 16,
                           unit.heads + g + lane)
        g = g + heads


cdef void _with_means(const ScanJob* job, const Unit* unit, int64_t first, int n) noexcept nogil:
    """q·μ of n ≤ MEAN_CELLS cells; what is not finite counts as 0."""
    cdef row_t at[MEAN_CELLS]
    cdef float dots[4 * TILE]
    cdef fetch_t fetch
    cdef int i, g = 0, heads, h
    cdef float* to
    for i in range(n):
        at[i] = <row_t>_mean_of(unit.cells + first + i, unit.kv_head)
    fetch_start(&fetch, at, 0, 0, 1)
    while g < job.G:
        heads = 4 if g + 3 < job.G else 2 if g + 1 < job.G else 1
        rows_dot(unit.packed + <int64_t>g * job.packed, job.packed, heads, at, n, job.D, BFLOAT16, &fetch, dots)
        for h in range(heads):
            to = unit.means + (g + h) * unit.count + first
            for i in range(n):
                to[i] = dots[h * TILE + i] if isfinite(dots[h * TILE + i]) else 0
        g = g + heads


cdef void _set_unit(const ScanJob* job, const Unit* unit) noexcept nogil:
    """What a score stands for, when means are known."""
    cdef int g
    for g in range(job.G):
        set_unit(unit.heads + g, job.nibbles, largest_size(unit.means + g * unit.count, unit.count), unit.largest)


cdef void _score_item(const void* work, int64_t at, int worker) noexcept nogil:
    cdef const ScanJob* job = <const ScanJob*>work
    cdef const SignedItem* item = job.items + at
    cdef const Unit* unit = job.units + item.unit
    cdef const Cell* cell
    cdef int64_t began = now_ns(), i, n = unit.count * CELL_ROWS
    cdef int g = 0, heads
    cdef const uint8_t* codes
    cdef const uint8_t* ahead
    for i in range(item.first, min(item.first + <int64_t>SCORED_CELLS, unit.count)):
        cell, g = unit.cells + i, 0
        codes = _codes_of(cell, unit.kv_head)
        ahead = _codes_of(cell + 1, unit.kv_head) if i + 1 < unit.count else codes
        while g < job.G:
            heads = min(4, job.G - g)
            score_cell(codes, _factors_of(cell, unit.kv_head), unit.largest, codes if g else ahead, job.nibbles,
                       unit.tables + <int64_t>g * job.nibbles * 16, unit.heads + g, unit.means + g * unit.count + i,
                       unit.count, heads, job.jitter, unit.start + i * CELL_ROWS,
                       unit.scores + g * n + i * CELL_ROWS, n)
            g = g + heads
    job.times[worker * 8] += now_ns() - began


cdef void _take_item(const void* work, int64_t at, int worker) noexcept nogil:
    """Threshold and bits of a query head."""
    cdef const ScanJob* job = <const ScanJob*>work
    cdef const Unit* unit = job.units + job.items[at].unit
    cdef int64_t began = now_ns(), g = job.items[at].first, n = unit.count * CELL_ROWS
    cdef signed_t* head = unit.heads + g
    cdef uint64_t* bits = unit.bits + g * (n // 64)
    cdef int bound
    if unit.taken:
        bound = unit.bounds[g]
    else:
        bound = score_bound(unit.scores + g * n, n, unit.shares[g],
                            <int16_t*>(job.scratch + worker * job.scratch_bytes))
    head.tau = INFINITY if bound > TOP_SCORE else (<float>bound - <float>0.5) * head.unit
    if bound < -TOP_SCORE:
        head.rate = 1
    if unit.taken:
        take_bits(unit.taken + g * (n // 64), n, bound, bits)
    else:
        take_scores(unit.scores + g * n, n, bound, bits)
    job.times[worker * 8] += now_ns() - began


cdef Parts _signed_parts(Signed signed, groups, Tables sources, const double[:, ::1] rates,
                         const double[:, ::1] shares):
    """One part for each sequence: all rows that have signatures."""
    cdef Parts parts = Parts(len(groups))
    cdef Part* part
    cdef int64_t h, H = rates.shape[1], Hkv = signed.count // len(groups) if groups else 1, b, n
    for b, group in enumerate(groups):
        n = group.cells.shape[0] * CELL_ROWS
        part = parts.add(b, sources.of(b), 0, n, H)
        part.units = signed.units + b * Hkv
        for h in range(Hkv):
            signed.units[b * Hkv + h].bits = part.bits + h * signed.job.G * part.words
            signed.units[b * Hkv + h].shares = &shares[b, h * signed.job.G]
        for h in range(H):
            signed.heads[b * H + h].rate = rates[b, h]
    parts.first = list(range(len(groups) + 1))
    return parts


cdef Parts _take_signed(Signed signed, groups, Tables sources, rates, shares, key, int threads, int64_t* times,
                        taken=()):
    """Parts with the bits of what is sampled."""
    cdef Parts parts = _signed_parts(signed, groups, sources, rates, shares)
    cdef int64_t Hkv = signed.count // len(groups) if groups else 1
    _give_taken(signed, taken, rates.shape[1])
    _take_tail(parts, rates, key, Hkv, threads, times)
    signed.prepare(threads, times)
    signed.scan(threads, times)
    return parts


def rabitq_attend(const float[:, :, ::1] q, const float[:, :, ::1] packed, float share, groups,
                  const int16_t[::1] jitter, const float[::1] weights, rates, shares, key, float scale, float softcap,
                  int threads, runs, bint with_error, taken):
    """See _attend_all and _give_taken."""
    cdef int64_t began = now_ns()
    cdef Memory times = Memory(threads * 64)
    tables = [group.table for group in groups]
    cdef Tables sources = Tables(tables + [run[0] for of_sequence in runs for run in of_sequence])
    cdef Signed signed = Signed(q, packed, groups, jitter, key, scale)
    cdef Parts parts = _take_signed(signed, groups, sources, rates, shares, key, threads, <int64_t*>times.at, taken)
    cdef weigh_t about
    about.bits, about.share = 4 * signed.job.nibbles, share
    return _attend_all(q, parts, sources, tables, runs, weights, &about, 0, scale, softcap, threads, with_error, times,
                       began)


def rabitq_sample(const float[:, :, ::1] q, const float[:, :, ::1] packed, float share, groups,
                  const int16_t[::1] jitter, rates, shares, key, float scale, int threads):
    """Sampled rows of every sequence and query head: int64, ascending."""
    cdef Memory times = Memory(threads * 64)
    cdef Tables sources = Tables([group.table for group in groups])
    cdef Signed signed = Signed(q, packed, groups, jitter, key, scale)
    cdef Parts parts = _take_signed(signed, groups, sources, rates, shares, key, threads, <int64_t*>times.at)
    return _sampled_rows(parts, q.shape[0], q.shape[1])


def rabitq_scores(const float[:, :, ::1] q, const float[:, :, ::1] packed, groups, const int16_t[::1] jitter, key,
                  float scale, int threads):
    """Scores int16 [H, n] of every sequence, and their units float32 [B, H]."""
    cdef Memory times = Memory(threads * 64), items
    cdef Signed signed = Signed(q, packed, groups, jitter, key, scale)
    cdef int64_t u, first, n, count = 0, Hkv = signed.count // len(groups) if groups else 1, H = q.shape[1]
    cdef SignedItem* item
    cdef int16_t[:, ::1] view
    signed.prepare(threads, <int64_t*>times.at)
    scores = [np.empty((H, group.cells.shape[0] * CELL_ROWS), dtype=np.int16) for group in groups]
    items = Memory((signed.rows // CELL_ROWS * Hkv + 1) * sizeof(SignedItem))
    item = <SignedItem*>items.at
    for u in range(signed.count):
        view = scores[u // Hkv]
        if view.shape[1]:
            signed.units[u].scores = &view[u % Hkv * signed.job.G, 0]
        for first in range(0, signed.units[u].count, SCORED_CELLS):
            item[count].unit, item[count].first = u, first
            count += 1
    signed.job.items = item
    with nogil:
        crew_run(threads, 0, count, _score_item, &signed.job)
    units = np.array([signed.heads[i].unit for i in range(q.shape[0] * H)], dtype=np.float32)
    return scores, units.reshape(q.shape[0], H)
