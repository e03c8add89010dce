"""Everything that a command asks of the engine, as frozen values.

None means "not said": the plan, the model's generation config or a default decides, in that order of use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

APP_NAME = "magicpig-cli"  # of the config, data and cache directories (platformdirs)
DEFAULT_SINK = 4
DEFAULT_LOCAL = 64
DEFAULT_K = 10
DEFAULT_L = 150
SAMPLERS = ("lsh", "rabitq")
AUTO_SAMPLER = "auto"  # what `--attention auto` samples with where no profile says otherwise: the planner's choice
DEFAULT_BUDGET = 0.02  # of the indexed keys, that rabitq samples
DEFAULT_BITS = 128  # per key, of rabitq
MAX_BITS = 512
DEFAULT_TAIL = 0.0  # share of what is sampled that is drawn uniformly, whatever the logits
BUDGET_RANGE = (0.0025, 0.16)  # within which --target-error moves the budget of a head
INDEX_FROM = 256  # offloaded keys from which tables are built; below, exact attention reads less
TAIL_ROWS = 1024  # codes compared one by one (6.6 µs per head, EVIDENCE.md section 1) before a segment of them is begun
TAIL_ROOM = 1600  # codes that a tail can hold, all compared: so many, while that is made (docs/decisions/004)
JOINED_ROWS = 16_384  # longest segment that is made of smaller ones while decoding; it is held beside them for a while
REBUILD_GROWTH = 1.25  # times the keys behind an index's mean: a prefill that leads beyond gives it a new one
HALVES_FROM = 2  # sequences decoded together from which on a sampled step beside a GPU is made in two halves
ROWS_AT_ONCE = 4096  # rows that leave the window of a device in one copy: more than a chunk has, less than a context
HASH_ROWS = 4096  # rows copied to a device and projected at a time
SCAN_KEYS = 1 << 18  # signatures of one sequence and layer, all KV heads together, that a device scans at a time
# Keys per block of the online softmax of a prompt chunk. 512 is 1.2× faster than 1024 (the scores of one block stay in
# L2): measured on 2 cores with 9/3 heads of 64 and 8k history, when all chunks took this path on CPUs too.
BLOCK_KEYS = 512
FLASH_KEYS = 1024  # per call of torch's flash kernel for CPUs: 512 is 5% slower, 2048 3% faster for twice the memory
MAX_K = 16  # a code is an unsigned 16-bit number
MAX_L = 1000  # tables up to which sampling weights are within their stated error (docs/decisions/001)
MAX_SEED = 2**64 - 1  # of tokens and of hash tables
REPETITION_PENALTY_RANGE = (0.01, 100.0)  # beyond it a penalty only decides, or leaves the range of a float
DEFAULT_TEMPERATURE = 0.7
DEFAULT_MAX_TOKENS = 512
RECORDED_BATCHES = 4  # batch sizes whose decode steps are kept as CUDA graphs, per lane (docs/decisions/018)
MAX_DELAY_S = 1.0  # for which running answers wait while prompts are read; one chunk is always read


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which weights, in which form, on which device."""

    model: str = "demo"  # Hub id, local directory, .gguf file or `demo`
    revision: str | None = None
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str = "auto"  # auto | float32 | bfloat16
    quantize: str = "auto"  # auto (as the file stores linear layers) | none | int8 | int4
    load_format: str = "auto"  # auto | dummy (random weights from the config)
    no_cuda_graphs: bool = False  # every operator of a decode step is launched by itself
    offline: bool = False
    trust_remote_code: bool = False
    chat_template: str | None = None  # text of a template that replaces the tokenizer's


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How decode attends to the long middle of the context (paper section 4)."""

    mode: str = "auto"  # auto | lsh | rabitq | exact
    K: int | None = None  # lsh: bits per table, 1..MAX_K
    L: int | None = None  # lsh: tables, 2..MAX_L
    budget: float | None = None  # rabitq: share of the indexed keys to sample, in (0, 1]
    tail: float | None = None  # share of what is sampled that is drawn uniformly, in [0, 1)
    bits: int | None = None  # rabitq: bits per key, a multiple of 32 up to MAX_BITS
    signatures: str | None = None  # rabitq, beside a GPU: host | device, who scans them; None or auto = chosen
    target_error: float | None = None  # rabitq: estimated relative error for which each head's budget is moved
    sink: int | None = None  # first tokens, always attended exactly
    local: int | None = None  # most recent tokens, always attended exactly
    dense_layers: tuple[int, ...] | None = None  # None = chosen for the model
    hash_seed: int = 0
    kv_dtype: str = "auto"  # auto | float32 | bfloat16 | int8


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Token sampling of one answer. None = the model's generation config, else the default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of one command."""

    model: ModelOptions = field(default_factory=ModelOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    context: int | None = None  # tokens; None = the model's effective context
    allow_extrapolation: bool = False
    threads: int | None = None
    profile: str | None = None  # name or file of a hardware profile; None = the one that matches this machine
    system: str | None = None
