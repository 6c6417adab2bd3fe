"""Sampling kernels for NVIDIA GPUs: all rows of a batch at once, without a sort.

The rules are those of `sampler.py` in runtime/compute/; tests compare the two.

In reading order:

- argmax.py: the greatest logit of each row and its token, in Triton
- thresholds.py: where top-k, top-p and min-p cut logits off
- draw.py: drawing tokens from those that are kept

May import: triton, torch and the kernels of dense/.
"""
