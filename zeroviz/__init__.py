"""Ideas, arithmetic and pictures. Never imports torch or ipyparallel."""
