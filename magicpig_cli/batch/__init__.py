"""JSONL in, JSONL out."""
