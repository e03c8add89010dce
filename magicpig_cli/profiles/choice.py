"""Which profile is for this machine and this model."""

from __future__ import annotations

import re

from magicpig_cli.hardware import Gpu, Hardware
from magicpig_cli.profiles.files import shipped, user_profiles
from magicpig_cli.profiles.profile import BUILT_IN, Match, Profile
from magicpig_cli.units import format_bytes


def choose(
    hardware: Hardware, on_gpu: bool, gpu_index: int = 0, model_name: str | None = None,
    own: tuple[Profile, ...] | None = None,
) -> tuple[Profile, str]:  # fmt: skip
    """The profile that matches best, and why in words. Broken user profiles are passed over.

    own: profiles of the user; None = those in the user's folder.

    A user's profile comes before a shipped one, and replaces one of the same name. Among them one that names the model
    wins, then the one that says most about the machine, then the one written last.
    """
    gpu = next((gpu for gpu in hardware.gpus if gpu.index == gpu_index), None) if on_gpu else None
    own = user_profiles() if own is None else own
    names = {profile.name for profile in own}
    for candidates in (own, tuple(profile for profile in shipped() if profile.name not in names)):
        fitting = [p for p in candidates if matches(p.match, hardware, on_gpu, gpu, model_name)]
        if fitting:
            best = max(fitting, key=lambda profile: (_specificity(profile.match), _written(profile)))
            return best, _reason(best, hardware, gpu, shipped=candidates is not own)
    return BUILT_IN, "no profile is for this machine"


def matches(match: Match, hardware: Hardware, on_gpu: bool, gpu: Gpu | None, model_name: str | None) -> bool:
    """Whether all that is given holds, and something is given."""
    if match == Match():
        return False
    if match.device is not None and match.device != ("gpu" if on_gpu else "cpu"):
        return False
    if match.model is not None and match.model != model_name:
        return False
    if match.cpu_model is not None and not contains(hardware.cpu_model, match.cpu_model):
        return False
    if match.gpu_name is None and match.gpu_memory_min is None and match.gpu_memory_max is None:
        return True
    return gpu is not None and _gpu_matches(match, gpu)


def _gpu_matches(match: Match, gpu: Gpu) -> bool:
    if match.gpu_name is not None and not contains(gpu.name, match.gpu_name):
        return False
    if match.gpu_memory_min is not None and gpu.total_bytes < match.gpu_memory_min:
        return False
    return match.gpu_memory_max is None or gpu.total_bytes < match.gpu_memory_max


def _words(name: str) -> list[str]:
    """`NVIDIA A100-SXM4-80GB` → nvidia, a100, sxm4, 80gb: whole words, so that A100 is not found in A1000.

    Four digits are a word of their own: `rtx4090` is RTX 4090.
    """
    return re.findall(r"[a-z]+(?=\d{4})|[^\W_]+", name.lower())


def contains(name: str, wanted: str) -> bool:
    """Whether the words of `wanted`, any at all, follow each other in the name of a device."""
    words, part = _words(name), _words(wanted)
    return bool(part) and any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))


def _specificity(match: Match) -> tuple[int, int, int, int]:
    """How much a rule says: the model, then words of names, then limits of memory, then the kind of device."""
    named = len(_words(match.gpu_name or "")) + len(_words(match.cpu_model or ""))
    limits = (match.gpu_memory_min is not None) + (match.gpu_memory_max is not None)
    return int(match.model is not None), named, limits, int(match.device is not None)


def _written(profile: Profile) -> float:
    """When its file was last written, in seconds; shipped ones never tie."""
    try:
        return profile.path.stat().st_mtime if profile.path is not None else 0.0
    except OSError:
        return 0.0


def _reason(profile: Profile, hardware: Hardware, gpu: Gpu | None, *, shipped: bool) -> str:
    """`for GPU NVIDIA L20 with at least 40.0 GiB; shipped`."""
    match = profile.match
    parts = [f"model {match.model}"] if match.model is not None else []
    if gpu is not None and match.gpu_name is not None:
        parts.append(f"GPU {gpu.name}")
    if gpu is not None and (limits := _memory_range(match)):
        parts.append(f"a GPU with {limits} (this one has {format_bytes(gpu.total_bytes)})")
    if match.cpu_model is not None:
        parts.append(f"CPU {hardware.cpu_model}")
    if not parts:
        parts.append("any model on a GPU" if match.device == "gpu" else "any model on a CPU")
    return f"for {', '.join(parts)}; {'shipped' if shipped else profile.path}"


def _memory_range(match: Match) -> str:
    low, high = match.gpu_memory_min, match.gpu_memory_max
    if low is not None and high is not None:
        return f"{format_bytes(low)} to {format_bytes(high)}"
    if low is not None:
        return f"at least {format_bytes(low)}"
    return f"less than {format_bytes(high)}" if high is not None else ""
