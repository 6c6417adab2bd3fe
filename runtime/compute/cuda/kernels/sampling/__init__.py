"""Sampling kernels for NVIDIA GPUs: all rows of a batch at once, without a sort.

The rules are those of runtime/compute/sampler.py, against which the tests compare the kernels.

In reading order:

- argmax.py: the greatest logit of each row, and its token
- thresholds.py: where top-k, top-p and min-p cut logits off
- draw.py: tokens drawn from what is kept

May import: torch, triton and the kernels of dense/.
"""
