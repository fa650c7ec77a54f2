"""Train: `accelerate launch scripts/train.py CONFIG [section.key=value …]`.

The same as `llmtrain train`, for launchers that want a file. A data worker imports this file again,
so nothing heavy stands at its top and nothing happens on import.
"""

import sys

from llmtrain.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
