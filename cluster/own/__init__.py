"""The teaching implementation: DDP and ZeRO-1, 2, 3, executing zeroviz's schedule on real tensors, without hooks.

Read `step.py` first, then `ddp.py`, `zero1.py`, `zero2.py`, `zero3.py`: each stage says only what it changes.
"""
