# Signatures that somebody else compares, who has a copy of them: what is needed for that, and what became of it.


def rabitq_lookup(const float[:, :, ::1] q, const float[:, :, ::1] packed, groups, const int16_t[::1] jitter, key,
                  float scale, int threads):
    """What the scores of each sequence are made of beside signatures: a list of (look-up tables uint8 [H, nibbles, 16],
    lift, centre, share and share of the jitter int32 [H, 4], scores of the means int16 [H, cells])."""
    cdef Memory times = Memory(threads * 64)
    cdef Signed signed = Signed(q, packed, groups, jitter, key, scale)
    cdef int64_t b, h, cell, H = q.shape[1], Hkv = signed.count // len(groups) if groups else 1
    cdef int64_t bytes = <int64_t>signed.job.nibbles * 16
    cdef uint8_t[:, :, ::1] tables
    cdef int32_t[:, ::1] lines
    cdef int16_t[:, ::1] means
    cdef const Unit* unit
    cdef const float* of_means
    signed.prepare(threads, <int64_t*>times.at)
    found = []
    for b in range(q.shape[0]):
        unit = signed.units + b * Hkv
        found.append((np.empty((H, signed.job.nibbles, 16), dtype=np.uint8), np.empty((H, 4), dtype=np.int32),
                      np.empty((H, unit.count), dtype=np.int16)))
        tables, lines, means = found[b]
        for h in range(H):
            unit = signed.units + b * Hkv + h // signed.job.G
            memcpy(&tables[h, 0, 0], unit.tables + h % signed.job.G * bytes, bytes)
            of_means = unit.means + h % signed.job.G * unit.count
            lines[h, 0] = signed.heads[b * H + h].lift
            lines[h, 1] = signed.heads[b * H + h].centre
            lines[h, 2] = signed.heads[b * H + h].share
            lines[h, 3] = signed.heads[b * H + h].jitter
            for cell in range(unit.count):
                means[h, cell] = to_int16(of_means[cell] / signed.heads[b * H + h].unit)
    return found


cdef _give_taken(Signed signed, taken, int H):
    """What somebody else has compared: for each sequence (bits uint64 [H, n/64], thresholds int32 [H]), or None."""
    cdef int64_t b, h, Hkv = H // signed.job.G
    cdef const uint64_t[:, ::1] bits
    cdef const int32_t[::1] bounds
    for b, found in enumerate(taken):
        if found is None or found[0].size == 0:
            continue
        bits, bounds = found
        signed.held.append(found)
        for h in range(Hkv):
            signed.units[b * Hkv + h].taken = &bits[h * signed.job.G, 0]
            signed.units[b * Hkv + h].bounds = &bounds[h * signed.job.G]
