"""What is shipped: every file loads, says where each figure comes from, and is for the machines of its name."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import profiles
from magicpig_cli.hardware import Gpu, Hardware
from magicpig_cli.profiles.files import shipped_folder
from magicpig_cli.profiles.schema import FIGURES, to_document

MIB = 1 << 20
HOST = Hardware(
    cpu_model="AMD EPYC 7763 64-Core Processor", isa="avx2", tiers=("portable", "avx2"), cores_physical=64,
    cores_usable=128, threads=64, numa_nodes=1, memory_total=512 << 30, memory_free=500 << 30, memory_limit=None,
    process_bytes=0,
)  # fmt: skip

# Name and MiB as drivers report them → profile
GPUS = [
    ("NVIDIA GeForce RTX 4090", 24_217, "rtx4090"),
    ("NVIDIA GeForce RTX 4090 D", 24_210, "rtx4090"),
    ("nvidia geforce rtx 4090", 24_217, "rtx4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376, "gpu-12gb"),  # 16 GB and another chip
    ("NVIDIA GeForce RTX 3090", 24_268, "rtx3090"),
    ("NVIDIA GeForce RTX 3090 Ti", 24_564, "rtx3090"),
    ("NVIDIA L20", 46_068, "l20"),
    ("NVIDIA L2", 24_564, "gpu-24gb"),
    ("NVIDIA L4", 22_563, "gpu-24gb"),
    ("NVIDIA L40S", 45_373, "gpu-48gb"),
    ("NVIDIA A100-SXM4-80GB", 81_037, "a100"),
    ("NVIDIA A100 80GB PCIe", 81_051, "a100"),
    ("NVIDIA A100-SXM4-40GB", 40_337, "a100"),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9_728, "gpu-8gb"),  # a slice has neither the memory nor the units
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40_192, "a100"),
    ("NVIDIA RTX A1000 6GB Laptop GPU", 6_144, "gpu-8gb"),
    ("NVIDIA A10", 22_724, "gpu-24gb"),
    ("NVIDIA A10G", 22_515, "gpu-24gb"),
    ("NVIDIA H200", 143_156, "h200"),
    ("NVIDIA H200 NVL", 143_156, "h200"),
    ("NVIDIA GH200 480GB", 97_280, "gpu-80gb"),
    ("NVIDIA H100 80GB HBM3", 81_079, "gpu-80gb"),
    ("NVIDIA H20", 97_508, "gpu-80gb"),
    ("NVIDIA GeForce RTX 5090", 32_110, "gpu-24gb"),
    ("NVIDIA RTX 6000 Ada Generation", 48_519, "gpu-48gb"),
    ("NVIDIA GeForce RTX 3060", 12_045, "gpu-12gb"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", 8_188, "gpu-8gb"),
    ("Tesla T4", 14_913, "gpu-12gb"),
    ("Tesla V100-SXM2-32GB", 32_501, "gpu-24gb"),
    ("AMD Instinct MI210", 65_520, "gpu-48gb"),
    ("AMD Instinct MI300X", 196_592, "gpu-80gb"),
]


def with_gpu(name: str, total: int) -> Hardware:
    return replace(HOST, gpus=(Gpu(0, name, total, total),))


def figures(profile: profiles.Profile) -> list[str]:
    """Keys that a source is wanted for: every figure, each entry of the tables for itself."""
    entries = [f"attention.tables[{i}]" for i in range(len(profile.tables))]
    return [key for key in FIGURES if key != "attention.tables"] + entries


def test_all_that_the_roadmap_names_is_shipped():
    names = {profile.name for profile in profiles.shipped()}
    assert {"rtx4090", "rtx3090", "l20", "a100", "h200", "cpu"} < names
    assert len([name for name in names if name.startswith("gpu-")]) >= 3


@pytest.mark.parametrize("profile", profiles.shipped(), ids=lambda profile: profile.name)
def test_every_figure_is_written_and_has_a_source(profile):
    assert profile.path is not None
    document = yaml.safe_load(profile.path.read_text(encoding="utf-8"))
    assert "base" not in document
    written = [f"{section}.{key}" for section in ("attention", "run", "memory") for key in document[section]]
    whole = to_document(profile)
    figured = [f"{section}.{key}" for section in ("attention", "run", "memory") for key in whole[section]]
    assert written == figured
    defaults = ("budget", "bits", "tail", "target_error", "head_shares")
    assert set(FIGURES) - set(figured) == {f"attention.{key}" for key in defaults}
    assert list(profile.sources) == [
        key if key != "attention.tables" else entry
        for key in figured
        for entry in (figures(profile)[-len(profile.tables) :] if key == "attention.tables" else [key])
    ]
    for key, source in profile.sources.items():
        assert re.match(r"(paper, (section|table)|measured: |reasoned: )", source), (key, source)
        assert "\n" not in source


@pytest.mark.parametrize("profile", profiles.shipped(), ids=lambda profile: profile.name)
def test_what_was_reasoned_is_not_said_to_be_measured(profile):
    """No GPU has been measured yet; only the CPU's own figures have."""
    if profile.match.device == "gpu":
        assert not [key for key, source in profile.sources.items() if source.startswith("measured")]


@pytest.mark.parametrize("profile", profiles.shipped(), ids=lambda profile: profile.name)
def test_every_length_has_tables_and_longer_ones_sample_no_larger_share(profile):
    assert profile.tables[-1].up_to is None
    ratios = [table.sampled_ratio for table in profile.tables]
    assert all(ratio is not None for ratio in ratios)
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize(("name", "mib", "wanted"), GPUS, ids=[name for name, _, _ in GPUS])
def test_gpus_get_the_profile_of_their_name(name, mib, wanted):
    profile, reason = profiles.choose(with_gpu(name, mib * MIB), on_gpu=True)
    assert profile.name == wanted
    assert reason.endswith("; shipped")


def test_a_run_on_the_cpu_gets_the_cpu_s_profile_whatever_cards_there_are():
    assert profiles.choose(HOST, on_gpu=False)[0].name == "cpu"
    assert profiles.choose(with_gpu("NVIDIA H200", 143_156 * MIB), on_gpu=False)[0].name == "cpu"


@given(st.integers(1 << 30, 1 << 40))
def test_a_gpu_of_any_size_has_exactly_one_generic_profile(total):
    machine = with_gpu("Some Card", total)
    generic = [profile for profile in profiles.shipped() if profile.name.startswith("gpu-")]
    fitting = [
        profile.name
        for profile in generic
        if total >= (profile.match.gpu_memory_min or 0)
        and (profile.match.gpu_memory_max is None or total < profile.match.gpu_memory_max)
    ]
    assert [profiles.choose(machine, on_gpu=True)[0].name] == fitting


def test_shipped_files_are_those_of_the_checkout():
    assert {path.stem for path in shipped_folder().iterdir()} == {profile.name for profile in profiles.shipped()}
