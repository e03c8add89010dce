#!/usr/bin/env bash
# Installs what is missing, then asks the demo model about a document: the licence of this repository, ~2,400 tokens.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
.venv/bin/magicpig chat -m demo --temperature 0 --max-tokens 96 \
  -f LICENSE "Does this license come with a warranty? Answer in one sentence."
