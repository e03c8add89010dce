"""Small tokenizers of the three kinds that language models use, and chat templates as models ship them."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, OPEN, CLOSE = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
_ASCII = tuple(map(chr, range(ord("!"), ord("~") + 1)))
_WORDS = ("the", "of", "and", "an", "er", "in")


def byte_characters() -> list[str]:
    """How byte-level BPE writes each byte value (GPT-2's table): printable ones as themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def byte_level(extra: tuple[bytes, ...] = (), *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, Qwen: each byte is a token, some pairs are merged. Id = byte value for the first 256.

    `extra`: tokens of two bytes, whatever characters they cut through.
    """
    table = byte_characters()
    pairs = [word.encode() for word in _WORDS if len(word) == 2] + list(extra)
    merges = [(table[first], table[second]) for first, second in pairs]
    vocab = {token: id_ for id_, token in enumerate([*table, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _dress(tokenizer, adds_bos)


def byte_fallback(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2, Mistral, Gemma: ▁ for a space, characters that are no token become byte tokens <0xNN>."""
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *_ASCII, "好"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "n")]
    pieces += [a + b for a, b in merges]
    vocab = {piece: id_ for id_, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _dress(tokenizer, adds_bos)


def metaspace(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Unigram with ▁, as sentencepiece models converted without byte fallback: whole characters only."""
    letters = [(letter, -5.0) for letter in (*_ASCII, *"你好世界é👩\u200d💻\n")]
    vocab = [("<unk>", 0.0), ("▁", -3.0), *letters, *(("▁" + word, -2.0) for word in _WORDS)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _dress(tokenizer, adds_bos)


def _dress(tokenizer: Tokenizer, adds_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS, OPEN, CLOSE)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


KINDS: dict[str, Any] = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_BOS = "{{ bos_token }}" + CHATML
# Mistral: no system role, turns must alternate, the last turn ends with </s> like all.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# Leaves a system text out without a word.
DEAF = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen 3: only the last answer carries its (empty) thoughts.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# Closes only turns that another one follows.
OPEN_ENDED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
)
# Llama 2: a space before the token that ends the turn.
SPACED = "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|im_end|>{% endfor %}"
