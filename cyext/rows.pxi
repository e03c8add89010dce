# Rows that are written one at a time.


def write_row(table, int64_t row, const float[:, ::1] key, const float[:, ::1] value):
    """Row `row` of the table, float32 or bfloat16, becomes key and value [Hkv, D]."""
    cdef const int64_t[::1] blocks = table.addresses
    cdef int64_t block_rows = table.block_rows, head
    cdef int D = table.head_dim, type = table.type
    cdef int64_t half = half_bytes(D, type)
    cdef char* at = <char*>blocks[row // block_rows] + row % block_rows * 2 * half
    for head in range(key.shape[0]):
        store_values(&key[head, 0], D, type, at)
        store_values(&value[head, 0], D, type, at + half)
        at += block_rows * 2 * half
