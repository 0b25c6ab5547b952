"""A torch that is not installed: its folder is put before others on the path of processes that have no use for it."""

raise ImportError("this process has no use for torch")
