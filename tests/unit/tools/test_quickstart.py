import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.config.load import load_config
from llmtrain.tools import recipes as module
from llmtrain.tools.launch.child import Ended


def test_two_cpu_processes_train_the_packaged_config(monkeypatch):
    seen = {}

    def note(config_file, overrides, *, processes, env):
        seen.update(config=config_file, overrides=overrides, processes=processes, env=env)
        return Ended(0, "")

    monkeypatch.setattr(module, "launch", note)
    out = Path('a "b": [c]')
    assert module.quickstart(out) == Ended(0, "")
    assert seen["processes"] == 2
    assert seen["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert load_config(seen["config"], seen["overrides"]).run.dir == str(out)
    module.quickstart()
    assert load_config(seen["config"], seen["overrides"]).run.dir == "runs/quickstart"


@pytest.mark.launches
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_the_quickstart_never_imports_deepspeed(tmp_path, strategy):
    """It is installed everywhere on Linux; its import takes seconds and looks for a compiler.

    Torch's module that builds extensions warns where there is a CUDA toolkit and no GPU.
    """
    program = (
        "import sys, llmtrain\n"
        "from llmtrain.tools.recipes import CONFIG\n"
        "assert 'deepspeed' not in sys.modules\n"
        "given = ['training.steps=1', 'run.dir=run', 'data.workers=0']\n"
        f"given.append('distributed.strategy={strategy}')\n"
        "assert llmtrain.train(llmtrain.load_config(CONFIG, given)).exit_code == 0\n"
        "sys.exit(bool({'deepspeed', 'torch.utils.cpp_extension'} & sys.modules.keys()))\n"
    )
    given = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **given}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
