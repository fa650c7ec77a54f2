"""What a launcher's second attempt finds: the store of the first, with its dead addresses."""

import json
from pathlib import Path


def test_a_second_attempt_does_not_call_the_ranks_of_the_first(server, tmp_path):
    from torch.distributed import TCPStore

    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as a launcher does
    env = {"MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(3):
        output = tmp_path / str(attempt)
        env["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        codes = server.run(["call", "helpers.talk", "talk", str(output)], 3, tmp_path, env)
        assert codes == [0, 0, 0], (tmp_path / "output.txt").read_text()
        heard = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(3)]
        assert [one["broadcast"] for one in heard] == ["from 0"] * 3


def test_nodes_that_count_attempts_differently_meet(server, tmp_path):
    """A node that hears of a lost peer before its own rank fails does not count that restart."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # as scripts/slurm/node.sh asks for
    output = tmp_path / "met"
    arguments = ["call", "helpers.talk", "meet_in_attempts", str(output), "0", "1"]
    assert server.run(arguments, 2, tmp_path, env) == [0, 0], (tmp_path / "output.txt").read_text()
    assert json.loads(output.read_text()) == ["rank 0", "rank 1"]
