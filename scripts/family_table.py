"""The table of docs/families.md: what the tests have found of every family, from their own functions.

    python scripts/family_table.py            runs tiny models of all families, writes the table between its markers
    python scripts/family_table.py --check    exits 1 if the table is not what it finds now

No weights are needed; it takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from magicpig_cli.model.shape import unsupported_reason  # noqa: E402
from tests.families import CASES, REFUSED, Case, examine  # noqa: E402

TARGET = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- table: scripts/family_table.py -->", "<!-- end of table -->"
COLUMNS = (
    "models", "family in transformers", "in the tiny config", "exact = generate", "sampled sane", "blocks",
    "sliding layers", "notes",
)  # fmt: skip


def cells(case: Case) -> list[str]:
    """A row of the table of families that work."""
    print(case.name, file=sys.stderr)
    found = examine(case.name)
    sampled = "nothing to sample" if found.everything_equal is None else _yes(found.lsh_sane)
    blocks = f"{found.blocks} of {found.layers} by kernels" if found.blocks else "own code"
    sliding = f"{found.windowed} of {found.layers}" if found.windowed else "-"
    return [
        case.name, f"`{case.family}`", _written(case.overrides) or "-", _yes(found.exact_equal and found.blocks_equal),
        sampled, blocks, sliding, case.note or "-",
    ]  # fmt: skip


def _yes(good: bool) -> str:
    return "yes" if good else "NO"


def _written(values: Mapping[str, Any]) -> str:
    """`head_dim 24, rope_parameters: llama3 factor 8.0`."""
    return ", ".join(_pair(name, value) for name, value in values.items())


def _pair(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{name} {value}"
    if nested := [part for part in value.values() if isinstance(part, Mapping)]:
        value = nested[0]
    factor = f" factor {value['factor']:g}" if "factor" in value else ""
    return f"{name}: {value.get('rope_type') or value.get('type')}{factor}"


def table() -> str:
    """What stands between the markers."""
    works = [list(COLUMNS), ["---"] * len(COLUMNS), *map(cells, CASES)]
    refused = [["family in transformers", "`magicpig models check` says"], ["---"] * 2]
    refused += [[f"`{family}`", unsupported_reason(AutoConfig.for_model(family)) or "NO REASON"] for family in REFUSED]
    lines = [_lines(works), "Known not to work:", _lines(refused)]
    return "\n\n".join(lines)


def _lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def document(old: str) -> str:
    """The page `old` with the table as it is now. Raises ValueError if its markers are gone."""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{TARGET.name} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    only_check = parser.parse_args().check
    old = TARGET.read_text(encoding="utf-8")
    new = document(old)
    if not only_check:
        TARGET.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"{TARGET.name} is not what the tests find: python scripts/family_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
