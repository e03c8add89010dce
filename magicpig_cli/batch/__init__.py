"""JSONL in, JSONL out.

    reader (bytes of a line) ──> line (what it asks for) ──> request (token ids, parameters)
    check: all lines once, before any weight is loaded
    resume: what an earlier run has left of them
    runner: the good ones again, each when its turn comes ──> records ──> writer

Nothing here holds the input: between check and run a line is its offset and two lengths.
"""
