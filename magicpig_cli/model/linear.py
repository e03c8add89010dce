"""Linear layers and embeddings of a model on a CPU, replaced by ones that our kernels multiply: `stored.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from magicpig_cli.events import LoadProgress
from magicpig_cli.kernels.memory import give_back_freed
from magicpig_cli.model.progress import Report, ignore
from magicpig_cli.model.quantized import is_packed
from magicpig_cli.model.stored import (
    Form,
    Holder,
    Products,
    Room,
    Stored,
    StoredEmbedding,
    StoredLinear,
    int4_gives_back,
    multiply_together,
    stored,
)

_ATTRIBUTE = "magicpig_products"  # of the model, where its Products are
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names of layers side by side, by family
_GEMMA_FACTOR = "scalar_embed_scale"  # attribute of Gemma 3's embedding: what its forward multiplies rows by


def hold(model: PreTrainedModel, form: Form, report: Report = ignore, *, as_stored: bool = False) -> None:
    """Replace the linear layers of a model on a CPU, and its token embedding unless that stays float32.

    Everything else becomes float32. Beside int4 layers the embedding and the output layer are int8. as_stored: so are
    layers that int4 would not give back as they are, and those that are multiplied together with them.

    An output layer tied to the embedding shares its weight as before. Experts that are no nn.Linear (Mixtral's: one
    tensor for all of them) remain float32. Goes layer by layer, so the extra memory is that of the largest layer,
    unless the model's weights are one mapped file, which stays mapped until the last one is stored.
    What quantizers hold is left alone.
    """
    names = [name for name, module in model.named_modules() if _can_hold(module, form)]
    output, products, shared = _output_layer(model), Products(), _tied_weight(model)
    wide = _not_given_back(model) if form == "int4" and as_stored else set()
    room, made = Room(), None  # the latter: of the shared weight
    for done, name in enumerate(names):
        report(LoadProgress(f"storing weights as {form}", done, len(names)))
        module = model.get_submodule(name)
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        own: Form = "int8" if form == "int4" and (_is_end(module, output) or module in wide) else form
        held = made if weight is shared and made else stored(weight, own, room)
        made = held if weight is shared else made
        model.set_submodule(name, _holder(module, held, products, few_rows=module is output))
    embedding = model.get_input_embeddings()
    if form == "float32" and made is not None and embedding.weight is shared:  # the embedding is as it should be
        embedding.weight = made.weight
    report(LoadProgress(f"storing weights as {form}", len(names), len(names)))
    _join_same_input(model)
    _widen_the_rest(model, room)
    give_back_freed()
    setattr(model, _ATTRIBUTE, products)


def _tied_weight(model: PreTrainedModel) -> torch.Tensor | None:
    """The weight that embedding and output layer share, if they do."""
    embedding, output = model.get_input_embeddings(), _output_layer(model)
    weight: torch.Tensor = embedding.weight  # type: ignore[assignment]
    return weight if output is not None and output.weight is weight else None


def _output_layer(model: PreTrainedModel) -> nn.Module | None:
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found


def _is_end(module: nn.Module, output: nn.Module | None) -> bool:
    """Whether a module is the embedding or the output layer, whose rounding no other layer evens out."""
    return module is output or not isinstance(module, nn.Linear)


def _can_hold(module: nn.Module, form: Form) -> bool:
    """Linear layers and embeddings whose code is known; of other classes nobody knows what forward does."""
    if isinstance(module, nn.Linear) and not _is_plain(module):
        return False
    if form == "float32":
        return type(module) is nn.Linear  # an embedding is as it should be
    return type(module) in (nn.Linear, nn.Embedding) or hasattr(module, _GEMMA_FACTOR)


def _not_given_back(model: PreTrainedModel) -> set[nn.Module]:
    """Linear layers that int4 would change, and those that are given the same input: their product has one form."""
    layers = [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module)]
    found: set[nn.Module] = {layer for layer in layers if not int4_gives_back(layer.weight)}
    for block in model.modules():
        for names in _SAME_INPUT:
            side_by_side = {getattr(block, name, None) for name in names}
            if found & side_by_side:
                found |= {layer for layer in side_by_side if isinstance(layer, nn.Linear)}
    return found


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a linear layer is what its class says: quantizers pack its weight, put scales beside, replace forward."""
    beside = set(layer._parameters) - {"weight", "bias"} or layer._buffers or "forward" in vars(layer)
    return not beside and not is_packed(layer.weight)


def _join_same_input(model: PreTrainedModel) -> None:
    """One product for query, key and value, and one for gate and up, where a block has them as layers of their own."""
    for block in model.modules():
        for names in _SAME_INPUT:
            layers = [getattr(block, name, None) for name in names]
            found = [layer for layer in layers if isinstance(layer, StoredLinear)]
            if len(found) == len(layers) and len({layer.weight.dtype for layer in found}) == 1:
                multiply_together(found)


def _holder(module: nn.Module, held: Stored, products: Products, *, few_rows: bool) -> Holder:
    if isinstance(module, nn.Linear):
        return StoredLinear(held, module.bias, products, few_rows=few_rows)
    return StoredEmbedding(held, getattr(module, _GEMMA_FACTOR, 1.0))


def _widen_the_rest(model: PreTrainedModel, room: Room) -> None:
    """Norms, routers, experts and buffers become float32 in `room`; not the integers and scales of quantizers.

    Copied even if they are float32: a single norm left in a mapped file would keep all of it mapped.
    """
    held = {id(tensor) for module in model.modules() if isinstance(module, Holder) for tensor in module.held()}
    for module in model.modules():
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        if any(is_packed(tensor) and id(tensor) not in held for tensor in own):
            continue
        for tensor in own:
            if tensor.is_floating_point() and id(tensor) not in held:
                tensor.data = room.tensor(tuple(tensor.shape), torch.float32).copy_(tensor.data)


@contextmanager
def phase(model: PreTrainedModel, *, prefill: bool) -> Iterator[None]:
    """Run a forward inside: a prompt chunk, or one token for each of several sequences. Nothing if nothing is held."""
    products: Products | None = getattr(model, _ATTRIBUTE, None)
    if products is None:
        yield
        return
    products.prefill = prefill
    try:
        yield
    finally:
        products.forget()
