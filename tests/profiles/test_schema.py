"""Every kind of bad input is answered with file, key and what is allowed; good input means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from magicpig_cli import profiles
from magicpig_cli.errors import UsageError
from magicpig_cli.profiles import BUILT_IN, Match, TableSize


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key(tmp_path):
    profile = profiles.load(write(tmp_path, """
match: {device: gpu, gpu_name: RTX 4090, gpu_memory_min: 20GiB, gpu_memory_max: 1TiB, cpu_model: EPYC, model: a/b}
attention:
  sampler: lsh
  tables:
    - {K: 8, L: 75, up_to: 16k, sampled_ratio: 0.05}
    - {K: 10, L: 150}
  head_shares: {1: [0.5, 1.5], 16: [1, 2.25]}
  dense_layers: [0, 16]
  sink: 8
  local: 1k
  auto_lsh_from: 8k
run: {chunk: 2k, threads: 12, max_batch: 32}
memory: {host_reserve: 1.5GiB, device_reserve: 512 MiB}
sources: {"attention.tables[1]": "paper, table 3", attention.sink: "measured: here"}
"""))  # fmt: skip
    gib = 1 << 30
    assert profile.match == Match("gpu", "RTX 4090", 20 * gib, 1024 * gib, "EPYC", "a/b")
    assert profile.tables == (TableSize(8, 75, 16_384, 0.05), TableSize(10, 150))
    assert profile.head_shares == {1: (0.5, 1.5), 16: (1.0, 2.25)}
    assert (profile.dense_layers, profile.sink, profile.local) == ((0, 16), 8, 1024)
    assert (profile.auto_lsh_from, profile.chunk, profile.threads, profile.max_batch) == (8192, 2048, 12, 32)
    assert (profile.host_reserve, profile.device_reserve) == (3 * gib // 2, gib // 2)
    assert profile.sources == {"attention.tables[1]": "paper, table 3", "attention.sink": "measured: here"}
    assert (profile.name, profile.path) == ("mine", tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "attention:\nrun: {}\nmatch:\nsources:\n", "\ufeffrun: {chunk: 512}"]
)
def test_what_is_left_out_is_as_built_in(tmp_path, text):
    profile = profiles.load(write(tmp_path, text))
    assert profile == BUILT_IN.__class__(name="mine", path=tmp_path / "mine.yaml")


def test_a_base_gives_what_is_left_out_with_its_sources(tmp_path):
    base = profiles.find("rtx4090")
    profile = profiles.load(write(tmp_path, "base: rtx4090\nrun: {chunk: 1k}\nattention: {tables: [{K: 9, L: 99}]}\n"))
    assert (profile.chunk, profile.tables) == (1024, (TableSize(9, 99),))
    assert (profile.match, profile.max_batch, profile.dense_layers) == (base.match, base.max_batch, base.dense_layers)
    gone = {"run.chunk", *(f"attention.tables[{i}]" for i in range(len(base.tables)))}
    assert profile.sources == {key: text for key, text in base.sources.items() if key not in gone}
    other = profiles.load(
        write(tmp_path, "base: rtx4090\nmatch: {device: gpu}\nsources: {run.threads: 'measured: x'}\n")
    )
    assert other.match == Match(device="gpu")
    assert other.sources == base.sources | {"run.threads": "measured: x"}


TABLES = "attention: {tables: [{K: 9, L: 120, up_to: 32k}, %s]}"
BAD = [
    # what the file holds, words of the message, words of the hint
    (TABLES % "{K: 17, L: 9}", "attention.tables[1].K is 17, allowed are 1 to 16", None),
    (TABLES % "{K: 0, L: 9}", "attention.tables[1].K is 0, allowed are 1 to 16", None),
    (TABLES % "{K: ten, L: 9}", "attention.tables[1].K is 'ten', allowed are 1 to 16", None),
    (TABLES % "{K: true, L: 9}", "attention.tables[1].K is True, allowed are 1 to 16", None),
    (TABLES % "{K: 9.5, L: 9}", "attention.tables[1].K is 9.5, allowed are 1 to 16", None),
    (TABLES % "{K: 9, L: 1}", "attention.tables[1].L is 1, allowed are 2 to 1,000", None),
    (TABLES % "{K: 9, L: 1001}", "attention.tables[1].L is 1001, allowed are 2 to 1,000", None),
    (TABLES % "{L: 9}", "attention.tables[1].K is missing", "{K: 10, L: 150, up_to: 96k}"),
    (TABLES % "{K: 9}", "attention.tables[1].L is missing", "{K: 10, L: 150, up_to: 96k}"),
    (TABLES % "{K: 9, L: 9, upto: 64k}", "attention.tables[1].upto is unknown", "did you mean up_to?"),
    (TABLES % "{K: 9, L: 9, up_to: 64q}", "attention.tables[1].up_to is '64q', allowed are numbers of tokens", None),
    (TABLES % "{K: 9, L: 9, up_to: 32k}", "tables[1].up_to is 32,768, but the entry before", "order"),
    (TABLES % "{K: 9, L: 9, sampled_ratio: 0}", "attention.tables[1].sampled_ratio is 0, allowed are", None),
    (TABLES % "{K: 9, L: 9, sampled_ratio: 5%}", "attention.tables[1].sampled_ratio is '5%', allowed are", None),
    (TABLES % "[10, 150]", "attention.tables[1] is [10, 150], not keys with values", "K, L, up_to, sampled_ratio"),
    ("attention: {tables: [{K: 9, L: 120}, {K: 8, L: 9}]}", "attention.tables[0].up_to is missing", "only the last"),
    ("attention: {tables: []}", "attention.tables is [], allowed are lists like", None),
    ("attention: {tables: {K: 9, L: 9}}", "attention.tables is {'K': 9, 'L': 9}, allowed are lists like", None),
    ("attention: {sampler: lhs}", "attention.sampler is 'lhs', allowed are lsh and rabitq and auto", None),
    ("attention: {head_shares: [1, 2]}", "attention.head_shares is [1, 2], allowed are layers with as many", None),
    ("attention: {head_shares: {1: 2}}", "attention.head_shares is {1: 2}, allowed are layers with as many", None),
    ("attention: {head_shares: {1: []}}", "attention.head_shares is {1: []}, allowed are layers with as many", None),
    ("attention: {head_shares: {a: [1]}}", "attention.head_shares is {'a': [1]}, allowed are layers with", None),
    ("attention: {head_shares: {1: [0, 1]}}", "attention.head_shares is {1: [0, 1]}, allowed are layers with", None),
    ("attention: {head_shares: {1: [101]}}", "attention.head_shares is {1: [101]}, allowed are layers with", None),
    ("attention: {head_shares: {1: [1], 2: [1, 2]}}", "attention.head_shares is {1: [1], 2: [1, 2]}, allowed", None),
    ("attention: {dense_layers: 0}", "attention.dense_layers is 0, allowed are ascending lists", None),
    ("attention: {dense_layers: [16, 0]}", "attention.dense_layers is [16, 0], allowed are ascending lists", None),
    ("attention: {dense_layers: [0, 0]}", "attention.dense_layers is [0, 0], allowed are ascending lists", None),
    ("attention: {dense_layers: [-1]}", "attention.dense_layers is [-1], allowed are ascending lists", None),
    ("attention: {dense_layers: [a]}", "attention.dense_layers is ['a'], allowed are ascending lists", None),
    ("attention: {sink: -1}", "attention.sink is -1, allowed are numbers of tokens from 0", None),
    ("attention: {local: 0}", "attention.local is 0, allowed are numbers of tokens from 1", None),
    ("attention: {local: [64]}", "attention.local is [64], allowed are numbers of tokens from 1", None),
    ("attention: {auto_lsh_from: never}", "attention.auto_lsh_from is 'never', allowed are numbers of tokens", None),
    ("attention: {snik: 4}", "attention.snik is unknown", "did you mean sink?"),
    ("attention: {k: 4}", "attention.k is unknown", "sampler"),
    ("attention: lsh", "attention is 'lsh', not keys with values", "its keys are sampler, tables"),
    ("atention: {sink: 4}", "atention is unknown", "did you mean attention?"),
    ("CHUNK: 4", "CHUNK is unknown", "base, match, attention, run, memory, sources"),
    ("7: 4", "7 is unknown", "base, match"),
    ("run: {chunk: 0}", "run.chunk is 0, allowed are numbers of tokens from 1 to 65,536, like 4k", None),
    ("run: {chunk: 128k}", "run.chunk is '128k', allowed are numbers of tokens from 1 to 65,536, like 4k", None),
    ("run: {threads: all}", "run.threads is 'all', allowed are physical, or 1 to 1,024", None),
    ("run: {threads: 0}", "run.threads is 0, allowed are physical, or 1 to 1,024", None),
    ("run: {max_batch: '8'}", "run.max_batch is '8', allowed are 1 to 1,024", None),
    ("memory: {host_reserve: lots}", "memory.host_reserve is 'lots', allowed are amounts of memory like 24GiB", None),
    ("memory: {device_reserve: -5}", "memory.device_reserve is -5, allowed are amounts of memory like 24GiB", None),
    ("memory: {device_reserve: 1.5}", "memory.device_reserve is 1.5, allowed are amounts of memory like 24GiB", None),
    ("match: {device: cuda}", "match.device is 'cuda', allowed are cpu and gpu", None),
    ("match: {gpu_name: 4090}", "match.gpu_name is 4090, allowed are text", None),
    ("match: {gpu_name: '()'}", "match.gpu_name is '()', allowed are text with letters or digits", None),
    ("match: {cpu_model: ''}", "match.cpu_model is '', allowed are text with letters or digits", None),
    ('match: {model: "a\\x1b[2J"}', "match.model is 'a\\x1b[2J', allowed are names of models", None),
    ("match: {model: ' '}", "match.model is ' ', allowed are names of models", None),
    ("match: {gpu: L20}", "match.gpu is unknown", "did you mean gpu_name?"),
    ("match: {device: cpu, gpu_name: L20}", "match.device is cpu, but match.gpu_name asks for a GPU", "leave out"),
    ("match: {device: cpu, gpu_memory_max: 9GiB}", "device is cpu, but match.gpu_memory_max asks", "leave out"),
    ("match: {gpu_memory_min: 2GiB, gpu_memory_max: 2GiB}", "gpu_memory_min is 2,147,483,648 bytes", "min on"),
    ("base: rtx409", "base is 'rtx409', which is no shipped profile", "did you mean rtx4090?"),
    ("base: mine", "base is 'mine', which is no shipped profile", "a100"),
    ("base: [a]", "base is ['a'], allowed are names of shipped profiles", None),
    ("sources: {run.chnk: x}", "sources.run.chnk is unknown", "did you mean run.chunk?"),
    ("sources: {'attention.tables[1]': x}", "sources.attention.tables[1] is unknown", "mean attention.tables[0]?"),
    ("sources: {run.chunk: 7}", "sources.run.chunk is 7, allowed are texts", None),
    ("sources: paper", "sources is 'paper', not keys with texts", "attention.sink"),
    ("- a\n- b\n", "it holds ['a', 'b'], not keys", "match"),
    ("hello", "it holds 'hello', not keys", "match"),
    ("run: {chunk: 1k}\nrun: {chunk: 2k}\n", "it is not YAML at line 2: run is there twice", None),
    ("run:\n  chunk: 1k\n  chunk: 2k\n", "it is not YAML at line 3: chunk is there twice", None),
    ("run: [", "it is not YAML at line 1", None),
    ("run: {chunk: !!python/object:os.system 1}", "it is not YAML at line 1: could not determine a constructor", None),
    ("[a, b]: 1", "it is not YAML at line 1", None),
    ("run: 2024-99-99", "it is not YAML: month must be in 1..12", None),
    ("[" * 5000, "it is not YAML", None),
    ("run: {chunk: \x01}", "it is not YAML", None),
    ("x: " + "y" * 300_000, "it has more than 262,144 bytes", None),
    ("run: " + "9" * 100, "run is 99999", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "hint"), BAD, ids=[text[:40].replace("\n", "⏎") for text, _, _ in BAD])
def test_bad_input_is_named(tmp_path, text, message, hint):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        profiles.load(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert message in caught.value.message
    assert len(caught.value.message) < len(str(path)) + 300
    if hint is not None:
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "it is no file"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not UTF-8 text"),
        (lambda path: path.symlink_to(path.parent / "gone"), "cannot be read: No such file"),
        (lambda path: None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_readable_file(tmp_path, make, message):
    path = tmp_path / "mine.yaml"
    make(path)
    with pytest.raises(UsageError, match=message):
        profiles.load(path)


def test_tables_by_length():
    profile = BUILT_IN.__class__(tables=(TableSize(8, 75, 16_384), TableSize(9, 120, 32_768)))
    sizes = [profile.table_size(tokens).K for tokens in (1, 16_384, 16_385, 32_768, 1 << 20)]
    assert sizes == [8, 8, 9, 9, 9]


def test_the_manual_shows_every_key_and_nothing_else(tmp_path):
    manual = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text(encoding="utf-8")
    example = manual.partition("```yaml\n")[2].partition("```")[0]
    profile = profiles.load(write(tmp_path, example))
    assert profile.match.gpu_name == "RTX 4090"
    document = yaml.safe_load(example)
    written = profiles.save(profile, "manual").read_text(encoding="utf-8")
    for section, keys in yaml.safe_load(written).items():
        assert section == "sources" or document[section].keys() == keys.keys()
    assert document.keys() == {"base", "match", "attention", "run", "memory", "sources"}
