from pathlib import Path

from llmtrain.config.load import load_config
from llmtrain.tools import quickstart as module
from llmtrain.tools.launch.launch import Ended


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
