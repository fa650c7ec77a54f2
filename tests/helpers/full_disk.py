"""A disk without room: the only thing that is faked is what the file system says of itself."""

import os

from llmtrain.cli.main import main


def train(config: str, free_bytes: str) -> None:
    """`llmtrain train CONFIG` on a disk with so many free bytes."""
    real = os.statvfs

    def statvfs(path: object) -> os.statvfs_result:
        fields = list(real(path))
        fields[4] = int(free_bytes) // fields[1]  # f_bavail, in fragments
        return os.statvfs_result(fields)

    os.statvfs = statvfs
    main(["train", config])
