"""What a batch job does next: judged by the run's `status.json`, never by a launcher's exit code.

Where rank 0 died without a word, the marks of other ranks (`logs/rank-R.failed`) may know why.

    verdict.py where CONFIG [section.key=value …]  →  the run directory; a bad config exits with 2
    verdict.py seen RUN_DIR                        →  which status.json and marks lie there now
    verdict.py next RUN_DIR SEEN TIME_LIMIT        →  `requeue` or `end`, a code, the reason

SEEN: the answer before the run was started · TIME_LIMIT: `yes` if the job was about to run out.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESTARTABLE = 75
MOST_REQUEUES = 3  # without a new checkpoint between them


def where(config_file: str, *overrides: str) -> str:
    """The run directory of a config."""
    from llmtrain.config.load import load_config
    from llmtrain.errors import UserError

    try:
        config = load_config(config_file, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    return str(config.run_dir.absolute())


def seen(run_dir: str) -> str:
    """Which `status.json` and marks lie in a run directory, on one line: so new ones are known."""
    from llmtrain.rundir import failures

    path = Path(run_dir) / "status.json"
    version = [path.stat().st_ino, path.stat().st_mtime_ns] if path.exists() else None
    left = {str(mark): version for mark, version in failures.versions(Path(run_dir)).items()}
    return json.dumps({"status": version, "marks": left})


def next_(run_dir: str, before: str, time_limit: str) -> str:
    """What the job does now that its nodes have ended."""
    old, new = json.loads(before), json.loads(seen(run_dir))
    left = _cause(Path(run_dir), old["marks"])
    if new["status"] == old["status"]:
        code, reason = left or (1, f"no rank came as far as {run_dir}/status.json")
        return f"end {code} {reason}: see the logs of the nodes"
    status = json.loads((Path(run_dir) / "status.json").read_bytes())
    if status["state"] == "running" and left:
        return f"end {left[0]} {left[1]}"
    again, code, reason = judge(status, out_of_time=time_limit == "yes")
    if not again:
        return f"end {code} {reason}"
    requeues = count(Path(run_dir) / "logs" / "requeues.json", status["checkpoint"])
    if requeues > MOST_REQUEUES:
        return (
            f"end {code or RESTARTABLE} {reason}; no new checkpoint since {MOST_REQUEUES} requeues"
        )
    return f"requeue {code} {reason}"


def _cause(run_dir: Path, before: dict[str, list[int]]) -> tuple[int, str] | None:
    """Code and reason of a rank that left a new mark, if a restart does not cure them."""
    from llmtrain.rundir import failures

    old = {Path(path): (inode, changed) for path, (inode, changed) in before.items()}
    mark = failures.worst(failures.new_since(run_dir, old))
    if mark is None or not mark.is_cause:
        return None
    return mark.code, " ".join(f"rank {mark.rank}: {mark.reason}".split())


def judge(status: dict[str, Any], *, out_of_time: bool) -> tuple[bool, int, str]:
    """Whether to requeue, with which code this start ended, why."""
    state, code = status["state"], status["exit_code"]
    reason = " ".join(str(status["reason"] or "done").split())
    if state == "running":
        return True, RESTARTABLE, "rank 0 died without a word"
    if state == "stopped":
        again = out_of_time or status["reason"] == "launcher_lost"
        return again, code, f"stopped at step {status['step']} ({reason})"
    return code == RESTARTABLE, code, f"{state} at step {status['step']}: {reason}"


def count(path: Path, checkpoint: str | None) -> int:
    """The number of this requeue among those since the last new checkpoint."""
    try:
        known = json.loads(path.read_bytes())
    except FileNotFoundError:
        known = {"checkpoint": checkpoint, "requeues": 0}
    same = known["checkpoint"] == checkpoint
    requeues = known["requeues"] + 1 if same else 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"checkpoint": checkpoint, "requeues": requeues}))
    return requeues


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    verbs: dict[str, Callable[..., str]] = {"where": where, "seen": seen, "next": next_}
    print(verbs[verb](*arguments))
