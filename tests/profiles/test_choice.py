"""Which profile wins: the user's before shipped ones, one that names the model, the one that says most."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from magicpig_cli import profiles
from magicpig_cli.config import ModelOptions, Settings
from magicpig_cli.errors import UsageError
from magicpig_cli.hardware import Gpu, Hardware
from magicpig_cli.planning import profile_for
from magicpig_cli.profiles import BUILT_IN, Match, Profile
from magicpig_cli.profiles.choice import contains

GIB = 1 << 30
LAPTOP = Hardware(
    cpu_model="Intel(R) Core(TM) i7-1260P", isa="avx2", tiers=("portable", "avx2"), cores_physical=12, cores_usable=16,
    threads=12, numa_nodes=1, memory_total=32 * GIB, memory_free=30 * GIB, memory_limit=None, process_bytes=0,
)  # fmt: skip
SERVER = replace(
    LAPTOP,
    cpu_model="Intel(R) Xeon(R) Platinum 8480+",
    gpus=(
        Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB),
        Gpu(1, "NVIDIA L20", 45 * GIB, 44 * GIB),
        Gpu(2, "NVIDIA H200", 140 * GIB, 139 * GIB),
    ),
)


def save(name: str, **match) -> None:
    profiles.save(Profile(match=Match(**match)), name)


def chosen(machine: Hardware = LAPTOP, gpu: int | None = None, model: str | None = None) -> str:
    return profiles.choose(machine, gpu is not None, gpu or 0, model)[0].name


def test_each_gpu_of_a_machine_has_its_own():
    assert [chosen(SERVER, gpu) for gpu in (0, 1, 2, None)] == ["rtx4090", "l20", "h200", "cpu"]


def test_a_gpu_that_torch_does_not_see_has_none():
    profile, reason = profiles.choose(LAPTOP, on_gpu=True, gpu_index=0)
    assert profile is BUILT_IN
    assert reason == "no profile is for this machine"


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090", True),
        ("NVIDIA GeForce RTX 4090", "RTX 409", False),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA RTX A1000", "A100", False),
        ("NVIDIA RTX A1000", "rtx a1000", True),
        ("AMD EPYC 7763 64-Core Processor", "EPYC7763", True),
        ("NVIDIA L40S", "L40", False),
        ("NVIDIA L4", "-", False),
    ],
)
def test_words_of_a_name(name, wanted, found):
    assert contains(name, wanted) == found


def test_a_user_s_rule_wins_even_if_it_says_less():
    save("mine", device="gpu")
    assert chosen(SERVER, 0) == "mine"
    assert chosen(SERVER) == "cpu"


@pytest.mark.parametrize(
    ("general", "special"),
    [
        ({"device": "gpu"}, {"gpu_memory_min": 20 * GIB}),
        ({"device": "gpu", "gpu_memory_min": 20 * GIB, "gpu_memory_max": 30 * GIB}, {"gpu_name": "RTX 4090"}),
        ({"gpu_memory_min": 20 * GIB}, {"gpu_memory_min": 20 * GIB, "gpu_memory_max": 30 * GIB}),
        ({"gpu_name": "4090"}, {"gpu_name": "RTX 4090"}),
        ({"gpu_name": "RTX 4090"}, {"gpu_name": "RTX 4090", "cpu_model": "Xeon"}),
        ({"gpu_name": "GeForce RTX 4090", "cpu_model": "Platinum 8480+"}, {"model": "demo"}),
        ({"model": "demo", "device": "gpu"}, {"model": "demo", "gpu_name": "4090"}),
    ],
)
def test_the_rule_that_says_more_wins(general, special):
    save("a", **general)
    assert chosen(SERVER, 0, "demo") == "a"
    save("b", **special)
    assert chosen(SERVER, 0, "demo") == "b"
    save("a", **special)
    save("b", **general)
    assert chosen(SERVER, 0, "demo") == "a"


def test_of_two_that_say_the_same_the_last_written_wins(own_folder):
    for name in ("b", "a", "c"):
        save(name, device="cpu")
    for age, name in enumerate(("a", "c", "b")):
        os.utime(own_folder / f"{name}.yaml", (1000 - age, 1000 - age))
    assert chosen() == "a"
    os.utime(own_folder / "b.yaml", (2000, 2000))
    assert chosen() == "b"


def test_a_tuned_profile_is_for_its_model_on_its_machine_only():
    save("tuned", device="cpu", cpu_model=LAPTOP.cpu_model, model="org/model")
    assert chosen(LAPTOP, model="org/model") == "tuned"
    assert chosen(LAPTOP, model="org/model-2") == "cpu"
    assert chosen(LAPTOP) == "cpu"
    assert chosen(SERVER, model="org/model") == "cpu"
    assert chosen(SERVER, 0, "org/model") == "rtx4090"
    assert chosen(replace(LAPTOP, cpu_model="12th Gen Intel(R) Core(TM) i7-1260P"), model="org/model") == "tuned"


def test_without_a_rule_a_profile_is_used_by_name_only(own_folder):
    save("mine")
    assert chosen() == "cpu"
    (own_folder / "mine.yaml").write_text("base: cpu\nattention: {sink: 8}\n")  # a base brings its rule
    assert chosen() == "mine"
    (own_folder / "mine.yaml").write_text("base: cpu\nmatch: {}\nattention: {sink: 8}\n")
    assert chosen() == "cpu"


def test_a_user_s_profile_replaces_the_shipped_one_of_its_name():
    save("rtx4090", device="cpu", model="demo")
    assert chosen(SERVER, 0) == "gpu-24gb"
    assert chosen(SERVER, None, "demo") == "rtx4090"


def test_a_broken_one_is_passed_over(own_folder):
    own_folder.mkdir(parents=True)
    (own_folder / "cpu.yaml").write_text("match: {device: cpu}\nrun: {threads: many}\n")
    profile, reason = profiles.choose(LAPTOP, on_gpu=False)
    assert profile in profiles.shipped()
    assert reason == "for any model on a CPU; shipped"


@pytest.mark.parametrize("part", ["RTX 409", "090", "RTX 4090 Ti", "4090 RTX", "GeForce 4090"])
def test_names_are_compared_word_by_word(part):
    save("mine", gpu_name=part)
    assert chosen(SERVER, 0) == "rtx4090"


def test_reasons_name_what_matched(own_folder):
    def reason(gpu: int | None, model: str | None = None) -> str:
        return profiles.choose(SERVER, gpu is not None, gpu or 0, model)[1]

    assert reason(1) == "for GPU NVIDIA L20, a GPU with at least 40.0 GiB (this one has 45.0 GiB); shipped"
    save("mine", gpu_memory_min=20 * GIB, gpu_memory_max=30 * GIB)
    assert reason(0) == f"for a GPU with 20.0 GiB to 30.0 GiB (this one has 24.0 GiB); {own_folder}/mine.yaml"
    save("mine", cpu_model="Xeon", model="demo")
    assert reason(0, "demo") == f"for model demo, CPU Intel(R) Xeon(R) Platinum 8480+; {own_folder}/mine.yaml"


@pytest.mark.parametrize(
    ("device", "machine", "name"),
    [
        ("auto", LAPTOP, "cpu"), ("auto", SERVER, "rtx4090"), ("cpu", SERVER, "cpu"), ("cuda", SERVER, "rtx4090"),
        ("cuda:1", SERVER, "l20"), ("cuda:2", SERVER, "h200"), ("cuda:3", SERVER, "built-in"),
    ],
)  # fmt: skip
def test_the_device_that_was_asked_for_decides(device, machine, name):
    assert profile_for(machine, Settings(ModelOptions(device=device)))[0].name == name


def test_what_was_asked_for_is_taken_whatever_matches(own_folder):
    save("mine", device="cpu")
    assert profile_for(LAPTOP, Settings())[0].name == "mine"
    profile, reason = profile_for(LAPTOP, Settings(profile="h200"))
    assert (profile.name, reason) == ("h200", "as asked")
    with pytest.raises(UsageError, match="there is no profile 'h20'"):
        profile_for(LAPTOP, Settings(profile="h20"))
