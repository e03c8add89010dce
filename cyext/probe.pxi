# Memory bandwidth, measured with the loads and the threads of the kernels: simd/probe.h.

cdef enum:
    PROBE_BYTES = 1 << 20  # of an item
    PROBE_AHEAD = 32       # rows fetched before their turn: the best of 4 to 64 (Zen 4, 512-byte rows)


def read_sequential(const uint8_t[::1] data, int threads):
    """Nanoseconds to read every byte once, from front to back, and what the reading summed up."""
    cdef int64_t began, size = data.shape[0]
    sums = np.zeros((threads, 16), dtype=np.float32)  # a cache line each
    cdef float[:, ::1] totals = sums
    cdef ReadJob job = ReadJob(<const char*>&data[0], size, NULL, 0, 0, 0, &totals[0, 0])
    began = now_ns()
    with nogil:
        crew_run(threads, size * NS_PER_BYTE, (size + PROBE_BYTES - 1) // PROBE_BYTES, _read_item, &job)
    return now_ns() - began, float(sums[:, 0].sum())


cdef struct ReadJob:
    const char* data
    int64_t size       # bytes of data
    const row_t* rows
    int64_t count      # rows
    int64_t share      # rows of an item
    int64_t row_bytes
    float* totals      # [worker][16]


cdef void _read_item(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const ReadJob* job = <const ReadJob*>work
    job.totals[16 * worker] += read_bytes(job.data + item * PROBE_BYTES,
                                          min(<int64_t>PROBE_BYTES, job.size - item * PROBE_BYTES))


cdef void _read_share(const void* work, int64_t item, int worker) noexcept nogil:
    cdef const ReadJob* job = <const ReadJob*>work
    cdef int64_t first = min(item * job.share, job.count)
    job.totals[16 * worker] += read_tiles(job.rows + first, min(job.share, job.count - first), job.row_bytes,
                                          PROBE_AHEAD)


def read_rows(table, int64_t kv_head, const int64_t[::1] rows, int threads):
    """Nanoseconds to read K and V of the listed rows, and what the reading summed up."""
    cdef Tables sources = Tables([table])
    cdef int64_t count = rows.shape[0], i, began
    cdef Memory memory = Memory(count * sizeof(row_t))
    cdef row_t* at = <row_t*>memory.at
    sums = np.zeros((threads, 16), dtype=np.float32)
    cdef float[:, ::1] totals = sums
    cdef ReadJob job = ReadJob(NULL, 0, at, count, (count + threads - 1) // threads, sources.of(0).row_bytes,
                               &totals[0, 0])
    for i in range(count):
        at[i] = row_at(sources.of(0), kv_head, rows[i])
    began = now_ns()
    with nogil:
        crew_run(threads, count * job.row_bytes * NS_PER_BYTE, threads, _read_share, &job)
    return now_ns() - began, float(sums[:, 0].sum())
