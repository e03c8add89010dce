# Rows sampled by tables (paper section 4.1). A part is a segment or a tail of one sequence.


cdef struct Lists:  # where the ids of the L buckets of one query stand; scratch of a thread
    const uint16_t** ids
    int* sizes
    uint8_t* counters


cdef Parts _table_parts(groups, Tables sources, int H):
    """A part for each segment and each tail."""
    cdef Parts parts = Parts(sum([len(group.segments) + (group.tail is not None) for group in groups]))
    cdef Part* part
    for b, group in enumerate(groups):
        parts.first.append(parts.count)
        for segment in group.segments:
            part = parts.add(b, sources.of(b), segment.start, segment.n, H)
            _set_mean(part, group.mu)
            part.buckets = 1 << <int>segment.K
            _set_segment(part, segment.offsets, segment.ids)
        if group.tail is not None:
            part = parts.add(b, sources.of(b), group.tail.start, group.tail.n, H)
            _set_mean(part, group.mu)
            _set_tail(part, group.tail.codes)
        parts.held.append(group)
    parts.first.append(parts.count)
    return parts


cdef void _set_mean(Part* part, const float[:, ::1] mu):
    part.mu = &mu[0, 0]


cdef void _set_segment(Part* part, const uint16_t[:, :, ::1] offsets, const uint16_t[:, :, ::1] ids):
    part.offsets, part.ids = &offsets[0, 0, 0], &ids[0, 0, 0]


cdef void _set_tail(Part* part, const uint16_t[:, :, ::1] codes):
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
            bits[word] |= counters_take(lists.counters + 64 * word)
    else:
        for word in range(part.words):
            bits[word] |= compare_codes(tail + 64 * word, part.capacity, <int>min(<int64_t>64, part.n - 64 * word), L,
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


def lsh_attend(const float[:, :, ::1] q, const uint16_t[:, :, ::1] codes, groups, const float[::1] weights,
               double rate, key, float scale, float softcap, int threads, runs, bint with_error):
    """See _attend_all."""
    cdef int64_t began = now_ns()
    cdef Memory times = Memory(threads * 64)
    tables = [group.table for group in groups]
    cdef int Hkv = tables[0].kv_heads if tables else codes.shape[1]
    cdef Tables sources = Tables(tables + [run[0] for of_sequence in runs for run in of_sequence])
    cdef Parts parts = _table_parts(groups, sources, codes.shape[1])
    _take_tail(parts, np.full((codes.shape[0], codes.shape[1]), rate), key, Hkv, threads, <int64_t*>times.at)
    _retrieve_all(parts, codes, Hkv, threads, <int64_t*>times.at)
    return _attend_all(q, parts, sources, tables, runs, weights, NULL, rate, scale, softcap, threads, with_error, times,
                       began)


def lsh_sample(const uint16_t[:, :, ::1] codes, groups, int threads, double rate, key):
    """Sampled rows of every sequence and query head: int64, ascending."""
    tables = [group.table for group in groups]
    cdef Tables sources = Tables(tables)
    cdef int H = codes.shape[1], Hkv = tables[0].kv_heads if tables else H
    cdef Memory times = Memory(threads * 64)
    cdef Parts parts = _table_parts(groups, sources, H)
    _take_tail(parts, np.full((codes.shape[0], H), rate), key, Hkv, threads, <int64_t*>times.at)
    _retrieve_all(parts, codes, Hkv, threads, <int64_t*>times.at)
    return _sampled_rows(parts, codes.shape[0], H)
