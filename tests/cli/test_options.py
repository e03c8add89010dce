"""Every shared option, and where its value comes from: option > environment > config.yaml > default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from magicpig_cli.cli import app, chat
from magicpig_cli.cli.options import GROUPS, SHARED_OPTIONS, command_options
from magicpig_cli.config import DEFAULT_BITS, DEFAULT_BUDGET, DEFAULT_TAIL, AttentionOptions, Settings
from magicpig_cli.profiles import BUILT_IN, shipped


def test_a_default_that_is_told_is_that_of_every_shipped_profile():
    """`(default 4)`; what differs from profile to profile is told as theirs."""
    told = {
        option.field.removeprefix("attention."): float(found[1])
        for option in SHARED_OPTIONS
        if option.group == "attention" and (found := re.search(r"\(default ([\d.]+)\)", option.help))
    }
    assert {"sink", "local", "bits", "hash_seed"} <= set(told)
    for profile in (BUILT_IN, *shipped()):
        own = {"sink": {profile.sink}, "local": {profile.local}, "bits": {profile.bits or DEFAULT_BITS}}
        own |= {"budget": {profile.budget or DEFAULT_BUDGET}, "hash_seed": {AttentionOptions().hash_seed}}
        own |= {"tail": {DEFAULT_TAIL if profile.tail is None else profile.tail}}
        own |= {name: {getattr(table, name) for table in profile.tables} for name in ("K", "L")}
        for name, value in told.items():
            assert own[name] == {value}, (name, profile.name)


class Caught:
    """Settings that the command got."""

    settings: Settings | None = None
    own: Any = None


@pytest.fixture
def caught(monkeypatch, tmp_path) -> Caught:
    """`magicpig chat` replaced by a command with every shared option, in an empty configuration."""
    box = Caught()

    @command_options(*GROUPS)
    def probe(settings: Settings, own: Annotated[int, typer.Option()] = 7) -> None:
        """Remember what came."""
        box.settings, box.own = settings, own

    monkeypatch.setattr(chat, "chat", probe)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for option in SHARED_OPTIONS:
        monkeypatch.delenv("MAGICPIG_" + option.name.upper(), raising=False)
    return box


def write_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "magicpig-cli" / "config.yaml"
    path.parent.mkdir()
    path.write_text(text)
    return path


def field(settings: Settings | None, path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


# option name → (what is typed, what Settings hold)
EXAMPLES: dict[str, tuple[str | None, Any]] = {
    "model": ("org/name", "org/name"),
    "revision": ("v1", "v1"),
    "device": ("cuda:1", "cuda:1"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantize": ("int8", "int8"),
    "no_cuda_graphs": (None, True),
    "context": ("96k", 98_304),
    "allow_extrapolation": (None, True),
    "chat_template": (__file__, Path(__file__).read_text(encoding="utf-8")),
    "threads": ("3", 3),
    "profile": ("rtx4090", "rtx4090"),
    "offline": (None, True),
    "trust_remote_code": (None, True),
    "attention": ("lsh", "lsh"),
    "K": ("12", 12),
    "L": ("200", 200),
    "budget": ("0.05", 0.05),
    "tail": ("0", 0.0),
    "bits": ("256", 256),
    "target_error": ("0.1", 0.1),
    "signatures": ("device", "device"),
    "sink": ("8", 8),
    "local": ("128", 128),
    "dense_layers": ("16,0", (0, 16)),
    "kv_dtype": ("int8", "int8"),
    "hash_seed": ("5", 5),
    "max_tokens": ("9", 9),
    "temperature": ("0", 0.0),
    "top_p": ("0.9", 0.9),
    "top_k": ("40", 40),
    "min_p": ("0.1", 0.1),
    "repetition_penalty": ("1.1", 1.1),
    "stop": ("end of  answer", ("end of  answer",)),
    "seed": ("0", 0),
    "system": ("Be brief [/INST].", "Be brief [/INST]."),
    "load_format": ("dummy", "dummy"),
}


def test_the_examples_cover_every_option():
    assert EXAMPLES.keys() == {option.name for option in SHARED_OPTIONS}


@pytest.mark.parametrize("option", SHARED_OPTIONS, ids=lambda option: option.name)
def test_every_spelling_sets_its_field_and_nothing_else(caught, option):
    typed, wanted = EXAMPLES[option.name]
    defaults = {other.field: field(Settings(), other.field) for other in SHARED_OPTIONS}
    assert defaults[option.field] != wanted
    for spelling in option.spellings:
        assert app.run(["chat", spelling] + ([] if typed is None else [typed])) == 0
        got = {other.field: field(caught.settings, other.field) for other in SHARED_OPTIONS}
        assert got == defaults | {option.field: wanted}


@pytest.mark.parametrize("option", SHARED_OPTIONS, ids=lambda option: option.name)
def test_every_option_can_come_from_the_environment(caught, monkeypatch, option):
    typed, wanted = EXAMPLES[option.name]
    monkeypatch.setenv("MAGICPIG_" + option.name.upper(), "1" if typed is None else typed)
    if option.name == "system":
        monkeypatch.setenv("MAGICPIG_SYSTEM", "Be brief [/INST].")
    assert app.run(["chat"]) == 0
    assert field(caught.settings, option.field) == wanted


def test_precedence(caught, monkeypatch, tmp_path):
    write_config(tmp_path, "K: 1\nL: 11\nsink: 21\nchat:\n  L: 12\n")
    assert app.run(["chat"]) == 0
    assert (caught.settings.attention.K, caught.settings.attention.L, caught.settings.attention.sink) == (1, 12, 21)
    monkeypatch.setenv("MAGICPIG_K", "2")
    monkeypatch.setenv("MAGICPIG_L", "13")
    assert app.run(["chat", "-K", "3"]) == 0
    assert (caught.settings.attention.K, caught.settings.attention.L, caught.settings.attention.sink) == (3, 13, 21)
    assert caught.settings.attention.local == Settings().attention.local


def test_config_file_forms(caught, tmp_path):
    write_config(
        tmp_path,
        "context: 32k\ndense-layers: [0, 3]\noffline: true\ntrust_remote_code: false\nrevision: null\n"
        "stop: [one, 'two words']\nbench:\n  reps: 2\nchat:\n  own: 9\nmodels check:\n  context: 8k\n",
    )
    assert app.run(["chat"]) == 0
    settings = caught.settings
    assert (settings.context, settings.attention.dense_layers) == (32_768, (0, 3))
    assert (settings.model.offline, settings.model.trust_remote_code, settings.model.revision) == (True, False, None)
    assert settings.generation.stop == ("one", "two words")
    assert caught.own == 9


def test_a_command_s_own_option_with_a_shared_name_is_left_alone(caught, monkeypatch, tmp_path):
    @command_options("attention", without=("attention",))
    def probe(settings: Settings, attention: Annotated[str, typer.Option()] = "lsh,exact") -> None:
        """Like bench, whose --attention is a list of modes."""
        caught.settings, caught.own = settings, attention

    monkeypatch.setattr(chat, "chat", probe)
    path = write_config(tmp_path, "attention: auto\nK: 8\n")
    assert app.run(["chat"]) == 0
    assert (caught.own, caught.settings.attention.K) == ("lsh,exact", 8)
    path.write_text("attention: auto\nchat:\n  attention: exact\n")
    assert app.run(["chat"]) == 0
    assert caught.own == "exact"


def test_a_single_stop_in_the_config_file(caught, tmp_path):
    write_config(tmp_path, "stop: END OF TEXT\n")
    assert app.run(["chat"]) == 0
    assert caught.settings.generation.stop == ("END OF TEXT",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("contxt: 32k\n", ["'contxt'", "did you mean context?"]),
        ("chat:\n  oen: 9\n", ["chat: unknown key 'oen'", "did you mean own?"]),
        ("zzzzzz: 1\n", ["'zzzzzz'", "--help"]),
        ("chat: 3\n", ["chat must hold options, not 3"]),
        ("- a\n- b\n", ["['a', 'b']"]),
        ("a: [\n", ["not YAML"]),
        ("K: yes\n", ["K is True, not a value"]),
        ("context: {a: 1}\n", ["context is {'a': 1}, not a value"]),
        ("offline: maybe\n", ["offline is 'maybe', not true or false"]),
    ],
)
def test_a_wrong_config_file_is_named(caught, tmp_path, capsys, text, words):
    path = write_config(tmp_path, text)
    assert app.run(["chat"]) == 2
    printed = capsys.readouterr().err
    assert caught.settings is None
    for word in [str(path), *words]:
        assert word in printed


@pytest.mark.parametrize(("text", "words"), [("context: lots\n", "--context: 'lots'"), ("K: many\n", "-K")])
def test_a_wrong_value_in_the_config_file_names_the_option(caught, tmp_path, capsys, text, words):
    write_config(tmp_path, text)
    assert app.run(["chat"]) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_config_file_does_not_hide_the_help(tmp_path, monkeypatch, capsys):
    write_config(tmp_path, "a: [\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert app.run(["chat", "--help"]) == 0
    assert "--context" in capsys.readouterr().out


def test_an_empty_config_file(caught, tmp_path):
    write_config(tmp_path, "# nothing yet\n")
    assert app.run(["chat"]) == 0
    assert caught.settings == Settings()


@pytest.mark.parametrize("text", ["end of answer", " ", "a:b,c;d", "\n\nUser:", "### "])
def test_the_environment_holds_one_stop_text(caught, monkeypatch, text):
    monkeypatch.setenv("MAGICPIG_STOP", text)
    assert app.run(["chat"]) == 0
    assert caught.settings.generation.stop == (text,)
    assert app.run(["chat", "--stop", "typed one", "--stop", "b"]) == 0
    assert caught.settings.generation.stop == ("typed one", "b")


def test_the_environment_s_stop_text_comes_before_that_of_the_config_file(caught, monkeypatch, tmp_path):
    write_config(tmp_path, "stop: [from file, two]\n")
    monkeypatch.setenv("MAGICPIG_STOP", "from environment")
    assert app.run(["chat"]) == 0
    assert caught.settings.generation.stop == ("from environment",)


def test_repeated_stop(caught):
    assert app.run(["chat", "--stop", "a", "--stop", "b c"]) == 0
    assert caught.settings.generation.stop == ("a", "b c")


@pytest.mark.parametrize(("typed", "layers"), [("auto", None), ("none", ()), ("3", (3,)), (" 2, 1,2", (1, 2))])
def test_dense_layers(caught, typed, layers):
    assert app.run(["chat", "--dense-layers", typed]) == 0
    assert caught.settings.attention.dense_layers == layers


def test_system_prompt_from_a_file(caught, tmp_path):
    (tmp_path / "system.txt").write_text("\ufeffYou are [bold].\n", encoding="utf-8")
    assert app.run(["chat", "-s", f"@{tmp_path}/system.txt"]) == 0
    assert caught.settings.system == "You are [bold].\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "9x"], "--context: '9x' is not a number of tokens"),
        (["-c", "0"], "--context: a context of 0"),
        (["--attention", "topk"], "--attention: 'topk' is unknown"),
        (["--dtype", "float16"], "--dtype: 'float16'"),
        (["--quantize", "int2"], "--quantize: 'int2'"),
        (["--device", "gpu"], "--device: 'gpu'"),
        (["--dense-layers", "a"], "--dense-layers: 'a'"),
        (["--chat-template", "/no/such"], "--chat-template: cannot read /no/such: No such file"),
        (["-s", "@/no/such"], "--system: cannot read /no/such"),
        (["-K", "17"], "-K"),
        (["-L", "1"], "-L"),
        (["--top-p", "1.5"], "--top-p"),
        (["-t", "0"], "--threads"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--repetition-penalty", "1e-40"], "0.01"),
        (["--repetition-penalty", "101"], "100"),
        (["--repetition-penalty", "nan"], "--repetition-penalty"),
        (["--temp", "nan"], "--temperature"),
        (["--temp", "inf"], "--temperature: inf is not a finite number"),
        (["--top-p", "nan"], "--top-p"),
        (["--min-p", "nan"], "--min-p"),
        (["-L", "1001"], "1000"),
        (["--hash-seed", "18446744073709551616"], "18446744073709551615"),
        (["--seed", "18446744073709551616"], "18446744073709551615"),
        (["-c", "9" * 400], "--context: a number of 400 digits"),
        (["-c", "9" * 5000 + "k"], "--context: a number of 5000 digits"),
        (["-c", "0." + "1" * 5000], "--context: a number of 5001 digits"),
        (["-c", "9" * 20], "is more than 1,125,899,906,842,624"),
        (["--stop", ""], "--stop: an empty text"),
        (["--sed", "1"], "--seed"),
        (["--seed"], "--seed"),
        (["surplus"], "surplus"),
    ],
)
def test_wrong_values_are_one_line_that_names_the_option(caught, capsys, arguments, words):
    assert app.run(["chat", *arguments]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert caught.settings is None
    assert printed[0].startswith("error: ")
    assert words in printed[0]
    assert len(printed) <= 2
    assert all(line.startswith("hint: ") for line in printed[1:])


def test_options_can_be_left_out():
    @command_options("model", "attention", without=("model",))
    def probe(settings: Settings) -> None:
        """Nothing."""

    names = probe.__signature__.parameters
    assert "model" not in names
    assert {"device", "K", "debug", "verbose"} <= names.keys()
    assert "settings" not in names
