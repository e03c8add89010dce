# Tables over consecutive rows by counting sort (DESIGN.md, "Cache"). Items are (kv head, table).


def build_segment(const uint16_t[:, :, ::1] codes, int K, int threads):
    """Offsets uint16 [Hkv, L, 2**K + 1] and ids uint16 [Hkv, L, n] of codes uint16 [Hkv, L, n]."""
    cdef int64_t n = codes.shape[2], items = codes.shape[0] * codes.shape[1], item, buckets = 1 << K
    all_offsets = np.zeros((codes.shape[0], codes.shape[1], buckets + 1), dtype=np.uint16)
    all_ids = np.empty((codes.shape[0], codes.shape[1], n), dtype=np.uint16)
    cdef uint16_t[:, :, ::1] offsets = all_offsets, ids = all_ids
    cdef uint16_t[:, ::1] cursors = np.empty((threads, buckets), dtype=np.uint16)
    for item in prange(items, nogil=True, schedule="dynamic", num_threads=threads):
        _sort(&codes[0, 0, 0] + item * n, n, buckets, &cursors[threadid(), 0],
              &offsets[0, 0, 0] + item * (buckets + 1), &ids[0, 0, 0] + item * n)
    return all_offsets, all_ids


cdef void _sort(const uint16_t* codes, int64_t n, int64_t buckets, uint16_t* cursor, uint16_t* offsets,
                uint16_t* ids) noexcept nogil:
    """Stable, so ids ascend within a bucket. offsets is zero before."""
    cdef int64_t i, bucket
    for i in range(n):
        offsets[codes[i] + 1] += 1
    for bucket in range(buckets):
        cursor[bucket] = offsets[bucket]
        offsets[bucket + 1] += offsets[bucket]
    for i in range(n):
        ids[cursor[codes[i]]] = <uint16_t>i
        cursor[codes[i]] += 1


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


def merge_segments(a, b, int threads):
    """Offsets and ids of two neighbouring segments: bucket by bucket a's ids, then b's."""
    cdef const uint16_t[:, :, ::1] a_offsets = a.offsets, b_offsets = b.offsets, a_ids = a.ids, b_ids = b.ids
    cdef int64_t a_n = a.n, b_n = b.n, n = a_n + b_n, buckets = a_offsets.shape[2] - 1
    cdef int64_t items = a_ids.shape[0] * a_ids.shape[1], item
    all_offsets = np.empty_like(a.offsets)
    all_ids = np.empty((a_ids.shape[0], a_ids.shape[1], n), dtype=np.uint16)
    cdef uint16_t[:, :, ::1] offsets = all_offsets, ids = all_ids
    for item in prange(items, nogil=True, schedule="dynamic", num_threads=threads):
        _interleave(&a_offsets[0, 0, 0] + item * (buckets + 1), &a_ids[0, 0, 0] + item * a_n, a_n,
                    &b_offsets[0, 0, 0] + item * (buckets + 1), &b_ids[0, 0, 0] + item * b_n, buckets,
                    &offsets[0, 0, 0] + item * (buckets + 1), &ids[0, 0, 0] + item * n)
    return all_offsets, all_ids


cdef void _interleave(const uint16_t* a_offsets, const uint16_t* a_ids, int64_t a_n, const uint16_t* b_offsets,
                      const uint16_t* b_ids, int64_t buckets, uint16_t* offsets, uint16_t* ids) noexcept nogil:
    cdef int64_t bucket, i, count
    offsets[0] = 0
    for bucket in range(buckets):
        count = a_offsets[bucket + 1] - a_offsets[bucket]
        memcpy(ids, a_ids + a_offsets[bucket], count * sizeof(uint16_t))
        ids = ids + count
        for i in range(b_offsets[bucket], b_offsets[bucket + 1]):
            ids[0] = <uint16_t>(b_ids[i] + a_n)
            ids = ids + 1
        offsets[bucket + 1] = <uint16_t>(a_offsets[bucket + 1] + b_offsets[bucket + 1])


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
