"""magicpig: chat with and batch-process very long documents by LSH-sampled attention (MagicPIG, arXiv 2410.16179)."""

__version__ = "0.1.0"
