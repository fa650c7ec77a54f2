#!/usr/bin/env bash
# What docs/reference/versions.md tells: `make test` in fresh environments with other versions.
#
#   scripts/try_versions.sh                      all of them, each a line of the table
#   scripts/try_versions.sh floors newest        some of them
#   NEXT_PYTHON=/path/to/python3.13 scripts/try_versions.sh python3.13
#
#   floors       the lower bounds of pyproject.toml, exactly
#   newest       the newest releases that pyproject.toml allows, no pins
#   python3.13   the same with Python 3.13, without the extras
#
# An environment takes up to 8 GB below FOLDER (by default a temporary folder), and is removed after
# its tests. Logs stay there. PYTHON=… is the interpreter of the first two.
set -euo pipefail
cd "$(dirname "$0")/.."

FOLDER=${FOLDER:-$(mktemp -d)}
PYTHON=${PYTHON:-python3.11}
NEXT_PYTHON=${NEXT_PYTHON:-python3.13}
mkdir -p "$FOLDER"

floors() {  # torch>=2.13,<2.15 becomes torch==2.13, and so on
  "$PYTHON" - pyproject.toml <<'PROGRAM'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = [one for extra in ("quantized", "eval", "trackers") for one in project["optional-dependencies"][extra]]
for one in project["dependencies"] + extras:
    print("==".join(re.match(r"([\w-]+)>=([\d.]+)", one).groups()))
PROGRAM
}

try() {  # NAME PYTHON EXTRAS PIP_ARGS
  local venv="$FOLDER/$1" log="$FOLDER/$1.log" begun=$SECONDS code=0
  make VENV="$venv" PYTHON="$2" EXTRAS="$3" PIP_ARGS="$4" test >"$log" 2>&1 || code=$?
  local result
  if result=$(grep -E '^[0-9]+ (passed|failed)' "$log" | tail -n 1); then
    "$venv/bin/python" - "$1" "$result" <<'PROGRAM'
import platform, sys
from importlib.metadata import version
names = ("torch", "accelerate", "transformers", "deepspeed", "peft", "numpy", "pydantic", "typer")
versions = [platform.python_version(), *(version(name) for name in names)]
print("|", " | ".join([sys.argv[1], *versions, sys.argv[2]]), "|")
PROGRAM
  fi
  echo "$1: exit code $code after $((SECONDS - begun)) s, log in $log" >&2
  rm -rf "$venv"
  return "$code"
}

failed=0
for name in "${@:-floors newest python3.13}"; do
  for one in $name; do
    case "$one" in
      floors)
        floors >"$FOLDER/floors.txt"
        try floors "$PYTHON" "dev,trackers,eval,quantized" "-c $FOLDER/floors.txt" || failed=1 ;;
      newest) try newest "$PYTHON" "dev,trackers,eval,quantized" "" || failed=1 ;;
      python3.13) try python3.13 "$NEXT_PYTHON" dev "" || failed=1 ;;
      *) echo "no such environment: $one (floors, newest, python3.13)" >&2; exit 2 ;;
    esac
  done
done
exit "$failed"
