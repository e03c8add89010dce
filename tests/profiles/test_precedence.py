"""Where a value comes from: option > environment > config.yaml > user's profile > shipped profile > built-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicpig_cli import planning, profiles
from magicpig_cli.cli import app
from magicpig_cli.planner import Plan, plan
from tests.tiny import tiny_config


class Machine:
    """A run of `models check` on a tiny model, on the CPU, and the plan that it made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = folder / "model"
        self.config = folder / "config" / "magicpig-cli" / "config.yaml"
        self.plan: Plan | None = None
        tiny_config("llama").save_pretrained(self.model)
        self.config.parent.mkdir(parents=True)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        monkeypatch.setattr(planning, "plan", self._remember)

    def _remember(self, *arguments: object) -> Plan:
        self.plan = plan(*arguments)
        return self.plan

    def check(self, *arguments: str) -> Plan:
        assert app.run(["models", "check", str(self.model), "--device", "cpu", "--json", *arguments]) == 0
        assert self.plan is not None
        return self.plan


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    monkeypatch.delenv("MAGICPIG_PROFILE", raising=False)
    monkeypatch.delenv("MAGICPIG_LOCAL", raising=False)
    return Machine(tmp_path, monkeypatch)


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_a_value(machine, own_folder, monkeypatch):
    shipped = profiles.Profile(name="cpu", match=profiles.Match(device="cpu"), local=101)
    monkeypatch.setattr("magicpig_cli.profiles.choice.shipped", lambda: ())
    assert machine.check().local == 64  # built in
    monkeypatch.setattr("magicpig_cli.profiles.choice.shipped", lambda: (shipped,))
    assert machine.check().local == 101
    put(own_folder, "mine", "match: {device: cpu}\nattention: {local: 102}\n")
    assert machine.check().local == 102
    machine.config.write_text("local: 103\n")
    assert machine.check().local == 103
    monkeypatch.setenv("MAGICPIG_LOCAL", "104")
    assert machine.check().local == 104
    assert machine.check("--local", "105").local == 105
    assert machine.plan is not None
    assert machine.plan.sink == 4


def test_which_profile(machine, own_folder, monkeypatch):
    for number in (1, 2, 3):
        put(own_folder, f"mine-{number}", f"attention: {{local: {100 + number}}}\n")
    put(own_folder, "matching", "match: {device: cpu}\nattention: {local: 100}\n")
    assert machine.check().local == 100
    machine.config.write_text("profile: mine-1\n")
    assert machine.check().local == 101
    monkeypatch.setenv("MAGICPIG_PROFILE", "mine-2")
    assert machine.check().local == 102
    assert machine.check("--profile", "mine-3").local == 103
    assert machine.check("--profile", str(own_folder / "mine-1.yaml")).local == 101
    assert machine.check("--profile", "built-in").local == 64


def test_shares_of_heads_are_for_the_model_that_they_were_measured_on(machine, own_folder):
    heads = tiny_config("llama").num_attention_heads
    shares = (0.5,) + (1.5,) * (heads - 1)
    for name, measured_on in (("mine", "model"), ("other", "org/model")):
        document = f"match: {{model: {measured_on}}}\nattention: {{head_shares: {{1: {list(shares)}}}}}\n"
        put(own_folder, name, document)
    assert machine.check("--attention", "rabitq").head_shares == {1: shares}  # picked by the directory's name
    found = machine.check("--attention", "rabitq", "--profile", "other")
    assert found.head_shares == {}
    assert "head shares: not those of profile other, which were measured on org/model" in found.reasons


def test_the_plan_says_which_profile_and_why(machine, own_folder, capsys):
    def said(*arguments: str) -> list[str]:
        machine.check(*arguments)
        return [line for line in json.loads(capsys.readouterr().out)["plan"] if line.startswith("profile ")]

    assert said() == ["profile cpu: for any model on a CPU; shipped"]
    put(own_folder, "mine", "match: {device: cpu, model: model}\n")
    assert said() == [f"profile mine: for model model; {own_folder}/mine.yaml"]
    assert said("--profile", "l20") == ["profile l20: as asked"]


def test_a_broken_profile_is_a_warning_to_those_who_do_not_use_it(machine, own_folder, capsys):
    put(own_folder, "bad", "match: {device: cpu}\nattention: {tables: [{K: 17, L: 9}]}\n")
    wanted = f"{own_folder}/bad.yaml: attention.tables[0].K is 17, allowed are 1 to 16"
    machine.check()
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"warning: profile passed over: {wanted}"]
    assert json.loads(printed.out)["supported"]
    machine.check("--profile", "cpu")
    assert capsys.readouterr().err == ""
    assert app.run(["models", "check", str(machine.model), "--profile", "bad"]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: --profile: {wanted}"]


@pytest.mark.parametrize(
    "command", [["chat", "hello"], ["bench"], ["batch", "x.jsonl"], ["models", "check", "x"], ["doctor"]]
)
def test_a_profile_that_is_not_there_is_said_before_anything_else(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert app.run([*command, "--profile", "rtx409"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: --profile: there is no profile 'rtx409'; there are a100, ")
    assert lines[1:] == ["hint: did you mean rtx4090?"]


def test_doctor_names_it(own_folder, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    put(own_folder, "mine", "match: {device: cpu}\n")
    put(own_folder, "bad", "run: {threads: many}\n")
    assert app.run(["doctor", "--device", "cpu", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["profile"] == "mine"
    assert "bad.yaml: run.threads is 'many'" in printed.err
    assert app.run(["doctor", "--device", "cpu"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("profile "))
    assert row.split(None, 1)[1] == f"mine: for any model on a CPU; {own_folder}/mine.yaml"
    assert app.run(["doctor", "--device", "cpu", "--profile", "h200"]) == 0
    assert any(line.split() == ["profile", "h200:", "as", "asked"] for line in capsys.readouterr().out.splitlines())
