# Tables over consecutive rows by counting sort (DESIGN.md, "Cache"). Items are (kv head, table).


cdef struct Source:  # a segment that is taken over into a longer one
    const uint16_t* offsets
    const uint16_t* ids
    int64_t n


def join(parts, const uint16_t[:, :, :] codes, int64_t rows, int64_t first, int64_t last, int64_t codes_from,
         uint16_t[:, :, ::1] all_offsets, uint16_t[:, :, ::1] all_ids, int threads):
    """Tables [first, last) over the rows of neighbouring segments, then `rows` rows by their codes: counting sort.

    A table is an item h·L + l. codes uint16 [heads, L, ≥ rows] are those of the items from codes_from on."""
    cdef int64_t count = len(parts), buckets = all_offsets.shape[2] - 1, n = all_ids.shape[2], L = all_ids.shape[1]
    cdef int64_t item, at, stride = codes.strides[1] // sizeof(uint16_t), plane = codes.strides[0] // sizeof(uint16_t)
    cdef Memory memory = Memory(count * sizeof(Source))
    cdef Source* sources = <Source*>memory.at
    cdef const uint16_t[:, :, ::1] offsets, ids
    for at in range(count):
        offsets, ids = parts[at].offsets, parts[at].ids
        sources[at].offsets, sources[at].ids, sources[at].n = &offsets[0, 0, 0], &ids[0, 0, 0], parts[at].n
    threads = _useful(threads, <double>(last - first) * (n + 2 * buckets))
    cdef uint16_t[:, ::1] cursors = np.empty((threads, buckets), dtype=np.uint16)
    cdef const uint16_t* code = &codes[0, 0, 0] if rows else NULL
    for item in prange(first, last, nogil=True, schedule="dynamic", num_threads=threads):
        at = item - codes_from
        _join(sources, count, item, code + at // L * plane + at % L * stride, rows, buckets, &cursors[threadid(), 0],
              &all_offsets[0, 0, 0] + item * (buckets + 1), &all_ids[0, 0, 0] + item * n)


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


def truncate_segment(segment, int64_t n, int threads):
    """Offsets and ids without the ids from n on, which stand at the end of every bucket."""
    cdef const uint16_t[:, :, ::1] old_offsets = segment.offsets, old_ids = segment.ids
    cdef int64_t buckets = old_offsets.shape[2] - 1, old_n = segment.n
    cdef int64_t items = old_ids.shape[0] * old_ids.shape[1], item
    all_offsets = np.empty_like(segment.offsets)
    all_ids = np.empty((old_ids.shape[0], old_ids.shape[1], n), dtype=np.uint16)
    cdef uint16_t[:, :, ::1] offsets = all_offsets, ids = all_ids
    for item in prange(items, nogil=True, schedule="dynamic", num_threads=threads):
        _shorten(&old_offsets[0, 0, 0] + item * (buckets + 1), &old_ids[0, 0, 0] + item * old_n, n, buckets,
                 &offsets[0, 0, 0] + item * (buckets + 1), &ids[0, 0, 0] + item * n)
    return all_offsets, all_ids


cdef void _shorten(const uint16_t* old_offsets, const uint16_t* old_ids, int64_t n, int64_t buckets,
                   uint16_t* offsets, uint16_t* ids) noexcept nogil:
    cdef int64_t bucket, i, kept = 0
    offsets[0] = 0
    for bucket in range(buckets):
        for i in range(old_offsets[bucket], old_offsets[bucket + 1]):
            if old_ids[i] >= n:
                break
            ids[kept] = old_ids[i]
            kept = kept + 1
        offsets[bucket + 1] = <uint16_t>kept
