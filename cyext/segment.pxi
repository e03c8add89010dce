# Tables over consecutive rows by counting sort (DESIGN.md, "Cache"). Items are (kv head, table).


cdef struct Source:  # a segment that is taken over into a longer one
    const uint16_t* offsets
    const uint16_t* ids
    int64_t n


def join(parts, const uint16_t[:, :, :] codes, int64_t rows, int64_t first, int64_t last, int64_t codes_from,
         uint16_t[:, :, ::1] all_offsets, uint16_t[:, :, ::1] all_ids, int threads):
    """Tables [first, last) over the rows of neighbouring segments, then `rows` rows by their codes: counting sort.

    A table is an item h·L + l. codes uint16 [heads, L, ≥ rows] are those of the items from codes_from on."""
    cdef int64_t count = len(parts), buckets = all_offsets.shape[2] - 1, at
    cdef Memory memory = Memory(count * sizeof(Source))
    cdef Source* sources = <Source*>memory.at
    cdef const uint16_t[:, :, ::1] offsets, ids
    for at in range(count):
        offsets, ids = parts[at].offsets, parts[at].ids
        sources[at].offsets, sources[at].ids, sources[at].n = &offsets[0, 0, 0], &ids[0, 0, 0], parts[at].n
    cdef double ns = <double>(last - first) * (all_ids.shape[2] + 2 * buckets)
    cdef uint16_t[:, ::1] cursors = np.empty((threads, buckets), dtype=np.uint16)
    cdef JoinJob job
    job.sources, job.count, job.first, job.buckets = sources, count, first, buckets
    job.L, job.n = all_ids.shape[1], all_ids.shape[2]
    job.codes, job.rows, job.codes_from = &codes[0, 0, 0] if rows else NULL, rows, codes_from
    job.plane, job.stride = codes.strides[0] // sizeof(uint16_t), codes.strides[1] // sizeof(uint16_t)
    job.cursors, job.offsets, job.ids = &cursors[0, 0], &all_offsets[0, 0, 0], &all_ids[0, 0, 0]
    with nogil:
        crew_run(threads, ns, last - first, _join_item, &job)


cdef struct JoinJob:
    const Source* sources
    int64_t count           # of sources
    int64_t first           # table
    int64_t buckets
    int64_t L
    int64_t n               # ids of a joined table
    const uint16_t* codes
    int64_t rows            # that codes are of
    int64_t codes_from      # table whose codes come first
    int64_t plane           # of codes, from one head to the next
    int64_t stride          # of codes, from one table to the next
    uint16_t* cursors       # [worker][buckets]
    uint16_t* offsets       # [table][buckets + 1]
    uint16_t* ids           # [table][n]


cdef void _join_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const JoinJob* job = <const JoinJob*>work
    cdef int64_t table = job.first + item, at = table - job.codes_from
    _join(job.sources, job.count, table, job.codes + at // job.L * job.plane + at % job.L * job.stride, job.rows,
          job.buckets, job.cursors + worker * job.buckets, job.offsets + table * (job.buckets + 1),
          job.ids + table * job.n)


cdef void _join(const Source* sources, int64_t count, int64_t item, const uint16_t* codes, int64_t rows,
                int64_t buckets, uint16_t* cursor, uint16_t* offsets, uint16_t* ids) noexcept nogil:
    """Stable: parts in order, then rows, so ids ascend within a bucket."""
    cdef int64_t i, bucket, at, base = 0
    cdef uint16_t mask = <uint16_t>(buckets - 1), code, total = 0
    cdef const uint16_t* part
    memset(offsets, 0, (buckets + 1) * sizeof(uint16_t))
    for i in range(rows):
        offsets[(codes[i] & mask) + 1] += 1
    for at in range(count):
        part = sources[at].offsets + item * (buckets + 1)
        for bucket in range(buckets):
            offsets[bucket + 1] += part[bucket + 1] - part[bucket]
    for bucket in range(buckets):
        cursor[bucket] = total
        total = total + offsets[bucket + 1]
        offsets[bucket + 1] = total
    for at in range(count):
        part = sources[at].offsets + item * (buckets + 1)
        _place(part, sources[at].ids + item * sources[at].n, base, buckets, cursor, ids)
        base = base + sources[at].n
    for i in range(rows):
        code = codes[i] & mask
        ids[cursor[code]] = <uint16_t>(base + i)
        cursor[code] += 1


cdef void _place(const uint16_t* offsets, const uint16_t* from_ids, int64_t base, int64_t buckets, uint16_t* cursor,
                 uint16_t* ids) noexcept nogil:
    """Append the ids of one segment, moved up by `base`, to their buckets."""
    cdef int64_t bucket, i, count
    cdef const uint16_t* source = from_ids
    cdef uint16_t* to
    for bucket in range(buckets):
        count = offsets[bucket + 1] - offsets[bucket]
        to = ids + cursor[bucket]
        for i in range(count):
            to[i] = <uint16_t>(source[i] + base)
        source = source + count
        cursor[bucket] += <uint16_t>count


def segment_codes(segment):
    """uint16 [Hkv, L, n]: the bucket in which each id stands."""
    cdef const uint16_t[:, :, ::1] offsets = segment.offsets, ids = segment.ids
    cdef int64_t h, l, bucket, i
    result = np.empty((ids.shape[0], ids.shape[1], ids.shape[2]), dtype=np.uint16)
    cdef uint16_t[:, :, ::1] codes = result
    with nogil:
        for h in range(ids.shape[0]):
            for l in range(ids.shape[1]):
                for bucket in range(offsets.shape[2] - 1):
                    for i in range(offsets[h, l, bucket], offsets[h, l, bucket + 1]):
                        codes[h, l, ids[h, l, i]] = <uint16_t>bucket
    return result


def truncate_segment(segment, int64_t n, uint16_t[:, :, ::1] offsets, uint16_t[:, :, ::1] ids, int threads):
    """Offsets and ids without the ids from n on, which stand at the end of every bucket."""
    cdef const uint16_t[:, :, ::1] old_offsets = segment.offsets, old_ids = segment.ids
    cdef ShortenJob job
    job.old_offsets, job.old_ids, job.old_n = &old_offsets[0, 0, 0], &old_ids[0, 0, 0], segment.n
    job.offsets, job.ids, job.n, job.buckets = &offsets[0, 0, 0], &ids[0, 0, 0], n, old_offsets.shape[2] - 1
    cdef double ns = <double>old_ids.size
    with nogil:
        crew_run(threads, ns, old_ids.shape[0] * old_ids.shape[1], _shorten, &job)


cdef struct ShortenJob:
    const uint16_t* old_offsets  # [table][buckets + 1]
    const uint16_t* old_ids      # [table][old_n]
    int64_t old_n
    uint16_t* offsets            # [table][buckets + 1]
    uint16_t* ids                # [table][n]
    int64_t n
    int64_t buckets


cdef void _shorten(const void* work, int64_t table, int worker) noexcept nogil:
    cdef const ShortenJob* job = <const ShortenJob*>work
    cdef const uint16_t* old_offsets = job.old_offsets + table * (job.buckets + 1)
    cdef const uint16_t* old_ids = job.old_ids + table * job.old_n
    cdef uint16_t* offsets = job.offsets + table * (job.buckets + 1)
    cdef uint16_t* ids = job.ids + table * job.n
    cdef int64_t bucket, i, kept = 0
    offsets[0] = 0
    for bucket in range(job.buckets):
        for i in range(old_offsets[bucket], old_offsets[bucket + 1]):
            if old_ids[i] >= job.n:
                break
            ids[kept] = old_ids[i]
            kept = kept + 1
        offsets[bucket + 1] = <uint16_t>kept
