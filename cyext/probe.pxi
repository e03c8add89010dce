# Memory bandwidth, measured with the loads and the threads of the kernels: simd/probe.h.

cdef enum:
    PROBE_BYTES = 1 << 20  # of an item
    PROBE_AHEAD = 32       # rows fetched before their turn: the best of 4 to 64 (Zen 4, 512-byte rows)


def read_sequential(const uint8_t[::1] data, int threads):
    """Nanoseconds to read every byte once, from front to back, and what the reading summed up."""
    cdef int64_t began = now_ns(), size = data.shape[0], items = (size + PROBE_BYTES - 1) // PROBE_BYTES, item
    cdef float total = 0
    for item in prange(items, nogil=True, schedule="static", num_threads=threads):
        total += read_bytes(<const char*>&data[0] + item * PROBE_BYTES,
                            min(<int64_t>PROBE_BYTES, size - item * PROBE_BYTES))
    return now_ns() - began, total


def read_rows(table, int64_t kv_head, const int64_t[::1] rows, int threads):
    """Nanoseconds to read K and V of the listed rows, and what the reading summed up."""
    cdef Tables sources = Tables([table])
    cdef int64_t count = rows.shape[0], i, item, share = (count + threads - 1) // threads, began
    cdef int64_t row_bytes = sources.of(0).row_bytes
    cdef Memory memory = Memory(count * sizeof(row_t))
    cdef row_t* at = <row_t*>memory.at
    cdef float total = 0
    for i in range(count):
        at[i] = row_at(sources.of(0), kv_head, rows[i])
    began = now_ns()
    for item in prange(threads, nogil=True, schedule="static", num_threads=threads):
        total += read_tiles(at + min(item * share, count), max(<int64_t>0, min(share, count - item * share)), row_bytes,
                            PROBE_AHEAD)
    return now_ns() - began, total
