"""How much worse a sampler answers than exact attention does, on tasks and text with a known outcome.

    texts → tasks (prompts with answers, of an exact length) → run (one exact prefill, a fork per mode and hash seed)
    → units (what is finished is kept, a second run goes on) → report (means, intervals, table, JSON) → plot

Tasks follow RULER's descriptions (arXiv 2404.06654) in own words. Nothing here prints: `run` yields progress.
"""
