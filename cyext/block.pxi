# A decoder block of a decode step on both sides of attention: simd/layers.h between the products of product.pxi.
# Everything but the products is a few microseconds of one thread.


cdef struct Norm:
    const float* weight  # NULL: there is none
    int64_t n            # values that are normed together
    float eps


cdef Norm _norm(norm):
    cdef Norm result
    cdef const float[::1] weight
    result.weight = NULL
    if norm is not None:
        weight = norm.weight
        result.weight, result.n, result.eps = &weight[0], weight.shape[0], norm.eps
    return result


cdef void _apply(const Norm* norm, const float* x, int64_t values, float* out) noexcept nogil:
    """The norm of each n values of x."""
    cdef int64_t i
    if norm.weight != NULL:
        for i in range(values // norm.n):
            rms_norm(x + i * norm.n, norm.weight, norm.n, norm.eps, out + i * norm.n)
    elif out != x:
        memcpy(out, x, values * sizeof(float))


def block_inputs(const float[:, ::1] x, block, cosine, sine, int threads):
    """q float32 [M, H, D], k and v float32 [M, Hkv, D] of x [M, E], rotated by cosine and sine [M, R] unless None."""
    cdef int64_t M = x.shape[0], heads = block.heads, kv_heads = block.kv_heads, D = block.head_dim, m, h
    cdef int64_t queries = M * heads * D, keys = M * kv_heads * D
    result = np.empty(queries + 2 * keys, dtype=np.float32)
    cdef float[::1] out = result
    cdef const float[:, ::1] cosines, sines
    cdef const float[::1] bias
    cdef Norm before = _norm(block.before_attention), of_q = _norm(block.q_norm), of_k = _norm(block.k_norm)
    cdef Memory normed = Memory(M * x.shape[1] * sizeof(float))
    if M:
        _apply(&before, &x[0, 0], M * x.shape[1], <float*>normed.at)
        _multiply(<float*>normed.at, M, block.qkv, threads, &out[0])
        if block.qkv_bias is not None:
            bias = block.qkv_bias
            _add_bias(&out[0], M, heads * D, &bias[0])
            _add_bias(&out[queries], M, kv_heads * D, &bias[heads * D])
            _add_bias(&out[queries + keys], M, kv_heads * D, &bias[(heads + kv_heads) * D])
        _apply(&of_q, &out[0], queries, &out[0])
        _apply(&of_k, &out[queries], keys, &out[queries])
        if cosine is not None:
            cosines, sines = cosine, sine
            for m in range(M):
                for h in range(heads):
                    rotate(&out[(m * heads + h) * D], &cosines[m, 0], &sines[m, 0], <int>cosines.shape[1])
                for h in range(kv_heads):
                    rotate(&out[queries + (m * kv_heads + h) * D], &cosines[m, 0], &sines[m, 0],
                           <int>cosines.shape[1])
    return (result[:queries].reshape(M, heads, D), result[queries : queries + keys].reshape(M, kv_heads, D),
            result[queries + keys :].reshape(M, kv_heads, D))


cdef void _add_bias(float* x, int64_t M, int64_t n, const float* bias) noexcept nogil:
    cdef int64_t m
    for m in range(M):
        add_to(x + m * n, bias, n)


def block_output(const float[:, ::1] x, const float[:, ::1] attended, block, int threads):
    """float32 [M, E]: the block's result from its input x [M, E] and what attention gave, [M, H·D]."""
    cdef int64_t M = x.shape[0], values = M * x.shape[1], hidden = M * <int64_t>block.gate_up.outer[0]
    cdef Norm after = _norm(block.after_attention), before_mlp = _norm(block.before_mlp)
    cdef Norm after_mlp = _norm(block.after_mlp)
    result = np.empty((M, x.shape[1]), dtype=np.float32)
    cdef float[:, ::1] out = result
    cdef Memory room = Memory((values + 2 * hidden) * sizeof(float))
    cdef float* some = <float*>room.at
    cdef float* gate = some + values
    if M == 0:
        return result
    _multiply(&attended[0, 0], M, block.output, threads, &out[0, 0])
    _apply(&after, &out[0, 0], values, &out[0, 0])
    add_to(&out[0, 0], &x[0, 0], values)
    _apply(&before_mlp, &out[0, 0], values, some)
    _multiply(some, M, block.gate_up, threads, gate)
    gate_values(gate, gate + hidden, hidden, block.activation_kind)
    _multiply(gate, M, block.down, threads, some)
    _apply(&after_mlp, some, values, some)
    add_to(&out[0, 0], some, values)
    return result
