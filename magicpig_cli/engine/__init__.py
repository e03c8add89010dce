"""Prefill and decode over token ids, token sampling, text and conversation."""
