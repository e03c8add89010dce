"""Loading models and hooking transformers' attention."""

import logging

# transformers imports these where they are installed (extra `quant`). They tell of kernels for other GPUs that cannot
# be loaded here, and one says at every product which number type it casts to.
for _talkative in ("torchao", "torch.utils._pytree", "bitsandbytes"):
    logging.getLogger(_talkative).setLevel(logging.ERROR)
